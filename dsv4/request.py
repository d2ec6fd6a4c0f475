"""What a caller asks for (`SamplingParams`) and gets (`Completion`). No torch."""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4.config import shown
from dsv4.errors import Dsv4Error

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RequestError(Dsv4Error, ValueError):
    """A request that cannot be served as it is; the message names the field and what would be accepted. `field` is that
    of `SamplingParams` (or `prompt`) which is wrong, where it is one of them."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # ended from outside (`abort`): what it had drawn stays


# numbers of `SamplingParams` that a draw reads: columns of `SamplingState`, copied for each slot, sent to every rank
DRAW_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. The defaults are the model card's: temperature 1, no filtering.

    n                   answers to each prompt; answer i has the seed `seed + i`
    max_tokens          new tokens at most; 0, with prompt_logprobs, scores the prompt and writes nothing
    min_tokens          the text does not end before these new tokens: not at the end of sequence, a stop id or string
    temperature         0 is greedy: the largest logit, the lower id on a tie
    top_k               keep the k most likely tokens; 0 (or -1) keeps all
    top_p               keep the fewest tokens whose probabilities reach top_p; 1 keeps all
    min_p               drop tokens below min_p times the best probability; 0 drops none
    repetition_penalty  divides positive (multiplies negative) logits of tokens seen in prompt or output; 1 is off
    presence_penalty    subtracted once from tokens already generated; 0 is off
    frequency_penalty   subtracted per earlier occurrence in the output; 0 is off
    logit_bias          by token id, from -100 to 100, added to the logits before anything else; None: none
    allowed_token_ids   the only tokens that may come, besides the end of sequence where that may; None: all
    bad_words_ids       sequences of ids that are never completed
    seed                the same seed gives the same text whatever else runs beside it; any 64-bit integer. None: every
                        answer has one of its own, which it names (`Completion.seed`)
    stop                strings that end the text; they are not part of it
    stop_token_ids      ids that end the text besides the model's end of sequence
    ignore_eos          go on past the model's end of sequence
    logprobs            None: none; n: the log-probability of each token, and the n most likely ones beside it
    prompt_logprobs     the same for each token of the prompt but the first, which nothing predicts
    routed_experts      give the experts that every layer chose for every token (`Completion.routed_experts`)
    indexer_topk        give the entries that the indexer of every CSA layer picked for every token
    replay_start        both from this token on, at most the prompt length; what is before may come from the cache
    cache_salt          prompts share cached prefixes only with prompts of the same salt; None: with those of none
    priority            higher goes first, and takes slots and cache blocks from lower when there are too few
    deadline            seconds from its submission after which the request fails if it is not done; None waits
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts: bool = False
    indexer_topk: bool = False
    replay_start: int = 0
    cache_salt: str | None = None
    priority: int = 0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words_ids"):
            value = getattr(self, name)
            if name in _OPTIONAL and value is None:
                continue
            if not isinstance(value, (list, tuple)):
                raise _wrong(name, f"must be a list, found {shown(value)}")
            object.__setattr__(self, name, tuple(value))
        _check_integers(self)
        _check_reals(self)
        _check_tokens(self)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise _wrong("stop", f"must hold non-empty strings, found {shown(text)}")
        for name in ("ignore_eos", "routed_experts", "indexer_topk"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, f"must be true or false, found {shown(getattr(self, name))}")
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise _wrong("cache_salt", f"must be a non-empty string, found {shown(self.cache_salt)}")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise _wrong("max_tokens", "must be at least 1 unless prompt_logprobs asks for a score, found 0")
        if self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"must be at most max_tokens ({self.max_tokens}), found {self.min_tokens}")

    def answers(self) -> list[SamplingParams]:
        """The parameters of each of the `n` answers: of one answer, with a seed."""
        if self.n == 1 and self.seed is not None:
            return [self]
        seeds = [new_seed() if self.seed is None else later_seed(self.seed, place) for place in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_bias(self) -> bool:
        """Whether some tokens are likelier, or out of question, all through the answer."""
        has_bad_tokens = any(len(word) == 1 for word in self.bad_words_ids)
        return bool(self.logit_bias) or self.allowed_token_ids is not None or has_bad_tokens


def new_seed() -> int:
    """A seed for who gave none: at random, and small enough for a number of JavaScript."""
    return secrets.randbits(53)


def later_seed(seed: int, place: int) -> int:
    """That of the answer at `place` of a request; again one of 64 bits."""
    return (seed + place + 2**63) % 2**64 - 2**63


_INTEGER_RANGE = {
    "n": (1, 2**31 - 1), "max_tokens": (0, 2**31 - 1), "min_tokens": (0, 2**31 - 1), "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1), "logprobs": (0, 100), "prompt_logprobs": (0, 100), "priority": (-10, 10),
    "replay_start": (0, 2**31 - 1),
}  # fmt: skip
_OPTIONAL = {"seed", "logprobs", "prompt_logprobs", "deadline", "allowed_token_ids"}
_MAX_BIAS = 100
# name: (lowest, highest, lowest itself allowed)
_REAL_RANGE = {
    "temperature": (0.0, 100.0, True), "top_p": (0.0, 1.0, False), "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False), "presence_penalty": (-100.0, 100.0, True),
    "frequency_penalty": (-100.0, 100.0, True), "deadline": (0.0, 1e9, False),
}  # fmt: skip


def _wrong(field: str, message: str) -> RequestError:
    return RequestError(f"{field} {message}", field=field)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_integers(params: SamplingParams) -> None:
    for name, (low, high) in _INTEGER_RANGE.items():
        value = getattr(params, name)
        if name in _OPTIONAL and value is None:
            continue
        if not _is_int(value) or not low <= value <= high:
            raise _wrong(name, f"must be an integer from {low} to {high}, found {shown(value)}")


def _check_reals(params: SamplingParams) -> None:
    for name, (low, high, closed) in _REAL_RANGE.items():
        value = getattr(params, name)
        if name in _OPTIONAL and value is None:
            continue
        if not _is_real(value) or not low <= value <= high or (value == low and not closed):
            span = f"from {low:g} to {high:g}" if closed else f"above {low:g} and at most {high:g}"
            raise _wrong(name, f"must be a number {span}, found {shown(value)}")


def _check_tokens(params: SamplingParams) -> None:
    """Fields that hold token ids. Whether an id is in the vocabulary is for the engine to say."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            if not _is_int(token_id) or token_id < 0:
                raise _wrong(name, f"must hold ids >= 0, found {shown(token_id)}")
    if params.allowed_token_ids == ():
        raise _wrong("allowed_token_ids", "must hold at least one id (None allows all), found ()")
    words = []
    for word in params.bad_words_ids:
        is_word = isinstance(word, (list, tuple)) and len(word) > 0
        if not is_word or not all(_is_int(token_id) and token_id >= 0 for token_id in word):
            raise _wrong("bad_words_ids", f"must hold non-empty lists of ids >= 0, found {shown(word)}")
        words.append(tuple(word))
    object.__setattr__(params, "bad_words_ids", tuple(words))
    if params.logit_bias is None:
        return
    if not isinstance(params.logit_bias, Mapping):
        raise _wrong("logit_bias", f"must map token ids to numbers, found {shown(params.logit_bias)}")
    for token_id, bias in params.logit_bias.items():
        if not _is_int(token_id) or token_id < 0:
            raise _wrong("logit_bias", f"must have ids >= 0 as keys, found {shown(token_id)}")
        if not _is_real(bias) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            limits = f"from {-_MAX_BIAS} to {_MAX_BIAS}"
            raise _wrong("logit_bias", f"must hold numbers {limits}, found {shown(bias)} for token {token_id}")
    object.__setattr__(params, "logit_bias", dict(params.logit_bias))


