"""`BucketGraph`: a captured step of a fixed number of rows: the forward call, the draw, and the log-probabilities.

Three graphs, since not every step needs all: a step that reads prompts may draw nothing, and the draw may have to wait
for the host (a rule's mask) while the forward call runs. Each reads static buffers and the results of those before it.
With a drafter there are more: its rows of the step's tokens, and a graph for each number of drafts it may be asked for.

All graphs share memory: what one gives lies where an earlier one has its temporaries, and is gone when that one runs
again. So a graph reads only what was made since the forward call of its own step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import COLUMNS, PADDED_SLOT, TokenBatch, columns_of
from dsv4.engine.draft.round import NO_DRAFT, NO_REQUEST, Drafted, Extended, FedDrafts, extend, propose
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.run.graphs import Capture, Replay, Result
from dsv4.engine.step.builder import StepBuffer, part_starts
from dsv4.engine.step.constraint import num_words
from dsv4.engine.step.sampler import NUM_TOP
from dsv4.model.drafter import Drafter
from dsv4.ops import OpSet
from dsv4.ops.sampling import SamplingRows, SamplingState


class Forwarded(NamedTuple):
    """What a forward call leaves on the device. That of a replay is overwritten by the next replay.

    logits   fp32 (or wider) [R, vocab]: of the rows asked for
    streams  [T, n, D]: after the last layer
    experts  [T, k] for every layer, padding included
    picks    entries [T, index_topk] for every CSA layer, where they were asked for
    hidden   [T, ...]: what the drafter takes of every token, where there is one
    bucket   the graph that made it, or None
    """

    logits: Tensor
    streams: Tensor
    experts: tuple[Tensor, ...]
    hidden: Tensor | None = None
    bucket: BucketGraph | None = None
    picks: tuple[Tensor, ...] = ()


class Draws(NamedTuple):
    """Token ids int64 [R], and their `sampled_logprobs` where a request asked for them."""

    token_ids: Tensor
    logprobs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Drafting:
    """The drafter of a runner: at most `max_drafts` for a request, asked for one of the numbers of `choices`."""

    drafter: Drafter
    max_drafts: int
    choices: tuple[int, ...]

    def __post_init__(self) -> None:
        most = min(self.max_drafts, self.drafter.max_drafts)
        if not self.choices or not all(1 <= choice <= most for choice in self.choices):
            raise ValueError(f"choices must be from 1 to {most}, found {self.choices}")


Compute = Callable[[TokenBatch, Tensor, int | None], Forwarded]  # batch, rows to draw from, rows that are no padding


class BucketGraph:
    """The static buffers of one bucket, and the captured calls over them."""

    def __init__(
        self, size: int, block_table: Tensor, state: SamplingState, ops: OpSet, experts: ExpertPool | None = None,
        drafting: Drafting | None = None, draft_table: Tensor | None = None,
    ) -> None:  # fmt: skip
        device, (num_slots, vocab_size) = block_table.device, state.bias.shape
        self._num_valid = 0
        self._experts = experts
        self._state, self._ops = state, ops
        self._num_top = min(NUM_TOP[0], vocab_size)
        self._padding, _ = padding_batch(size, block_table)
        self._num_filled = 0  # rows of the buffers that do not hold padding
        most_drafts = 0 if drafting is None else drafting.max_drafts
        num_draws = min(size, num_slots * (1 + most_drafts))  # a short prompt has many rows that draw nothing
        starts = part_starts((self._padding.numel(), num_draws, num_draws, num_draws))
        self.buffer = StepBuffer(torch.zeros(starts[-1], dtype=torch.int64, device=device), size, num_draws)
        self._columns = self.buffer.numbers[: self._padding.numel()].view_as(self._padding).copy_(self._padding)
        self.batch = TokenBatch.over(self._columns, block_table, size)
        self._draw_rows, slots, positions = (self.buffer.numbers[start : start + num_draws] for start in starts[1:4])
        rows = padding_rows(num_draws, vocab_size, device, None if drafting is None else most_drafts)
        self._rows = replace(rows, slots=slots.copy_(rows.slots), positions=positions)
        self._drafting, self._draft_table = drafting, draft_table
        if drafting is not None:
            self._fed = FedDrafts.padding(size, min(size, num_slots), drafting.max_drafts, device)

    def capture(self, compute: Compute, capture: Capture) -> None:
        """Capture `compute` over the buffers, and drawing from what it gives."""

        def ready(call: Callable[[], Result]) -> Replay[Result]:
            """Captured, and run once on padding, since the next capture reads its results: until then they are what
            memory happens to hold."""
            replay = capture(call)
            replay()
            return replay

        with padded_from(self._experts, 0):
            self._forward: Replay[Forwarded] = ready(lambda: compute(self.batch, self._draw_rows, self._num_valid))
            logits = self._forward.result.logits
            self._draw: Replay[Tensor] = ready(lambda: self._ops.sample(logits, self._rows, self._state))
            token_ids = self._draw.result
            self._logprobs: Replay[tuple[Tensor, ...]] = ready(
                lambda: self._ops.sampled_logprobs(logits, token_ids, self._num_top)
            )
            if self._drafting is not None:
                self._capture_drafting(self._drafting, token_ids, ready)

    def _capture_drafting(self, drafting: Drafting, token_ids: Tensor, capture: Capture) -> None:
        drafter, ops, state, hidden = drafting.drafter, self._ops, self._state, self._forward.result.hidden
        table = self._draft_table
        assert hidden is not None and table is not None
        self._extend: Replay[Extended] = capture(
            lambda: extend(drafter, ops, state, replace(self.batch), hidden, token_ids, self._fed)
        )
        ends = self._extend.result

        def drafts(num_drafts: int) -> Replay[Drafted]:
            return capture(lambda: propose(drafter, ops, state, ends, num_drafts, table))

        self._propose = {num_drafts: drafts(num_drafts) for num_drafts in drafting.choices}

    def forward(self, batch: TokenBatch, draw_rows: Tensor) -> Forwarded:
        num_tokens, num_rows = batch.num_tokens, draw_rows.shape[0]
        if batch.token_ids.data_ptr() != self._columns.data_ptr():  # it was not built in this buffer
            if self._num_filled > num_tokens:
                self._columns[:, num_tokens : self._num_filled].copy_(self._padding[:, num_tokens : self._num_filled])
            targets = [*self._columns[:, :num_tokens].unbind(0), self._draw_rows[:num_rows]]
            torch._foreach_copy_(targets, [*(getattr(batch, name) for name in COLUMNS), draw_rows])
        self._num_filled = self._num_valid = num_tokens
        with padded_from(self._experts, num_tokens):
            made = self._forward()
        hidden = None if made.hidden is None else made.hidden[:num_tokens]
        return Forwarded(made.logits[:num_rows], made.streams[:num_tokens], made.experts, hidden, self)

    def draw(self, rows: SamplingRows, num_top: int | None) -> Draws:
        """From the logits of the last forward call."""
        num_rows = rows.slots.shape[0]
        ours = self._rows
        if rows.slots.data_ptr() != ours.slots.data_ptr():
            ours.slots.fill_(PADDED_SLOT)
            torch._foreach_copy_([ours.slots[:num_rows], ours.positions[:num_rows]], [rows.slots, rows.positions])
        assert ours.mask is not None and ours.is_masked is not None
        if rows.mask is None or rows.is_masked is None:
            ours.is_masked.zero_()
        else:
            torch._foreach_copy_([ours.mask[:num_rows], ours.is_masked[:num_rows]], [rows.mask, rows.is_masked])
        if ours.drafts is not None and rows.drafts is not None:
            ours.drafts[:num_rows].copy_(rows.drafts)
        token_ids = self._draw()[:num_rows]
        if num_top is None:
            return Draws(token_ids)
        if num_top == self._num_top:
            return Draws(token_ids, tuple(part[:num_rows] for part in self._logprobs()))
        logits = self._forward.result.logits[:num_rows]
        return Draws(token_ids, self._ops.sampled_logprobs(logits, token_ids, num_top))

    def draft(self, fed: FedDrafts, num_drafts: int, *, has_drawn: bool) -> Drafted | None:
        """After the last draw, if there was one: the drafter's rows, and drafts for the requests that drew; None for 0
        drafts."""
        if not has_drawn:  # the drafter reads draws: give it those of the padding slot
            self._rows.slots.fill_(PADDED_SLOT)
            self._draw()
        num_requests, num_tokens = fed.slots.shape[0], fed.next_ids.shape[0]
        self._fed.slots.fill_(PADDED_SLOT)
        self._fed.num_drafts.fill_(NO_REQUEST)
        ours = [self._fed.next_ids[:num_tokens], *(column[:num_requests] for column in self._fed[1:])]
        torch._foreach_copy_(ours, list(fed))
        with padded_from(self._experts, num_tokens):
            self._extend()
        if num_drafts == 0:
            return None
        assert self._drafting is not None
        with padded_from(self._experts, num_requests * self._drafting.drafter.rows_per_request):
            made = self._propose[num_drafts]()
        confidences = None if made.confidences is None else made.confidences[:num_requests]
        return Drafted(made.drafts[:num_requests], confidences)


def padding_batch(size: int, block_table: Tensor) -> tuple[Tensor, TokenBatch]:
    """The columns [5, W] of a batch of padding, and the batch over them."""
    columns = torch.from_numpy(columns_of((), (), (), (), size)).to(block_table.device)
    return columns, TokenBatch.over(columns, block_table, size)


def padding_rows(size: int, vocab_size: int, device: torch.device, max_drafts: int | None = None) -> SamplingRows:
    """Rows that draw nothing, each with room for `max_drafts` drafts if there is a drafter."""
    return SamplingRows(
        slots=torch.full((size,), PADDED_SLOT, dtype=torch.int64, device=device),
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        mask=torch.zeros((size, num_words(vocab_size)), dtype=torch.int32, device=device),
        is_masked=torch.zeros(size, dtype=torch.int32, device=device),
        drafts=None if max_drafts is None else torch.full((size, max_drafts), NO_DRAFT, device=device),
    )


def padded_from(experts: ExpertPool | None, num_valid: int | None) -> AbstractContextManager[None]:
    """Rows from `num_valid` on fetch no experts."""
    return nullcontext() if experts is None else experts.only(num_valid)
