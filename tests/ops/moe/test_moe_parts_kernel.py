"""The experts' work in pieces, as ranks divide it: parts from owners, the shared expert, the fold: the same bits."""

from dataclasses import replace

import pytest
import torch
from quantised_weights import fp8, nvfp4
from test_moe_kernel import (
    EXPERTS,
    FEW,
    LAYERS,
    LIMIT,
    READY,
    ROUNDED,
    TOP_K,
    WIDE,
    experts_of,
    inputs,
)

from dsv4.ops.lib.arrivals import NEVER, arrival_counters
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe import (
    Ranges,
    launch_moe,
    moe,
    moe_fold,
    moe_fold_ref,
    moe_parts,
    moe_parts_ref,
    moe_ref,
    moe_shared,
    moe_shared_ref,
    prepare_experts,
)
from dsv4.testing.inputs import kernel_device, normal
from dsv4.testing.numeric import assert_bitwise

OWNERS = (range(0, 2), range(2, 2), range(2, EXPERTS))  # one of them has no expert at all


def own(experts, owner):
    """Ids as a rank sees them: its own from 0 on, the others -1."""
    return torch.where((experts >= owner.start) & (experts < owner.stop), experts - owner.start, -1)


def gathered(experts, parts_of):
    """Parts [T, k, D], each taken from the rank that owns its expert; NaN from all others."""
    taken = None
    for owner in OWNERS:
        if len(owner) == 0:
            continue
        parts = parts_of(own(experts, owner), owner)
        is_own = ((experts >= owner.start) & (experts < owner.stop)).unsqueeze(-1)
        taken = torch.full_like(parts, float("nan")) if taken is None else taken
        taken = torch.where(is_own, parts, taken)
    return taken


def slices(matrices, owner):
    return tuple(weight[owner.start : owner.stop] for weight in matrices)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_oracles_of_the_pieces(tokens, dtype):
    routed, shared = (tuple(weight.dequantize().to(dtype) for weight in part) for part in LAYERS["nvfp4"])
    x, experts, weights = inputs(tokens)
    x = x.to(dtype)
    parts = gathered(
        experts, lambda ids, owner: moe_parts_ref(x, ids, weights, slices(routed, owner), shared, limit=LIMIT)
    )
    shared_out = torch.full_like(x, float("nan"))
    moe_shared_ref(x, routed, shared, shared_out, top_k=TOP_K, limit=LIMIT)
    assert_bitwise(moe_fold_ref(parts, shared_out), moe_ref(x, experts, weights, routed, shared, limit=LIMIT))


