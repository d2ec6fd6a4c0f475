"""The kernel of ops/hyper for many tokens; kernel_few.py says what the two have in common.

Step 1 takes 32 rows at a time, asks for the next ones before it multiplies these, and keeps the parts of fn in shared
memory in a form that costs more to make and less to use. Programs of their own finish FINISH tokens each, a few tiles
behind step 1 (`program_of_many`); Sinkhorn runs for all of them at once, a thread a token. The last finisher of a tile
clears its counter.
"""

from __future__ import annotations

from dsv4.ops.hyper.kernel_streams import (
    FROM_EMBEDDING,
    FROM_STREAMS,
    FROM_SUBLAYER,
    MIX_COLS,
    join_partial,
    keep_layout,
    keep_layouts,
    load_before,
    load_fn,
    load_four,
    mix_streams,
    pairs_of_parts,
    store_streams,
    sum_of_parts,
)
from dsv4.ops.hyper.kernel_weights import (
    iterate,
    load_partial,
    load_rows,
    load_scales,
    store_hidden,
    store_post,
    token_weights,
)
from dsv4.ops.lib.arrivals import wait_for_arrivals
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import in_product_order
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait

SUB_ROWS = 32  # rows of one matrix product: tiles are made of these

_SUB_ROWS = tl.constexpr(SUB_ROWS)
_MIX_COLS = tl.constexpr(MIX_COLS)
_FROM_STREAMS, _FROM_EMBEDDING = tl.constexpr(FROM_STREAMS), tl.constexpr(FROM_EMBEDDING)
_FROM_SUBLAYER = tl.constexpr(FROM_SUBLAYER)


@jit
def _rows_of_parts(x):
    """As `_joined_parts` of few tokens, but all high parts first, then the middle, the low, the zeros, and for operands
    `in_product_order`. Slower to make, faster to use often: most threads get sums that belong together, and the
    compiler, which does not see the join, moves no registers in front of a product."""
    pairs = pairs_of_parts(in_product_order(tl.trans(x)))  # [MIX_COLS, K, 2, 2]
    return tl.trans(keep_layout(tl.reshape(tl.permute(pairs, (2, 3, 0, 1)), [4 * _MIX_COLS, x.shape[0]])))


