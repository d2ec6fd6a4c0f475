"""Sparse attention: every query reads its window and some compressed entries through one shared K=V head, with a sink.

For query t: keys are the window positions max(0, t - window + 1) .. t and the picked entries (CSA) or all visible ones
(HCA), with no de-duplication. logit = q.k / sqrt(d); o = sum e^(l - M) v / (sum e^(l - M) + e^(sink - M)), M the
highest logit of a real key. With rope frequencies the last dims of the output are rotated back to position 0.

Kernels (attention_kernels.py): tiles of 64 keys, folded in order within runs of 18, and runs in order. Many queries: a
program takes all runs of a query and 64 heads. Fewer: a run. Few: a tile; and a second launch folds what runs or tiles
stored. All give the same bits, so the choice may depend on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.config import BLOCK_TOKENS
from dsv4.formats.row_store import RowStore, decode_rows
from dsv4.formats.rows import ENTRY_GROUP, RowKind
from dsv4.ops.attention_kernels import (
    BY_RUN,
    BY_TILE,
    HEADS,
    IN_TURN,
    KEYS,
    RUN,
    WHOLE,
    _attend_kernel,
    _combine_kernel,
)
from dsv4.ops.history import gather_history
from dsv4.ops.indexer import gather_entries, num_visible
from dsv4.ops.invariant import KEY_TILE, QUERY_TILE, accumulator, exp
from dsv4.ops.rope import rope_ref
from dsv4.ops.row_kernels import RowTarget, row_target
from dsv4.ops.tl_utils import IS_INTERPRETED, KernelInputError, check_launch, current_arch


def sparse_attention_ref(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, *, window_len: int, freqs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, d], this batch's rows [T], the cache, picks [T, k] (-1: none) or None for all visible -> [T, H, d].

    `rows` are not in the ring yet (see append_swa). Probabilities are rounded to q's dtype before they meet the values,
    the denominator is not. A padded row, or one without keys, gives zeros. With `freqs` the result is
    rope_ref(result, batch.positions, freqs, inverse=True).
    """
    out = torch.zeros_like(q)
    fresh = decode_rows(rows)  # [T, d]
    for tokens in torch.arange(batch.num_tokens, device=q.device).split(QUERY_TILE):
        values, valid = _window_keys(fresh, window, batch, tokens, window_len)
        if entries is not None:
            entry_ids = _visible_picks(picks, entries, batch, tokens)
            values = torch.cat((values, gather_entries(entries, batch, tokens, entry_ids)), 1)
            valid = torch.cat((valid, entry_ids >= 0), 1)
        valid = valid & (batch.slots[tokens] >= 0).unsqueeze(-1)
        out[tokens] = attend_ref(q[tokens], values, valid, sink)
    return out if freqs is None else rope_ref(out, batch.positions, freqs, inverse=True)


