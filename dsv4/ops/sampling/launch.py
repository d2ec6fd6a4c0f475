"""Launchers of sampling.

The oracle computes in fp64, the kernels in fp32, both relative to the row's largest logit: z =
(logit - largest) / temperature, wrong by about 2^-23 of itself, noise by about 2^-22. They choose the same token unless
two sums of z and noise are closer than that, some 5e-6. The kernels round bias and every step of the penalties to fp32:
two tokens that these bring closer than that may change places. The sums that top-p compares are of integers, each
probability rounded down to 2^-40 of the largest: no order of summation can show. A token is kept by one and dropped by
the other only where the oracle's comparison is closer than 2^-20.

Log-probabilities: a chunk of 2,048 exponentials is summed in fp32 (each wrong by 1.1 in the last place and by what the
difference to the largest was rounded, the sum by 23 additions at most), the rest is fp64: at most 2^-18 nats from the
oracle, and 2^-22 for logits as models make them.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dsv4.ops.lib.arrivals import NUM_COUNTERS, arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.sampling.kernel_draw import _draw_kernel
from dsv4.ops.sampling.kernel_logprobs import _exp_sum_kernel, _logprob_kernel, _resolve_kernel
from dsv4.ops.sampling.kernel_row import NUM_DIGITS, ROW_FIELDS, TILE, Scratch, SlotArguments, _scan_kernel
from dsv4.ops.sampling.kernel_search import NUM_PASSES, _narrow_kernel, _tie_kernel
from dsv4.ops.sampling.op import SamplingRows, SamplingState
from dsv4.ops.sampling.plan import LOGPROB_TILE, OPTIONS, RESOLVE_BLOCK, SAMPLE_CONFIG, SampleConfig
from dsv4.ops.select import topk_select


def sample(logits: Tensor, rows: SamplingRows, state: SamplingState) -> Tensor:
    """See `sample_ref`, and the head of this file for where sums are within rounding. Any float dtype and strides."""
    return launch_sample(logits, rows, state, SAMPLE_CONFIG)


def launch_sample(logits: Tensor, rows: SamplingRows, state: SamplingState, config: SampleConfig) -> Tensor:
    """`sample` with the work divided as `config` says."""
    _check(logits, rows, state)
    (num_rows, vocab_size), device = logits.shape, logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_ids
    num_tiles = -(-vocab_size // TILE)
    chunk_tiles = config.chunk_tiles(num_rows, num_tiles)
    num_chunks = -(-num_tiles // chunk_tiles)
    scratch = _scratch(num_rows, num_tiles * TILE, num_chunks, device)
    slots, logits = rows.slots.contiguous(), logits if logits.stride(1) == 1 else logits.contiguous()
    mask = is_masked = slots.view(torch.int32)  # of the right type, and not read
    if rows.mask is not None and rows.is_masked is not None:
        mask, is_masked = rows.mask.contiguous(), rows.is_masked.contiguous()
    drafts, num_drafts = slots, 0  # not read either
    if rows.drafts is not None:
        drafts, num_drafts = rows.drafts.contiguous(), rows.drafts.shape[1]
    slot_arguments = SlotArguments(*(getattr(state, name) for name in SlotArguments._fields))
    grid, sizes = (num_chunks, num_rows), (chunk_tiles * TILE, num_chunks)
    options = {"num_warps": config.num_warps, **OPTIONS}
    c_block = next_power_of_2(config.max_chunks)
    _scan_kernel[grid](
        logits, slots, int(rows.mask is not None), mask, is_masked, drafts, num_drafts, slot_arguments, scratch,
        logits.stride(0), vocab_size, *sizes, C_BLOCK=c_block, **options,
    )
    for _ in range(NUM_PASSES):
        _narrow_kernel[grid](slots, slot_arguments, scratch, *sizes, **options)
    _tie_kernel[grid](scratch, *sizes, **options)
    _draw_kernel[grid](
        slots, rows.positions.contiguous(), int(rows.drafts is None), slot_arguments, scratch, token_ids, vocab_size,
        *sizes, C_BLOCK=c_block, **options,
    )
    return token_ids


def _scratch(num_rows: int, pitch: int, num_chunks: int, device: torch.device) -> Scratch:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    def integers() -> Tensor:
        return empty(num_chunks, dtype=torch.int32)

    return Scratch(
        allowed=empty(pitch), pitch=pitch, row_fields=empty(ROW_FIELDS, dtype=torch.int64),
        histogram=empty(NUM_DIGITS, dtype=torch.int64), chunk_max=empty(num_chunks), chunk_argmax=integers(),
        chunk_min=empty(num_chunks), chunk_ties=integers(), best=empty(num_chunks), best_index=integers(),
        arrivals=arrival_counters("sample", device),
    )


def sampled_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sampled_logprobs_ref`, and the head of this file for how close. fp32, bf16 or fp16 logits of any strides."""
    check_launch(logits, token_ids)
    num_rows, vocab_size = logits.shape
    top_ids = topk_select(logits, num_top)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top = torch.empty(top_ids.shape, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return chosen, top_ids, top
    num_chunks = -(-vocab_size // LOGPROB_TILE)
    chunk_max, chunk_sum = (
        torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    options = {"num_warps": 4, **OPTIONS}
    _exp_sum_kernel[(num_chunks, num_rows)](
        logits, chunk_max, chunk_sum, *logits.stride(), vocab_size, num_chunks, TILE=LOGPROB_TILE, **options
    )
    num_top = top_ids.shape[1]
    _logprob_kernel[(num_rows,)](
        logits, chunk_max, chunk_sum, token_ids.contiguous(), top_ids, chosen, top, *logits.stride(), num_chunks,
        NUM_TOP=num_top, TOP_BLOCK=next_power_of_2(max(num_top, 1)), C_BLOCK=next_power_of_2(num_chunks), **options,
    )
    return chosen, top_ids, top


def resolve_tokens(token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """See `resolve_tokens_ref`."""
    check_launch(token_ids, slots, last_tokens)
    for name, column in (("token_ids", token_ids), ("slots", slots), ("last_tokens", last_tokens)):
        length = last_tokens.numel() if column is last_tokens else token_ids.numel()
        _expect(name, column, torch.int64, (length,))
    out = torch.empty_like(token_ids, memory_format=torch.contiguous_format)
    if out.numel():
        _resolve_kernel[(-(-out.numel() // RESOLVE_BLOCK),)](
            token_ids.contiguous(), slots.contiguous(), last_tokens.contiguous(), out, out.numel(),
            BLOCK=RESOLVE_BLOCK, num_warps=4, **OPTIONS,
        )
    return out


def _check(logits: Tensor, rows: SamplingRows, state: SamplingState) -> None:
    columns = {spec.name: getattr(state, spec.name) for spec in fields(state)}
    check_launch(logits, rows.slots, rows.positions, rows.mask, rows.is_masked, rows.drafts, *columns.values())
    if logits.dim() != 2 or not logits.dtype.is_floating_point or not 0 < logits.shape[1] < 1 << 18:
        raise KernelInputError(f"expected logits [R, V], V below 2^18, found {logits.dtype} {tuple(logits.shape)}")
    num_rows, vocab_size = logits.shape
    num_slots = state.flags.numel()
    if num_rows > NUM_COUNTERS:
        raise KernelInputError(f"expected at most {NUM_COUNTERS} rows of logits, found {num_rows}")
    if (rows.mask is None) != (rows.is_masked is None):
        raise KernelInputError("expected both mask and is_masked, or neither, found only one")
    for name, row_column, dtype, shape in (
        ("slots", rows.slots, torch.int64, (num_rows,)), ("positions", rows.positions, torch.int64, (num_rows,)),
        ("is_masked", rows.is_masked, torch.int32, (num_rows,)),
        ("mask", rows.mask, torch.int32, (num_rows, -(-vocab_size // 32))),
        ("drafts", rows.drafts, torch.int64, (num_rows, 0 if rows.drafts is None else rows.drafts.shape[-1])),
    ):
        if row_column is not None:
            _expect(name, row_column, dtype, shape)
    dtypes = dict.fromkeys(("top_k", "seeds", "prompt_lens", "last_tokens"), torch.int64)
    dtypes |= dict.fromkeys(("flags", "token_counts"), torch.int32)
    for name, column in columns.items():
        wide = (num_slots, vocab_size) if name in ("token_counts", "bias") else (num_slots,)
        _expect(name, column, dtypes.get(name, torch.float32), wide)
        if not column.is_contiguous():
            raise KernelInputError(f"{name}: expected a contiguous tensor, found strides {column.stride()}")


def _expect(name: str, column: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tuple(column.shape) != shape or column.dtype != dtype:
        raise KernelInputError(f"{name}: expected {dtype} {shape}, found {column.dtype} {tuple(column.shape)}")