@pytest.mark.parametrize(
    ("name", "config"),
    [("nvfp4", FEW), ("nvfp4", ROUNDED), ("nvfp4", WIDE), ("mxfp4", ROUNDED)],
    ids=["few", "narrow", "wide", "mxfp4 narrow"],
)
def test_kernels_of_the_pieces(name, config):
    """Whatever the form of the launch: parts by owner, the shared expert and the fold have the bits of one launch."""
    x, experts, weights = inputs(3, seed=3)
    routed, shared = READY[name]

    def parts_of(ids, owner):
        here = prepare_experts(slices(LAYERS[name][0], owner))
        return launch_moe(x, ids, weights, here, shared, LIMIT, config, has_shared=False)

    parts, nobody = gathered(experts, parts_of), torch.full_like(experts, -1)
    shared_out = torch.full_like(x, float("nan"))
    launch_moe(x, nobody, weights, routed, shared, LIMIT, config, has_routed=False, out=shared_out)
    assert_bitwise(moe_fold(parts, shared_out), launch_moe(x, experts, weights, routed, shared, LIMIT, config))
    for purpose in ("moe", "shared expert", "shared expert gate and up"):
        assert not arrival_counters(purpose, x.device).any(), "nobody counted for the next launch"
    assert (arrival_counters("parts", x.device, NEVER) < NEVER // 2).all(), "no part is anybody's last"


@pytest.mark.parametrize("config", [FEW, ROUNDED, WIDE], ids=["few", "narrow", "wide"])
def test_parts_go_to_the_ranks_of_their_tokens(config):
    """Into the buffers of three ranks with two tokens each: the bits of parts kept here, and nothing else."""
    x, experts, weights = inputs(6, seed=5)
    experts = own(experts, OWNERS[-1])
    here = prepare_experts(slices(LAYERS["nvfp4"][0], OWNERS[-1]))
    shared = READY["nvfp4"][1]
    buffers = [torch.full((2, TOP_K, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device) for _ in range(3)]
    peer_buffers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=x.device)
    kept = launch_moe(x, experts, weights, here, shared, LIMIT, config, has_shared=False)
    launch_moe(x, experts, weights, here, shared, LIMIT, config, has_shared=False, peer_buffers=peer_buffers)
    stored, is_own = torch.cat(buffers), (experts >= 0).unsqueeze(-1)
    assert 0 < is_own.sum() < is_own.numel()
    assert_bitwise(stored, kept.masked_fill(~is_own, float("nan")))
    assert moe_parts(x, experts, weights, here, shared, limit=LIMIT, peer_buffers=peer_buffers) is None
    assert_bitwise(torch.cat(buffers), stored)
    with pytest.raises(KernelInputError, match="addresses for equal shares of 6 tokens, found torch.int64 \\(4,\\)"):
        moe_parts(x, experts, weights, here, shared, limit=LIMIT, peer_buffers=peer_buffers.new_zeros(4))


def test_the_set_of_kernels_follows_the_oracle_and_takes_plain_weights():
    x, experts, weights = inputs(1)
    routed, shared = READY["mxfp4"]
    parts, shared_out = moe_parts(x, experts, weights, routed, shared, limit=LIMIT), torch.empty_like(x)
    moe_shared(x, routed, shared, shared_out, top_k=TOP_K, limit=LIMIT)
    assert_bitwise(moe_fold(parts, shared_out), moe(x, experts, weights, routed, shared, limit=LIMIT))
    plain = tuple(tuple(weight.dequantize().bfloat16() for weight in part) for part in LAYERS["mxfp4"])
    expected = moe_parts_ref(x, experts, weights, *plain, limit=LIMIT)
    assert_bitwise(moe_parts(x, experts, weights, *plain, limit=LIMIT), expected)
    moe_shared(x, *plain, shared_out, top_k=TOP_K, limit=LIMIT)
    expected = torch.empty_like(x)
    moe_shared_ref(x, *plain, expected, top_k=TOP_K, limit=LIMIT)
    assert_bitwise(shared_out, expected)


def test_the_order_of_the_fold_is_seen():
    """Parts whose sum depends on their order: the largest first loses the small ones."""
    shared = torch.zeros(1, 160, dtype=torch.bfloat16, device=kernel_device())
    values = torch.tensor([2.0**25, 1.0, -(2.0**25)], dtype=torch.bfloat16, device=kernel_device())
    parts = values.view(1, 3, 1).expand(1, 3, 160)
    assert_bitwise(moe_fold(parts, shared), torch.zeros_like(shared))
    assert_bitwise(moe_fold(parts[:, [0, 2, 1]], shared), torch.ones_like(shared))


def test_rejects():
    (x, experts, weights), ready = inputs(3), READY["nvfp4"]
    with pytest.raises(KernelInputError, match="expected bf16 parts \\[3, k, 256\\]"):
        moe_fold(normal((3, TOP_K, 128)), x)
    with pytest.raises(KernelInputError, match="expected the shared expert's output in bf16"):
        moe_fold(normal((3, TOP_K, 256)), x.float())
    for out in (x.float(), x[:2], x.new_empty(256, 3).T):
        with pytest.raises(KernelInputError, match="expected contiguous rows like x"):
            moe_shared(x, *ready, out, top_k=TOP_K, limit=LIMIT)
    several = replace(FEW, ranges=Ranges(down=2))
    wider = prepare_experts(experts_of(nvfp4, width=256)), prepare_experts(experts_of(fp8, None, width=256))
    with pytest.raises(KernelInputError, match="parts made by one program"):
        launch_moe(x, experts, weights, *wider, LIMIT, several, has_shared=False)
