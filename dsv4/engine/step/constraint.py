"""What may come next in a request whose output must follow a rule (a JSON schema, a forced tool call)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsv4.errors import Dsv4Error

WORD_BITS = 32

Words = NDArray[np.int32]  # a bit for each token of the vocabulary, the lowest first; bits behind the last do not count


class ConstraintError(Dsv4Error, RuntimeError):
    """The rule cannot be followed any further: it met a limit of its own, or a token it does not allow."""


class Constraint(Protocol):
    """One request's rule, at one place in its output. Called by the engine only, between forward calls."""

    def allowed(self) -> Words:
        """The tokens that may come next, the end of sequence among them where it may end: `num_words` of them."""

    def accept(self, token_id: int) -> None:
        """The request has drawn this token, or may have: see `rollback`. `ConstraintError` if the rule cannot go on."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that `accept` was given, one it refused and errors of `allowed` behind them
        included: they were drafts, tried to see what they would allow."""


class ConstraintGroup(Protocol):
    """A constraint class may have this in `group`: what many of its instances allow, found together."""

    def allowed(self, rules: Sequence[Constraint], words: Words) -> Mapping[int, Exception]:
        """Fill `words` [len(rules), num_words], whose rows lie side by side. By place, what went wrong with a rule."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def fill_allowed(rules: Sequence[Constraint], words: Words, vocab_size: int) -> dict[int, Exception]:
    """A row of `words` for each of `rules`. By place, why a rule allows nothing."""
    failed: dict[int, Exception] = {}
    group: ConstraintGroup | None = getattr(rules[0], "group", None) if rules else None
    if group is not None and all(getattr(rule, "group", None) is group for rule in rules):
        failed.update(group.allowed(rules, words))
    else:
        for place, rule in enumerate(rules):
            try:
                words[place] = checked_words(rule, vocab_size)
            except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
                failed[place] = error
    return failed


def checked_words(rule: Constraint, vocab_size: int) -> Words:
    """What a rule allows, if it has the right form."""
    allowed, expected = rule.allowed(), (num_words(vocab_size),)
    if allowed.dtype != np.int32 or allowed.shape != expected:
        raise ConstraintError(
            f"the constraint gave {allowed.dtype} {list(allowed.shape)}, not int32 {list(expected)}: a bit a token"
        )
    return allowed


def pack_tokens(is_allowed: NDArray[np.bool_]) -> Words:
    """bool [vocab] as words."""
    words = np.zeros(num_words(len(is_allowed)), dtype=np.int32)
    packed = np.packbits(is_allowed, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


def has_bit(words: Words, token_id: int) -> bool:
    return bool(words[token_id // WORD_BITS] >> token_id % WORD_BITS & 1)
