"""Choosing the next token, and log-probabilities of what was chosen."""

from dsv4.ops.sampling.config import SAMPLE_CONFIG, SampleConfig
from dsv4.ops.sampling.launch import launch_sample, sample, sampled_logprobs
from dsv4.ops.sampling.op import (
    SamplingBatch,
    apply_penalties,
    gumbel_noise,
    keep_mask,
    philox,
    sample_ref,
    sampled_logprobs_ref,
    token_logprobs,
)

__all__ = [
    "SAMPLE_CONFIG", "SampleConfig", "SamplingBatch", "apply_penalties", "gumbel_noise", "keep_mask",
    "launch_sample", "philox", "sample", "sample_ref", "sampled_logprobs", "sampled_logprobs_ref", "token_logprobs",
]  # fmt: skip
