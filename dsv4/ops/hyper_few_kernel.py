"""The hyper-connection kernel for a few tokens, where latency is all that counts; see ops/hyper_kernels.py.

A tile of TILE tokens has NUM_SPLITS programs for step 1 and two workers a token for step 2: one collapses and norms,
one runs Sinkhorn. Between the steps there is one exchange and no counter in its way: a partial is stored in one 64-bit
word with the number of the launch above it, and a worker reads a token's words until all carry its own launch's number.
What takes two writes and two reads one after the other with a counter (value, arrival, wait, value) takes one of each.
The collapsing worker makes the new streams once more from what the launch was given, so that it needs nothing but the
words from others, and it does so while they are under way.

The number of a launch comes from a counter per tile to which every program adds one, workers without a token too, after
it has read it: until the last has added, the count divided by the number of programs is the same for all of them. The
words must outlive a launch (a stale one carries an older number), so they are not scratch; they start as zeros, and
launches count from one.

Waiting cannot hang: a worker waits only for programs of its tile with lower numbers, which a GPU starts first. The
interpreter runs programs in that order.
"""

from __future__ import annotations

from dsv4.ops.hyper_kernels import (
    MIX_COLS,
    load_scales,
    partial_dots,
    partial_places,
    sinkhorn,
    store_hidden,
    store_post,
    streams_after,
    token_weights,
)
from dsv4.ops.tl_utils import jit, pdl_trigger, tl

WORKERS_PER_TOKEN = 2
_MIX_COLS = tl.constexpr(MIX_COLS)
_WORKERS = tl.constexpr(WORKERS_PER_TOKEN)


@jit
def _wait_for_partials(
    words_ptr, tag, row, first_mix, last_mix, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    NUM_MIXES: tl.constexpr,
):  # fmt: skip
    """A row's partials fp32 [splits, MIX_COLS] as soon as all are there: mixes first_mix .. last_mix and the sum of
    squares; 0 elsewhere."""
    mixes = tl.arange(0, _MIX_COLS)
    is_wanted = ((mixes >= first_mix) & (mixes <= last_mix) & (mixes < NUM_MIXES)) | (mixes == NUM_MIXES)
    mask = (tl.arange(0, SPLIT_BLOCK) < NUM_SPLITS)[:, None] & is_wanted[None, :]
    places = partial_places(words_ptr, row, NUM_SPLITS, SPLIT_BLOCK)
    words = tl.zeros([SPLIT_BLOCK, _MIX_COLS], tl.int64)
    is_missing = 1
    while is_missing != 0:
        words = tl.load(places, mask=mask, other=0, volatile=True)
        is_stale = mask & (((words ^ tag) >> 32) != 0)
        is_missing = tl.max(tl.max(is_stale.to(tl.int32), axis=0), axis=0)
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@jit(do_not_specialize=("num_tokens",))
def hyper_few_kernel(
    out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, base_ptr, scale_ptr, norm_ptr,
    streams_ptr, hidden_ptr, codes_ptr, code_scale_ptr, new_post_ptr, new_comb_ptr,
    words_ptr, counter_ptr, num_tokens, norm_eps, hc_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr, TILE: tl.constexpr, NUM_MIXES: tl.constexpr, NUM_ITERS: tl.constexpr,
    SOURCE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    pdl_trigger()
    program, tile = tl.program_id(0), tl.program_id(1)
    launch = tl.load(counter_ptr + tile, volatile=True) // (NUM_SPLITS + TILE * _WORKERS) + 1
    tag = launch << 32
    tile_words_ptr = words_ptr + tile.to(tl.int64) * (NUM_SPLITS * TILE * _MIX_COLS)
    row = (program - NUM_SPLITS) // _WORKERS
    token = tile.to(tl.int64) * TILE + row
    collapses = (program - NUM_SPLITS) % _WORKERS == 0
    if program < NUM_SPLITS:
        partial_dots(
            out_ptr, x_ptr, post_ptr, comb_ptr, fn_ptr, streams_ptr, tile_words_ptr, tag, tile, program, num_tokens,
            D, SPLIT, NUM_SPLITS, TILE, NUM_MIXES, SOURCE, True,
        )  # fmt: skip
    elif token < num_tokens:
        base, scale = load_scales(base_ptr, scale_ptr, NUM_MIXES)
        if collapses:
            cols = tl.arange(0, BLOCK)
            mask = (cols < D)[None, :]
            norm_weight = mask
            if HAS_NORM:
                norm_weight = tl.load(norm_ptr + cols[None, :], mask=mask, other=0.0)
            rows = token + tl.arange(0, 1)
            x0, x1, x2, x3 = streams_after(
                out_ptr, x_ptr, post_ptr, comb_ptr, rows, cols, rows < num_tokens, mask, D, SOURCE
            )  # fmt: skip
            partial = _wait_for_partials(tile_words_ptr, tag, row, 0, 7, NUM_SPLITS, SPLIT_BLOCK, NUM_MIXES)
            values = token_weights(partial, base, scale, norm_eps, hc_eps, D, NUM_MIXES)
            if NUM_MIXES > 4:
                store_post(new_post_ptr, values, token)
            store_hidden(
                x0, x1, x2, x3, values, norm_weight, norm_eps, hidden_ptr, codes_ptr, code_scale_ptr, token,
                cols[None, :], mask, D, BLOCK, GROUP, HAS_NORM, HAS_CODES,
            )  # fmt: skip
        elif NUM_MIXES > 4:
            partial = _wait_for_partials(tile_words_ptr, tag, row, 8, 23, NUM_SPLITS, SPLIT_BLOCK, NUM_MIXES)
            values = token_weights(partial, base, scale, norm_eps, hc_eps, D, NUM_MIXES)
            sinkhorn(values, new_comb_ptr, token, hc_eps, NUM_ITERS)
    tl.debug_barrier()  # all threads have read the counter
    tl.atomic_add(counter_ptr + tile, 1, sem="relaxed")
