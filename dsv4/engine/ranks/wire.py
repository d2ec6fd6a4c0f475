"""A step of all ranks as flat lists of int64, and what each rank drew, on the way back. No torch.

    plan    step, its size (rows, requests, drafts asked for), whether it draws at once, then for each rank besides 0:
            its length, and
            cache changes   count, (kind, numbers)...
            new requests    count, (slot, max_len, prompt_len, scored, parameters, number of tokens, tokens)...
            pieces          count, (slot, start, length, draws, number of drafts, drafts)...
    masks   for each rank besides 0: its length, and
            masks           count, (row that draws, number of words, words)...: the tokens its rules allow, a bit each
    answer  step, checksum, and
            drawn           count, then for each row that draws: 1, token, log-probabilities; or 0, a reason
            offered         count, then for each request that draws: number of drafts, drafts, confidences
            scored          count, (slot, count, (token, log-probabilities)...)...: tokens of prompts

Text, stop strings, rules and deadlines stay on rank 0: the others need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4.dist.messages import bits_float, float_bits, text_numbers
from dsv4.engine.draft.counts import Offer
from dsv4.engine.ranks.books import Admitted, CacheChange, Launched, Released, Rewound, StopAt
from dsv4.engine.ranks.scheduler import StepSize
from dsv4.request import DRAW_REALS, SamplingParams, TokenLogprobs

_NONE = -1
_CHANGES: tuple[type[CacheChange], ...] = (Admitted, Released, StopAt, Launched, Rewound)  # by their numbers

SentMasks = tuple[tuple[int, tuple[int, ...]], ...]  # a row that draws, and 32 tokens a word, the lowest bit first


@dataclass(frozen=True)
class Opening:
    """A request a rank has not run: how it draws, and everything it knows, unless its admission has said that."""

    slot: int
    max_len: int
    prompt_len: int
    num_scored: int
    params: SamplingParams
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class RankPiece:
    """See `Piece`; its last tokens are `drafts`."""

    slot: int
    start: int
    length: int
    draws: bool
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a step."""

    changes: tuple[CacheChange, ...] = ()
    openings: tuple[Opening, ...] = ()
    pieces: tuple[RankPiece, ...] = ()


class RanksStep(NamedTuple):
    """A step, as every rank hears of it: its number, the size of its calls, and whether they draw without being told
    what rules allow. `share` is the rank's own."""

    number: int
    size: StepSize
    draws_at_once: bool
    share: RankShare


@dataclass(frozen=True)
class DrawnToken:
    """What a request drew, or why it could not."""

    token_id: int
    logprobs: TokenLogprobs | None
    error: str | None = None


@dataclass(frozen=True)
class RankAnswer:
    """What a rank's rows drew, in the order of the plan, what its drafter expects next of the requests that drew, if it
    was asked, and what was scored of prompts, by slot."""

    drawn: tuple[DrawnToken, ...] = ()
    offers: tuple[Offer, ...] = ()
    scores: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()


def drawing_params(params: SamplingParams, eos_token_id: int) -> SamplingParams:
    """What drawing depends on, without what rank 0 decides in every step (rules, ends)."""
    allowed = params.allowed_token_ids
    if allowed is not None and not params.ignore_eos:
        allowed = (*allowed, eos_token_id)
    return SamplingParams(
        top_k=params.top_k, seed=params.seed, logprobs=params.logprobs, prompt_logprobs=params.prompt_logprobs,
        logit_bias=params.logit_bias or None, allowed_token_ids=allowed, ignore_eos=True,
        bad_words_ids=tuple(word for word in params.bad_words_ids if len(word) == 1),
        **{name: getattr(params, name) for name in DRAW_REALS},
    )  # fmt: skip


def encode_plan(number: int, size: StepSize, draws_at_once: bool, shares: Sequence[RankShare]) -> list[int]:
    """`shares[i]` is rank i + 1's."""
    return [number, *size, int(draws_at_once), *_sections(map(_encode_share, shares))]


