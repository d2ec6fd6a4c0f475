"""`Serving`: what requests are given to: an `Engine`, or the engines of several ranks as one. Imports neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from dsv4.engine.engine import Engine
    from dsv4.engine.ranks.engine import RanksEngine

Serving: TypeAlias = "Engine | RanksEngine"
