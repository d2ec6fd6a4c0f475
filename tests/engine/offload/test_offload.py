"""Offloaded experts give the bits of resident ones, whatever is where, and the slots keep their books."""

from dataclasses import replace

import pytest
import torch
from engine_cases import SMALL
from offload_cases import offload

from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.engine.offload.placement import OffloadError, Placement
from dsv4.engine.offload.pool import ExpertPool
from dsv4.formats.trees import tensors_of
from dsv4.loader.write.synth import random_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH

CONFIG = replace(SMALL, n_routed_experts=8)
TOP_K = CONFIG.num_experts_per_tok
PROMPT = torch.randint(0, CONFIG.vocab_size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PLACEMENTS = {
    "no fixed, least cached": Placement(0, TOP_K),
    "some fixed, least cached": Placement(3, TOP_K),
    "some of both": Placement(2, 4),
    "all fixed": Placement(8, 0),
    "all cached": Placement(0, 8),
    "some of both, least cached": Placement(2, 3),
}


@pytest.fixture(scope="module", params=["mxfp4", "nvfp4", "fp8", "bf16"])
def params(request):
    return random_params(CONFIG, experts=request.param)


@pytest.fixture(scope="module")
def nvfp4():
    return random_params(CONFIG, experts="nvfp4")


def run(model, chunks):
    """Logits of every token of the prompt, fed in pieces."""
    cache = KVCacheManager(
        CONFIG, model.schedule, EngineConfig(max_context_tokens=64, max_concurrent_requests=1), device="cpu",
        plain_dtype=None,
    )  # fmt: skip
    slot, rows, remaining = cache.admit(len(PROMPT)), [], list(PROMPT)
    for length in chunks:
        batch = cache.make_batch([slot], [remaining[:length]])
        rows.append(model.logits(model.forward(batch, cache.handle)))
        del remaining[:length]
    return torch.cat(rows)


def offloaded(params, placement):
    moved, pool = offload(params, placement, TORCH, top_k=TOP_K, device="cpu")
    return Transformer(CONFIG, moved, torch.bfloat16, backend=pool.backend), pool


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_bits_of_the_resident_model(nvfp4, placement):
    """A prefill that needs every expert, then decode that evicts all the time."""
    chunks = [20] + [1] * 20
    expected = run(Transformer(CONFIG, nvfp4, torch.bfloat16), chunks)
    model, pool = offloaded(nvfp4, placement)
    assert torch.equal(run(model, chunks), expected)
    pool.check_integrity()
    if placement.num_fixed + placement.num_cached < 8:
        assert pool.stats.num_misses > 0
        assert pool.stats.num_hits >= 0
        num_ahead, rest = divmod(pool.stats.bytes_moved, pool.layers[0].expert_bytes)
        num_ahead -= pool.stats.num_misses
        assert 0 <= num_ahead <= 8 * pool.stats.num_staged_layers
        assert rest == 0


def test_every_format(params):
    expected = run(Transformer(CONFIG, params, torch.bfloat16), [30, 10])
    model, pool = offloaded(params, Placement(1, 3))
    assert torch.equal(run(model, [30, 10]), expected)
    assert pool.stats.num_staged_layers > 0


def test_resident_stacks_pass_through(nvfp4):
    """The draft blocks, and a model that is not offloaded at all."""
    pool = ExpertPool(Placement(2, 4), 8, TOP_K, TORCH, device="cpu")
    resident = Transformer(CONFIG, nvfp4, torch.bfloat16, backend=pool.backend)
    assert torch.equal(run(resident, [40]), run(Transformer(CONFIG, nvfp4, torch.bfloat16), [40]))


def test_a_wrong_slot_is_noticed(nvfp4):
    """Planted: two cached experts change places without their books."""
    model, pool = offloaded(nvfp4, Placement(0, 8))
    expected = run(model, [40])
    layer = pool.layers[1]
    for part in tensors_of(layer.stack):
        part[[0, 1]] = part[[1, 0]]
    with pytest.raises(AssertionError, match="does not hold expert"):
        pool.check_integrity()
    assert not torch.equal(run(model, [40]), expected)


def test_the_least_recently_used_leaves(nvfp4):
    _, pool = offloaded(nvfp4, Placement(0, 3))
    layer = pool.layers[0]
    for chosen in ([0, 1], [2, 0], [3, 0]):
        assert layer.slots_for(torch.tensor([chosen])) is not None
    assert set(layer._recent) == {2, 3, 0}
    pool.stats.reset()
    before = layer.slots_for(torch.tensor([[0, 2]]))
    assert pool.stats.num_misses == 0
    assert torch.equal(layer.slots_for(torch.tensor([[0, 2]])), before)
    layer.check_integrity()


def test_too_many_experts_change_nothing(nvfp4):
    _, pool = offloaded(nvfp4, Placement(2, 2))
    layer = pool.layers[0]
    layer.slots_for(torch.tensor([[4, 5]]))
    held = dict(layer._recent)
    assert layer.slots_for(torch.tensor([[4, 5], [6, 7]])) is None
    assert dict(layer._recent) == held


def test_padding_fetches_nothing(nvfp4):
    _, pool = offloaded(nvfp4, Placement(0, 2))
    layer = pool.layers[0]
    slots = layer.slots_for(torch.tensor([[1, 2], [3, 4], [5, 6]]), 1)
    assert sorted(layer._recent) == [1, 2]
    assert torch.equal(slots[1:], torch.full((2, 2), -1))
    assert torch.equal(layer.slots_for(torch.tensor([[-1, 2]])), torch.tensor([[-1, int(layer._slot_of[2])]]))


def test_when_a_size_always_fits():
    pool = ExpertPool(Placement(2, 4), 8, 2, TORCH, device="cpu")
    assert [pool.always_fits(size) for size in (1, 2, 3, 100)] == [True, True, False, False]
    assert ExpertPool(Placement(4, 4), 8, 2, TORCH, device="cpu").always_fits(100)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(6, 4), "at most 8 slots, found 6 fixed and 4 cached"),
        (Placement(-1, 4), "found -1 fixed"),
        (Placement(2, 1), "one token's 2 experts, found 1"),
    ],
)
def test_placements_that_cannot_work(placement, message):
    with pytest.raises(OffloadError, match=message):
        ExpertPool(placement, 8, 2, TORCH, device="cpu")


def test_bytes(nvfp4):
    """Slots and host hold every expert once where all slots but the fixed ones are copies."""
    _, pool = offloaded(nvfp4, Placement(3, 2))
    resident = sum(
        part.numel() * part.element_size() for block in nvfp4.layers for part in tensors_of(block.ffn.experts.matrices)
    )
    assert pool.device_bytes() == resident // 8 * 5
    assert pool.host_bytes() == resident // 8 * 5


def test_misses_are_as_many_as_the_plan_forecasts(nvfp4):
    """Every expert used alike: a choice misses as often as an expert is not on the device, fixed slots or not."""
    generator = torch.Generator().manual_seed(3)
    num_calls = 2000
    for placement in (Placement(0, 4), Placement(3, 2)):
        _, pool = offloaded(nvfp4, placement)
        layer = pool.layers[0]
        for _ in range(num_calls):
            layer.slots_for(torch.randperm(8, generator=generator)[:TOP_K].sort().values.unsqueeze(0))
        expected = 1 - (placement.num_fixed + placement.num_cached) / 8
        spread = (expected * (1 - expected) / (num_calls * TOP_K)) ** 0.5
        assert abs(pool.stats.num_misses / pool.stats.num_uses - expected) < 4 * spread