def decode_plan(numbers: Sequence[int], rank: int) -> RanksStep:
    number, num_rows, num_requests, num_drafts, draws_at_once, *sections = numbers
    size = StepSize(num_rows, num_requests, num_drafts)
    return RanksStep(number, size, bool(draws_at_once), _decode_share(_section(sections, rank)))


def encode_masks(masks: Sequence[SentMasks]) -> list[int]:
    """`masks[i]` are rank i + 1's."""
    return _sections([len(own), *(n for row, words in own for n in (row, len(words), *words))] for own in masks)


def decode_masks(numbers: Sequence[int], rank: int) -> SentMasks:
    section = _section(numbers, rank)
    return tuple((next(section), _take(section)) for _ in range(next(section)))


def _sections(sections: Iterable[list[int]]) -> list[int]:
    """One after the other, each after its length."""
    return [number for section in sections for number in (len(section), *section)]


def _section(numbers: Sequence[int], rank: int) -> Iterator[int]:
    """Those of a rank besides 0."""
    start = 0
    for _ in range(rank - 1):
        start += 1 + numbers[start]
    return iter(numbers[start + 1 : start + 1 + numbers[start]])


def _encode_share(share: RankShare) -> list[int]:
    numbers = [len(share.changes)]
    for change in share.changes:
        numbers += _encode_change(change)
    numbers.append(len(share.openings))
    for opening in share.openings:
        numbers += [opening.slot, opening.max_len, opening.prompt_len, opening.num_scored]
        numbers += _encode_params(opening.params)
        numbers += [len(opening.token_ids), *opening.token_ids]
    numbers.append(len(share.pieces))
    for piece in share.pieces:
        numbers += [piece.slot, piece.start, piece.length, int(piece.draws), len(piece.drafts), *piece.drafts]
    return numbers


def _decode_share(numbers: Iterator[int]) -> RankShare:
    changes = tuple(_decode_change(numbers) for _ in range(next(numbers)))
    openings = tuple(
        Opening(next(numbers), next(numbers), next(numbers), next(numbers), _decode_params(numbers), _take(numbers))
        for _ in range(next(numbers))
    )
    pieces = tuple(
        RankPiece(next(numbers), next(numbers), next(numbers), bool(next(numbers)), _take(numbers))
        for _ in range(next(numbers))
    )
    return RankShare(changes, openings, pieces)


def _encode_change(change: CacheChange) -> list[int]:
    kind = _CHANGES.index(type(change))
    if not isinstance(change, Admitted):
        return [kind, *map(int, change)]
    salt = [_NONE] if change.salt is None else _salt_numbers(change.salt)
    numbers = [kind, change.slot, change.max_tokens, change.position, change.num_below, *salt]
    return [*numbers, len(change.token_ids), *change.token_ids]


def _decode_change(numbers: Iterator[int]) -> CacheChange:
    made = _CHANGES[next(numbers)]
    if made is Admitted:
        slot, max_tokens, position, num_below, length = (next(numbers) for _ in range(5))
        data = None if length == _NONE else bytes(next(numbers) for _ in range(length))
        salt = None if data is None else data.decode("utf-8", "surrogatepass")
        return Admitted(slot, max_tokens, position, num_below, _take(numbers), salt)
    if made is Released:
        return Released(next(numbers), bool(next(numbers)), next(numbers))
    return made(next(numbers), next(numbers))  # type: ignore[call-arg]  # the others have two numbers


def _salt_numbers(salt: str) -> list[int]:
    data = salt.encode("utf-8", "surrogatepass")  # as its hash takes it
    return [len(data), *data]


