"""`GrammarError`. No torch: the front end writes grammars, the engine's process compiles them."""

from __future__ import annotations

from dsv4.errors import Dsv4Error


class GrammarError(Dsv4Error, ValueError):
    """A schema or grammar that cannot be enforced; the text says what is wrong with it."""
