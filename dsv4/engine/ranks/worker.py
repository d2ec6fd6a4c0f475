"""One rank's share of every step, besides rank 0's: `RankExecutor` repeats what rank 0's books say, runs the tokens and
draws. `follow` takes work from rank 0 until the end.

Nothing is decided here. Rank 0 says when a step is launched, when it draws (at once, or when rules have been asked) and
when it is collected; it may launch a step before the one before it is collected, as on one GPU. A rank with nothing to
run pads: its experts serve the others.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.tree import ChainKeys
from dsv4.dist.control import Follower
from dsv4.dist.errors import RanksDiverged
from dsv4.dist.messages import pack, unpack
from dsv4.engine.draft.host_copy import read_offers
from dsv4.engine.ranks.books import Admitted, CacheChange, Launched, Released, Rewound
from dsv4.engine.ranks.tiers import Below, SyncEndpoint
from dsv4.engine.ranks.wire import (
    DrawnToken,
    Opening,
    RankAnswer,
    RankPiece,
    RanksStep,
    SentMasks,
    decode_masks,
    decode_plan,
    encode_answer,
)
from dsv4.engine.request import Request
from dsv4.engine.run.bucket import padding_batch
from dsv4.engine.run.in_flight import InFlightStep
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.kept import Outcome, by_piece, num_accepted
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.step.builder import StepBuilder
from dsv4.engine.step.masks import Masks
from dsv4.engine.step.sampler import Drawn, Undrawable, outcomes
from dsv4.model.attention import SharedWindow
from dsv4.model.transformer import Transformer
from dsv4.request import TokenLogprobs

_NO_EOS = -1  # rank 0 decides when a request is over
_LOOK_SECONDS = 1.0  # a rank waits for files no longer than this in one go: one that stands still is taken for dead


class Work(IntEnum):
    """The first number of what rank 0 asks for."""

    STEP = 0  # a plan: launch this rank's share
    DRAW = 1  # what rules allow: draw from the step launched last
    COLLECT = 2  # say what the oldest step drew
    FORWARD = 3  # so many rows of padding through all layers
    BLOCK = 4  # through one layer
    MTP = 5  # through an MTP block
    DSPARK = 6  # through the layers of a DSpark head
    LOOK = 7  # say what host memory and files have of a prefix


class RankExecutor:
    """The requests that live on one rank, as far as running and drawing needs them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.cache = runner.cache
        self._builder = StepBuilder(self.cache, runner.draft_table)
        self._requests: dict[int, Request] = {}  # by slot
        self._known: dict[int, list[int]] = {}  # by slot: tokens the prefix cache knows of
        self._flights: deque[InFlightStep] = deque()  # launched and not collected, the oldest first

    def launch(self, given: RanksStep) -> None:
        """The share's tokens, padded to the rows that all ranks run."""
        self.repeat(given.share.changes)
        for opening in given.share.openings:
            self._open(opening)
        plan = StepPlan(tuple(self._piece(one) for one in given.share.pieces))
        flight = InFlightStep.launch(self.runner, self._builder, plan, given.size)
        flight.number = given.number
        for piece in plan.pieces:
            piece.request.num_unread += piece.draws
        self._flights.append(flight)
        if given.draws_at_once:
            self.draw(())

    def draw(self, masks: SentMasks) -> None:
        """Launch the draw of the step launched last; `masks` are what rules allow some of its requests."""
        if not self._flights or self._flights[-1].drawn is not None:
            raise RanksDiverged("asked to draw from a step that was not launched")
        flight = self._flights[-1]
        flight.draw(self.runner, _masks(masks))

    def collect(self) -> tuple[int, RankAnswer]:
        """The number of the oldest step, what its rows drew, and what the drafter expects next."""
        if not self._flights or self._flights[0].drawn is None:
            raise RanksDiverged("asked for a step that was not launched and drawn")
        flight = self._flights.popleft()
        assert flight.drawn is not None
        found, drawing, pieces = flight.drawn.wait(), flight.step.drawing, flight.plan.others
        results = outcomes(found[0].tolist(), found[1:], drawing, {}) if drawing else []
        for piece, drawn in by_piece(flight.plan.others, results):
            kept = drawn[: 1 + num_accepted(piece, drawn)]
            piece.request.num_unread -= piece.draws
            piece.request.token_ids += [outcome.token_id for outcome in kept if isinstance(outcome, Drawn)]
            piece.request.drafts = ()
        offers = read_offers(flight.drafted, sum(piece.draws for piece in pieces))
        flight.scores.read()
        answer = RankAnswer(tuple(map(_drawn_token, results)), tuple(offers), tuple(_take_scores(pieces)))
        return flight.number, answer

    def look(self, question: SyncEndpoint) -> Below:
        """What lies below the device, kept until the next step's changes are repeated."""
        tiers, (must_wait, num_here, keys) = self.cache.tiers, question
        assert tiers is not None, "rank 0 has tiers, and the same limits"
        num_loading = tiers.prepare(keys, num_here)
        if num_loading and must_wait:
            tiers.wait(_LOOK_SECONDS)
            num_loading = tiers.prepare(keys, num_here)
        num_blocks, is_from_disk = tiers.promise(keys)
        return Below(num_blocks, num_loading, is_from_disk)

    def _piece(self, one: RankPiece) -> Piece:
        request, num_drafts = self._request(one.slot), len(one.drafts)
        if one.start + one.length - num_drafts > request.num_known:
            raise RanksDiverged(f"slot {one.slot} knows {request.num_known} tokens, the plan runs to more")
        request.drafts = one.drafts
        return Piece(request, one.slot, one.start, one.length, one.draws, num_drafts)

    def repeat(self, changes: Sequence[CacheChange]) -> None:
        """What rank 0's books say happened to this cache."""
        for change in changes:
            self._repeat(change)
        if self.cache.tiers is not None:
            self.cache.tiers.end_promises()

    def _repeat(self, change: CacheChange) -> None:
        cache, slot = self.cache, change.slot
        if isinstance(change, Admitted):
            known = self._known[slot] = list(change.token_ids)
            chain = cache.chain(known, change.salt) if known else None
            if chain is not None and change.num_below:
                self._check_below(chain, change.num_below)
            given = cache.admit(change.max_tokens, chain, cache.match(chain, change.num_below))
            if given != slot or cache.position(given) != change.position:
                raise RanksDiverged(
                    f"the cache gave slot {given} at token {cache.position(given)} where rank 0's books gave slot "
                    f"{slot} at {change.position}"
                )
        elif isinstance(change, Released):
            self._learn(slot, change.num_known)
            cache.release(slot, keep=change.keep)
            self._requests.pop(slot, None)
            del self._known[slot]
        elif isinstance(change, Launched):
            self._learn(slot, change.num_known)
            cache.launched(slot)
        elif isinstance(change, Rewound):
            cache.rewind(slot, change.position)
        else:
            cache.stop_at(slot, change.position)

    def _check_below(self, chain: ChainKeys, num_blocks: int) -> None:
        """What rank 0 was promised is there."""
        tiers = self.cache.tiers
        if tiers is None or tiers.longest(chain.first(num_blocks)) != num_blocks:
            raise RanksDiverged(f"host memory has no prefix of {num_blocks} blocks, this rank had reported that it has")

    def _learn(self, slot: int, num_known: int) -> None:
        """The prefix cache hears of the request's tokens as far as rank 0's books had."""
        known = self._known[slot]
        if len(known) < num_known:
            known += self._request(slot).token_ids[len(known) : num_known]
        if len(known) < num_known:
            raise RanksDiverged(f"slot {slot} knows {len(known)} tokens, rank 0's books {num_known}")

    def _open(self, opening: Opening) -> None:
        token_ids = list(opening.token_ids or self._known.get(opening.slot, ()))
        self._requests[opening.slot] = Request(
            params=opening.params, token_ids=token_ids, prompt_len=opening.prompt_len, max_len=opening.max_len,
            eos_token_id=_NO_EOS, slot=opening.slot, num_scored=opening.num_scored,
        )  # fmt: skip

    def _request(self, slot: int) -> Request:
        if slot not in self._requests:
            raise RanksDiverged(f"the plan runs slot {slot}, which holds no request here")
        return self._requests[slot]


