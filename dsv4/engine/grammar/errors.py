"""`GrammarError`. No torch: a front end writes and checks grammars, the engine's process compiles them."""

from dsv4.errors import Dsv4Error


class GrammarError(Dsv4Error, ValueError):
    """A schema or grammar that cannot be enforced; the text says what is wrong with it."""


def first_line(text: str) -> str:
    """Of an error, without the place in our grammar, which means nothing to the author of the schema."""
    line = text.strip().split("\n")[0]
    return line.rpartition("failed to compile JSON schema: ")[2][:300]
