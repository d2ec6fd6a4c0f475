"""Choosing the next token over slots of device state, and log-probabilities of what was chosen."""

from dsv4.ops.sampling.launch import launch_sample, resolve_tokens, sample, sampled_logprobs
from dsv4.ops.sampling.op import (
    HAS_BIAS,
    HAS_PENALTIES,
    IN_PROMPT,
    NOTHING_ALLOWED,
    POISONED,
    SamplingRows,
    SamplingState,
    allowed_logits,
    apply_penalties,
    gumbel_noise,
    keep_mask,
    philox,
    resolve_tokens_ref,
    sample_ref,
    sampled_logprobs_ref,
    token_logprobs,
)
from dsv4.ops.sampling.plan import SAMPLE_CONFIG, SampleConfig

__all__ = [
    "HAS_BIAS",
    "HAS_PENALTIES",
    "IN_PROMPT",
    "NOTHING_ALLOWED",
    "POISONED",
    "SAMPLE_CONFIG",
    "SampleConfig",
    "SamplingRows",
    "SamplingState",
    "allowed_logits",
    "apply_penalties",
    "gumbel_noise",
    "keep_mask",
    "launch_sample",
    "philox",
    "resolve_tokens",
    "resolve_tokens_ref",
    "sample",
    "sample_ref",
    "sampled_logprobs",
    "sampled_logprobs_ref",
    "token_logprobs",
]
