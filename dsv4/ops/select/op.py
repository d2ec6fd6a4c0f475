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
    if not ascending:
        return _best_first(ordered, k) if k else torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    values, indices = ordered.sort(dim=-1, descending=True, stable=True)
    beyond = scores.shape[-1]
    chosen = indices.masked_fill(values == float("-inf"), beyond)[:, :k].sort(-1).values
    picks = torch.full((scores.shape[0], k), -1, dtype=torch.int64, device=scores.device)
    picks[:, : chosen.shape[-1]] = chosen.masked_fill(chosen == beyond, -1)
    return picks


def _best_first(scores: Tensor, k: int) -> Tensor:
    """Numbers [T, N] -> indices of the k largest, as above."""
    if 8 * k > scores.shape[-1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    picks = scores.topk(k).indices.sort(-1).values
    values = scores.gather(-1, picks)
    has_choice = (scores >= values.amin(-1, keepdim=True)).sum(-1) > k  # equal scores, of which topk takes any
    picks = picks.gather(-1, values.sort(dim=-1, descending=True, stable=True).indices)
    picks[has_choice] = scores[has_choice].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return picks