def attend_ref(q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """q [Q, H, d], keys [Q, N, d] (= values; finite where invalid too), valid [Q, N], sink [H] -> [Q, H, d].

    Keys are taken KEY_TILE at a time, so that more (masked) keys in the batch change nothing for a query.
    """
    acc = accumulator(q)
    padding = -keys.shape[1] % KEY_TILE
    tiles = torch.nn.functional.pad(keys.to(acc), (0, 0, 0, padding)).split(KEY_TILE, 1)
    masks = torch.nn.functional.pad(valid, (0, padding)).split(KEY_TILE, 1)
    scale = q.shape[-1] ** -0.5
    logits = [
        (torch.bmm(q.to(acc), tile.transpose(1, 2).contiguous()) * scale).masked_fill(~mask.unsqueeze(1), float("-inf"))
        for tile, mask in zip(tiles, masks, strict=True)
    ]
    highest = torch.stack([tile.amax(-1) for tile in logits]).amax(0)  # [Q, H]
    has_key = valid.any(-1, keepdim=True)  # [Q, 1]; not from the logits, or a NaN would pass for an absent key
    highest = torch.where(has_key, highest, torch.zeros_like(highest))
    total = torch.zeros_like(highest)
    out = torch.zeros(q.shape, dtype=acc, device=q.device)
    for tile, logit in zip(tiles, logits, strict=True):
        weight = exp(logit - highest.unsqueeze(-1))
        total = total + weight.sum(-1)
        out = out + torch.bmm(weight.to(q.dtype).to(acc), tile.contiguous())
    total = total + exp(sink.to(acc) - highest)
    out = torch.where(has_key.unsqueeze(-1), out / total.unsqueeze(-1), torch.zeros_like(out))
    return out.to(q.dtype)


def _window_keys(
    fresh: Tensor, window: WindowView, batch: TokenBatch, tokens: Tensor, window_len: int
) -> tuple[Tensor, Tensor]:
    """Keys [Q, window_len padded to KEY_TILE, d], oldest first, and which of them exist."""
    padded_len = -(-window_len // KEY_TILE) * KEY_TILE
    ages = torch.arange(padded_len - 1, -1, -1, device=fresh.device)
    wanted = batch.positions[tokens].unsqueeze(-1) - ages  # [Q, padded_len]

    def cached_row(slots: Tensor, at: Tensor) -> Tensor:
        return window.rows.gather(slots, at % window.ring_len)

    def cached_position(slots: Tensor, at: Tensor) -> Tensor:
        return window.positions[slots, at % window.ring_len].long()

    holds = gather_history(batch, tokens, wanted, lambda rows: batch.positions[rows], cached_position)
    valid = (wanted >= 0) & (ages < window_len) & (holds == wanted)
    keys = gather_history(batch, tokens, wanted, lambda rows: fresh[rows], cached_row)
    return keys.masked_fill(~valid.unsqueeze(-1), 0.0), valid


def _visible_picks(picks: Tensor | None, entries: PagedView, batch: TokenBatch, tokens: Tensor) -> Tensor:
    """Entry ids [Q, N] each query reads, -1 = none; never one that its position may not see."""
    limit = num_visible(batch.positions[tokens], BLOCK_TOKENS // entries.entries_per_block).unsqueeze(-1)
    if picks is None:
        entry_ids = torch.arange(int(limit.max()), device=limit.device).expand(len(tokens), -1)
    else:
        entry_ids = picks[tokens].long()
    return entry_ids.masked_fill(entry_ids >= limit, -1)


class AttentionPlan(NamedTuple):
    """How the work is cut; no choice here changes a bit.

    `max_states`: no more states than this are stored, of 128 KB each; four waves of queries with eight runs. `wide`:
    64-wide groups of a row in one matrix; `ahead`: groups fetched a tile ahead. `combine_rows`: heads a program folds
    of tiles, `combine_run_rows` of runs, `combine_runs` at a time. `overlap`: a launch may begin before the one before
    it has ended.
    """

    max_states: int = 4224
    multiprocessors: int = 132
    num_warps: int = 8
    wide: int = 2
    ahead: int = 2
    combine_rows: int = 8
    combine_run_rows: int = 16
    combine_warps: int = 4
    combine_runs: int = 8
    overlap: bool = True

    def cut(self, num_programs: int, num_tiles: int, run_tiles: int) -> int:
        """What a program takes, by counts that the host knows: `num_tiles` is what a block table has room for."""
        num_runs = -(-num_tiles // run_tiles)
        times = self.predicted_us(num_programs, num_tiles, run_tiles)
        if num_programs * num_runs > self.max_states:
            del times[BY_RUN]
        if num_programs * num_tiles > self.max_states:
            del times[BY_TILE]
        cut = min(times, key=times.__getitem__)
        return WHOLE if num_runs <= 1 and cut != BY_TILE else cut

    def predicted_us(self, num_programs: int, num_tiles: int, run_tiles: int) -> dict[int, float]:
        """Times on an H200, within 12 % of what was measured: few programs are worth a state stored for every tile or
        run, which takes as long as 1/40 or 1/80 of a tile on a chip that is full.
        """
        runs_at_once = run_tiles * self.multiprocessors
        tile_us = 5.2 if num_tiles > run_tiles else 6.0
        return {
            BY_TILE: 15 + 0.125 * num_programs * num_tiles,
            BY_RUN: 15
            + tile_us * run_tiles * -(-num_programs * num_tiles // runs_at_once)
            + 0.06 * num_programs * -(-num_tiles // run_tiles),
            IN_TURN: 6 + tile_us * num_tiles * -(-num_programs // self.multiprocessors),
        }

    def range_tokens(self, token_states: int) -> int:
        """Tokens of a launch that stores so many states a token; in fours, so that pointers keep the alignment that a
        kernel is compiled for.
        """
        most = max(self.max_states // token_states, 1)
        return most if most < 4 else most // 4 * 4


PLAN = AttentionPlan()
LOG2_E = 1.4426950408889634


def sparse_attention(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, *, window_len: int, freqs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `sparse_attention_ref`. q in bf16 with contiguous columns; rows and cache in ENTRY_FP8 with whole words of
    scales; the result is contiguous.
    """
    return launch_attention(PLAN, q, rows, window, entries, picks, sink, batch, window_len, freqs)


def launch_attention(
    plan: AttentionPlan, q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None,
    picks: Tensor | None, sink: Tensor, batch: TokenBatch, window_len: int, freqs: Tensor | None, run_tiles: int = RUN,
) -> Tensor:  # fmt: skip
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
    angles = sink if freqs is None else freqs.contiguous()
    has_entries = entries is not None and (picks is None or picks.shape[1] > 0)
    ratio = 1 if entries is None else BLOCK_TOKENS // entries.entries_per_block
    num_entries = 0
    if has_entries and entries is not None:
        num_entries = table.shape[1] * entries.entries_per_block if picks is None else picks.shape[1]
    num_tiles = -(-window_len // KEYS) + -(-num_entries // KEYS)
    head_blocks = -(-num_heads // HEADS)
    cut = plan.cut(num_tokens * head_blocks, num_tiles, run_tiles)
    num_runs = -(-num_tiles // run_tiles)
    num_parts = {WHOLE: 1, IN_TURN: num_runs, BY_RUN: num_runs, BY_TILE: num_tiles}[cut]
    most_tokens = min(plan.range_tokens(head_blocks * num_runs), num_tokens) if cut == IN_TURN else num_tokens
    num_states = 0 if cut == WHOLE else most_tokens * head_blocks * num_parts
    states, highest, total = _scratch(num_states, dim, q.device)
    shape: dict[str, Any] = {
        "NUM_GROUPS": dim // ENTRY_GROUP - 1, "HAS_ENTRIES": has_entries,
        "NUM_PICKS": 0 if picks is None else picks.shape[1], "RATIO": ratio, "WINDOW": window_len,
        "HEAD_BLOCKS": head_blocks, "INVERSE_ROPE": freqs is not None, "RUN": run_tiles, "CUT": cut,
    }  # fmt: skip
    chunk_starts = batch.chunk_starts.contiguous()
    for start in range(0, num_tokens, most_tokens):
        # every pointer at the first token of a range; the rows of tokens before it lie before it
        part = slice(start, start + most_tokens)
        fresh = _target(replace(rows, data=rows.data[start:].unsqueeze(1), scales=rows.scales[start:].unsqueeze(1)))
        num_programs = min(most_tokens, num_tokens - start) * head_blocks
        _attend_kernel[(num_programs, 1 if cut == IN_TURN else num_parts)](
            q[part], q.stride(0), q.stride(1), out[part], num_heads, dim**-0.5 * LOG2_E, sink, angles, positions[part],
            slots[part], chunk_starts[part], fresh, ring, window.positions, window.positions.stride(0), pages,
            picked[part], picked.stride(0), table, table.stride(0), states, highest, total, num_parts,
            **shape, RING_LEN=window.ring_len, ALIGNED=all(map(_is_aligned, (fresh, ring, pages))),
            WIDE=min(_matrix_groups(plan), dim // ENTRY_GROUP), AHEAD=min(plan.ahead, dim // ENTRY_GROUP + 1),
            num_warps=plan.num_warps, num_stages=1, enable_fp_fusion=False,
            launch_pdl=plan.overlap and cut == IN_TURN,
        )  # fmt: skip
        if cut in (BY_RUN, BY_TILE):
            rows_at_once, parts_at_once = (
                (plan.combine_rows, run_tiles) if cut == BY_TILE else (plan.combine_run_rows, plan.combine_runs)
            )
            _combine_kernel[(num_programs, HEADS // rows_at_once, dim // ENTRY_GROUP)](
                states, highest, total, num_parts, out[part], num_heads, sink, angles, positions[part], slots[part],
                **shape, ROWS=rows_at_once, AT_ONCE=parts_at_once,
                num_warps=plan.combine_warps, num_stages=1, enable_fp_fusion=False, launch_pdl=plan.overlap,
            )  # fmt: skip
    return out


def _matrix_groups(plan: AttentionPlan) -> int:
    """`plan.wide`, or a whole row on Blackwell: Triton keeps every product of a loop in tensor memory of its own, and
    with several a tile needs 544 columns where there are 512.
    """
    return plan.wide if IS_INTERPRETED or current_arch() < 100 else 8


def _check(
    q: Tensor, rows: RowStore, window: WindowView, entries: PagedView | None, picks: Tensor | None, sink: Tensor,
    batch: TokenBatch, freqs: Tensor | None,
) -> None:  # fmt: skip
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
    )  # fmt: skip


def _is_aligned(target: RowTarget) -> bool:
    """Every row begins at a multiple of 16 bytes."""
    return not (target.data.storage_offset() % 16 or target.data_stride % 16 or target.data_row % 16)


def _scratch(num_states: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What programs store: P V, highest logit and sum, of every head."""
    part = torch.empty((num_states, HEADS, dim), dtype=torch.float32, device=device)
    highest, total = torch.empty((2, num_states, HEADS), dtype=torch.float32, device=device).unbind(0)
    return part, highest, total
