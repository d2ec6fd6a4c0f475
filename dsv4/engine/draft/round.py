"""A round of drafting on the device: which drafts of a step came true, the drafter's rows of its tokens, new drafts.

Everything has shapes that the host knows, and nothing is read on the host: a round can be captured.
The draw before it was made from every row of a request that was fed, its newest token and k drafts, each as if the
drafts before it were its own (`SamplingRows.drafts`). So the first draws up to one that differs from its draft are what
plain decoding draws, with the same noise; only they are counted.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.cache.batch import PADDED_SLOT, TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.model.drafter import DraftEnds, Drafter, Proposal
from dsv4.model.dspark import DSparkDrafter
from dsv4.model.mtp_drafter import MtpDrafter
from dsv4.model.transformer import Transformer
from dsv4.ops import OpSet
from dsv4.ops.sampling import HAS_PENALTIES, SamplingRows, SamplingState

NO_DRAFT = -1
NO_REQUEST = -1  # as a number of drafts
_FIRST_CODE = -2  # below every other number of a step


class FedDrafts(NamedTuple):
    """R requests that draw in a step of T tokens, with at most K drafts each; int64.

    next_ids    [T]  the token behind each of the batch's rows; any where only the draw will tell
    slots       [R]  -1 marks padding
    positions   [R]  of the newest token, whose row is the first that draws
    rows        [R]  that row of the batch; those of the drafts follow it
    places      [R]  the same row among the rows that draw
    num_drafts  [R]  -1 for padding
    drafts      [R, K]  -1 behind the last
    """

    next_ids: Tensor
    slots: Tensor
    positions: Tensor
    rows: Tensor
    places: Tensor
    num_drafts: Tensor
    drafts: Tensor

    @classmethod
    def padding(cls, num_tokens: int, num_requests: int, max_drafts: int, device: torch.device) -> FedDrafts:
        """Of requests that are not there."""

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        return cls(
            next_ids=full(0, num_tokens), slots=full(PADDED_SLOT, num_requests), positions=full(0, num_requests),
            rows=full(0, num_requests), places=full(0, num_requests), num_drafts=full(NO_REQUEST, num_requests),
            drafts=full(NO_DRAFT, num_requests, max_drafts),
        )  # fmt: skip


class Extended(NamedTuple):
    """Where R requests stand after a step, and what the drafter goes on from: the parts of `DraftEnds`, int64 [R], and
    what `Drafter.extend` gave."""

    slots: Tensor
    positions: Tensor
    anchors: Tensor
    rows: Tensor
    extended: Tensor | None


class Drafted(NamedTuple):
    """Drafts int64 [R, k], and their confidences [R, k] where the drafter has them."""

    drafts: Tensor
    confidences: Tensor | None


def extend(
    drafter: Drafter, ops: OpSet, state: SamplingState, batch: TokenBatch, hidden: Tensor, token_ids: Tensor,
    fed: FedDrafts,
) -> Extended:  # fmt: skip
    """token_ids [N]: what every row that draws drew. Remember what came true, and let the drafter write its rows."""
    num_tokens, num_draws = batch.num_tokens, token_ids.shape[0]
    steps = torch.arange(fed.drafts.shape[1] + 1, device=token_ids.device)
    drawn = token_ids[(fed.places.unsqueeze(1) + steps).clamp(max=num_draws - 1)]  # [R, K + 1]
    kept = ops.accept(fed.drafts, fed.num_drafts, drawn, fed.positions)
    rows, anchors = fed.rows + kept.num_accepted, kept.token_ids.clamp(min=0)
    _remember(drawn, steps <= kept.num_accepted.unsqueeze(1), anchors, fed.slots, state)
    # the row of the last token that stays is followed by the newest one; padding writes behind the end
    ends = torch.where(fed.slots >= 0, rows, num_tokens)
    next_ids = torch.cat((fed.next_ids, fed.next_ids.new_zeros(1))).index_copy_(0, ends, anchors)[:num_tokens]
    return Extended(fed.slots, kept.positions, anchors, rows, drafter.extend(batch, hidden, next_ids))


def _remember(drawn: Tensor, is_kept: Tensor, anchors: Tensor, slots: Tensor, state: SamplingState) -> None:
    """What the slots remember of draws [R, K + 1], as a draw without drafts does. Sums of integers, to which padding
    adds 0: it may name a slot that others have."""
    is_real, held = slots >= 0, slots.clamp(min=0)
    state.last_tokens.index_add_(0, held, (anchors - state.last_tokens[held]).masked_fill(~is_real, 0))
    counts = is_kept & (drawn >= 0) & (is_real & ((state.flags[held] & HAS_PENALTIES) != 0)).unsqueeze(1)
    cells = held.unsqueeze(1) * state.token_counts.shape[1] + drawn.clamp(min=0)
    table = state.token_counts.view(-1)
    table.index_add_(0, cells.flatten(), counts.flatten().to(table.dtype))


def make_table(num_slots: int, max_drafts: int, device: torch.device) -> Tensor:
    """For the last drafts of every slot, int64 [S + 1, K]; the last row is padding's."""
    return torch.zeros((num_slots + 1, max_drafts), dtype=torch.int64, device=device)


def draft_code(slot: int, place: int, max_drafts: int) -> int:
    """What stands for a draft that the host has not read, among a step's numbers (none of which is so small)."""
    return _FIRST_CODE - (slot * max_drafts + place)


def fill_drafts(numbers: Tensor, table: Tensor) -> Tensor:
    """A step's numbers, int64 [M], with the drafts that their codes stand for."""
    places = (_FIRST_CODE - numbers).clamp(0, table.numel() - 1)
    return torch.where(numbers <= _FIRST_CODE, table.view(-1)[places], numbers)


def propose(
    drafter: Drafter, ops: OpSet, state: SamplingState, ends: Extended, num_drafts: int, table: Tensor
) -> Drafted:  # fmt: skip
    """Drafts behind the newest tokens, drawn as the target will draw: the same settings, noise and penalties. They are
    left in `table` too."""
    chosen = ends.slots.new_empty((ends.slots.shape[0], 0))  # [R, drafts so far]

    def choose(logits: Tensor, draft_idx: int) -> Tensor:
        nonlocal chosen
        rows = SamplingRows(ends.slots, ends.positions + draft_idx, drafts=chosen)
        token_ids = ops.sample(logits, rows, state).clamp(min=0)
        chosen = torch.cat((chosen, token_ids.unsqueeze(1)), 1)
        return token_ids

    anchors = DraftEnds(ends.slots, ends.positions, ends.anchors, ends.rows)
    proposal: Proposal = drafter.propose(anchors, ends.extended, num_drafts, choose)
    padding = table.shape[0] - 1
    table[:, :num_drafts].index_copy_(0, torch.where(ends.slots >= 0, ends.slots, padding), proposal.drafts)
    return Drafted(proposal.drafts, proposal.confidences)


class DraftCache(Protocol):
    """What a drafter needs of a cache."""

    @property
    def block_table(self) -> Tensor: ...

    def handle(self, layer_idx: int) -> LayerCacheHandle: ...


def make_drafter(model: Transformer, cache: DraftCache) -> Drafter | None:
    """Over a cache whose schedule has the draft blocks; None for a model without any."""
    if model.weights.dspark is not None:
        return DSparkDrafter(model, cache.handle, cache.block_table)
    if model.weights.mtp:
        return MtpDrafter(model, cache.handle, cache.block_table)
    return None
