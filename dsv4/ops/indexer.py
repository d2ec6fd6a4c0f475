"""The lightning indexer of CSA layers: scores every visible entry with small heads and picks the best.

I[t, s] = sum_h scale w[t, h] relu(q[t, h] . k[s]); visible are the entries s < floor((t + 1) / 4). A head weight may be
negative, so a score may be too. Ties go to the lower entry.

Kernels: indexer_kernels.py for queries and scores, ops/topk.py for the selection. `index_topk` is two launches for
every WORKSPACE_BYTES of scores, whatever the positions: the scores, and the selection; one more before them, for many
tokens, orders the queries' dimensions. A token whose visible entries all fit into top_k leaves all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.hadamard import hadamard_ref
from dsv4.ops.indexer_kernels import (
    MAX_GROUP,
    group_scores_kernel,
    index_queries_kernel,
    plane_queries_kernel,
    token_scores_kernel,
)
from dsv4.ops.invariant import KEY_TILE, QUERY_TILE, accumulator, ordered_sum
from dsv4.ops.norm import KERNEL_DTYPES
from dsv4.ops.rope import rope_ref
from dsv4.ops.row_kernels import row_kind, row_shape
from dsv4.ops.tl_utils import KernelInputError, LaunchConfig, check_launch, next_power_of_2
from dsv4.ops.topk import MAX_COLUMNS, MAX_K, TOPK_CONFIG, TopkConfig, select, topk_select_ref
from dsv4.ops.topk_long_kernels import LIST

WORKSPACE_BYTES = 256 << 20  # scores and lists of the tokens handled at once
INDEX_FLAGS = {"ASCENDING": True, "DROP": False, "HAS_LENGTHS": True}


@dataclass(frozen=True)
class ScoreConfig:
    """How scoring is divided; scores do not depend on it.

    Up to `few_tokens` a program has one token; beyond, a group of neighbours, that share a decoded tile of keys.
    """

    tile: int = 64
    num_warps: int = 4
    stages: int = 4
    programs: int = 528  # that run at once
    few_tokens: int = 256
    group_tile: int = 128
    group_warps: int = 4
    group_stages: int = 3
    group_programs: int = 1056  # about so many, where there is work for them
    max_group: int = MAX_GROUP
    group_registers: int | None = None  # at most, of a thread
    shares: int = 32
    start_tiles: int = 3  # the beginning of a program takes as long as so many tiles
    max_waves: int = 4
    registers: int | None = None  # at most, of a thread that has one token
    is_fused: bool = True  # relu times weight and the sum over heads are one rounding (the same bits in both kernels)

    def group(self, num_tokens: int) -> int:
        """Tokens of one program, one for each `shares` of the batch: many share more, few leave more programs. 0: one
        token.
        """
        return 0 if num_tokens <= self.few_tokens else min(max(num_tokens // self.shares, 1), self.max_group)

    def grid(self, num_tokens: int, capacity: int) -> tuple[int, int]:
        """Programs of a token or group, and how many of these there are.

        Of one token: as many as make waves (`programs` run at once) times tiles of each the least: a few more than a
        wave holds would double the time. Groups differ in what they see: several waves even that out.
        """
        group = self.group(num_tokens)
        if group:
            num_groups = -(-num_tokens // group)
            return min(-(-capacity // self.group_tile), max(-(-self.group_programs // num_groups), 1)), num_groups
        num_tiles = -(-capacity // self.tile)

        def cost(share: int) -> int:
            return -(-share * num_tokens // self.programs) * (-(-num_tiles // share) + self.start_tiles)

        most = max(min(num_tiles, self.max_waves * self.programs // num_tokens), 1)
        return min(range(1, most + 1), key=cost), num_tokens

    def options(self, is_group: bool) -> dict[str, Any]:
        num_warps, num_stages = (self.group_warps, self.group_stages) if is_group else (self.num_warps, self.stages)
        options = {
            "num_warps": num_warps, "num_stages": num_stages, "STAGES": num_stages, "enable_fp_fusion": self.is_fused,
        }  # fmt: skip
        registers = self.group_registers if is_group else self.registers
        return options if registers is None else options | {"maxnreg": registers}


class KeyWords(NamedTuple):
    """Index keys [blocks, entries] for a kernel: data as words, a word of scales a key, strides in elements."""

    words: Tensor  # int32
    words_stride: int
    words_row: int
    scales: Tensor  # int32, four codes; fp32 for FP8 keys
    scales_stride: int
    scales_row: int


SCORE_CONFIG = ScoreConfig()
FEW_QUERIES = 256  # up to here a token's heads are shared by several programs


def index_queries_ref(q: Tensor, positions: Tensor, freqs: Tensor, key_format: RowFormat) -> Tensor:
    """q [T, Hi, Di] -> roped, and where keys are quantised rotated and quantised by the same rule as they are."""
    q = rope_ref(q, positions, freqs)
    if key_format.kind is RowKind.PLAIN:
        return q
    return decode_rows(encode_rows(hadamard_ref(q), key_format)).to(q.dtype)


def num_visible(positions: Tensor, ratio: int) -> Tensor:
    """Entries a token at each position may see: the one it closes itself included."""
    return (positions + 1) // ratio


def gather_entries(pages: PagedView, batch: TokenBatch, tokens: Tensor, entry_ids: Tensor) -> Tensor:
    """Values [Q, N, dim] of entries [Q, N] of the requests of batch rows `tokens` [Q]; 0 where negative."""
    valid = (entry_ids >= 0) & (batch.slots[tokens] >= 0).unsqueeze(-1)
    safe = entry_ids.clamp_min(0)
    slots = batch.slots[tokens].clamp_min(0).unsqueeze(-1)
    blocks = batch.block_table[slots, safe // pages.entries_per_block].long().clamp_min(0)
    values = pages.rows.gather(blocks, safe % pages.entries_per_block)
    return values.masked_fill(~valid.unsqueeze(-1), 0.0)


def index_topk_ref(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, *, ratio: int, top_k: int, scale: float = 1.0
) -> Tensor:
    """q [T, Hi, Di], weights [T, Hi] -> entries int64 [T, top_k], ascending, -1 where there are fewer.

    A weight times `scale` is rounded once, to at least fp32.

    Equal scores: with quantised keys the lower entry wins, so that chunking cannot matter. Plain keys (`exact`
    numerics) are picked by torch.topk over every entry the request has at the end of the call, because that is what the
    published code does, and which of two equal scores it takes depends on that length.
    """
    weights = weights.to(accumulator(weights)) * scale
    is_plain = keys.rows.format.kind is RowKind.PLAIN
    picks = torch.full((batch.num_tokens, top_k), -1, dtype=torch.int64, device=q.device)
    limits = num_visible(batch.positions, ratio).masked_fill(batch.slots < 0, 0)
    widths = (batch.chunk_ends // ratio).masked_fill(batch.slots < 0, 0)
    for tokens in _query_groups(widths if is_plain else torch.zeros_like(widths)):
        limit = limits[tokens]
        num_entries = int((widths[tokens] if is_plain else limit).max())
        if num_entries == 0:
            continue
        scores = torch.cat([
            _score_tile(q[tokens], weights[tokens], keys, batch, tokens, limit, start)
            for start in range(0, num_entries, KEY_TILE)
        ], -1)[:, :num_entries]  # fmt: skip
        hidden = torch.arange(num_entries, device=q.device) >= limit.unsqueeze(-1)
        scores = scores.masked_fill(hidden, float("-inf"))
        best = _published_topk(scores, top_k) if is_plain else topk_select_ref(scores, top_k)
        best = best.masked_fill(best >= limit.unsqueeze(-1), num_entries).sort(-1).values
        picks[tokens, : best.shape[-1]] = best.masked_fill(best == num_entries, -1)
    return picks


def _published_topk(scores: Tensor, k: int) -> Tensor:
    """torch.topk as the published CPU run did it: a GPU's would break ties its own way."""
    return scores.cpu().topk(min(k, scores.shape[-1]), -1).indices.to(scores.device)


