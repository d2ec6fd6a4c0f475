"""What a DSpark head takes from the target, how sure it is of a draft, and which drafts stay: contracts, oracles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.lib.invariant import accumulator, rows_matmul, sigmoid

PADDED = -1


def tap_streams_ref(streams: Tensor, out: Tensor) -> None:
    """streams [T, n, D] after a layer -> their mean over n into out [T, D], in place.

    First stream first, in at least fp32, rounded once. `out` may be columns of a wider matrix. Rows are independent: a
    padded row costs time, changes nothing.
    """
    first, *others = streams.to(accumulator(streams)).unbind(1)
    out.copy_(sum(others, first) / streams.shape[1])


def confidence_ref(hidden: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """hidden [R, D] before its norm, embedded [R, r], weight [1, D + r] -> [R] in at least fp32: sigmoid of
    weight . (hidden, embedded). Rows are independent.
    """
    joined = torch.cat((hidden, embedded), -1)
    return sigmoid(rows_matmul(joined, weight).to(accumulator(joined))).squeeze(-1)


class Acceptance(NamedTuple):
    """What a step made of its drafts, int64 [R] each: how many stay; the position of the newest token, and its id."""

    num_accepted: Tensor
    positions: Tensor
    token_ids: Tensor


def accept_ref(drafts: Tensor, num_drafts: Tensor, drawn: Tensor, positions: Tensor) -> Acceptance:
    """Drafts [R, k], of which the first num_drafts [R] were fed behind the newest token at `positions` [R], and what
    was drawn [R, k + 1] from the row of that token and of each draft. int64 throughout.

    Drafts stay while each equals what was drawn before it; the draw behind the last of them is the new newest token. A
    draft, or a draw, of -1 (none) ends the run. num_drafts -1 marks padding: 0 stay, its position, token -1. Draws
    behind the first num_drafts + 1 are not read.
    """
    most = drafts.shape[1]
    is_fed = torch.arange(most, device=drafts.device) < num_drafts.unsqueeze(-1)  # [R, k]
    is_same = is_fed & (drafts == drawn[:, :most]) & (drafts >= 0)
    num_accepted = is_same.long().cumprod(-1).sum(-1)
    is_real = num_drafts > PADDED
    newest = drawn.gather(1, num_accepted.unsqueeze(-1)).squeeze(-1)
    return Acceptance(
        num_accepted, torch.where(is_real, positions + num_accepted + 1, positions), newest.masked_fill(~is_real, -1)
    )
