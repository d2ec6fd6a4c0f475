"""Tiles of routed experts for persistent CTAs on Hopper: which a CTA takes, and what the roles of its warps tell one
another about them. Barriers: those of a ring of STAGES stages (`ring_at`), then `summed`, `taken` and two `described`.
Descriptions of two tiles lie DESCRIPTIONS bytes behind the first barrier, which lies BARRIERS bytes into shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import gl, gluon_jit, hopper
from dsv4.ops.lib.pipeline import BARRIER_BYTES, init_ring_at
from dsv4.ops.lib.warp_groups import load_word, warp_wait

_BARRIER_BYTES = gl.constexpr(BARRIER_BYTES)
if hopper is not None:
    _barrier = hopper.mbarrier


class Tile(NamedTuple):
    """Of an expert, -1 after the last: where its pairs begin and end, and which of the blocks of weight rows."""

    expert: Any
    start: Any
    end: Any
    block: Any


@gluon_jit
def tile_at(order, index, num_tiles, num_pairs, BLOCKS: gl.constexpr):
    """The tiles' pairs follow one another: one ends where the next begins, the last where all end."""
    tile = index // BLOCKS
    expert = gl.load(order.tile_experts + tile, mask=tile < num_tiles, other=-1)
    start = gl.load(order.tile_starts + tile, mask=tile < num_tiles, other=0)
    end = gl.load(order.tile_starts + tile + 1, mask=tile + 1 < num_tiles, other=-1)
    return Tile(expert, start, gl.where(end < 0, num_pairs, end), index % BLOCKS)


@gluon_jit
def tile_barriers(rest, STAGES: gl.constexpr, FULL_ARRIVALS: gl.constexpr, MMA_WARPS: gl.constexpr):
    """In `rest`, int32: MMA warps arrive at `free` and `summed` one by one."""
    barriers = rest.reinterpret(gl.int64, [rest.shape[0] // 2, 1], _barrier.MBarrierLayout())
    init_ring_at(barriers, 0, STAGES, FULL_ARRIVALS, MMA_WARPS)
    _barrier.init(barriers.index(2 * STAGES), count=MMA_WARPS)
    for barrier in gl.static_range(2 * STAGES + 1, 2 * STAGES + 4):
        _barrier.init(barriers.index(barrier), count=1)
    return barriers


@gluon_jit
def describe(
    memory, place, rows, scale, other_scale, STAGES: gl.constexpr, DESCRIPTIONS: gl.constexpr, WARPS: gl.constexpr
):
    """A tile for the MMA warps: 0 rows after the last. The other place is still read: a tile has more steps than there
    are stages, so the producer is never two tiles ahead."""
    word = gl.arange(0, 4, gl.BlockedLayout([1], [32], [WARPS], [0]))
    factor = gl.where(word == 1, scale, other_scale).to(gl.int32, bitcast=True)
    memory.tiles.index(DESCRIPTIONS // 16 + place).store(gl.where(word == 0, rows, factor))
    _barrier.arrive(memory.barriers.index(2 * STAGES + 2 + place))


@gluon_jit
def described_rows(number, BARRIERS: gl.constexpr, STAGES: gl.constexpr, DESCRIPTIONS: gl.constexpr):
    """Waits for the description of a CTA's tile: how many token rows it has."""
    warp_wait(BARRIERS + (2 * STAGES + 2 + number % 2) * _BARRIER_BYTES, number // 2 % 2)
    return load_word(BARRIERS + DESCRIPTIONS + number % 2 * 16)


@gluon_jit
def described_factors(number, BARRIERS: gl.constexpr, STAGES: gl.constexpr, DESCRIPTIONS: gl.constexpr):
    """Of its sums, once those of the tile before are taken."""
    warp_wait(BARRIERS + (2 * STAGES + 1) * _BARRIER_BYTES, number % 2 ^ 1)
    factors = BARRIERS + DESCRIPTIONS + number % 2 * 16
    return load_word(factors + 4).to(gl.float32, bitcast=True), load_word(factors + 8).to(gl.float32, bitcast=True)
