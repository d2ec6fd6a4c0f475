"""Kernels of ops/hyper: how they work, and the one for few tokens.

A launch is (hc_post | expansion | nothing) + hc_pre or hc_head + RMSNorm + FP8 codes. The fp32 matrix fn [24, 4 D] is
far larger than one token's streams, and one program would need too long to read it, so the columns are split over many
programs:

1. Program (split, tile) owns SPLIT columns of every stream and TILE tokens. It makes the new streams, rounds and
   stores them, and leaves 24 partial dots and a partial sum of squares per token in memory.
2. A token whose partials are complete is finished by one program: sum of the partials, sigmoid, Sinkhorn, collapse,
   norm.

Few tokens (`hyper_kernel`, here): there is one tile; its programs that arrive last become workers, wait for the few
still missing and share the tokens. The counter of arrivals only grows, by the number of splits a launch, so that no
launch has to reset it and a CUDA graph can be replayed.

Many tokens (`hyper_many_kernel`, kernel_many.py): programs of their own finish a few tokens each, a few tiles
behind step 1, where the streams are still in L2.

Both are made of the same parts: step 1 of kernel_streams.py, step 2 of kernel_weights.py.

Nothing depends on who waits for whom: the partials, the order of their sum and every step after it are fixed by the
layer's shape. Waiting cannot hang: a program waits for programs with lower numbers or of its own tile, which a GPU
starts before those of later tiles, and a tile has fewer waiting programs than a GPU has room for. In the interpreter,
where programs run one after another, the last one does all the work of few tokens.

The dots run on tensor cores without losing fp32: a stream is bf16 already, and fn is taken apart into three bf16 parts
that add up to it exactly; their products are exact, and each part has its own fp32 accumulator. All products are made
of the same instruction of 16 rows and 16 columns, which come in the same order however many rows there are at a time
(`in_product_order` of ops/lib/maths.py), so that a token's bits do not depend on the number of tokens.
"""

from __future__ import annotations