@jit
def _sinkhorn(values_ptr, STRIDE: tl.constexpr, comb_ptr, tokens, mask, eps, NUM_ITERS: tl.constexpr):
    """A thread a token, whose weights [MIX_COLS] lie at values_ptr + token * STRIDE."""
    from_ptr, to_ptr = values_ptr + tokens * STRIDE + 8, comb_ptr + tokens * 16
    rows = (
        load_four(from_ptr, mask), load_four(from_ptr + 4, mask), load_four(from_ptr + 8, mask),
        load_four(from_ptr + 12, mask),
    )
    rows = iterate(rows, eps, NUM_ITERS)
    for place in tl.static_range(16):
        tl.store(to_ptr + place, rows[place // 4][place % 4], mask=mask)


@jit
def _partial_dots(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, streams_ptr, partial_ptr, split, num_tokens,
    D: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, NUM_MIXES: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Step 1 of a tile's num_tokens (pointers start at the tile): new streams, their partial dots with fn and their
    partial squares into the tile's partials [TILE, splits, MIX_COLS]."""
    cols = split * SPLIT + tl.arange(0, SPLIT)  # [SPLIT]
    mixes = tl.arange(0, _MIX_COLS)
    # weights are asked for before the launch that makes the streams has ended
    fn = load_fn(fn_ptr, cols, D, NUM_MIXES)
    pdl_trigger()
    pdl_wait()
    rows = tl.arange(0, _SUB_ROWS)  # [SUB_ROWS]
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (cols < D)[None, :]
    before = load_before(
        out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, num_tokens - 1, D, SOURCE, True
    )
    fn = keep_layouts(fn)
    fn_parts = _rows_of_parts(fn[0]), _rows_of_parts(fn[1]), _rows_of_parts(fn[2]), _rows_of_parts(fn[3])
    for _ in range(TILE // _SUB_ROWS):
        x = mix_streams(before, SOURCE)  # four of [SUB_ROWS, SPLIT]
        if SOURCE != _FROM_STREAMS:
            store_streams(streams_ptr, x, rows, cols, mask, D)
        place, is_row = (rows * NUM_SPLITS + split)[:, None] * _MIX_COLS + mixes[None, :], row_mask[:, None]
        # the next rows are asked for before these are multiplied
        rows += _SUB_ROWS
        row_mask = rows < num_tokens
        mask = row_mask[:, None] & (cols < D)[None, :]
        before = load_before(
            out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, num_tokens - 1, D, SOURCE, True
        )
        x = keep_layouts(x)
        left = in_product_order(x[0]), in_product_order(x[1]), in_product_order(x[2]), in_product_order(x[3])
        parts = tl.dot(left[0], fn_parts[0])  # [SUB_ROWS, 4 MIX_COLS]
        for stream in tl.static_range(1, 4):
            parts = tl.dot(left[stream], fn_parts[stream], parts)
        dots = sum_of_parts(tl.permute(tl.reshape(parts, [_SUB_ROWS, 4, _MIX_COLS]), (0, 2, 1)))
        # whole lines: L2 would fetch the rest of one that is written in part
        tl.store(partial_ptr + place, join_partial(dots, x, NUM_MIXES), mask=is_row)


@jit
def program_of_many(num_tiles, lag, NUM_SPLITS: tl.constexpr, NUM_FINISHERS: tl.constexpr):
    """Whether this program finishes tokens, of which tile, and its number among its like.

    Order of programs: step 1 of the first `lag` tiles; then, tile by tile, a tile's finishers and step 1 of the tile
    `lag` after it; then the finishers that are left. So a tile's finishers start behind its step 1, late enough to wait
    for little and early enough to find the streams in L2.
    """
    BOTH: tl.constexpr = NUM_SPLITS + NUM_FINISHERS
    lag = tl.minimum(num_tiles, lag)
    later = tl.program_id(0) - lag * NUM_SPLITS
    left = later - (num_tiles - lag) * BOTH
    if later < 0:
        is_finisher, tile, place = later >= 0, tl.program_id(0) // NUM_SPLITS, tl.program_id(0) % NUM_SPLITS
    elif left < 0:
        is_finisher, tile, place = later % BOTH < NUM_FINISHERS, later // BOTH, later % BOTH
        if not is_finisher:
            tile, place = tile + lag, place - NUM_FINISHERS
    else:
        is_finisher, tile, place = left >= 0, num_tiles - lag + left // NUM_FINISHERS, left % NUM_FINISHERS
    return is_finisher, tile, place


@jit(do_not_specialize=("num_tokens", "lag"))
def hyper_many_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr,
    result, partial_ptr, counter_ptr, num_tokens, norm_eps, hc_eps, lag,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, TILE: tl.constexpr, FINISH: tl.constexpr,
    NUM_MIXES: tl.constexpr, NUM_ITERS: tl.constexpr, SOURCE: tl.constexpr, HAS_NORM: tl.constexpr,
    CODES: tl.constexpr,
):
    """Many tokens: programs of their own finish them (`program_of_many`). `result`: `HyperResult`."""
    is_finisher, tile, place = program_of_many(tl.cdiv(num_tokens, TILE), lag, NUM_SPLITS, TILE // FINISH)
    tile_tokens = tl.minimum(num_tokens - tile * TILE, TILE)
    first_token = tile.to(tl.int64) * TILE
    if not is_finisher:
        _partial_dots(
            out_ptr + first_token * D, x_ptr + first_token * (D if SOURCE == _FROM_EMBEDDING else 4 * D),
            post_ptr + first_token * 4, comb_ptr + first_token * 16, fn_ptr, result.streams + first_token * (4 * D),
            partial_ptr + first_token * (NUM_SPLITS * _MIX_COLS), place, tile_tokens,
            D, SPLIT, NUM_SPLITS, TILE, NUM_MIXES, SOURCE,
        )
        tl.debug_barrier()  # all threads have stored before one of them says so
        tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
    else:
        first = place * FINISH
        if first < tile_tokens:
            base, scale = load_scales(base_ptr, scale_ptr, NUM_MIXES)
            cols = tl.arange(0, BLOCK)[None, :]
            mask = cols < D
            pdl_trigger()
            pdl_wait()
            wait_for_arrivals(counter_ptr + tile, NUM_SPLITS)
            source_ptr = result.streams if SOURCE == _FROM_SUBLAYER else x_ptr
            for row in range(first, tl.minimum(first + FINISH, tile_tokens)):
                token = first_token + row
                partial = load_partial(partial_ptr, token, NUM_SPLITS, SPLIT_BLOCK, NUM_MIXES)
                values = token_weights(partial, base, scale, norm_eps, hc_eps, D, NUM_MIXES)
                if NUM_MIXES > 4:
                    store_post(result.post, values, token)
                    # for Sinkhorn, in place of partials that have been read
                    mixes = tl.arange(0, _MIX_COLS)
                    tl.store(partial_ptr + token * (NUM_SPLITS * _MIX_COLS) + mixes, values)
                x = load_rows(source_ptr, token, cols, mask, D, SOURCE == _FROM_EMBEDDING)
                norm_weight = mask
                if HAS_NORM:  # held in registers from token to token it would spill
                    norm_weight = tl.load(norm_ptr + cols, mask=mask, other=0.0)
                store_hidden(
                    x, values, norm_weight, norm_eps, result.hidden, result.codes, result.code_scale, token, cols,
                    mask, D, BLOCK, GROUP, HAS_NORM, CODES,
                )
            tl.debug_barrier()
            if NUM_MIXES > 4:
                rows = first + tl.arange(0, FINISH)
                _sinkhorn(
                    partial_ptr, NUM_SPLITS * _MIX_COLS, result.comb, first_token + rows,
                    rows < tile_tokens, hc_eps, NUM_ITERS,
                )
            # the tile's last finisher clears its counter for the next launch
            num_finishers = tl.cdiv(tile_tokens, FINISH)
            if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == NUM_SPLITS + num_finishers - 1:
                tl.store(counter_ptr + tile, 0)
