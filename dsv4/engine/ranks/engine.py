"""`RankEngine`: the engine of several ranks, on rank 0. One plan a step goes to all; each runs its own requests.

A step: `RankScheduler` says which requests feed how many tokens on which rank. The plan goes out as one message
(engine/rank_wire.py). Every rank runs its share, padded to the rows of the busiest one, because each layer's experts
are everybody's; then it draws. Rank 0's own share is the step of any other engine. The draw of a step whose requests
have rules waits for a second message, with what the rules allow; a third asks every rank for what it drew.

Steps overlap as in `Engine`: the plan of a step goes out before the one before it is collected. `observers` are told
of rank 0's own tokens.

A rank that fails ends the engine (`RankFailed`): requests are spread over all ranks' memory, and none could go on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.ledger import CacheLedger
from dsv4.cache.manager import KVCacheManager
from dsv4.dist.control import Leader
from dsv4.dist.errors import RankFailed, RanksDiverged
from dsv4.dist.messages import pack, unpack
from dsv4.engine.draft.counts import FixedDrafts
from dsv4.engine.engine import Engine
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.ranks.books import RankBooks
from dsv4.engine.ranks.scheduler import RankScheduler, RanksPlan, StepSize
from dsv4.engine.ranks.tiers import Lookups, RankTiers
from dsv4.engine.ranks.wire import (
    DrawnToken,
    Opening,
    RankAnswer,
    RankPiece,
    RankShare,
    SentMasks,
    decode_answer,
    drawing_params,
    encode_masks,
    encode_plan,
)
from dsv4.engine.ranks.worker import RollingChecksum, Work
from dsv4.engine.request import Request
from dsv4.engine.run.in_flight import InFlightStep, RemoteResults
from dsv4.engine.run.runner import Runner
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.step.masks import Masks, make_masks
from dsv4.engine.step.sampler import Drawn, Undrawable
from dsv4.engine.step.tokens import StepTokens
from dsv4.model.attention import SharedWindow
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer


class RankEngine(Engine):
    """As `Engine`, over the caches of `num_ranks` ranks that are alike. `cache` and `runner` are rank 0's own."""

    def __init__(
        self, model: Transformer, cache: KVCacheManager, link: Leader, num_ranks: int, *,
        runner: Runner | None = None, overlap: bool | None = None, clock: Callable[[], float] = time.monotonic,
        experts: ExpertPool | None = None, drafts: FixedDrafts | None = None,
    ) -> None:  # fmt: skip
        self._lookups = Lookups(self._look)
        tiers = [None if cache.tiers is None else RankTiers(self._lookups, rank) for rank in range(1, num_ranks)]
        self._others = [RankBooks(cache.schema, cache.limits, one) for one in tiers]
        self._lookups.books.extend(self._others)
        self._books: list[CacheLedger] = [cache, *self._others]
        scheduler = RankScheduler(self._books, max_batched_tokens=cache.limits.max_chunk_tokens)
        super().__init__(
            model, cache, runner=runner, overlap=overlap, clock=clock, experts=experts, scheduler=scheduler,
            drafts=drafts,
        )  # fmt: skip
        self._link = link
        self._num_plans = self._num_collected = 0
        self._checksums = [RollingChecksum() for _ in self._others]
        self._opened: dict[Request, int] = {}  # what other ranks know: the request, as it was after so many preemptions

    @property
    def num_slots(self) -> int:
        return sum(books.schema.num_slots for books in self._books)

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        self._link.when_failed(tell)

    def step(self) -> StepTokens:
        """See `Engine.step`. An interrupt (Ctrl-C) is seen between two steps: in the middle the others would wait."""
        with _interrupts_later():
            try:
                return super().step()
            except BaseException:
                if self._link.is_lost:
                    self._drop_flights()  # nobody will ever say what they drew
                raise

    def check_integrity(self) -> None:
        """Also the books of the other ranks' caches, which follow them in every step, or say so."""
        super().check_integrity()
        for books in self._others:
            books.check_integrity()

    def _blocks(self) -> tuple[int, int]:
        return sum(one.schema.num_blocks for one in self._books), sum(one.num_free_blocks for one in self._books)

    def _prefix_stats(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for books in self._books:
            total.update(books.prefix_stats())
        return dict(total)

    # ---- launching ----

    def _plan(self) -> StepPlan | None:
        self._lookups.forget()
        return super()._plan()

    def _wait_for_files(self, seconds: float) -> None:
        for books in self._books:
            books.wait_for_files(seconds)

    def _look(self, question: list[int]) -> list[list[int]]:
        """What every other rank says it has below its device."""
        with self._link.working():
            self._link.tell(pack([Work.LOOK, *question]))
            return [unpack(answer) for answer in self._link.answers()]

    def _forward(self, plan: StepPlan) -> InFlightStep:
        assert isinstance(plan, RanksPlan)
        size = StepSize(self.runner.padded(plan.num_rows), plan.num_requests, self._num_asked(plan))
        self._num_plans += 1
        shares = [self._share(books, part) for books, part in zip(self._others, plan.shares[1:], strict=True)]
        self._opened = {request: count for request, count in self._opened.items() if request.slot is not None}
        with self._link.working():
            self._tell(Work.STEP, encode_plan(self._num_plans, size, not plan.has_rules, shares))
            flight = self._run(plan.shares[0], size)
        flight.plan = plan
        return flight

    def _share(self, books: RankBooks, part: StepPlan) -> RankShare:
        """What a rank is told."""
        changes = books.take_changes()
        books.prepare_forward(
            [piece.slot for piece in part.pieces], [piece.start for piece in part.pieces],
            [piece.length for piece in part.pieces],
        )  # fmt: skip
        openings = []
        for piece in part.pieces:
            request = piece.request
            if self._opened.get(request) != request.num_preemptions:
                self._opened[request] = request.num_preemptions
                openings.append(_opening(request, piece.slot))
        return RankShare(changes, tuple(openings), tuple(map(_told, part.pieces)))

    def _draw(self, flight: InFlightStep) -> None:
        assert isinstance(flight.plan, RanksPlan)
        with self._link.working():
            if flight.plan.has_rules:
                vocab_size = self.model.config.vocab_size
                shares, device = flight.plan.shares[1:], self.cache.device
                found = [make_masks(part.others, vocab_size, device) for part in shares]
                flight.stuck_elsewhere = [masks.stuck for masks in found]  # these rows draw in vain
                self._tell(Work.DRAW, encode_masks([_told_masks(masks) for masks in found]))
            super()._draw(flight)

    # ---- collecting ----

    def _collect(self) -> None:
        with self._link.working():
            self._tell(Work.COLLECT, [])
            super()._collect()

    def _elsewhere(self, flight: InFlightStep) -> RemoteResults:
        plan, stuck = flight.plan, flight.stuck_elsewhere or [{}] * len(self._others)
        assert isinstance(plan, RanksPlan)
        self._num_collected += 1
        found = RemoteResults([], [])
        for rank, payload in enumerate(self._link.answers(), start=1):
            answer, part = self._check(rank, payload), plan.shares[rank]
            _take_scores(part, answer)
            expected = sum(1 + piece.num_drafts for piece in part.pieces if piece.draws)
            if len(answer.drawn) != expected:
                raise RanksDiverged(f"rank {rank} drew from {len(answer.drawn)} rows, the plan has {expected}")
            found.drawn.extend(_outcome(one, stuck[rank - 1].get(row)) for row, one in enumerate(answer.drawn))
            found.offers.extend(answer.offers)
        return found

    def _check(self, rank: int, payload: bytes) -> RankAnswer:
        """What a rank says, once it has shown that it did what it was told."""
        step, checksum, answer = decode_answer(unpack(payload))
        if step != self._num_collected:
            raise RanksDiverged(f"rank {rank} answered plan {step}, expected {self._num_collected}")
        if checksum != self._checksums[rank - 1].add_answer(answer):
            raise RanksDiverged(f"rank {rank}: the checksum of its plans and tokens differs from rank 0's")
        return answer

    def _tell(self, work: Work, numbers: list[int]) -> None:
        payload = pack([work, *numbers])
        for checksum in self._checksums:
            checksum.add(payload)
        self._link.tell(payload)


class LeadingTransformer(Transformer):
    """Rank 0's model for calls outside the engine: the other ranks run as many rows of padding through the same layers,
    so that their experts are there."""

    def __init__(self, inner: Transformer, link: Leader) -> None:
        self.config, self.params = inner.config, inner.params
        self.schedule, self.context = inner.schedule, inner.context
        self._link = link

    def block(self, layer_idx: int, streams: Tensor, cache: LayerCacheHandle, batch: TokenBatch) -> BlockOutput:
        with self._together(Work.BLOCK, batch, layer_idx):
            return super().block(layer_idx, streams, cache, batch)

    def forward(
        self, batch: TokenBatch, cache: Callable[[int], LayerCacheHandle],
        observe: Callable[[int, BlockOutput], None] | None = None,
    ) -> Tensor:  # fmt: skip
        with self._together(Work.FORWARD, batch):
            return super().forward(batch, cache, observe)

    def mtp(self, mtp_idx: int, streams: Tensor, batch: TokenBatch, cache: LayerCacheHandle) -> Tensor:
        with self._together(Work.MTP, batch, mtp_idx):
            return super().mtp(mtp_idx, streams, batch, cache)

    def dspark(
        self, batch: TokenBatch, handles: Sequence[LayerCacheHandle], shared: SharedWindow | None
    ) -> Tensor:  # fmt: skip
        with self._together(Work.DSPARK, batch):
            return super().dspark(batch, handles, shared)

    @contextmanager
    def _together(self, work: Work, batch: TokenBatch, layer_idx: int = 0) -> Iterator[None]:
        with self._link.working():
            self._link.tell(pack([work, batch.num_tokens, layer_idx]))
            yield
            self._link.answers()


def _opening(request: Request, slot: int) -> Opening:
    known = () if request.chain is not None else tuple(request.token_ids)  # its admission said them
    params = drawing_params(request.params, request.eos_token_id)
    return Opening(slot, request.max_len, request.prompt_len, request.num_scored, params, known)


def _told(piece: Piece) -> RankPiece:
    return RankPiece(piece.slot, piece.start, piece.length, piece.draws, piece.request.drafts[: piece.num_drafts])


def _told_masks(masks: Masks) -> SentMasks:
    """Of the rows that have one."""
    if masks.rows is None or masks.words is None:
        return ()
    return tuple((row, tuple(words)) for row, words in zip(masks.rows.tolist(), masks.words.tolist(), strict=True))


def _take_scores(part: StepPlan, answer: RankAnswer) -> None:
    """Each request gets what was scored of its prompt."""
    requests = {piece.slot: piece.request for piece in part.pieces}
    for slot, scores in answer.scores:
        request = requests[slot]
        request.prompt_logprobs += scores
        request.num_scored += len(scores)


def _outcome(drawn: DrawnToken, stuck: str | None) -> Drawn | Undrawable:
    reason = stuck or drawn.error
    return Drawn(drawn.token_id, drawn.logprobs) if reason is None else Undrawable(reason)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C inside is raised at the end. Only the main thread is interrupted; elsewhere there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt
