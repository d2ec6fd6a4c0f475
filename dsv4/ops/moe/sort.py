"""Rows for the grouped product: (token, choice) pairs grouped by expert, and the tiles that cover them.

Kernel: a counting sort. Every program counts all pairs, or beyond COUNT_FIRST pairs sums the counts that a first launch
made chunk by chunk. So it knows where each expert starts and what earlier chunks put there, and places its own pairs by
counting equal experts before them. Further programs of that launch write the tile map. Nothing is decided by an arrival
order: the result is the stable sort. All sizes are bounds known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.ops.lib.guard import KernelInputError, check_launch, jit, tl
from dsv4.ops.lib.launch import next_power_of_2


@dataclass(frozen=True)
class ExpertOrder:
    """All int32. N = T k pairs, E experts, M = `max_tiles(N, E, tile_rows)`.

    counts        [E]      pairs of each expert
    offsets       [E + 1]  where each expert's pairs start in `pairs`; the last is the number of pairs in use
    pairs         [N]      token * k + choice, ascending inside an expert; -1 after the last
    tile_experts  [M]      expert of each tile of up to tile_rows pairs, ascending; -1 after the last tile
    tile_starts   [M]      where it starts in `pairs`; it ends with the expert or tile_rows later; -1 after the last
    """

    counts: Tensor
    offsets: Tensor
    pairs: Tensor
    tile_experts: Tensor
    tile_starts: Tensor


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that any choice of experts needs at most: one for every expert met, the other pairs in full tiles."""
    met = min(num_pairs, num_experts)
    return met + (num_pairs - met) // tile_rows


