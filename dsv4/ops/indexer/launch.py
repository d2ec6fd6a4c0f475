"""Launchers of the indexer.

Kernels: kernel_index.py for scores, ops/select for the selection. `index_topk` is two launches for every
WORKSPACE_BYTES of scores, whatever the positions: the scores, and the selection; one more before them, for many tokens,
orders the queries' dimensions. A token whose visible entries all fit into top_k leaves all of them at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.indexer.kernel_index import (
    group_scores_kernel,
    plane_queries_kernel,
    token_scores_kernel,
)
from dsv4.ops.indexer.plan import INDEX_FLAGS, WORKSPACE_BYTES, ScoreConfig, score_config
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.norm import KERNEL_DTYPES
from dsv4.ops.rows.target import row_kind
from dsv4.ops.select import MAX_COLUMNS, MAX_K, TOPK_CONFIG, TopkConfig, select
from dsv4.ops.select.kernel_list import LIST


class KeyWords(NamedTuple):
    """Index keys [blocks, entries] for a kernel: data as words, a word of scales a key, strides in elements."""

    words: Tensor  # int32
    words_stride: int
    words_row: int
    scales: Tensor  # int32, four codes; fp32 for FP8 keys
    scales_stride: int
    scales_row: int


def index_topk(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, *, ratio: int, top_k: int, scale: float = 1.0
) -> Tensor:
    """See `index_topk_ref`. bf16 queries as `attention_inputs` gives them, weights in bf16, fp16 or fp32, quantised
    keys; top_k up to 1024. A score that is NaN counts as -inf, and FP4 keys with a scale of 2^65 or more count as NaN.
    """
    config = score_config(q.device)
    return launch_index_topk(q, weights, keys, batch, ratio, top_k, config, TOPK_CONFIG, scale=scale)


def row_bytes(capacity: int) -> int:
    """Workspace of a token: scores, and the list of a long row."""
    return 4 * capacity + 8 * LIST


def launch_index_topk(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, ratio: int, top_k: int,
    score_config: ScoreConfig, topk_config: TopkConfig, workspace_bytes: int = WORKSPACE_BYTES, scale: float = 1.0,
) -> Tensor:
    """`index_topk` with the work divided as the configurations say."""
    _check(q, weights, keys, batch, top_k)
    capacity = batch.block_table.shape[1] * keys.entries_per_block
    picks = torch.empty(q.shape[0], top_k, dtype=torch.int64, device=q.device)
    if picks.numel() == 0:
        return picks
    if capacity == 0:
        return picks.fill_(-1)
    num_rows = max(workspace_bytes // row_bytes(capacity), 1)
    for start in range(0, q.shape[0], num_rows):
        part = slice(start, start + num_rows)
        scores, lengths = index_scores(q[part], weights[part], keys, batch, part, ratio, top_k, score_config, scale)
        select(scores, lengths, picks[part], topk_config, INDEX_FLAGS)
    return picks


def index_scores(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, part: slice, ratio: int, top_k: int,
    config: ScoreConfig, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Scores fp32 [Q, capacity] of the tokens `part` of the batch, and how many entries each sees.

    Written are the visible entries of tokens that see more than top_k.
    """
    num_tokens, num_heads, dim = q.shape
    capacity = batch.block_table.shape[1] * keys.entries_per_block
    scores = torch.empty(num_tokens, capacity, dtype=torch.float32, device=q.device)
    lengths = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
    group = config.group(num_tokens)
    q = q if q.stride(2) == 1 else q.contiguous()
    q = _in_planes(q, keys.rows.format) if group else q
    pointers = (
        q, weights.contiguous(), _key_words(keys.rows), batch.block_table, batch.positions[part].contiguous(),
        batch.slots[part].contiguous(), scores, lengths, scale,
    )
    strides = q.stride(0), q.stride(1), num_heads, batch.block_table.stride(0), capacity
    options: dict[str, Any] = {
        "KIND": row_kind(keys.rows.format), "NUM_HEADS": num_heads, "HEADS": max(next_power_of_2(num_heads), 16),
        "DIM": dim, "WORDS": keys.rows.format.data_bytes // 4, "PER_BLOCK": keys.entries_per_block,
        "RATIO": ratio, "TOP_K": top_k, **config.options(group > 0),
    }
    grid = config.grid(num_tokens, capacity)
    if group:
        group_scores_kernel[grid](*pointers, num_tokens, capacity, group, *strides, TILE=config.group_tile, **options)
    else:
        token_scores_kernel[grid](*pointers, capacity, *strides, TILE=config.tile, **options)
    return scores, lengths


def _in_planes(q: Tensor, key_format: RowFormat) -> Tensor:
    """q [T, Hi, Di] with the dims of a head in the order in which kernels decode keys."""
    num_tokens, num_heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    plane_queries_kernel[(num_tokens,)](
        q, out, num_heads, q.stride(0), q.stride(1),
        KIND=row_kind(key_format), DIM=dim, HEADS=next_power_of_2(num_heads), num_warps=4, num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def _key_words(rows: RowStore) -> KeyWords:
    data, scales = rows.data, rows.scales
    assert scales is not None, rows.format
    is_aligned = all(
        part.dim() == 3 and part.stride(2) == 1 and part.storage_offset() % 4 == 0
        and part.stride(0) % 4 == 0 and part.stride(1) % 4 == 0
        for part in (data, scales)
    )
    if not is_aligned:
        raise KernelInputError(
            f"expected keys [blocks, entries] of contiguous bytes, aligned to 4, found strides {data.stride()} and "
            f"{scales.stride()}"
        )
    words = data.view(torch.int32)
    factors = scales.view(torch.int32 if rows.format.kind is RowKind.INDEX_FP4 else torch.float32)
    return KeyWords(words, words.stride(0), words.stride(1), factors, factors.stride(0), factors.stride(1))


def _check(q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, top_k: int) -> None:
    check_launch(q, weights, keys.rows.data, batch.positions)
    fmt = keys.rows.format
    if fmt.kind not in (RowKind.INDEX_FP4, RowKind.INDEX_FP8):
        raise KernelInputError(
            f"expected index keys in FP4 or FP8, found {fmt.kind}; the TORCH backend takes plain keys"
        )
    if q.dim() != 3 or q.shape[0] != batch.num_tokens or q.shape[2] != fmt.dim or q.dtype != torch.bfloat16:
        raise KernelInputError(f"expected bf16 q [{batch.num_tokens}, Hi, {fmt.dim}], found {q.dtype} {tuple(q.shape)}")
    if (
        fmt.dim != 128
        or keys.entries_per_block % 32
        or keys.entries_per_block != next_power_of_2(keys.entries_per_block)
    ):
        raise KernelInputError(
            f"expected keys of 128 dims in blocks of 32, 64 or more, found {fmt.dim} in blocks of "
            f"{keys.entries_per_block}"
        )
    if weights.shape != q.shape[:2] or weights.dtype not in KERNEL_DTYPES:
        raise KernelInputError(
            f"expected weights {tuple(q.shape[:2])} in one of {KERNEL_DTYPES}, found {weights.dtype} "
            f"{tuple(weights.shape)}"
        )
    capacity = batch.block_table.shape[1] * keys.entries_per_block
    if not 0 <= top_k <= MAX_K or capacity >= MAX_COLUMNS:
        raise KernelInputError(f"expected top_k up to {MAX_K} of fewer than {MAX_COLUMNS}, found {top_k} of {capacity}")
    if batch.block_table.stride(1) != 1:
        raise KernelInputError(f"expected a block table of contiguous rows, found strides {batch.block_table.stride()}")
