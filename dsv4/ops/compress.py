"""The compressor: one cache entry per 4 tokens (CSA, overlapping) or per 128 (HCA), pooled by a learned softmax.

Token t brings kv c_t and score z_t = gate + ape[t mod m]. CSA columns [0, Dc) of both belong to the *following* block's
entry, columns [Dc, 2 Dc) to the token's *own* block; HCA has the own half only. When token t = m (i + 1) - 1 arrives,
entry i = sum over slots of softmax_slot(z) * c, channel by channel, over the own halves of block i and, for CSA, the
following halves of block i - 1 (absent for i = 0). Then norm, rope at position m i, encode, write through the block
table.

The sums have one order everywhere: the 8 slots of a CSA entry one after the other, the 128 of an HCA entry in eight
runs of 16, each first to last, then the runs in pairs. The kernels are in ops/compress_kernels.py; their exponential
is fp32, wrong by 1.1 in the last place at most where the oracle's is rounded once from fp64, and their sums are fp32
throughout where torch keeps a running sum in fp64. Both vanish in the rounding of an entry to `spec.dtype` but for rare
steps of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView
from dsv4.config import CSA_RATIO, HCA_RATIO
from dsv4.formats.row_store import encode_rows
from dsv4.formats.rows import RowKind
from dsv4.ops.arrivals import NUM_COUNTERS, arrival_counters
from dsv4.ops.compress_kernels import (
    POOL_RUNS,
    BatchArguments,
    CompressorArguments,
    TailArguments,
    _compress_kernel,
    _compress_pair_kernel,
)
from dsv4.ops.hadamard import hadamard_ref
from dsv4.ops.history import gather_history, last_writers
from dsv4.ops.invariant import exp, ordered_sum
from dsv4.ops.norm import KERNEL_DTYPES, rms_norm_ref
from dsv4.ops.rope import rope_ref
from dsv4.ops.row_kernels import RowTarget, check_norm_weight, row_shape, row_target
from dsv4.ops.tl_utils import KernelInputError, LaunchConfig, check_launch, next_power_of_2


@dataclass(frozen=True)
class CompressorSpec:
    """What is fixed for one compressor: tokens per entry, the entry's weights and the dtype it is rounded to."""

    ratio: int
    ape: Tensor
    norm_weight: Tensor
    freqs: Tensor
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Compression:
    """One call of `compress` without the batch: the projections [T, w], and what they are made into and kept in."""

    kv: Tensor
    gate: Tensor
    spec: CompressorSpec
    state: CompressorView
    pages: PagedView