def _query_groups(keys: Tensor) -> Iterator[Tensor]:
    """Batch rows in groups of at most QUERY_TILE that share the same key."""
    for key in keys.unique():
        yield from (keys == key).nonzero().squeeze(-1).split(QUERY_TILE)


def _score_tile(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, tokens: Tensor, limit: Tensor, start: int
) -> Tensor:
    """Scores [Q, KEY_TILE] of entries start .. start + KEY_TILE - 1; meaningless beyond a query's limit."""
    acc = accumulator(q)
    entry_ids = torch.arange(start, start + KEY_TILE, device=q.device).expand(len(tokens), -1)
    entry_ids = entry_ids.masked_fill(entry_ids >= limit.unsqueeze(-1), -1)
    tile = gather_entries(keys, batch, tokens, entry_ids).to(acc)  # [Q, KEY_TILE, Di]
    dots = torch.bmm(q.to(acc), tile.transpose(1, 2).contiguous())  # [Q, Hi, KEY_TILE]
    return ordered_sum(weights.to(acc).unsqueeze(-1) * dots.relu(), 1)


def index_queries(q: Tensor, positions: Tensor, freqs: Tensor, key_format: RowFormat) -> Tensor:
    """See `index_queries_ref`. bf16, fp16 or fp32 with contiguous heads; quantised formats only; one launch."""
    check_launch(q, positions, freqs)
    if q.dim() != 3 or q.shape[2] != key_format.dim or positions.shape != q.shape[:1] or q.dtype not in KERNEL_DTYPES:
        raise KernelInputError(
            f"expected q [T, Hi, {key_format.dim}] in one of {KERNEL_DTYPES} and positions [T], "
            f"found {q.dtype} {tuple(q.shape)} and {tuple(positions.shape)}"
        )
    shape = row_shape(key_format, freqs)
    if key_format.kind is RowKind.ENTRY_FP8:
        raise KernelInputError("expected the format of index keys, found entry_fp8")
    del shape["SCALE_BYTES"]
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    config = LaunchConfig(rows=8, num_warps=1) if num_tokens <= FEW_QUERIES else LaunchConfig(rows=32, num_warps=4)
    index_queries_kernel[(num_tokens, -(-num_heads // config.rows))](
        q, out, positions.contiguous(), freqs.contiguous(), num_heads, q.stride(0), q.stride(1),
        HEADS=config.rows, **shape, **config.options,
    )  # fmt: skip
    return out


def index_topk(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, *, ratio: int, top_k: int, scale: float = 1.0
) -> Tensor:
    """See `index_topk_ref`. bf16 queries as `index_queries` gives them, weights in bf16, fp16 or fp32, quantised keys;
    top_k up to 1024. A score that is NaN counts as -inf, and FP4 keys with a scale of 2^65 or more count as NaN.
    """
    return launch_index_topk(q, weights, keys, batch, ratio, top_k, SCORE_CONFIG, TOPK_CONFIG, scale=scale)


def row_bytes(capacity: int) -> int:
    """Workspace of a token: scores, and the list of a long row."""
    return 4 * capacity + 8 * LIST


def launch_index_topk(
    q: Tensor, weights: Tensor, keys: PagedView, batch: TokenBatch, ratio: int, top_k: int,
    score_config: ScoreConfig, topk_config: TopkConfig, workspace_bytes: int = WORKSPACE_BYTES, scale: float = 1.0,
) -> Tensor:  # fmt: skip
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
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    )  # fmt: skip
    strides = q.stride(0), q.stride(1), num_heads, batch.block_table.stride(0), capacity
    options: dict[str, Any] = {
        "KIND": row_kind(keys.rows.format), "NUM_HEADS": num_heads, "HEADS": max(next_power_of_2(num_heads), 16),
        "DIM": dim, "WORDS": keys.rows.format.data_bytes // 4, "PER_BLOCK": keys.entries_per_block,
        "RATIO": ratio, "TOP_K": top_k, **config.options(group > 0),
    }  # fmt: skip
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
    )  # fmt: skip
    return out


def _key_words(rows: RowStore) -> KeyWords:
    data, scales = rows.data, rows.scales
    assert scales is not None, rows.format
    is_aligned = all(
        part.dim() == 3 and part.stride(2) == 1 and part.storage_offset() % 4 == 0
        and part.stride(0) % 4 == 0 and part.stride(1) % 4 == 0
        for part in (data, scales)
    )  # fmt: skip
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
            f"expected index keys in FP4 or FP8, found {fmt.kind}; the TORCH op set takes plain keys"
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
