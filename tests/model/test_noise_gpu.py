"""The kernels on a GPU are no farther from the oracles than the oracles are from themselves with noise.

A bit that differs anywhere is amplified by FP8 rounding until logits differ as much as quantisation makes them, so a
few rows tell nothing: 4,200 rows of set A's model do.
"""

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.tensors import QuantTensor
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.weights import load_params
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, TRITON

pytestmark = pytest.mark.gpu
NUM_TEXTS, NUM_TOKENS = 6, 700
PRODUCT_NOISE = 3e-4  # of a row's largest value: FP8 sums of 14 bits are off by 5e-4 at most, 5e-5 mostly


def with_noise(seed):
    """The oracles, their FP8 products off as the tensor cores' may be."""
    draws = torch.Generator(device="cuda").manual_seed(seed)

    def off(out, weight):
        if not isinstance(weight, QuantTensor):
            return out
        wide = out.float()
        noise = torch.randn(out.shape, generator=draws, device=out.device)
        return (wide + PRODUCT_NOISE * wide.abs().amax(-1, keepdim=True) * noise).to(out.dtype)

    def linear(x, weight, out_dtype=None):
        return off(TORCH.ops.linear(x, weight, out_dtype), weight)

    def linears(x, weights, out_dtypes, codes=None):
        return tuple(map(off, TORCH.ops.linears(x, weights, out_dtypes, codes), weights))

    return TORCH.with_ops(linear=linear, linears=linears)


def with_wrong_experts():
    """The oracles, with one wrong expert in every fiftieth row."""

    def moe(x, experts, weights, routed, shared, *, limit, rounded=None):
        experts = experts.clone()
        experts[::50, 0] = (experts[::50, 0] + 1) % routed[0].shape[0]
        return TORCH.ops.moe(x, experts, weights, routed, shared, limit=limit)

    return TORCH.with_ops(moe=moe)


@pytest.fixture(scope="module")
def logits_with(set_a):
    """`logits_with(backend)`: logits of all rows of the texts, fp64 [4200, vocab]."""
    config = ModelConfig.from_pretrained(set_a.model_path)
    draws = torch.Generator().manual_seed(1)
    texts = torch.randint(0, config.vocab_size, (NUM_TEXTS, NUM_TOKENS), generator=draws).tolist()
    limits = EngineConfig(max_context_tokens=1024, max_concurrent_requests=1, max_chunk_tokens=1024)

    def run(backend):
        params = prepare_params(load_params(Checkpoint.open(set_a.model_path), config, device="cuda"), backend)
        model = Transformer(config, params, torch.bfloat16, backend=backend)
        rows = []
        for text in texts:
            cache = KVCacheManager(config, model.schedule, limits, device="cuda", plain_dtype=None)
            batch = cache.make_batch([cache.admit(len(text))], [text])
            rows.append(model.logits(model.forward(batch, cache.handle)).double())
        return torch.cat(rows)

    return run


def test_kernels_are_no_farther_from_the_oracles_than_noise_is(logits_with):
    expected = logits_with(TORCH)

    def distance(backend):
        """Share of rows that keep the oracles' first token, mean cosine distance."""
        logits = logits_with(backend)
        kept = (logits.argmax(-1) == expected.argmax(-1)).double().mean()
        return float(kept), float((1 - torch.nn.functional.cosine_similarity(logits, expected, dim=-1)).mean())

    kept_by_noise, cosine_of_noise = distance(with_noise(seed=2))
    kept, cosine = distance(TRITON)
    assert kept >= kept_by_noise - 0.02  # four standard deviations
    assert cosine <= 1.2 * cosine_of_noise
    assert distance(with_wrong_experts())[1] > 1.2 * cosine_of_noise, "a mistake would not be seen"
