"""What attention reads of the batch itself: queries, window rows and index queries, from their projections.

Kernel: programs for heads (as of `rms_norm`, then `rope`), for rows (as of `window_rows`, then `append_swa`) and for
index queries in one launch: each is too short to fill a GPU at decode, and none needs another. The same bits as theirs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.formats.row_store import RowStore, encode_rows
from dsv4.formats.rows import RowKind
from dsv4.ops.indexer import FEW_QUERIES, turned_queries
from dsv4.ops.indexer.kernel_index import encode_queries
from dsv4.ops.lib.arch import overlapping
from dsv4.ops.lib.guard import KernelInputError, check_launch, jit, tl
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.norm import KERNEL_DTYPES, rms_norm_ref
from dsv4.ops.rows import RowLaunch, Turn, append_swa_ref, rotate
from dsv4.ops.rows.kernel_rope import rope_heads
from dsv4.ops.rows.kernel_window import window_tile
from dsv4.ops.rows.target import row_shape, rows_per_tile

# rows of a tile that go into the ring too: of more, the addresses of both places take the registers of all programs
RING_TILE_ROWS = 2


@waits_for_device
def attention_inputs_ref(
    q: Tensor, kv: Tensor, index_q: Tensor | None, kv_norm: Tensor, freqs: Tensor, eps: float, window: WindowView,
    keys: PagedView | None, batch: TokenBatch, *, appends: bool,
) -> tuple[Tensor, RowStore, Tensor | None]:
    """Projections q [T, H, d], kv [T, d] and, with index keys, index_q [T, Hi, Di] -> queries [T, H, d], rows [T], and
    index queries [T, Hi, Di] or None.

    Queries: RMSNorm of each head without weight, then rope. Rows: `window_rows` in the window's format. Index queries:
    `turned_queries` in the format of the keys. Nothing else is written, but with `appends` the ring (`append_swa`).

    `appends` is only for chunks of at most ring_len - window_len + 1 tokens (one token and the drafts the ring has room
    for). Attention takes positions from chunk_start on out of the returned rows, and of the ring it reads back to
    chunk_start - window_len + 1; the last token replaces position chunk_end - 1 - ring_len, which lies before that.
    """
    assert (index_q is None) == (keys is None), "index queries go with index keys"
    turn = Turn.of_batch(batch, freqs)
    rows = encode_rows(rotate(rms_norm_ref(kv, kv_norm, eps), turn), window.rows.format)
    if appends:
        append_swa_ref(rows, window, batch)
    if index_q is not None and keys is not None:
        index_q = turned_queries(index_q, turn, keys.rows.format)
    return rotate(rms_norm_ref(q, None, eps), turn), rows, index_q


class HeadArguments(NamedTuple):
    """Heads [T, H, dim] with contiguous columns, and where their results go, which are dense."""

    data: Any
    out: Any
    token_stride: int
    head_stride: int


@jit(do_not_specialize=("num_tokens", "num_row_tiles"))
def _attention_inputs_kernel(
    kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
    ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr, num_row_tiles, q, index_q,
    KIND: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LOG2_DIM: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ROWS: tl.constexpr, WINDOW_ROWS: tl.constexpr, RING_LEN: tl.constexpr, NUM_HEADS: tl.constexpr,
    INDEX_KIND: tl.constexpr, INDEX_DIM: tl.constexpr, INDEX_LOG2_DIM: tl.constexpr, NUM_INDEX_HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
):
    """Programs: tiles of WINDOW_ROWS rows first, since they take longest; then ROWS heads of a token each; then
    INDEX_HEADS index heads of a token each. `q`, `index_q`: `HeadArguments`.
    """
    HEAD_TILES: tl.constexpr = (NUM_HEADS + ROWS - 1) // ROWS
    pdl_wait()
    pdl_trigger()
    program = tl.program_id(0)
    if program < num_row_tiles:
        window_tile(
            program, kv_ptr, weight_ptr, positions_ptr, freqs_ptr, eps, num_tokens, stride_kvt, target,
            ring, ring_positions_ptr, stride_rps, slots_ptr, chunk_ends_ptr,
            KIND, DIM, ROPE_DIM, LOG2_DIM, SCALE_BYTES, WINDOW_ROWS, RING_LEN,
        )
    elif program < num_row_tiles + num_tokens * HEAD_TILES:
        program -= num_row_tiles
        rope_heads(
            q.data, q.out, positions_ptr, freqs_ptr, (program // HEAD_TILES).to(tl.int64),
            program % HEAD_TILES * ROWS, NUM_HEADS, q.token_stride, q.head_stride, 1, eps,
            DIM, ROPE_DIM, DIM, ROWS, True, False,
        )
    elif NUM_INDEX_HEADS > 0:
        INDEX_TILES: tl.constexpr = (NUM_INDEX_HEADS + INDEX_HEADS - 1) // INDEX_HEADS
        program -= num_row_tiles + num_tokens * HEAD_TILES
        encode_queries(
            index_q.data, index_q.out, positions_ptr, freqs_ptr, (program // INDEX_TILES).to(tl.int64),
            program % INDEX_TILES * INDEX_HEADS, NUM_INDEX_HEADS, index_q.token_stride, index_q.head_stride,
            INDEX_KIND, INDEX_DIM, ROPE_DIM, INDEX_LOG2_DIM, INDEX_HEADS,
        )


def attention_inputs(
    q: Tensor, kv: Tensor, index_q: Tensor | None, kv_norm: Tensor, freqs: Tensor, eps: float, window: WindowView,
    keys: PagedView | None, batch: TokenBatch, *, appends: bool,
) -> tuple[Tensor, RowStore, Tensor | None]:
    """See `attention_inputs_ref`. Projections in one of bf16, fp16 and fp32; quantised rows and keys; the results are
    contiguous. One launch.
    """
    rows_format = window.rows.format
    launch = RowLaunch.build(
        kv, kv_norm, batch.positions, freqs, eps, rows_format, window if appends else None, batch if appends else None
    )
    check_launch(q, kv, index_q)
    num_tokens = batch.num_tokens
    if q.dim() != 3 or q.shape[::2] != (num_tokens, rows_format.dim) or q.dtype != kv.dtype:
        raise KernelInputError(
            f"expected q [{num_tokens}, H, {rows_format.dim}] in {kv.dtype}, found {q.dtype} {tuple(q.shape)}"
        )
    q, q_out = _dense_heads(q), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_heads, num_index_heads, index_out = q.shape[1], 0, None
    index_arguments = HeadArguments(q, q_out, 0, 0)  # an unused pointer still needs a tensor
    index_shape = dict.fromkeys(("INDEX_KIND", "INDEX_DIM", "INDEX_LOG2_DIM"), 0)
    if index_q is not None:
        index_shape = _index_shape(index_q, freqs, keys, num_tokens)
        index_q, index_out = _dense_heads(index_q), torch.empty(index_q.shape, dtype=index_q.dtype, device=q.device)
        num_index_heads = index_q.shape[1]
        index_arguments = HeadArguments(index_q, index_out, *index_q.stride()[:2])
    elif keys is not None:
        raise KernelInputError("expected index queries where there are index keys, found none")
    if num_tokens == 0:
        return q_out, launch.rows, index_out
    # a token's index heads are shared by several programs where there are few tokens
    tile_rows, index_heads = launch.shape["ROWS"], 8 if num_tokens <= FEW_QUERIES else 32
    num_tiles = -(-num_heads // tile_rows) + -(-num_index_heads // index_heads)
    window_rows = min(RING_TILE_ROWS, tile_rows) if appends else tile_rows
    num_row_tiles = -(-num_tokens // window_rows)
    _attention_inputs_kernel[(num_row_tiles + num_tokens * num_tiles,)](
        *launch.arguments, *launch.ring, num_row_tiles, HeadArguments(q, q_out, *q.stride()[:2]), index_arguments,
        **launch.shape, RING_LEN=launch.ring_len, **index_shape, NUM_HEADS=num_heads, NUM_INDEX_HEADS=num_index_heads,
        INDEX_HEADS=index_heads, WINDOW_ROWS=window_rows, **rows_per_tile(rows_format.dim)[1], **overlapping(),
    )
    return q_out, launch.rows, index_out


def _dense_heads(q: Tensor) -> Tensor:
    return q if q.stride(2) == 1 else q.contiguous()


def _index_shape(index_q: Tensor, freqs: Tensor, keys: PagedView | None, num_tokens: int) -> dict[str, int]:
    if keys is None or keys.rows.format.kind is RowKind.ENTRY_FP8:
        raise KernelInputError(f"expected index keys, found {None if keys is None else keys.rows.format}")
    shape = row_shape(keys.rows.format, freqs)
    is_shaped = index_q.dim() == 3 and index_q.shape[::2] == (num_tokens, shape["DIM"])
    if not is_shaped or index_q.dtype not in KERNEL_DTYPES:
        raise KernelInputError(
            f"expected index_q [{num_tokens}, Hi, {shape['DIM']}] in one of {KERNEL_DTYPES}, found {index_q.dtype} "
            f"{tuple(index_q.shape)}"
        )
    return {f"INDEX_{name}": shape[name] for name in ("KIND", "DIM", "LOG2_DIM")}
