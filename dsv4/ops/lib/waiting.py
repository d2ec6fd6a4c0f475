"""Ops in which the host waits for the device, to read what it computed. No graph can hold such a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Op = TypeVar("Op", bound=Callable[..., Any])


def waits_for_device(op: Op) -> Op:
    """Say so of an op. A backend that is given one makes its calls directly (`Backend.with_ops`)."""
    op.waits_for_device = True  # type: ignore[attr-defined]
    return op


def is_waiting(op: Callable[..., Any]) -> bool:
    return getattr(op, "waits_for_device", False)
