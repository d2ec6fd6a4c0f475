"""Counters for launches in which the programs that arrive last finish the work of the others.

Either the finishing program sets its counter back to 0, or a counter only grows, by the same number in every launch: no
launch needs another one to clear it, and a CUDA graph can be replayed. `purpose` keeps counters apart that are counted
differently. Launches that share counters must not overlap in time: one stream, or ordered ones. Results never depend
on who arrives last.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4.ops.tl_utils import KernelInputError

NUM_COUNTERS = 1 << 16


@cache
def arrival_counters(purpose: str, device: torch.device) -> Tensor:
    """int64 [NUM_COUNTERS], 0 at first."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelInputError(f"expected one launch ({purpose}) before the capture of a graph, found none")
    return torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