def encode_answer(step: int, checksum: int, answer: RankAnswer) -> list[int]:
    numbers = [step, checksum, len(answer.drawn)]
    for one in answer.drawn:
        if one.error is not None:
            numbers += [0, *text_numbers(one.error)]
            continue
        numbers += [1, one.token_id]
        numbers += [_NONE] if one.logprobs is None else _encode_logprobs(one.logprobs)
    numbers.append(len(answer.offers))
    for drafts, confidences in answer.offers:
        sure = () if confidences is None else confidences
        numbers += [len(drafts), *drafts, len(sure), *map(float_bits, sure)]
    numbers.append(len(answer.scores))
    for slot, scores in answer.scores:
        numbers += [slot, len(scores)]
        for score in scores:
            numbers += [score.token_id, *_encode_logprobs(score)]
    return numbers


def decode_answer(numbers: Sequence[int]) -> tuple[int, int, RankAnswer]:
    """Step, checksum, and what was drawn, offered and scored."""
    values = iter(numbers)
    step, checksum = next(values), next(values)
    drawn = tuple(_decode_token(values) for _ in range(next(values)))
    offers = tuple(Offer(_take(values), _decode_confidences(values)) for _ in range(next(values)))
    scores = tuple((next(values), _decode_scores(values)) for _ in range(next(values)))
    return step, checksum, RankAnswer(drawn, offers, scores)


def _encode_logprobs(logprobs: TokenLogprobs) -> list[int]:
    numbers = [len(logprobs.top), float_bits(logprobs.logprob)]
    for token_id, logprob in logprobs.top:
        numbers += [token_id, float_bits(logprob)]
    return numbers


def _decode_logprobs(token_id: int, values: Iterator[int]) -> TokenLogprobs | None:
    num_top = next(values)
    if num_top == _NONE:
        return None
    logprob = bits_float(next(values))
    return TokenLogprobs(token_id, logprob, tuple((next(values), bits_float(next(values))) for _ in range(num_top)))


def _decode_token(values: Iterator[int]) -> DrawnToken:
    if next(values) == 0:
        return DrawnToken(0, None, bytes(_take(values)).decode())
    token_id = next(values)
    return DrawnToken(token_id, _decode_logprobs(token_id, values))


def _decode_confidences(values: Iterator[int]) -> tuple[float, ...] | None:
    """A drafter is sure of every draft to some degree, or says nothing."""
    return tuple(map(bits_float, _take(values))) or None


def _decode_scores(values: Iterator[int]) -> tuple[TokenLogprobs, ...]:
    scores = (_decode_logprobs(next(values), values) for _ in range(next(values)))
    return tuple(score for score in scores if score is not None)


def _encode_params(params: SamplingParams) -> list[int]:
    """Of `drawing_params`."""
    assert params.seed is not None, "a request has one"
    optional = (_NONE if value is None else value for value in (params.logprobs, params.prompt_logprobs))
    numbers = [params.top_k, params.seed, *optional, *(float_bits(getattr(params, name)) for name in DRAW_REALS)]
    biases = params.logit_bias or {}
    numbers.append(len(biases))
    for token_id, bias in biases.items():
        numbers += [token_id, float_bits(bias)]
    allowed = params.allowed_token_ids
    numbers += [_NONE] if allowed is None else [len(allowed), *allowed]
    banned = [word[0] for word in params.bad_words_ids]
    return [*numbers, len(banned), *banned]


def _decode_params(numbers: Iterator[int]) -> SamplingParams:
    top_k, seed = next(numbers), next(numbers)
    logprobs, prompt_logprobs = (None if value == _NONE else value for value in (next(numbers), next(numbers)))
    reals: dict[str, Any] = {name: bits_float(next(numbers)) for name in DRAW_REALS}
    biases = {next(numbers): bits_float(next(numbers)) for _ in range(next(numbers))}
    num_allowed = next(numbers)
    allowed = None if num_allowed == _NONE else tuple(next(numbers) for _ in range(num_allowed))
    return SamplingParams(
        top_k=top_k, seed=seed, logprobs=logprobs, prompt_logprobs=prompt_logprobs, logit_bias=biases or None,
        allowed_token_ids=allowed, bad_words_ids=tuple((token_id,) for token_id in _take(numbers)), ignore_eos=True,
        **reals,
    )  # fmt: skip


def _take(numbers: Iterator[int]) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(next(numbers)))
