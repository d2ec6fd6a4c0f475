"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, then the Gumbel-max trick with counted noise.

The noise of token v at step i of a request is a pure function of (seed, i, v), so a request draws the same tokens
whatever is batched beside it, on any device.

The oracle computes in fp64, the kernels (sampling_kernels.py) in fp32 and relative to the row's largest logit: z =
(logit - largest) / temperature, wrong by about 2^-23 of itself, noise by about 2^-22. They choose the same token unless
two sums of z and noise are closer than that, some 5e-6. The sums that top-p compares are of integers, each probability
rounded down to 2^-40 of the largest: no order of summation can show. A token is kept by one and dropped by the other
only where the oracle's comparison is closer than 2^-20.

Log-probabilities: a chunk of 2,048 exponentials is summed in fp32 (each wrong by 1.1 in the last place and by what the
difference to the largest was rounded, the sum by 23 additions at most), the rest is fp64: at most 2^-18 nats from the
oracle, and 2^-22 for logits as models make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.sampling_kernels import (
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
from dsv4.ops.tl_utils import KernelInputError, blackwell_registers, check_launch, next_power_of_2
from dsv4.ops.topk import topk_select, topk_select_ref

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class SamplingBatch:
    """One row per request: temperature, top_p, min_p, the three penalties fp32 [R]; top_k, seeds, steps int64 [R].

    `steps` counts the tokens a request has generated. `prompt_mask` bool [R, V] and `output_counts` int32 [R, V] are
    needed by penalties only and None without them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seeds: Tensor
    steps: Tensor
    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None


def sample_ref(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits [R, V] (fp32 or wider) -> token ids int64 [R]. Temperature 0 takes the largest logit, lower id on a tie.

    Filters apply in this order: top-k, top-p within what top-k kept, min-p. Rows do not see each other. NaN and -inf
    are never chosen while the row holds anything else; +inf wins over every number.
    """
    wide = _numbers(apply_penalties(logits.double(), batch))
    is_greedy = batch.temperature == 0
    scaled = _numbers(wide / torch.where(is_greedy, 1.0, batch.temperature.double()).unsqueeze(-1))
    keep = keep_mask(scaled, batch)
    noise = gumbel_noise(batch.seeds, batch.steps, logits.shape[-1])
    drawn = topk_select_ref((scaled + noise).masked_fill(~keep, float("-inf")), 1).squeeze(-1)
    return torch.where(is_greedy, topk_select_ref(wide, 1).squeeze(-1), drawn)


def _numbers(logits: Tensor) -> Tensor:
    """NaN as -inf, and +inf as the largest number, so that a softmax over the row has a value."""
    return logits.nan_to_num(nan=float("-inf"), posinf=_LARGEST, neginf=float("-inf"))


def apply_penalties(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Repetition (prompt and output), presence and frequency (output only) penalties; none without counts."""
    if batch.prompt_mask is None or batch.output_counts is None:
        return logits
    counts = batch.output_counts.to(logits.dtype)
    seen = batch.prompt_mask | (counts > 0)
    factor = batch.repetition_penalty.to(logits.dtype).unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(seen, repeated, logits)
    penalised = penalised - batch.frequency_penalty.to(logits.dtype).unsqueeze(-1) * counts
    return penalised - batch.presence_penalty.to(logits.dtype).unsqueeze(-1) * (counts > 0)


def keep_mask(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """bool [R, V]: the tokens that may be drawn of logits over temperature, without NaN or +inf; at least the best."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    top_k = torch.where(batch.top_k == 0, scaled.shape[-1], batch.top_k).unsqueeze(-1)
    keep = rank < top_k
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")), -1)
    before = probs.cumsum(-1) - probs  # probability of everything more likely
    keep = keep & ((before < batch.top_p.double().unsqueeze(-1)) | (batch.top_p.unsqueeze(-1) >= 1))
    keep = keep & (probs >= batch.min_p.double().unsqueeze(-1) * probs[:, :1])
    keep = keep | (rank == 0)
    return torch.zeros_like(keep).scatter(-1, order, keep)


def token_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities under the model itself, before penalties, temperature and filters. fp32 [R, V]."""
    return torch.log_softmax(logits.double(), -1).float()


def sampled_logprobs_ref(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, V], chosen ids [R] -> their log-probabilities fp32 [R]; the num_top likeliest ids int64 [R, num_top],
    best first, lower id on a tie, and their log-probabilities fp32 [R, num_top]. As `token_logprobs`: under the model
    itself.
    """
    table = token_logprobs(logits)
    top_ids = topk_select_ref(logits, num_top)
    return table.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), top_ids, table.gather(-1, top_ids)


def gumbel_noise(seeds: Tensor, steps: Tensor, vocab_size: int) -> Tensor:
    """[R, V]: -log(-log u) with u in (0, 1) from Philox 4x32-10 with key seed, whose four words serve four tokens.

    A run of 4 * NOISE_BLOCK tokens takes the words 0 of NOISE_BLOCK counters (c, step, 0, 0), then their words 1, 2, 3.
    Values of fp32 in fp64: a vectorised log may differ in its last fp64 bit with an element's place in the tensor, and
    the rounding takes that away.
    """
    num_runs = -(-vocab_size // (4 * NOISE_BLOCK))
    run_len = min(NOISE_BLOCK, vocab_size)  # a vocabulary that its first words cover needs no more counters
    counters = torch.arange(num_runs * run_len, device=seeds.device).unsqueeze(0)
    steps = steps.unsqueeze(-1)
    words = philox(seeds.unsqueeze(-1), (counters, steps, torch.zeros_like(steps), torch.zeros_like(steps)))
    runs = [word.unflatten(-1, (num_runs, run_len)) for word in words]  # [R, runs, run_len] each
    bits = torch.stack(runs, 2).flatten(1)[:, :vocab_size]
    uniform = ((bits >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).float().double()


def philox(seed: Tensor, counter: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 in int64 arithmetic: four 32-bit words from a 64-bit key and four counter words; all broadcast."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(*(word & _MASK for word in counter))
    for _ in range(10):
        high0, low0 = _multiply(_PHILOX_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _PHILOX_WEYL[0]) & _MASK, (key1 + _PHILOX_WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, without leaving int64: split the constant in 16-bit halves."""
    low_part = (constant & 0xFFFF) * value  # < 2^48
    high_part = (constant >> 16) * value + (low_part >> 16)  # < 2^49
    return (high_part >> 16) & _MASK, ((high_part << 16) & _MASK) | (low_part & 0xFFFF)


# ---- launchers ----


@dataclass(frozen=True)
class SampleConfig:
    """How the work is divided; results do not depend on it."""

    tile: int = 2048
    num_warps: int = 4
    max_chunks: int = 64

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


SAMPLE_CONFIG = SampleConfig()
# left alone, ptxas stops at 96 of its own accord and spills a few bytes
_DRAW_REGISTERS, _GATHER_REGISTERS = 128, 224
_LOGPROB_TILE = 2048  # decides the order of a sum: never a function of the batch


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
