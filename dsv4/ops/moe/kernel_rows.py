"""Which token rows a CTA of ops/moe has. Row numbers of a tile are a tuple of [8] for mma.sync, of which each has a
product of its own, or one tensor [R] for wgmma.

A row of `hidden` and of `parts` is a pair: token * k + choice. A pair's row of x is that of its token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import INTERPRET, jit, tl

DIRECT_PAIRS = 128  # up to this many (token, choice) pairs CTAs find their rows without a sort
SUB = tl.constexpr(8)  # token rows of one product by mma.sync
_DIRECT_PAIRS = tl.constexpr(DIRECT_PAIRS)


class PairOrder(NamedTuple):
    """The pointers of an `ExpertOrder` (sort.py) that the products read."""

    pairs: Any
    offsets: Any
    tile_experts: Any
    tile_starts: Any


class Matrix(NamedTuple):
    """A shuffled matrix, or a stack of them: words, words of scales, and the factor of its sums."""

    data: Any
    scale: Any
    out_scale: Any


class GateUpMatrices(NamedTuple):
    """What the first product reads of the routed experts and of the shared one."""

    gate: Matrix
    up: Matrix
    shared_gate: Matrix
    shared_up: Matrix


@jit
def with_item(items, item):
    """A tuple and one more: the compiler knows no unpacking."""
    return items + (item,)  # noqa: RUF005


@jit
def another(number):
    """`number`, which the compiler takes for another: what is made of it is made again, not kept in registers."""
    if not INTERPRET:
        number = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
    return number


# ---- the shared expert: tokens that follow one another ----


@jit
def shared_rows(
    tile, num_tokens, FIRST: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr = False
):
    """Tokens of a tile of the shared expert from its row FIRST on, and which exist: [SIZE]. Where there is none, the
    last. PADDED: there are rows for whole tiles.
    """
    token = tile * ROWS + FIRST + tl.arange(0, SIZE)
    if PADDED:
        return token, tl.full([SIZE], 1, tl.int1)
    else:
        return tl.minimum(token, num_tokens - 1), token < num_tokens


@jit
def shared_sub_rows(tile, num_tokens, ROWS: tl.constexpr, PADDED: tl.constexpr = False):
    """The same in sub-tiles: tuples of [8]."""
    tokens, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        token, has_row = shared_rows(tile, num_tokens, sub * SUB, SUB, ROWS, PADDED)
        tokens, is_row = with_item(tokens, token), with_item(is_row, has_row)
    return tokens, is_row


# ---- routed experts, few tokens: every CTA reads all ids ----


@jit
def direct_tile(place, experts_ptr, num_pairs, E: tl.constexpr):
    """The tile of the routed CTA at `place` where most pairs have no expert here: first the pairs that have one, so
    that none of their CTAs begins after CTAs with nothing to do.
    """
    others = tl.arange(0, _DIRECT_PAIRS)
    ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    is_here = (ids >= 0) & (ids < E)
    num_before = tl.cumsum(is_here.to(tl.int32), 0)  # and itself
    num_here = tl.sum(is_here.to(tl.int32), 0)
    places = tl.where(is_here, num_before - 1, num_here + others - num_before)
    return tl.sum(tl.where(places == place, others, 0), 0)


@jit
def direct_expert(tile, experts_ptr, num_pairs, E: tl.constexpr):
    """Expert of a tile, -1 where the tile is not used. Tile t belongs to pair t, and is used if among the pairs of its
    expert the pair is the first, or the first of another 8.
    """
    expert = tl.load(experts_ptr + tile, cache_modifier=".cg").to(tl.int32)
    others = tl.arange(0, _DIRECT_PAIRS)
    ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    before = tl.sum(((ids == expert) & (others < tile)).to(tl.int32), 0)
    return tl.where((expert < E) & (before % SUB == 0), expert, -1)


@jit
def direct_rows(tile, expert, experts_ptr, num_pairs):
    """Pairs of a tile, and which exist: [8]. Where there is none, a pair of the same tile."""
    others = tl.arange(0, _DIRECT_PAIRS)
    ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1).to(tl.int32)
    is_equal = (ids == expert) & (others >= tile)
    place = tl.where(is_equal, tl.cumsum(is_equal.to(tl.int32), 0) - 1, -1)
    is_own = place[None, :] == (tl.arange(0, SUB) + 0)[:, None]
    pair = tl.max(tl.where(is_own, others[None, :], -1), 1)
    return tl.where(pair >= 0, pair, tile), pair >= 0


# ---- routed experts, pairs sorted by a launch before ----


@jit
def sorted_expert(tile, order):
    """Expert of a tile, -1 where the tile is not used."""
    return tl.load(order.tile_experts + tile, cache_modifier=".cg")


@jit
def sorted_rows(tile, expert, order, FIRST: tl.constexpr, SIZE: tl.constexpr, AGAIN: tl.constexpr = False):
    """Pairs of a tile from its row FIRST on, and which exist: [SIZE]. Where there is none, a pair of the same tile.
    AGAIN: loads that the compiler takes for others than the first ones, which it would keep in registers.
    """
    CACHE: tl.constexpr = ".cg" if AGAIN else ".ca"
    end = tl.load(order.offsets + expert + 1, cache_modifier=CACHE)
    places = tl.load(order.tile_starts + tile, cache_modifier=CACHE) + FIRST + tl.arange(0, SIZE)
    return tl.load(order.pairs + tl.minimum(places, end - 1), cache_modifier=CACHE), places < end


@jit
def sorted_sub_rows(tile, expert, order, ROWS: tl.constexpr):
    """The same in sub-tiles: tuples of [8]."""
    pairs, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        pair, has_row = sorted_rows(tile, expert, order, sub * SUB, SUB)
        pairs, is_row = with_item(pairs, pair), with_item(is_row, has_row)
    return pairs, is_row


@jit
def sorted_num_rows(tile, expert, order):
    """What is left of a tile's expert's rows: more than the tile's own where others follow."""
    return tl.load(order.offsets + expert + 1) - tl.load(order.tile_starts + tile)


@jit
def rows_in_tile(tile, expert, order, ROWS: tl.constexpr):
    """The same, not asked for where all tiles are as small as can be."""
    if ROWS == SUB:
        return 0
    else:
        return sorted_num_rows(tile, expert, order)


# ---- tuples of rows ----


@jit
def tokens_of(pairs, TOP_K: tl.constexpr):
    tokens = ()
    for sub in tl.static_range(len(pairs)):
        tokens = with_item(tokens, pairs[sub] // TOP_K)
    return tokens


@jit
def plus(rows, first):
    moved = ()
    for index in tl.static_range(len(rows)):
        moved = with_item(moved, rows[index] + first)
    return moved