def compress_ref(
    kv: Tensor, gate: Tensor, spec: CompressorSpec, state: CompressorView, pages: PagedView, batch: TokenBatch
) -> None:
    """kv, gate [T, w] in at least fp32: writes every entry that closes in this batch, then the tails. In place.

    Entries are written before anything attends, so a token sees the entry it closes. Padding writes nothing. Index keys
    (any quantised key format) are rotated by the Hadamard matrix before they are encoded.
    """
    score = gate + spec.ape.to(gate.dtype)[batch.positions % spec.ratio]
    width = state.own.kv.shape[-1]
    closing = ((batch.positions + 1) % spec.ratio == 0) & (batch.slots >= 0)
    tokens = closing.nonzero().squeeze(-1)  # [C]
    if tokens.numel():
        pooled = _pool(kv, score, spec.ratio, state, batch, tokens).to(spec.dtype)
        entry_ids = batch.positions[tokens] // spec.ratio
        normed = rms_norm_ref(pooled, spec.norm_weight, spec.eps)
        values = rope_ref(normed, entry_ids * spec.ratio, spec.freqs)
        if pages.rows.format.kind in (RowKind.INDEX_FP4, RowKind.INDEX_FP8):
            values = hadamard_ref(values)
        blocks = batch.block_table[batch.slots[tokens], entry_ids // pages.entries_per_block].long()
        pages.rows[blocks, entry_ids % pages.entries_per_block] = encode_rows(values, pages.rows.format)
    if state.following is not None:
        _write_tail(state.following, kv[:, :width], score[:, :width], batch)
    _write_tail(state.own, kv[:, -width:], score[:, -width:], batch)


def compress_pair_ref(attention: Compression, index: Compression, batch: TokenBatch) -> None:
    """`compress` of both compressors of a CSA layer. They share nothing, so the order does not matter."""
    for job in (attention, index):
        compress_ref(job.kv, job.gate, job.spec, job.state, job.pages, batch)


def _pool(kv: Tensor, score: Tensor, ratio: int, state: CompressorView, batch: TokenBatch, tokens: Tensor) -> Tensor:
    """Entries [C, Dc] closed by the batch rows `tokens` [C]."""
    width = state.own.kv.shape[-1]
    ages = torch.arange(ratio - 1, -1, -1, device=kv.device)
    own = batch.positions[tokens].unsqueeze(-1) - ages  # [C, ratio], oldest first
    parts = [_tail_rows(kv[:, -width:], score[:, -width:], state.own, batch, tokens, own)]
    if state.following is not None:
        previous = _tail_rows(kv[:, :width], score[:, :width], state.following, batch, tokens, own - ratio)
        parts.insert(0, previous)
    slots_kv = torch.cat([part[0] for part in parts], 1)  # [C, slots, Dc]
    slots_score = torch.cat([part[1] for part in parts], 1)
    weight = exp(slots_score - slots_score.amax(1, keepdim=True))
    return _sum_of_slots(weight * slots_kv) / _sum_of_slots(weight)


def _sum_of_slots(x: Tensor) -> Tensor:
    """x [C, slots, Dc] -> [C, Dc] in the order of the module's docstring."""
    runs = POOL_RUNS if x.shape[1] == HCA_RATIO else 1
    total = ordered_sum(x.unflatten(1, (runs, -1)), 2)  # [C, runs, Dc]
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total.squeeze(1)


def _tail_rows(
    kv: Tensor, score: Tensor, tail: TailView, batch: TokenBatch, tokens: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """kv and score [C, N, Dc] at positions `wanted`; absent rows (before the request) weigh nothing."""

    def read(fresh: Tensor, ring: Tensor) -> Tensor:
        return gather_history(
            batch, tokens, wanted, lambda rows: fresh[rows], lambda slots, at: ring[slots, at % tail.ring_len]
        )

    absent = (wanted < 0).unsqueeze(-1)
    return (
        read(kv, tail.kv).masked_fill(absent, 0.0),
        read(score, tail.score).masked_fill(absent, float("-inf")),
    )


def _write_tail(tail: TailView, kv: Tensor, score: Tensor, batch: TokenBatch) -> None:
    writers = last_writers(batch, tail.ring_len)
    where = (batch.slots[writers], batch.positions[writers] % tail.ring_len)
    tail.kv[where] = kv[writers].to(tail.kv.dtype)
    tail.score[where] = score[writers].to(tail.score.dtype)


# ---- launchers ----


@dataclass(frozen=True)
class CompressPlan:
    """How a launch is cut: `config.rows` tokens a program, `tail_rows` rows of a ring written at a time.

    HCA columns are spread over programs, `cols` each; CSA ones are taken all at once. `max_registers` makes room for
    more programs on a multiprocessor. A CSA program may first ask for its first `prefetch_rows` tokens (a power of two,
    or none): in HCA programs, and where tokens are few, it costs more than it brings. CSA entries are pooled side by
    side as long as they have no more than `pool_cols` columns together. No plan changes a bit.
    """

    config: LaunchConfig
    tail_rows: int
    cols: int | None = None
    max_registers: int | None = None
    prefetch_rows: int = 0
    pool_cols: int = 0

    @property
    def options(self) -> dict[str, Any]:
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return self.config.options | limit

    def columns(self, dim: int) -> int:
        return dim if self.cols is None else min(self.cols, dim)

    def finish_rows(self, dim: int) -> int:
        """Rows of a tile that gives each thread at least 8 values of a row, as `rms_norm`'s does: the same order of
        sums.
        """
        return max(256 * self.config.num_warps // dim, 4)

    def candidates(self, reach: int) -> int:
        """Tokens a program looks at. The same for every small number of rows: one compiled kernel serves them all."""
        return next_power_of_2(max(self.config.rows, 16) + reach - 1)


# By the number of tokens: few (decode) get a program each, or one per 16 or 64 columns; many (prefill) share one: then
# 16 tokens of a CSA chunk close the four entries that one tile finishes together, and 128 of an HCA chunk close one.
CSA_FEW_TOKENS, HCA_ONE_WAVE_TOKENS, HCA_FEW_TOKENS = 512, 8, 256
CSA_FEW = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=2, max_registers=168)
CSA_MANY = CompressPlan(
    LaunchConfig(rows=16, num_warps=4), tail_rows=2, max_registers=168, prefetch_rows=8, pool_cols=512
)
HCA_ONE_WAVE = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=4, cols=16)
HCA_FEW = CompressPlan(LaunchConfig(rows=1, num_warps=4), tail_rows=4, cols=64)
HCA_MANY = CompressPlan(LaunchConfig(rows=128, num_warps=4), tail_rows=16, cols=32, max_registers=168)


def pick_plan(num_tokens: int, is_overlapping: bool) -> CompressPlan:
    if is_overlapping:
        return CSA_FEW if num_tokens <= CSA_FEW_TOKENS else CSA_MANY
    if num_tokens <= HCA_ONE_WAVE_TOKENS:
        return HCA_ONE_WAVE
    return HCA_FEW if num_tokens <= HCA_FEW_TOKENS else HCA_MANY


def compress(
    kv: Tensor, gate: Tensor, spec: CompressorSpec, state: CompressorView, pages: PagedView, batch: TokenBatch
) -> None:
    """See `compress_ref`. fp32 projections with contiguous columns, fp32 tails, quantised pages. One launch."""
    plan = pick_plan(batch.num_tokens, state.following is not None)
    launch_compress(Compression(kv, gate, spec, state, pages), batch, plan)


def compress_pair(attention: Compression, index: Compression, batch: TokenBatch) -> None:
    """See `compress_pair_ref`. One launch; the same bits as two calls of `compress`."""
    launch_compress_pair(attention, index, batch, pick_plan(batch.num_tokens, is_overlapping=True))


def launch_compress(job: Compression, batch: TokenBatch, plan: CompressPlan) -> None:
    """`compress` by a given plan."""
    arguments, target, shape = _arguments(job, batch)
    num_tokens, dim, rows = batch.num_tokens, shape["DIM"], plan.config.rows
    if num_tokens == 0:
        return
    num_groups, cols = -(-num_tokens // rows), plan.columns(dim)
    if num_groups > NUM_COUNTERS:
        raise KernelInputError(f"expected at most {NUM_COUNTERS * rows} tokens, found {num_tokens}")
    _compress_kernel[(num_groups, dim // cols)](
        arguments, target, _batch_arguments(batch), arrival_counters("compress", job.kv.device), num_tokens, rows,
        **_cuts(job, plan), **shape, COLS=cols, FINISH_ROWS=plan.finish_rows(dim), **plan.options,
    )  # fmt: skip


def launch_compress_pair(attention: Compression, index: Compression, batch: TokenBatch, plan: CompressPlan) -> None:
    """`compress_pair` by a given plan."""
    arguments, target, shape = _arguments(attention, batch)
    index_arguments, index_target, index_shape = _arguments(index, batch)
    cuts, rows = _cuts(attention, plan), plan.config.rows
    if cuts != _cuts(index, plan) or attention.state.following is None:
        raise KernelInputError("expected two CSA compressors with rings and pages of the same lengths")
    if batch.num_tokens == 0:
        return
    _compress_pair_kernel[(-(-batch.num_tokens // rows), 2)](
        arguments, target, index_arguments, index_target, _batch_arguments(batch), batch.num_tokens, rows,
        **cuts, **shape, FINISH_ROWS=plan.finish_rows(shape["DIM"]),
        **{f"INDEX_{name}": value for name, value in index_shape.items()},
        INDEX_FINISH_ROWS=plan.finish_rows(index_shape["DIM"]), **plan.options,
    )  # fmt: skip


def _cuts(job: Compression, plan: CompressPlan) -> dict[str, int]:
    ratio, following = job.spec.ratio, job.state.following
    return {
        "RATIO": ratio,
        "OWN_LEN": job.state.own.ring_len,
        "FOLLOWING_LEN": 0 if following is None else following.ring_len,
        "PER_BLOCK": job.pages.entries_per_block,
        "CANDIDATES": plan.candidates(ratio if following is None else 2 * ratio),
        "TAIL_ROWS": plan.tail_rows,
        "PREFETCH_ROWS": plan.prefetch_rows,
        "POOL_COLS": plan.pool_cols,
    }


def _batch_arguments(batch: TokenBatch) -> BatchArguments:
    table = batch.block_table.contiguous()
    return BatchArguments(
        positions=batch.positions.contiguous(),
        slots=batch.slots.contiguous(),
        chunk_starts=batch.chunk_starts.contiguous(),
        chunk_ends=batch.chunk_ends.contiguous(),
        table=table,
        table_stride=table.stride(0),
    )


def _arguments(job: Compression, batch: TokenBatch) -> tuple[CompressorArguments, RowTarget, dict[str, int]]:
    """What the kernels are given for one compressor; every mistake the kernels could not survive is found here."""
    spec, state, pages = job.spec, job.state, job.pages
    dim = pages.rows.format.dim
    is_overlapping = state.following is not None
    width = 2 * dim if is_overlapping else dim
    check_launch(
        job.kv, job.gate, spec.ape, spec.norm_weight, spec.freqs, state.own.kv, pages.rows.data, batch.positions
    )
    if spec.ratio != (CSA_RATIO if is_overlapping else HCA_RATIO):
        raise KernelInputError(
            f"expected {CSA_RATIO} tokens per entry with overlap or {HCA_RATIO} without, found {spec.ratio}"
        )
    for name, projection in (("kv", job.kv), ("gate", job.gate)):
        _check_fp32(name, projection, (batch.num_tokens, width))
    _check_fp32("ape", spec.ape, (spec.ratio, width))
    if spec.dtype not in KERNEL_DTYPES:
        raise KernelInputError(f"expected entries rounded to one of {KERNEL_DTYPES}, found {spec.dtype}")
    shape = row_shape(pages.rows.format, spec.freqs)
    own = _tail_arguments(state.own, dim)
    return (
        CompressorArguments(
            kv=job.kv,
            kv_stride=job.kv.stride(0),
            gate=job.gate,
            gate_stride=job.gate.stride(0),
            ape=spec.ape.contiguous(),
            own=own,
            following=own if state.following is None else _tail_arguments(state.following, dim),
            pooled=torch.empty(batch.num_tokens, dim, dtype=spec.dtype, device=job.kv.device),
            norm_weight=check_norm_weight(spec.norm_weight, dim),
            freqs=spec.freqs.contiguous(),
            eps=spec.eps,
        ),
        row_target(pages.rows),
        shape,
    )


def _check_fp32(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if values.dtype != torch.float32 or values.shape != shape or values.stride(-1) != 1:
        raise KernelInputError(
            f"expected {name} in fp32 of shape {shape} with contiguous columns, found {values.dtype} "
            f"{tuple(values.shape)} with strides {values.stride()}"
        )


def _tail_arguments(tail: TailView, dim: int) -> TailArguments:
    for name, ring in (("kv", tail.kv), ("score", tail.score)):
        _check_fp32(f"a tail's {name}", ring, (*tail.kv.shape[:2], dim))
    if tail.kv.stride() != tail.score.stride():
        raise KernelInputError(
            f"expected kv and score tails with the same strides, found {tail.kv.stride()} and {tail.score.stride()}"
        )
    return TailArguments(tail.kv, tail.score, *tail.kv.stride()[:2])
