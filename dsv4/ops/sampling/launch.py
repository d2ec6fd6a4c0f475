"""Launchers of sampling.

The oracle computes in fp64, the kernels (kernel_sample.py) in fp32 and relative to the row's largest logit: z = (logit
- largest) / temperature, wrong by about 2^-23 of itself, noise by about 2^-22. They choose the same token unless two
sums of z and noise are closer than that, some 5e-6. The sums that top-p compares are of integers, each probability
rounded down to 2^-40 of the largest: no order of summation can show. A token is kept by one and dropped by the other
only where the oracle's comparison is closer than 2^-20.

Log-probabilities: a chunk of 2,048 exponentials is summed in fp32 (each wrong by 1.1 in the last place and by what the
difference to the largest was rounded, the sum by 23 additions at most), the rest is fp64: at most 2^-18 nats from the
oracle, and 2^-22 for logits as models make them.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import blackwell_registers, next_power_of_2
from dsv4.ops.sampling.config import _DRAW_REGISTERS, _GATHER_REGISTERS, _LOGPROB_TILE, SAMPLE_CONFIG, SampleConfig
from dsv4.ops.sampling.kernel_sample import (
    MAX_LISTED,
    NOISE_BLOCK,
    NUM_BUCKETS,
    _count_kernel,
    _draw_kernel,
    _exp_sum_kernel,
    _gather_kernel,
    _logprob_kernel,
    _scan_kernel,
)
from dsv4.ops.sampling.op import SamplingBatch
from dsv4.ops.select import topk_select


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `sample_ref`, and the head of this file for where sums are within rounding. Any float dtype and strides."""
    return launch_sample(logits, batch, SAMPLE_CONFIG)


def launch_sample(logits: Tensor, batch: SamplingBatch, config: SampleConfig) -> Tensor:
    """`sample` with the work divided as `config` says."""
    _check(logits, batch)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0 or vocab_size == 1:  # one token leaves no choice (and a constant that the compiler stumbles over)
        return token_ids.zero_()
    columns = {
        spec.name: None if (column := getattr(batch, spec.name)) is None else column.contiguous()
        for spec in fields(batch)
    }
    unit = max(config.tile, 4 * NOISE_BLOCK)
    chunk_len = -(-vocab_size // (config.max_chunks * unit)) * unit
    num_chunks = -(-vocab_size // chunk_len)
    grid = (num_chunks, num_rows)

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    chunk_max, best = scratch(num_chunks, dtype=torch.float32), scratch(num_chunks, dtype=torch.float32)
    chunk_argmax, best_index = scratch(num_chunks), scratch(num_chunks)
    counts, total, arrivals = scratch(NUM_BUCKETS), scratch(dtype=torch.int64), scratch(4)
    list_values, list_indices = scratch(MAX_LISTED, dtype=torch.float32), scratch(MAX_LISTED)
    last_key, last_index = scratch(dtype=torch.int64), scratch()

    prompt, output = columns["prompt_mask"], columns["output_counts"]
    has_penalties = prompt is not None and output is not None
    if prompt is None or output is None:
        prompt = output = arrivals  # an unused pointer still needs a tensor
    row_inputs = (
        logits, prompt.view(torch.uint8), output, columns["temperature"], columns["repetition_penalty"],
        columns["presence_penalty"], columns["frequency_penalty"],
    )  # fmt: skip
    filters = columns["top_k"], columns["top_p"]
    maxima, buckets = (chunk_max, chunk_argmax), (counts, total)
    sizes = *logits.stride(), vocab_size, chunk_len, num_chunks
    flags = {"HAS_PENALTIES": has_penalties, **config.options}
    tile, c_block = config.tile, next_power_of_2(num_chunks)
    _scan_kernel[grid](*row_inputs, *maxima, *buckets, arrivals, *sizes, TILE=tile, **flags)
    _count_kernel[grid](
        *row_inputs, *filters, *maxima, *buckets, *sizes, TILE=tile, C_BLOCK=c_block, **flags,
        **blackwell_registers(255),
    )  # fmt: skip
    _gather_kernel[grid](
        *row_inputs, *filters, *maxima, *buckets, arrivals, list_values, list_indices, last_key, last_index, *sizes,
        TILE=tile, C_BLOCK=c_block, maxnreg=_GATHER_REGISTERS, **flags,
    )  # fmt: skip
    _draw_kernel[grid](
        *row_inputs, *filters, columns["min_p"], columns["seeds"], columns["steps"], *maxima, last_key, last_index,
        arrivals, best, best_index, token_ids, *sizes, C_BLOCK=c_block, maxnreg=_DRAW_REGISTERS,
        **flags,
    )  # fmt: skip
    return token_ids


def sampled_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sampled_logprobs_ref`, and the head of this file for how close. fp32, bf16 or fp16 logits of any strides."""
    check_launch(logits, token_ids)
    num_rows, vocab_size = logits.shape
    top_ids = topk_select(logits, num_top)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top = torch.empty(top_ids.shape, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return chosen, top_ids, top
    num_chunks = -(-vocab_size // _LOGPROB_TILE)
    chunk_max, chunk_sum = (
        torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    _exp_sum_kernel[(num_chunks, num_rows)](
        logits, chunk_max, chunk_sum, *logits.stride(), vocab_size, num_chunks, TILE=_LOGPROB_TILE, **options
    )
    num_top = top_ids.shape[1]
    _logprob_kernel[(num_rows,)](
        logits, chunk_max, chunk_sum, token_ids.contiguous(), top_ids, chosen, top, *logits.stride(), num_chunks,
        NUM_TOP=num_top, TOP_BLOCK=next_power_of_2(max(num_top, 1)), C_BLOCK=next_power_of_2(num_chunks), **options,
    )  # fmt: skip
    return chosen, top_ids, top


def _check(logits: Tensor, batch: SamplingBatch) -> None:
    columns = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    check_launch(logits, *columns.values())
    if logits.dim() != 2 or not logits.dtype.is_floating_point or not 0 < logits.shape[1] < 1 << 18:
        raise KernelInputError(f"expected logits [R, V], V below 2^18, found {logits.dtype} {tuple(logits.shape)}")
    dtypes = {"top_k": torch.int64, "seeds": torch.int64, "steps": torch.int64, "prompt_mask": torch.bool}
    dtypes["output_counts"] = torch.int32
    for name, column in columns.items():
        shape = tuple(logits.shape) if name in ("prompt_mask", "output_counts") else (logits.shape[0],)
        dtype = dtypes.get(name, torch.float32)
        if column is not None and (tuple(column.shape) != shape or column.dtype != dtype):
            raise KernelInputError(f"{name}: expected {dtype} {shape}, found {column.dtype} {tuple(column.shape)}")
