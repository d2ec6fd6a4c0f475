"""The list of a long row's scores that pass a bound: filled wherever there is room, and read as keys and columns."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import ordered_bits
from dsv4.ops.lib.pdl import prefetch_l2
from dsv4.ops.select.kernel_pieces import (
    EMPTY,
)

LIST = 4096  # keys that are searched in registers

_LIST = tl.constexpr(LIST)


@jit
def _list_passing(
    length_ptr, list_ptr, scores, columns, size, lowest, is_all, IS_FULL: tl.constexpr, FEW: tl.constexpr
):
    """Add the scores from `lowest` on, or all, to the row's list, wherever there is room."""
    passes = (scores >= lowest) | is_all
    if not IS_FULL:
        passes = passes & (columns < size)
    if FEW:
        # a thread's stand side by side: the order of the list does not matter
        ones = passes.to(tl.int32)
        counts = tl.sum(ones, 1)
        places = (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(ones, 1) - 1
        places += tl.atomic_add(length_ptr, tl.sum(counts, 0), sem="relaxed")
    else:
        # one addition for every score that passes: they are few, and the compiler makes one of a warp's
        zeros = tl.zeros_like(columns)
        places = tl.atomic_add(length_ptr + zeros, zeros + 1, mask=passes, sem="relaxed")
    packed = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | columns.to(tl.uint32).to(tl.int64)
    tl.store(list_ptr + places.to(tl.uint32), packed, mask=passes & (places < _LIST))


@jit
def _load_packed(list_ptr, LEN: tl.constexpr):
    """The first LEN places of the list, whether anything was stored there or not."""
    return tl.load(list_ptr + tl.arange(0, LEN), cache_modifier=".cg")


@jit
def _unpack(packed, total):
    """Keys and columns of places of the list; keys are EMPTY from place `total` on."""
    keys = ordered_bits((packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    return tl.where(tl.arange(0, packed.shape[0]) < total, keys, EMPTY), packed.to(tl.int32)


@jit
def _load_list(list_ptr, total, LEN: tl.constexpr):
    """The first LEN keys of the list, EMPTY behind its end, and their columns."""
    return _unpack(_load_packed(list_ptr, LEN), total)


@jit
def _prefetch(counters_ptr, scratch_ptr, list_ptr, program, PROGRAMS: tl.constexpr, SMALL: tl.constexpr):
    """Into L2, while the scores come: what programs count in, and all places of the list that are read first. The
    places behind its end are read too; no program stores there, so they would come from memory when all wait for them.
    """
    PER_LINE: tl.constexpr = 16
    PLACES: tl.constexpr = max(SMALL // PER_LINE // PROGRAMS, 1)
    prefetch_l2(counters_ptr)
    prefetch_l2(scratch_ptr)
    prefetch_l2(list_ptr + (program * PLACES + tl.arange(0, PLACES)) % (SMALL // PER_LINE) * PER_LINE)
