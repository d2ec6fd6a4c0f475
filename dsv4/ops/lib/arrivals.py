"""Counters for launches in which the programs that arrive last finish the work of the others.

Either the finishing program sets its counter back to 0, or a counter only grows, by the same number in every launch: no
launch needs another one to clear it, and a CUDA graph can be replayed. `purpose` keeps counters apart that are counted
differently. Launches that share counters must not overlap in time: one stream, or ordered ones. Results never depend
on which program arrives last.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4.ops.lib.guard import INTERPRET, KernelInputError, jit, tl

NUM_COUNTERS = 1 << 16
NEVER = -(1 << 62)  # counters that start here are complete in no lifetime


@cache
def arrival_counters(purpose: str, device: torch.device, start: int = 0) -> Tensor:
    """int64 [NUM_COUNTERS], `start` at first; `NEVER` where none is to be the last."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelInputError(f"expected one launch ({purpose}) before the capture of a graph, found none")
    return torch.full((NUM_COUNTERS,), start, dtype=torch.int64, device=device)


@jit
def arrive_and_share(counter_ptr, num_items, NUM_PROGRAMS: tl.constexpr, MAX_WORKERS: tl.constexpr):
    """This program has stored its part. The last MAX_WORKERS of NUM_PROGRAMS (no more than there are items) become
    workers: returns its number among them (negative: none), how many there are, and what the counter (which only grows)
    shows when all have arrived: a worker calls `wait_for_arrivals` with it before it reads what others stored.

    In the interpreter, where programs run one after another, the last one does all the work.
    """
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    order = (arrived % NUM_PROGRAMS).to(tl.int32)
    num_workers = tl.minimum(num_items, MAX_WORKERS)
    worker = order - (NUM_PROGRAMS - num_workers)
    if INTERPRET:
        worker = tl.where(order == NUM_PROGRAMS - 1, 0, -1)
        num_workers = num_workers * 0 + 1
    return worker, num_workers, arrived - order + NUM_PROGRAMS


@jit
def wait_for_arrivals(counter_ptr, complete):
    """Cannot hang where programs of the same counter start before later ones, and a GPU has room for all that wait."""
    if not INTERPRET:
        while tl.atomic_add(counter_ptr, 0, sem="acquire") < complete:
            pass
