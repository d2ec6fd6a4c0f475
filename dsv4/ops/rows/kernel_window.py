"""Rows of the window ring.

`_window_rows_kernel` takes a few tokens a program through `store_rows`, each row whole in registers, so that kv is read
once; `attention_inputs` has the same tiles with the ring as a second destination. `_append_swa_kernel` copies bytes.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.rows.kernel_store import row_offsets, store_rows


@jit
def _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN: tl.constexpr):
    """Slots [R], ring rows [R], and which tokens write: not padding, and not replaced by a later token of the chunk."""
    slots = tl.load(slots_ptr + tokens, mask=mask, other=-1)
    ends = tl.load(chunk_ends_ptr + tokens, mask=mask, other=0)
    return slots, positions % RING_LEN, mask & (slots >= 0) & (positions >= ends - RING_LEN)


@jit(do_not_specialize=("num_tokens",))
def _window_rows_kernel(
    kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
):
    pdl_trigger()
    window_tile(
        tl.program_id(0), kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
        target, positions_ptr, 0, positions_ptr, positions_ptr, KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, ROWS, 0,
    )


@jit
def window_tile(
    tile, kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
    ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr, RING_LEN: tl.constexpr,
):
    """The rows of tile `tile` of ROWS tokens, into the ring as well where RING_LEN is not 0."""
    tokens = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
    HAS_RING: tl.constexpr = RING_LEN > 0
    offsets = row_offsets(target, tokens, tokens * 0)
    ring_offsets = offsets
    is_writer = mask
    if HAS_RING:
        slots, ring_rows, is_writer = _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN)
        ring_offsets = row_offsets(ring, slots, ring_rows)
        tl.store(ring_positions_ptr + slots * stride_rps + ring_rows, positions.to(tl.int32), mask=is_writer)
    store_rows(
        kv_ptr, tokens * stride_kvt, mask, weight_ptr, positions, freqs_ptr, eps,
        target, offsets, ring, ring_offsets, is_writer,
        KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, HAS_RING,
    )


@jit(do_not_specialize=("num_tokens",))
def _append_swa_kernel(
    data_ptr, scales_ptr, ring, ring_positions_ptr, stride_rps, positions_ptr, slots_ptr, chunk_ends_ptr, num_tokens,
    stride_dt, stride_st, DATA_BYTES: tl.constexpr, DATA_BLOCK: tl.constexpr, SCALE_BYTES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, ROWS: tl.constexpr, RING_LEN: tl.constexpr,
):
    pdl_trigger()
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=mask, other=0)
    slots, ring_rows, is_writer = _ring_writers(tokens, mask, positions, slots_ptr, chunk_ends_ptr, RING_LEN)
    offsets = row_offsets(ring, slots, ring_rows)
    # window.rows[slots, ring_rows] = rows[writers]. Asked for before it is known who writes: one wait, not two
    cols, scale_cols = tl.arange(0, DATA_BLOCK)[None, :], tl.arange(0, SCALE_BLOCK)[None, :]
    is_data, is_scale = cols < DATA_BYTES, scale_cols < SCALE_BYTES
    data = tl.load(data_ptr + tokens[:, None] * stride_dt + cols, mask=mask[:, None] & is_data)  # [ROWS, bytes]
    scales = tl.load(scales_ptr + tokens[:, None] * stride_st + scale_cols, mask=mask[:, None] & is_scale)
    tl.store(ring.data + offsets[0][:, None] + cols, data, mask=is_writer[:, None] & is_data)
    tl.store(ring.scales + offsets[2][:, None] + scale_cols, scales, mask=is_writer[:, None] & is_scale)
    tl.store(ring_positions_ptr + slots * stride_rps + ring_rows, positions.to(tl.int32), mask=is_writer)
