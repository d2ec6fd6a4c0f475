"""Tiles of a product: stored, and summed over splits of K in one fixed order."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


@jit
def store_tile(
    acc, out_ptr, stride_out, col, num_cols, first_token, num_tokens,
    BM: tl.constexpr, BT: tl.constexpr, TOKENS_FIRST: tl.constexpr,
):
    """Columns [col, col + BM) of the tile's tokens, those below num_cols, rounded to the output's dtype."""
    tokens = first_token + tl.arange(0, BT)
    cols = col + tl.arange(0, BM)
    values = acc.to(out_ptr.dtype.element_ty)
    token_mask, col_mask = tokens < num_tokens, cols < num_cols
    token_offsets = tokens.to(tl.int64) * stride_out
    if TOKENS_FIRST:
        tl.store(out_ptr + token_offsets[:, None] + cols[None, :], values, mask=token_mask[:, None] & col_mask[None, :])
    else:
        tl.store(out_ptr + token_offsets[None, :] + cols[:, None], values, mask=token_mask[None, :] & col_mask[:, None])


@jit
def _nothing():
    """A tuple to add to: to a literal one mypy lets nothing be added."""
    return ()


@jit
def sum_of_splits(
    acc, partial_ptr, counter_ptr, tile, split, num_tokens, SPLITS: tl.constexpr, TOKENS_FIRST: tl.constexpr
):
    """Leave a partial tile, of its first num_tokens tokens; the last of its tile adds all up, first split first.
    Returns the sum and whether it is one. The last one sets the counter back, so that a graph can be replayed.
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    # this many partials are loaded at once, 64 values a thread of 4 warps; of large tiles one, for lack of registers
    AT_ONCE: tl.constexpr = min(SPLITS, 8192 // SIZE) if SIZE <= 2048 else 1
    first, second = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    # a token's outputs lie side by side
    offsets = first * acc.shape[1] + second if TOKENS_FIRST else second * acc.shape[0] + first
    mask = tl.broadcast_to((first if TOKENS_FIRST else second) < num_tokens, acc.shape)
    tile_ptrs = partial_ptr + tile.to(tl.int64) * (SPLITS * SIZE) + offsets
    tl.store(tile_ptrs + split * SIZE, acc, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    total = tl.zeros_like(acc)
    if is_last:
        tl.debug_barrier()
        # other multiprocessors wrote them: .cg reads from the cache they share
        if AT_ONCE == 1:
            for index in range(SPLITS):
                total += tl.load(tile_ptrs + index * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
        else:
            for start in tl.static_range(0, SPLITS, AT_ONCE):
                parts = _nothing()
                for index in tl.static_range(start, min(start + AT_ONCE, SPLITS)):
                    parts += (tl.load(tile_ptrs + index * SIZE, mask=mask, other=0.0, cache_modifier=".cg"),)
                for index in tl.static_range(len(parts)):
                    total += parts[index]
        tl.store(counter_ptr + tile, 0)
    return total, is_last