def _masks(sent: SentMasks) -> Masks:
    """What rank 0 says the rules of rows that draw allow. Which of them are stuck is its own business."""
    if not sent:
        return Masks()
    rows, words = zip(*sent, strict=True)
    return Masks(torch.tensor(rows), torch.tensor(words, dtype=torch.int32))


def _drawn_token(outcome: Outcome) -> DrawnToken:
    if isinstance(outcome, Undrawable):
        return DrawnToken(0, None, outcome.reason)
    return DrawnToken(outcome.token_id, outcome.logprobs)


def _take_scores(pieces: Sequence[Piece]) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
    """What was scored in this step; the requests here keep nothing of it."""
    for piece in pieces:
        found, piece.request.prompt_logprobs = piece.request.prompt_logprobs, []
        if found:
            yield piece.slot, tuple(one for one in found if one is not None)


class RollingChecksum:
    """Of all that rank 0 says of steps, and of what one rank drew: both must come to the same number in every step."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, payload: bytes) -> None:
        self._value = zlib.crc32(payload, self._value)

    def add_answer(self, answer: RankAnswer) -> int:
        self.add(pack(encode_answer(0, 0, answer)))
        return self._value


def follow(
    executor: RankExecutor, link: Follower, rank: int, num_ranks: int, make_drafts: Callable[[], KVCacheManager]
) -> None:  # fmt: skip
    """Do what rank 0 says until it ends."""
    last_step, checksum = 0, RollingChecksum()
    while (payload := link.work()) is not None:
        kind, *numbers = unpack(payload)
        work = Work(kind)
        if work is Work.LOOK:
            link.answer(pack(executor.look(SyncEndpoint.decode(numbers, rank, num_ranks))))
            continue
        if work in (Work.FORWARD, Work.BLOCK, Work.MTP, Work.DSPARK):
            serve_padding(executor.runner.model, executor.cache, make_drafts, work, numbers)
            link.answer(b"")
            continue
        checksum.add(payload)
        if work is Work.STEP:
            given = decode_plan(numbers, rank)
            if given.number != last_step + 1:
                raise RanksDiverged(f"plan {given.number} arrived after plan {last_step}")
            last_step = given.number
            executor.launch(given)
        elif work is Work.DRAW:
            executor.draw(decode_masks(numbers, rank))
        else:
            number, answer = executor.collect()
            link.answer(pack(encode_answer(number, checksum.add_answer(answer), answer)))


@torch.no_grad()
def serve_padding(
    model: Transformer, cache: KVCacheManager, make_drafts: Callable[[], KVCacheManager], work: Work, numbers: list[int]
) -> None:
    """Rows of padding through the same layers as rank 0's rows: for calls outside the engine. `make_drafts` makes a
    cache that has the draft blocks' layers."""
    num_rows, layer_idx = numbers
    _, batch = padding_batch(num_rows, cache.block_table)
    if work is Work.FORWARD:
        model.forward(batch, cache.handle)
        return
    streams = model.context.window_freqs.new_zeros(
        (num_rows, model.config.hc_mult, model.config.hidden_size), dtype=model.context.dtype
    )
    if work is Work.BLOCK:
        model.block(layer_idx, streams, cache.handle(layer_idx), batch)
        return
    drafts, num_main = make_drafts(), model.config.num_hidden_layers
    _, batch = padding_batch(num_rows, drafts.block_table)
    if work is Work.MTP:
        model.mtp(layer_idx, streams, batch, drafts.handle(num_main + layer_idx))
        return
    handles = [drafts.handle(place) for place in range(num_main, len(model.schedule))]
    model.dspark(batch, handles, SharedWindow(batch, handles[0].window.ring_len))
