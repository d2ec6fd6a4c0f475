"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, then the Gumbel-max trick with counted noise.

The noise of token v at step i of a request is a pure function of (seed, i, v), so a request draws the same tokens
whatever is batched beside it, on any device. Computed in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.ops.sampling.kernel_sample import NOISE_BLOCK
from dsv4.ops.select import topk_select_ref

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
