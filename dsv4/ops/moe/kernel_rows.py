"""Which token rows a program of ops/moe has. A tile is a tuple of row numbers, each with a product of its own: [8]
in the narrow form, powers of two in the wide one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import INTERPRET, jit, tl

DIRECT_PAIRS = 128  # up to this many (token, choice) pairs programs find their rows without a sort
SUB = tl.constexpr(8)  # token rows of one product of the narrow form
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


@jit
def shared_rows(
    tile, num_tokens, FIRST: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr = False
):  # fmt: skip
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
    """The same for every sub-tile of the narrow form: tuples of [8]."""
    tokens, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        token, has_row = shared_rows(tile, num_tokens, sub * SUB, SUB, ROWS, PADDED)
        tokens, is_row = with_item(tokens, token), with_item(is_row, has_row)
    return tokens, is_row


@jit
def direct_tile(place, experts_ptr, num_pairs, E: tl.constexpr):
    """The tile of the routed program at `place` where most pairs have no expert here: first the pairs that have one,
    so that none of their programs begins behind programs with nothing to do.
    """
    others = tl.arange(0, _DIRECT_PAIRS)
    ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    is_here = (ids >= 0) & (ids < E)
    num_before = tl.cumsum(is_here.to(tl.int32), 0)  # and itself
    num_here = tl.sum(is_here.to(tl.int32), 0)
    places = tl.where(is_here, num_before - 1, num_here + others - num_before)
    return tl.sum(tl.where(places == place, others, 0), 0)


@jit
def routed_expert(
    tile, experts_ptr, order, num_pairs, E: tl.constexpr, ROWS: tl.constexpr, DIRECT: tl.constexpr
):  # fmt: skip
    """Expert of a tile, -1 where the tile is not used.

    DIRECT: tile t belongs to pair t, and is used if among the pairs of its expert the pair is the first, or the first
    of another ROWS.
    """
    if DIRECT:
        expert = tl.load(experts_ptr + tile, cache_modifier=".cg").to(tl.int32)
        others = tl.arange(0, _DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1, cache_modifier=".cg").to(tl.int32)
        before = tl.sum(((ids == expert) & (others < tile)).to(tl.int32), 0)
        return tl.where((expert < E) & (before % ROWS == 0), expert, -1)
    else:
        return tl.load(order.tile_experts + tile, cache_modifier=".cg")


@jit
def sorted_rows(tile, expert, order, FIRST: tl.constexpr, SIZE: tl.constexpr, AGAIN: tl.constexpr):
    """`routed_rows` where a launch has sorted the pairs. AGAIN: loads that the compiler takes for others than the first
    ones, which it would keep in registers.
    """
    CACHE: tl.constexpr = ".cg" if AGAIN else ".ca"
    end = tl.load(order.offsets + expert + 1, cache_modifier=CACHE)
    places = tl.load(order.tile_starts + tile, cache_modifier=CACHE) + FIRST + tl.arange(0, SIZE)
    return tl.load(order.pairs + tl.minimum(places, end - 1), cache_modifier=CACHE), places < end


@jit
def routed_rows(
    tile, expert, experts_ptr, order, num_pairs, FIRST: tl.constexpr, SIZE: tl.constexpr, DIRECT: tl.constexpr
):
    """Pairs of a tile from its row FIRST on, and which exist: [SIZE]. Where there is none, a pair of the same tile."""
    if DIRECT:
        others = tl.arange(0, _DIRECT_PAIRS)
        ids = tl.load(experts_ptr + others, mask=others < num_pairs, other=-1).to(tl.int32)
        is_equal = (ids == expert) & (others >= tile)
        place = tl.where(is_equal, tl.cumsum(is_equal.to(tl.int32), 0) - 1, -1)
        is_own = place[None, :] == (tl.arange(0, SIZE) + FIRST)[:, None]
        pair = tl.max(tl.where(is_own, others[None, :], -1), 1)
        return tl.where(pair >= 0, pair, tile), pair >= 0
    else:
        return sorted_rows(tile, expert, order, FIRST, SIZE, False)


@jit
def routed_sub_rows(tile, expert, experts_ptr, order, num_pairs, ROWS: tl.constexpr, DIRECT: tl.constexpr):
    """The same for every sub-tile of the narrow form: tuples of [8]."""
    pairs, is_row = (), ()
    for sub in tl.static_range(ROWS // SUB):
        pair, has_row = routed_rows(tile, expert, experts_ptr, order, num_pairs, sub * SUB, SUB, DIRECT)
        pairs, is_row = with_item(pairs, pair), with_item(is_row, has_row)
    return pairs, is_row


@jit
def sorted_num_rows(tile, expert, order):
    """What is left of a tile's expert's rows: more than the tile's own where others follow."""
    return tl.load(order.offsets + expert + 1) - tl.load(order.tile_starts + tile)


@jit
def num_rows_of(tile, expert, order, ROWS: tl.constexpr, DIRECT: tl.constexpr):
    """The same, not asked for where all tiles are small."""
    if ROWS == SUB:
        return 0
    elif DIRECT:
        return ROWS
    else:
        return sorted_num_rows(tile, expert, order)


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


# ---- the wide form ----


@jit
def wide_shared_rows(tile, num_tokens, ROWS: tl.constexpr):
    """Tokens of a tile of the shared expert. ROWS is a power of two, or three times one: then two thirds and one."""
    FIRST: tl.constexpr = ROWS // 3 * 2 if ROWS % 3 == 0 else ROWS
    tokens, is_row = shared_rows(tile, num_tokens, 0, FIRST, ROWS)
    if FIRST == ROWS:
        return (tokens,), (is_row,)
    else:
        more, is_more = shared_rows(tile, num_tokens, FIRST, ROWS - FIRST, ROWS)
        return (tokens, more), (is_row, is_more)


@jit
def wide_routed_rows(tile, expert, order, ROWS: tl.constexpr, AGAIN: tl.constexpr = False):
    """Pairs of a tile of a routed expert, in the same parts. AGAIN: in parts of at most 64."""
    THIRDS: tl.constexpr = ROWS // 3 * 2 if ROWS % 3 == 0 else ROWS
    FIRST: tl.constexpr = min(THIRDS, 64) if AGAIN else THIRDS
    pairs, is_row = sorted_rows(tile, expert, order, 0, FIRST, AGAIN)
    if FIRST == ROWS:
        return (pairs,), (is_row,)
    else:
        more, is_more = sorted_rows(tile, expert, order, FIRST, ROWS - FIRST, AGAIN)
        return (pairs, more), (is_row, is_more)