def expert_sort_ref(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """experts [T, k] (any integer dtype) -> the pairs in ascending (expert, token, choice) order, and their tiles.

    Padded rows are left out: ids outside 0 .. num_experts - 1 (-1 by convention).
    """
    flat = experts.flatten().long()
    is_used = (flat >= 0) & (flat < num_experts)
    keys = torch.where(is_used, flat, num_experts)
    order = keys.sort(stable=True).indices
    counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    used = torch.arange(len(flat), device=flat.device) < offsets[-1]
    num_tiles = (counts + tile_rows - 1) // tile_rows
    bound = max_tiles(len(flat), num_experts, tile_rows)
    tile_experts, tile_starts = (torch.full((bound,), -1, device=flat.device) for _ in range(2))
    owners = torch.arange(num_experts, device=flat.device).repeat_interleave(num_tiles)
    within = torch.arange(len(owners), device=flat.device) - (num_tiles.cumsum(0) - num_tiles)[owners]
    tile_experts[: len(owners)] = owners
    tile_starts[: len(owners)] = offsets[owners] + within * tile_rows
    parts = counts, offsets, torch.where(used, order, -1), tile_experts, tile_starts
    return ExpertOrder(*(part.int() for part in parts))


CHUNK = 128  # pairs that a program places
COUNT_FIRST = 2048  # with more pairs than this a launch of its own counts
TILE_BLOCK = 16  # entries of the tile map a program writes
SORT_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


@jit
def _load_experts(experts_ptr, pairs, num_pairs, E: tl.constexpr):
    """Expert of each pair, E where the pair is padding or beyond the last."""
    expert = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@jit(do_not_specialize=("num_pairs",))
def _count_experts_kernel(
    experts_ptr, chunk_counts_ptr, num_pairs, E: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    chunk = tl.program_id(0)
    expert = _load_experts(experts_ptr, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, E)
    tl.store(chunk_counts_ptr + chunk * E_BLOCK + tl.arange(0, E_BLOCK), tl.histogram(expert, E_BLOCK, mask=expert < E))


@jit(do_not_specialize=("num_pairs", "num_chunks", "num_tiles"))
def _expert_sort_kernel(
    experts_ptr, chunk_counts_ptr, counts_ptr, offsets_ptr, pairs_ptr, tile_experts_ptr, tile_starts_ptr,
    num_pairs, num_chunks, num_tiles, E: tl.constexpr, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILES: tl.constexpr, COUNT_HERE: tl.constexpr,
):
    """Programs below num_chunks place the pairs of a chunk; those from there on write TILES entries of the tile map.

    COUNT_HERE: no launch has counted; every program goes through all pairs.
    """
    program = tl.program_id(0)
    ids = tl.arange(0, E_BLOCK)
    if COUNT_HERE:
        counts, before = _count_all(experts_ptr, program * CHUNK, num_pairs, E, E_BLOCK)
    else:
        counts, before = _sum_counts(chunk_counts_ptr, program, num_chunks, E_BLOCK)
    offsets = tl.cumsum(counts, 0) - counts
    total = tl.sum(counts, 0)
    if program < num_chunks:
        pairs = program * CHUNK + tl.arange(0, CHUNK)
        expert = _load_experts(experts_ptr, pairs, num_pairs, E)
        base = tl.gather(offsets + before, tl.minimum(expert, E_BLOCK - 1), 0)
        place = base + _equal_before(experts_ptr, expert, pairs, program, num_pairs, E, CHUNK)
        tl.store(pairs_ptr + place, pairs, mask=expert < E)
        tl.store(pairs_ptr + pairs, tl.full([CHUNK], -1, tl.int32), mask=(pairs >= total) & (pairs < num_pairs))
        if program == 0:
            tl.store(counts_ptr + ids, counts, mask=ids < E)
            tl.store(offsets_ptr + ids, offsets, mask=ids < E)
            tl.store(offsets_ptr + E, total)
    else:
        tiles = (program - num_chunks) * TILES + tl.arange(0, TILES)
        expert_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
        first_tile = tl.cumsum(expert_tiles, 0) - expert_tiles
        within = tiles[:, None] - first_tile[None, :]
        is_own = (within >= 0) & (within < expert_tiles[None, :])  # of one expert at most
        owner = tl.sum(tl.where(is_own, ids[None, :] + 1, 0), 1) - 1
        start = tl.sum(tl.where(is_own, offsets[None, :] + within * TILE_ROWS + 1, 0), 1) - 1
        tl.store(tile_experts_ptr + tiles, owner, mask=tiles < num_tiles)
        tl.store(tile_starts_ptr + tiles, start, mask=tiles < num_tiles)


@jit
def _sum_counts(chunk_counts_ptr, chunk, num_chunks, E_BLOCK: tl.constexpr):
    """Counts [E_BLOCK] over all chunks, and over those before `chunk`."""
    counts, before = tl.zeros([E_BLOCK], dtype=tl.int32), tl.zeros([E_BLOCK], dtype=tl.int32)
    for start in range(0, num_chunks, 8):
        chunks = start + tl.arange(0, 8)[:, None]
        places = chunks * E_BLOCK + tl.arange(0, E_BLOCK)[None, :]
        tile = tl.load(chunk_counts_ptr + places, mask=chunks < num_chunks, other=0)
        counts += tl.sum(tile, 0)
        before += tl.sum(tl.where(chunks < chunk, tile, 0), 0)
    return counts, before


@jit
def _count_all(experts_ptr, own, num_pairs, E: tl.constexpr, E_BLOCK: tl.constexpr):
    """Counts [E_BLOCK] over all pairs, and over those before the pair `own`."""
    STEP: tl.constexpr = 1024
    counts, before = tl.zeros([E_BLOCK], dtype=tl.int32), tl.zeros([E_BLOCK], dtype=tl.int32)
    for start in range(0, num_pairs, STEP):
        pairs = start + tl.arange(0, STEP)
        expert = _load_experts(experts_ptr, pairs, num_pairs, E)
        counts += tl.histogram(expert, E_BLOCK, mask=expert < E)
        before += tl.histogram(expert, E_BLOCK, mask=(expert < E) & (pairs < own))
    return counts, before


@jit
def _equal_before(experts_ptr, expert, pairs, chunk, num_pairs, E: tl.constexpr, CHUNK: tl.constexpr):
    """How many earlier pairs of the chunk have the same expert. The chunk is read again: from cache, as the other
    side.
    """
    OTHERS: tl.constexpr = 16
    place = tl.zeros([CHUNK], dtype=tl.int32)
    for start in range(0, CHUNK, OTHERS):
        others = chunk * CHUNK + start + tl.arange(0, OTHERS)
        other_expert = _load_experts(experts_ptr, others, num_pairs, E)
        is_equal = (other_expert[None, :] == expert[:, None]) & (others[None, :] < pairs[:, None])
        place += tl.sum(is_equal.to(tl.int32), 1)
    return place


class SortPlan(NamedTuple):
    """One sort: its result's tensors, where a first launch counts (`counts` of the result where none does), and the
    constants of the kernel. `num_programs`: of the second launch."""

    order: ExpertOrder
    chunk_counts: Tensor
    num_chunks: int
    num_programs: int
    flags: dict[str, int]


def begin_sort(
    experts: Tensor, num_experts: int, tile_rows: int, count_first: int, is_wanted: bool = True
) -> SortPlan:
    """Allocate, and count chunk by chunk where there are more than `count_first` pairs. Not `is_wanted`: no program
    sorts, and nothing is counted."""
    num_pairs, device = experts.numel(), experts.device
    bound = max_tiles(num_pairs, num_experts, tile_rows)
    sizes = num_experts, num_experts + 1, num_pairs, bound, bound
    order = ExpertOrder(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
    num_chunks, is_counted = -(-num_pairs // CHUNK), num_pairs > count_first
    flags = {"E": num_experts, "E_BLOCK": max(next_power_of_2(num_experts), 32), "CHUNK": CHUNK}
    chunk_counts = order.counts
    if is_counted and is_wanted:
        chunk_counts = torch.empty(num_chunks, flags["E_BLOCK"], dtype=torch.int32, device=device)
        _count_experts_kernel[(num_chunks,)](experts, chunk_counts, num_pairs, **flags, **SORT_OPTIONS)
    flags |= {"TILE_ROWS": tile_rows, "TILES": TILE_BLOCK, "COUNT_HERE": not is_counted}
    num_programs = num_chunks + -(-bound // TILE_BLOCK)
    return SortPlan(order, chunk_counts, num_chunks, num_programs * is_wanted, flags)


def expert_sort(experts: Tensor, num_experts: int, tile_rows: int) -> ExpertOrder:
    """See `expert_sort_ref`."""
    return launch_expert_sort(experts, num_experts, tile_rows, COUNT_FIRST)


def launch_expert_sort(experts: Tensor, num_experts: int, tile_rows: int, count_first: int) -> ExpertOrder:
    """`expert_sort`, counted by a launch of its own from `count_first` pairs on."""
    check_launch(experts)
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(f"expected int32 or int64 experts [T, k], found {experts.dtype} {tuple(experts.shape)}")
    if not 0 < num_experts <= 4096 or tile_rows < 1:
        raise KernelInputError(
            f"expected 1 to 4096 experts and tiles of a row or more, found {num_experts} and {tile_rows}"
        )
    experts = experts.contiguous()
    order, chunk_counts, num_chunks, num_programs, flags = begin_sort(experts, num_experts, tile_rows, count_first)
    if experts.numel() == 0:
        order.counts.zero_()
        order.offsets.zero_()
        return order
    _expert_sort_kernel[(num_programs,)](
        experts, chunk_counts, *vars(order).values(), experts.numel(), num_chunks, len(order.tile_experts), **flags,
        **SORT_OPTIONS,
    )
    return order
