"""`GrammarError`. No torch: the front end writes grammars, the engine's process compiles them."""

from __future__ import annotations


class GrammarError(ValueError):
    """A schema or grammar that cannot be enforced; the text says what is wrong with it."""
