"""Selection: the k largest of many scores, ties to the lower index. Used by the router, the indexer and the sampler."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_select_ref(scores: Tensor, k: int, *, lengths: Tensor | None = None, ascending: bool = False) -> Tensor:
    """Indices int64 of the k largest of scores [T, N]; ties go to the lower index, NaN counts as -inf.

    Best first: [T, min(k, N)]. `ascending`: [T, k] in ascending order, without -inf and NaN, -1 where there are fewer
    than k. `lengths` [T]: only the first lengths[t] scores of a row are read, the others count as -inf.
    """
    ordered = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if lengths is not None:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        ordered = ordered.masked_fill(columns >= lengths.unsqueeze(-1), float("-inf"))
    values, indices = ordered.sort(dim=-1, descending=True, stable=True)
    if not ascending:
        return indices[:, :k]
    beyond = scores.shape[-1]
    chosen = indices.masked_fill(values == float("-inf"), beyond)[:, :k].sort(-1).values
    picks = torch.full((scores.shape[0], k), -1, dtype=torch.int64, device=scores.device)
    picks[:, : chosen.shape[-1]] = chosen.masked_fill(chosen == beyond, -1)
    return picks