from dsv4.ops.hyper.kernel_streams import (
    FROM_EMBEDDING,
    FROM_STREAMS,
    FROM_SUBLAYER,
    MIX_COLS,
    join_partial,
    keep_layouts,
    load_before,
    load_fn,
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
from dsv4.ops.lib.arrivals import arrive_and_share, wait_for_arrivals
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait

FEW_ROWS = 16  # rows of the matrix product, and the most tokens of a launch

_FEW_ROWS = tl.constexpr(FEW_ROWS)
_MIX_COLS = tl.constexpr(MIX_COLS)
_FROM_STREAMS, _FROM_EMBEDDING = tl.constexpr(FROM_STREAMS), tl.constexpr(FROM_EMBEDDING)
_FROM_SUBLAYER = tl.constexpr(FROM_SUBLAYER)


@jit
def _joined_parts(x):
    """fp32 [K, MIX_COLS] -> bf16 [K, 4 MIX_COLS]: its parts and a zero, side by side. One wide matrix per stream passes
    through shared memory faster than three."""
    return tl.reshape(pairs_of_parts(x), [x.shape[0], 4 * _MIX_COLS])


@jit
def _pick(values, INDEX: tl.constexpr):
    """One of values [MIX_COLS] in every lane: a shuffle."""
    return tl.gather(values, tl.full([_MIX_COLS], INDEX, tl.int32), 0)


@jit
def _pick_four(values, FIRST: tl.constexpr):
    return _pick(values, FIRST), _pick(values, FIRST + 1), _pick(values, FIRST + 2), _pick(values, FIRST + 3)


@jit
def _sinkhorn(values, comb_ptr, token, eps, NUM_ITERS: tl.constexpr):
    """One token whose weights are in registers: every lane computes all of it, and each of sixteen stores a value."""
    rows = _pick_four(values, 8), _pick_four(values, 12), _pick_four(values, 16), _pick_four(values, 20)
    rows = iterate(rows, eps, NUM_ITERS)
    mixes = tl.arange(0, _MIX_COLS)
    comb = rows[0][0]
    for place in tl.static_range(1, 16):
        comb = tl.where(mixes == 8 + place, rows[place // 4][place % 4], comb)
    tl.store(comb_ptr + token * 16 + mixes - 8, comb, mask=(mixes >= 8) & (mixes < 24))


@jit
def _partial_dots(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, streams_ptr, partial_ptr, split, num_tokens,
    D: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr, NUM_MIXES: tl.constexpr, SOURCE: tl.constexpr,
):
    """Step 1: new streams, their partial dots with fn and their partial squares into partials [FEW_ROWS, splits,
    MIX_COLS]."""
    cols = split * SPLIT + tl.arange(0, SPLIT)  # [SPLIT]
    mixes = tl.arange(0, _MIX_COLS)
    # weights are asked for before the launch that makes the streams has ended
    fn = load_fn(fn_ptr, cols, D, NUM_MIXES)
    pdl_trigger()
    pdl_wait()
    rows = tl.arange(0, _FEW_ROWS).to(tl.int64)  # of narrower ones ptxas delays some loads
    row_mask = rows < num_tokens
    mask = row_mask[:, None] & (cols < D)[None, :]  # [FEW_ROWS, SPLIT]
    before = load_before(
        out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, row_mask, mask, num_tokens - 1, D, SOURCE, False
    )
    x = mix_streams(before, SOURCE)  # four of [FEW_ROWS, SPLIT]
    if SOURCE != _FROM_STREAMS:
        store_streams(streams_ptr, x, rows, cols, mask, D)
    x = keep_layouts(x)
    parts = tl.dot(x[0], _joined_parts(fn[0]))  # [FEW_ROWS, 4 MIX_COLS]
    for stream in tl.static_range(1, 4):
        parts = tl.dot(x[stream], _joined_parts(fn[stream]), parts)
    partial = join_partial(sum_of_parts(parts), x, NUM_MIXES)  # [FEW_ROWS, MIX_COLS]
    place = (rows * NUM_SPLITS + split)[:, None] * _MIX_COLS + mixes[None, :]
    tl.store(partial_ptr + place, partial, mask=row_mask[:, None] & (mixes <= NUM_MIXES)[None, :])


@jit(do_not_specialize=("num_tokens",))
def hyper_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr,
    result, partial_ptr, counter_ptr, num_tokens, norm_eps, hc_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, NUM_WORKERS: tl.constexpr,
    NUM_MIXES: tl.constexpr, NUM_ITERS: tl.constexpr, SOURCE: tl.constexpr, HAS_NORM: tl.constexpr,
    CODES: tl.constexpr,
):
    """Up to FEW_ROWS tokens: the programs that arrive last finish them. `result`: `HyperResult`."""
    split = tl.program_id(0)
    base, scale = load_scales(base_ptr, scale_ptr, NUM_MIXES)
    _partial_dots(
        out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, result.streams, partial_ptr, split, num_tokens,
        D, SPLIT, NUM_SPLITS, NUM_MIXES, SOURCE,
    )
    worker, num_workers, complete = arrive_and_share(counter_ptr, num_tokens, NUM_SPLITS, NUM_WORKERS)
    if worker >= 0:
        cols = tl.arange(0, BLOCK)[None, :]
        mask = cols < D
        norm_weight = mask
        if HAS_NORM:
            norm_weight = tl.load(norm_ptr + cols, mask=mask, other=0.0)
        wait_for_arrivals(counter_ptr, complete)
        source_ptr = result.streams if SOURCE == _FROM_SUBLAYER else x_ptr
        for row in range(worker, num_tokens, num_workers):
            # plus nothing: where the compiler knows it, ptxas takes 96 registers instead of 126 and asks for less ahead
            token = tl.program_id(1).to(tl.int64) + row
            partial = load_partial(partial_ptr, token, NUM_SPLITS, SPLIT_BLOCK, NUM_MIXES)  # [splits, MIX_COLS]
            values = token_weights(partial, base, scale, norm_eps, hc_eps, D, NUM_MIXES)  # [MIX_COLS]
            if NUM_MIXES > 4:
                store_post(result.post, values, token)
                _sinkhorn(values, result.comb, token, hc_eps, NUM_ITERS)
            x = load_rows(source_ptr, token, cols, mask, D, SOURCE == _FROM_EMBEDDING)
            store_hidden(
                x, values, norm_weight, norm_eps, result.hidden, result.codes, result.code_scale, token, cols, mask,
                D, BLOCK, GROUP, HAS_NORM, CODES,
            )
