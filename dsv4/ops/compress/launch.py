"""Launchers of the compressors.

The kernels are in kernel_compress.py; their exponential is fp32, wrong by 1.1 in the last place at most where the
oracle's is rounded once from fp64, and their sums are fp32 throughout where torch keeps a running sum in fp64. Both
vanish in the rounding of an entry to `spec.dtype` but for rare steps of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView
from dsv4.config import CSA_RATIO, HCA_RATIO
from dsv4.ops.compress.kernel_compress import (
    BatchArguments,
    CompressorArguments,
    _compress_kernel,
    _compress_pair_kernel,
)
from dsv4.ops.compress.kernel_tail import TailArguments
from dsv4.ops.compress.op import Compression, CompressorSpec
from dsv4.ops.compress.plan import CompressPlan, pick_plan
from dsv4.ops.lib.arrivals import NUM_COUNTERS, arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.norm import KERNEL_DTYPES
from dsv4.ops.rows.target import RowTarget, check_norm_weight, row_shape, row_target


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
    )


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
    )


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
