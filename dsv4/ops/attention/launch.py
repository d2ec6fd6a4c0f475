"""Launchers of attention.

Kernels: tiles of 64 keys, folded in order within runs of 18, and runs in order. A program takes a query and 64 heads,
where that is one run; or a run, or where queries are few a tile, and a second launch folds what runs or tiles stored
(kernel_attend.py). Between few and many, where a query is one run: one launch computes the probabilities of tiles, a
second sums columns of the values (kernel_columns.py). Many, on Hopper: kernel_pairs.py. All give the same bits, so the
choice may depend on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.config import BLOCK_TOKENS
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import ENTRY_GROUP, RowKind
from dsv4.ops.attention.kernel_attend import (
    BY_COLUMNS,
    BY_RUN,
    BY_TILE,
    IN_PAIRS,
    RUN,
    WHOLE,
    QueryArguments,
    StateArguments,
    TableArguments,
    TokenArguments,
    _attend_kernel,
)
from dsv4.ops.attention.kernel_columns import TileArguments, _pv_accumulate_kernel, _qk_softmax_kernel
from dsv4.ops.attention.kernel_combine import _combine_kernel
from dsv4.ops.attention.kernel_pairs import attend_pairs_kernel
from dsv4.ops.attention.kernel_pairs_rows import DIM as PAIRS_DIM
from dsv4.ops.attention.kernel_pairs_rows import HEADS as PAIRS_HEADS
from dsv4.ops.attention.kernel_rows import KEYS
from dsv4.ops.attention.plan import AttentionPlan, pick_plan
from dsv4.ops.lib.arch import architecture, num_multiprocessors, overlapping
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.rows.target import RowTarget, row_target

LOG2_E = 1.4426950408889634


def sparse_attention(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, *, window_len: int, freqs: Tensor | None = None,
) -> Tensor:
    """See `sparse_attention_ref`. q in bf16 with contiguous columns; rows and cache in ENTRY_FP8 with whole words of
    scales; the result is contiguous.
    """
    plan = pick_plan(architecture(), num_multiprocessors(q.device))
    return launch_attention(plan, q, rows, window, entries, picks, sink, batch, window_len, freqs)


def launch_attention(
    plan: AttentionPlan, q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None,
    picks: Tensor | None, sink: Tensor, batch: TokenBatch, window_len: int, freqs: Tensor | None, run_tiles: int = RUN,
) -> Tensor:
    """`sparse_attention` cut as `plan` says. `run_tiles` changes the order of sums, and so the bits."""
    check_launch(q, rows.data, window.rows.data, sink, batch.positions, picks, freqs)
    _check(q, rows, window, entries, picks, sink, batch, freqs)
    num_tokens, num_heads, dim = q.shape
    out = torch.empty((num_tokens, num_heads, dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_heads == 0:
        return out
    assert rows.scales is not None
    ring = _target(window.rows)
    pages = ring if entries is None else _target(entries.rows)  # an unused pointer still needs a tensor
    picked = batch.positions.unsqueeze(1) if picks is None or picks.shape[1] == 0 else picks
    if picked.stride(1) != 1:
        picked = picked.contiguous()
    table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
    positions, slots = batch.positions.contiguous(), batch.slots.contiguous()
    sink = sink.contiguous()
    tables = TableArguments(sink, sink if freqs is None else freqs.contiguous())
    has_entries = entries is not None and (picks is None or picks.shape[1] > 0)
    ratio = 1 if entries is None else BLOCK_TOKENS // entries.entries_per_block
    num_entries = 0
    if has_entries and entries is not None:
        num_entries = table.shape[1] * entries.entries_per_block if picks is None else picks.shape[1]
    num_tiles = -(-window_len // KEYS) + -(-num_entries // KEYS)
    head_blocks = -(-num_heads // plan.heads)
    fresh = _fresh(rows, 0)
    is_aligned = all(map(_is_aligned, (fresh, ring, pages)))
    if not (is_aligned and takes_pairs(q, window_len, run_tiles)):
        plan = plan._replace(pairs=False)
    cut = plan.cut(num_tokens * head_blocks, num_tiles, run_tiles)
    num_runs = -(-num_tiles // run_tiles)
    num_parts = {WHOLE: 1, BY_RUN: num_runs, IN_PAIRS: num_runs}.get(cut, num_tiles)
    most_tokens = num_tokens
    if cut in (BY_RUN, BY_TILE) and num_tokens * head_blocks * num_parts > plan.max_states:
        most_tokens = plan.range_tokens(head_blocks * num_parts)
    shape: dict[str, Any] = {
        "NUM_GROUPS": dim // ENTRY_GROUP - 1, "HAS_ENTRIES": has_entries,
        "NUM_PICKS": 0 if picks is None else picks.shape[1], "RATIO": ratio, "WINDOW": window_len,
        "HEADS": plan.heads, "HEAD_BLOCKS": head_blocks,
    }
    chunk_starts = batch.chunk_starts.contiguous()
    states: StateArguments | None = None
    for start in range(0, num_tokens, most_tokens):
        # every pointer at the first token of a range; the rows of tokens before it lie before it
        part = slice(start, start + most_tokens)
        fresh = _fresh(rows, start)
        step = _Step(
            min(most_tokens, num_tokens - start) * head_blocks, num_parts, q[part], out[part], tables,
            TokenArguments(positions[part], slots[part], chunk_starts[part]),
            (
                fresh, ring, window.positions, window.positions.stride(0), pages, picked[part], picked.stride(0),
                table, table.stride(0),
            ),
            shape, window.ring_len, is_aligned, freqs is not None,
        )
        if cut == BY_COLUMNS:
            _launch_columns(plan, step)
            continue
        if cut == IN_PAIRS:
            _launch_pairs(step, run_tiles)
            continue
        if states is None:
            states = _scratch(0 if cut == WHOLE else step.num_programs * num_parts, plan.heads, dim, q.device)
        _launch_tiles(plan, step, states, cut, run_tiles)
    return out


class _Step(NamedTuple):
    """Some tokens of a call, as kernels take them: programs of one part of a query, parts, and the arguments."""

    num_programs: int
    num_parts: int
    q: Tensor
    out: Tensor
    tables: TableArguments
    tokens: TokenArguments
    sources: tuple[Any, ...]
    shape: dict[str, Any]
    ring_len: int
    is_aligned: bool
    has_rope: bool

    @property
    def queries(self) -> tuple[Any, ...]:
        """The first arguments of both kernels that have queries."""
        return QueryArguments(self.q, self.q.stride(0), self.q.stride(1)), self.q.shape[1], self.dim**-0.5 * LOG2_E

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    @property
    def num_groups(self) -> int:
        return self.dim // ENTRY_GROUP


def _launch_tiles(plan: AttentionPlan, step: _Step, states: StateArguments, cut: int, run_tiles: int) -> None:
    """A program takes a query, a run or a tile (kernel_attend.py)."""
    wide = plan.run_wide if cut == BY_RUN else plan.wide
    shape = step.shape | {"INVERSE_ROPE": step.has_rope, "RUN": run_tiles, "CUT": cut}
    queries, num_heads, scale = step.queries
    _attend_kernel[(step.num_programs, step.num_parts)](
        queries, step.out, num_heads, scale, step.tables, step.tokens, *step.sources, states, step.num_parts,
        **shape, RING_LEN=step.ring_len, ALIGNED=step.is_aligned, WIDE=min(wide, step.num_groups),
        AHEAD=min(plan.ahead, step.num_groups + 1), num_warps=plan.num_warps, num_stages=1, enable_fp_fusion=False,
    )
    if cut in (BY_RUN, BY_TILE):
        rows_at_once, parts_at_once = (
            (plan.combine_rows, run_tiles) if cut == BY_TILE else (plan.combine_run_rows, plan.combine_runs)
        )
        _combine_kernel[(step.num_programs, plan.heads // rows_at_once, step.num_groups)](
            states, step.num_parts, step.out, num_heads, step.tables, step.tokens.positions, step.tokens.slots,
            **shape, ROWS=rows_at_once, AT_ONCE=parts_at_once,
            num_warps=plan.combine_warps, num_stages=1, enable_fp_fusion=False, **overlapping(plan.overlap),
        )


def _launch_columns(plan: AttentionPlan, step: _Step) -> None:
    """Probabilities of tiles, then columns of P V (kernel_columns.py)."""
    columns = plan.columns
    assert columns is not None
    num_programs, num_tiles, heads = step.num_programs, step.num_parts, plan.heads
    share = plan.share(num_programs, num_tiles)
    num_places, device = num_programs * num_tiles, step.q.device
    weights = torch.empty((num_places, heads, KEYS), dtype=step.q.dtype, device=device)
    highest, total = torch.empty((2, num_places, heads), dtype=torch.float32, device=device).unbind(0)
    tiles = TileArguments(
        weights, highest, total, torch.empty((num_places, KEYS), dtype=torch.int64, device=device),
        torch.empty((num_places, KEYS, 2), dtype=torch.int64, device=device),
    )
    _qk_softmax_kernel[(num_programs, -(-num_tiles // share))](
        *step.queries, step.tokens, *step.sources, tiles, num_tiles, share,
        **step.shape, RING_LEN=step.ring_len, ALIGNED=step.is_aligned, WIDE=min(columns.wide, step.num_groups),
        AHEAD=min(columns.ahead, step.num_groups + 1), num_warps=columns.num_warps, num_stages=1,
        enable_fp_fusion=False,
    )
    slice_groups = min(columns.slice, step.num_groups)
    _pv_accumulate_kernel[(step.num_groups // slice_groups, num_programs)](
        tiles, num_tiles, step.out, step.q.shape[1], step.tables, step.tokens.positions, step.tokens.slots,
        **step.shape, INVERSE_ROPE=step.has_rope, ALIGNED=step.is_aligned, SLICE=slice_groups,
        num_warps=columns.num_warps, num_stages=1, enable_fp_fusion=False, **overlapping(plan.overlap),
    )


def takes_pairs(q: Tensor, window_len: int, run_tiles: int) -> bool:
    """Whether `attend_pairs_kernel` does it: on Hopper, rows of 512 values, queries at multiples of 16 bytes, runs of
    whole pairs, windows of whole tiles (others, those of DSpark's blocks, have not been run)."""
    has_places = q.data_ptr() % 16 == 0 and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0
    is_whole = run_tiles % 2 == 0 and window_len % KEYS == 0
    return architecture().has_wide_kernels and q.shape[2] == PAIRS_DIM and has_places and is_whole


def _launch_pairs(step: _Step, run_tiles: int) -> None:
    """A program a multiprocessor, which takes query after query in pairs of tiles (kernel_pairs.py)."""
    num_programs = min(num_multiprocessors(step.q.device), step.num_programs)
    has_runs = step.num_parts > 1
    # each of two groups stores half the columns
    states = _scratch(2 * num_programs if has_runs else 0, PAIRS_HEADS, step.dim // 2, step.q.device)
    queries, num_heads, scale = step.queries
    shape = {name: value for name, value in step.shape.items() if name not in ("NUM_GROUPS", "HEADS")}
    attend_pairs_kernel[(num_programs,)](
        queries, step.out, num_heads, scale, step.tables, step.tokens, step.num_programs, *step.sources, states, 0,
        **shape, RING_LEN=step.ring_len, INVERSE_ROPE=step.has_rope, RUN=run_tiles, HAS_RUNS=has_runs,
        num_warps=4, enable_fp_fusion=False,
    )


def _check(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, freqs: Tensor | None,
) -> None:
    fmt = window.rows.format
    num_tokens = batch.num_tokens
    if (
        q.dtype != torch.bfloat16
        or q.dim() != 3
        or q.shape[0] != num_tokens
        or q.shape[2] != fmt.dim
        or q.stride(2) != 1
    ):
        raise KernelInputError(
            f"expected q [{num_tokens}, heads, {fmt.dim}] in bf16 with contiguous columns, found {q.dtype} "
            f"{tuple(q.shape)} with strides {q.stride()}"
        )
    if fmt.kind is not RowKind.ENTRY_FP8 or fmt.rope_dim != ENTRY_GROUP:
        raise KernelInputError(f"expected rows of {RowKind.ENTRY_FP8} with {ENTRY_GROUP} rope dims, found {fmt}")
    if fmt.scale_bytes != 8:
        raise KernelInputError(f"expected at most 8 groups a row, found {fmt}")
    if rows.format != fmt or rows.data.shape[:-1] != (num_tokens,):
        raise KernelInputError(
            f"expected {num_tokens} rows of {fmt}, found {tuple(rows.data.shape[:-1])} of {rows.format}"
        )
    if entries is not None and entries.rows.format != fmt:
        raise KernelInputError(f"expected entries of {fmt}, found {entries.rows.format}")
    if picks is not None and (entries is None or picks.dim() != 2 or picks.shape[0] != num_tokens):
        raise KernelInputError(f"expected entries and picks [{num_tokens}, k], found picks {tuple(picks.shape)}")
    if sink.shape != (q.shape[1],):
        raise KernelInputError(f"expected a sink of shape ({q.shape[1]},), found {tuple(sink.shape)}")
    if window.positions.dtype != torch.int32 or window.positions.stride(1) != 1:
        raise KernelInputError(
            f"expected ring positions in int32 with contiguous rows, found {window.positions.dtype} with strides "
            f"{window.positions.stride()}"
        )
    if freqs is not None and (freqs.dtype != torch.float32 or 2 * freqs.shape[0] != fmt.rope_dim):
        raise KernelInputError(
            f"expected fp32 frequencies of {fmt.rope_dim} dims, found {freqs.dtype} {tuple(freqs.shape)}"
        )


def _target(rows: RowStore) -> RowTarget:
    """Rows [A, B] for the kernel, with the 8 bytes of a row's scales as one word."""
    target = row_target(rows)
    scales = rows.scales
    assert scales is not None
    if scales.storage_offset() % 8 or scales.stride(0) % 8 or scales.stride(1) % 8:
        raise KernelInputError(f"expected scales aligned to 8 bytes, found strides {scales.stride()}")
    words = scales.view(torch.int64)
    return target._replace(
        scales=words, scales_stride=words.stride(0), scales_row=words.stride(1),
        factor=words, factor_stride=0, factor_row=0,
    )


def _fresh(rows: RowStore, start: int) -> RowTarget:
    """The batch's rows from a token on."""
    assert rows.scales is not None
    return _target(replace(rows, data=rows.data[start:].unsqueeze(1), scales=rows.scales[start:].unsqueeze(1)))


def _is_aligned(target: RowTarget) -> bool:
    """Every row begins at a multiple of 16 bytes."""
    return not (target.data.storage_offset() % 16 or target.data_stride % 16 or target.data_row % 16)


def _scratch(num_states: int, heads: int, dim: int, device: torch.device) -> StateArguments:
    part = torch.empty((num_states, heads, dim), dtype=torch.float32, device=device)
    highest, total = torch.empty((2, num_states, heads), dtype=torch.float32, device=device).unbind(0)
    return StateArguments(part, highest, total)
