"""`RankEngine`: the engine of several ranks, on rank 0. One plan a step goes to all; each runs its own requests.

A step: `RankScheduler` says which requests feed how many tokens on which rank. The plan goes out as one message
(engine/rank_wire.py). Every rank runs its share, padded to the rows of the busiest one, because each layer's experts
are everybody's; then it draws, and sends what it drew. Rank 0 takes the tokens as if it had drawn them all.

Steps do not overlap: rank 0 hears what all ranks drew before it plans again. `on_experts` is told of rank 0's own
tokens.

A rank that fails ends the engine (`RankFailed`): requests are spread over all ranks' memory, and none could go on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.errors import require_integrity
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.dist.control import Leader
from dsv4.dist.errors import RankFailed, RanksDiverged
from dsv4.dist.messages import pack, unpack
from dsv4.engine.engine import Engine, StepResult
from dsv4.engine.rank_books import RankBooks
from dsv4.engine.rank_scheduler import RankScheduler, RanksPlan
from dsv4.engine.rank_wire import (
    DrawnToken,
    Opening,
    RankAnswer,
    RankPiece,
    RankShare,
    decode_answer,
    decode_plan,
    drawing_params,
    encode_plan,
)
from dsv4.engine.rank_worker import RankExecutor, RollingChecksum, Work
from dsv4.engine.runner import Runner
from dsv4.engine.sampler import Drawn, Undrawable, make_masks
from dsv4.engine.scheduler import Piece, StepPlan
from dsv4.engine.sequence import Sequence
from dsv4.model.block import BlockOutput
from dsv4.model.transformer import Transformer
from dsv4.text.tokenizer import Tokenizer


class RankEngine(Engine):
    """As `Engine`, over the caches of `num_ranks` ranks that are alike. `cache` and `runner` are rank 0's own."""

    def __init__(
        self, model: Transformer, cache: KVCacheManager, tokenizer: Tokenizer | None, link: Leader, num_ranks: int, *,
        runner: Runner | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        schema = cache.schema
        self._books = [RankBooks(schema.num_slots, schema.num_blocks) for _ in range(num_ranks)]
        scheduler = RankScheduler(self._books, max_batched_tokens=cache.limits.max_chunk_tokens)
        super().__init__(model, cache, tokenizer, runner=runner, overlap=False, clock=clock, scheduler=scheduler)
        self._link = link
        self._executor = RankExecutor(self.runner)
        self._num_plans = 0
        self._checksums = [RollingChecksum() for _ in range(num_ranks - 1)]
        self._opened: list[set[Sequence]] = [set() for _ in range(num_ranks)]

    @property
    def num_slots(self) -> int:
        return sum(books.num_slots for books in self._books)

    def when_failed(self, tell: Callable[[RankFailed], None]) -> None:
        self._link.when_failed(tell)

    def step(self) -> list[StepResult]:
        """See `Engine.step`. An interrupt (Ctrl-C) is seen between two steps: in the middle the others would wait."""
        with _interrupts_later():
            try:
                return super().step()
            finally:
                self._follow_books()

    def abort(self, sequence: Sequence) -> None:
        super().abort(sequence)
        self._follow_books()

    def check_integrity(self) -> None:
        """Also rank 0's cache against its books. Other ranks' caches follow theirs in every step, or say so."""
        super().check_integrity()
        found = self.cache.num_free_slots, self.cache.num_free_blocks
        expected = self._books[0].num_free_slots, self._books[0].num_free_blocks
        require_integrity(found == expected, f"rank 0 has {found} slots and blocks free, its books say {expected}")

    def _follow_books(self) -> None:
        """Rank 0's cache after its books: calls outside the engine use it too. The others hear with the next plan."""
        if self._link.is_lost:
            return  # the plan may have been told to nobody, and no other follows
        self._executor.follow_books(RankShare(changes=tuple(self._books[0].take_changes())))

    def _blocks(self) -> tuple[int, int]:
        return sum(books.num_blocks for books in self._books), sum(books.num_free_blocks for books in self._books)

    def _launch(self) -> None:
        """The next step, and what came of it: nothing is left to collect."""
        plan = self._plan()
        if plan is None:
            return
        assert isinstance(plan, RanksPlan)
        stuck: dict[Sequence, str] = {}
        try:
            answers = self._run(plan, stuck)
        except BaseException:
            self.scheduler.discard(plan)
            raise
        self.scheduler.commit(plan)
        for part, answer in zip(plan.shares, answers, strict=True):
            _take_scores(part, answer)
        drawing = [piece.sequence for piece in plan.pieces if piece.draws]
        drawn = [one for answer in answers for one in answer.drawn]
        found = [_outcome(one, stuck.get(sequence)) for sequence, one in zip(drawing, drawn, strict=True)]
        self._settle(plan, found)

    def _run(self, plan: RanksPlan, stuck: dict[Sequence, str]) -> list[RankAnswer]:
        """The plan on every rank; what each of them says."""
        num_rows = self.runner.padded(plan.num_rows)
        self._num_plans += 1
        shares = [self._share(rank, part, stuck) for rank, part in enumerate(plan.shares)]
        numbers = encode_plan(self._num_plans, num_rows, shares)
        payload = pack([Work.STEP, *numbers])
        self._executor.on_experts = self.on_experts
        with self._link.working():
            self._link.tell(payload)
            answers = [self._executor.run(decode_plan(numbers, 0)[2], num_rows)]
            started = time.perf_counter()
            for rank, answer in enumerate(self._link.answers(), start=1):
                answers.append(self._check(rank, payload, answer))
            self._seconds_waiting += time.perf_counter() - started
        return answers

    def _share(self, rank: int, part: StepPlan, stuck: dict[Sequence, str]) -> RankShare:
        """What a rank is told. `stuck` gets the requests whose rules allow nothing: they draw in vain."""
        books, opened = self._books[rank], self._opened[rank]
        opened -= {sequence for sequence in opened if sequence.slot is None}
        openings, pieces = [], []
        for sequence, slot, start, length, draws, _ in part.pieces:
            books.advance(slot, length)
            pieces.append(RankPiece(slot, start, length, draws))
            if start == 0 or sequence not in opened:
                opened.add(sequence)
                openings.append(_opening(sequence, slot))
        masks = self._masks([piece for piece in part.pieces if piece.draws], stuck)
        return RankShare(tuple(books.take_changes()), tuple(openings), tuple(pieces), masks)

    def _masks(self, drawing: list[Piece], stuck: dict[Sequence, str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """By slot, what the rules of these requests allow, in words."""
        found = make_masks([piece.sequence for piece in drawing], self.model.config.vocab_size)
        stuck |= {drawing[row].sequence: why for row, why in found.stuck.items()}
        if found.bits is None or found.is_masked is None:
            return ()
        rows = found.is_masked.nonzero().flatten().tolist()
        return tuple((drawing[row].slot, tuple(found.bits[row].tolist())) for row in rows)

    def _check(self, rank: int, payload: bytes, answer: bytes) -> RankAnswer:
        """What a rank says, once it has shown that it did what it was told."""
        step, checksum, found = decode_answer(unpack(answer))
        if step != self._num_plans:
            raise RanksDiverged(f"rank {rank} answered plan {step}, expected {self._num_plans}")
        expected = self._checksums[rank - 1]
        expected.add(payload)
        if checksum != expected.add_answer(found):
            raise RanksDiverged(f"rank {rank}: the checksum of its plans and tokens differs from rank 0's")
        return found


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

    @contextmanager
    def _together(self, work: Work, batch: TokenBatch, layer_idx: int = 0) -> Iterator[None]:
        with self._link.working():
            self._link.tell(pack([work, batch.num_tokens, layer_idx]))
            yield
            self._link.answers()


def _opening(sequence: Sequence, slot: int) -> Opening:
    return Opening(
        slot, sequence.max_len, sequence.prompt_len, sequence.num_scored,
        drawing_params(sequence.params, sequence.eos_token_id), tuple(sequence.token_ids),
    )  # fmt: skip


def _take_scores(part: StepPlan, answer: RankAnswer) -> None:
    """Each request gets what was scored of its prompt."""
    sequences = {piece.slot: piece.sequence for piece in part.pieces}
    for slot, scores in answer.scores:
        sequence = sequences[slot]
        sequence.prompt_logprobs += scores
        sequence.num_scored += len(scores)


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