class TokenLogprobs(NamedTuple):
    """One token: its log-probability under the model, and the most likely tokens there, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """The result of one prompt. `text` is None where the checkpoint has no tokenizer.

    prompt_logprobs    where asked for, one per prompt token; None for the first
    num_cached_tokens  tokens of the prompt that came from the prefix cache
    seed               that it was drawn with: `SamplingParams.seed`, or the one chosen for it
    weight_versions    which weights drew which tokens: pairs of a token's number, from 0, and the version from it on.
                       One pair unless weights were updated in the middle (`pause("keep")`)
    routed_experts     where asked for: uint8 or uint16 [N, layers, k], ascending ids, of each token from number
                       `replay_start` of the prompt on but the last one, which nothing was computed from
    indexer_topk       where asked for: uint16 or uint32 [N, CSA layers, most], the entries of four tokens each that the
                       attention read, ascending, then the largest number of the dtype

    Two completions are equal whatever the last five are: they say how the result was reached, not what it is.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    seed: int = field(default=0, compare=False)
    weight_versions: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    routed_experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    indexer_topk: NDArray[Any] | None = field(default=None, compare=False, repr=False)


def check_token_ids(
    token_ids: Iterable[int], vocab_size: int, name: str, *, field: str | None = None
) -> list[int]:  # fmt: skip
    """The ids as plain integers (numpy's and torch's are taken too); `RequestError` for any outside the vocabulary,
    with `name` for what one of them is and `field` for where they are."""
    given = list(token_ids)
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) < vocab_size:  # nearly always; long prompts
        return given
    checked = []
    for place, token_id in enumerate(given):
        try:
            plain = -1 if isinstance(token_id, bool) else operator.index(token_id)
        except TypeError:
            plain = -1
        if not 0 <= plain < vocab_size:
            message = f"{name} {place} is {shown(token_id)}; ids are integers from 0 to {vocab_size - 1}"
            raise RequestError(message, field=field)
        checked.append(plain)
    return checked


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """`RequestError` for an id in `params` that the vocabulary does not have."""
    given = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": [token_id for word in params.bad_words_ids for token_id in word],
        "logit_bias": params.logit_bias or (),
    }
    for name, token_ids in given.items():
        outside = [token_id for token_id in token_ids if token_id >= vocab_size]
        if outside:
            raise _wrong(name, f"holds {shown(outside[0])}; ids are integers from 0 to {vocab_size - 1}")


def check_prompt(token_ids: Iterable[int], vocab_size: int, max_context_tokens: int) -> list[int]:
    """The ids as plain integers. `RequestError` for an empty prompt, an id outside the vocabulary, or no room for one
    new token."""
    checked = check_token_ids(token_ids, vocab_size, "prompt token", field="prompt")
    if not checked:
        raise RequestError("the prompt is empty; it needs at least one token", field="prompt")
    if len(checked) >= max_context_tokens:
        raise RequestError(
            f"the prompt has {len(checked)} tokens; max_context_tokens is {max_context_tokens} (--context on the "
            "command line) and one must remain for the answer: shorten the prompt or raise max_context_tokens",
            field="prompt",
        )
    return checked
