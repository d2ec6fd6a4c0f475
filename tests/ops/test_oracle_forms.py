"""Oracles that take a shorter way for some inputs, or share work between rows, give the bits of the plain way."""

import pytest
import torch
from quantised_weights import quantised

from dsv4.formats.tensors import WideWeight
from dsv4.ops.hyper import sinkhorn_ref
from dsv4.ops.lib.invariant import exact_matmul
from dsv4.ops.linear import linears_ref, segments_ref
from dsv4.ops.moe import experts_ref, moe_fold_ref, moe_parts_ref, moe_ref, moe_shared_ref
from dsv4.testing.inputs import normal
from dsv4.testing.numeric import assert_bitwise

INF, NAN = float("inf"), float("nan")
LIMIT, EXPERTS = 10.0, 5
FORMS = pytest.mark.parametrize("form", ["fp8", "mxfp4", "nvfp4", "bf16"])


def matrix(form, seed, *stack, rows=128, width=256):
    return quantised(form, normal((*stack, rows, width), seed=seed, dtype=torch.float32))


def experts_of(form, seed, *stack):
    return tuple(
        matrix(form, seed + place, *stack, rows=rows, width=width)
        for place, (rows, width) in enumerate(((128, 256), (256, 128), (128, 256)))
    )


@pytest.mark.parametrize("num_iters", [1, 2, 20])
def test_sinkhorn_of_few_tokens_is_that_of_many(num_iters):
    """In fp64, where another order of the sums would show."""
    logits = normal((200, 4, 4), seed=num_iters, dtype=torch.float64) * 4
    logits[1, 2, 3], logits[2, 0, 0], logits[3, 1] = NAN, INF, -INF
    logits[4], logits[5], logits[6, 0] = 0.0, 1e4, torch.tensor([80.0, -80.0, 3e38, -3e38])
    whole = sinkhorn_ref(logits, num_iters, 1e-6)
    for place in range(len(logits)):
        assert_bitwise(sinkhorn_ref(logits[place : place + 1], num_iters, 1e-6), whole[place : place + 1])
        assert_bitwise(sinkhorn_ref(logits[place : place + 2], num_iters, 1e-6), whole[place : place + 2])


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 3, 3), (1, 2, 2)])
def test_sinkhorn_without_eps_does_not_raise(shape):
    logits = torch.zeros(shape)
    logits[0, :, 0] = -2e3  # its softmax is 0 in a whole column
    assert sinkhorn_ref(logits, 2, 0.0).isnan().any()
    assert sinkhorn_ref(logits, 2, 1e-6).isfinite().all()


@pytest.mark.parametrize("num_runs", [1, 2, 3, 8])
def test_runs_of_few_rows_are_added_as_those_of_many(num_runs):
    generator = torch.Generator().manual_seed(num_runs)
    exponents = torch.randint(-30, 30, (9, num_runs, 128), generator=generator)
    x = torch.randint(-(2**20), 2**20, (9, num_runs, 128), generator=generator).double() * 2.0 ** exponents[..., :1]
    operand = torch.randint(-(2**20), 2**20, (num_runs, 128, 24), generator=generator).double()
    x[3], x[4] = 0.0, -0.0
    whole = exact_matmul(x, operand)
    for row in range(len(x)):
        assert_bitwise(exact_matmul(x[row : row + 1], operand), whole[row : row + 1])
        assert_bitwise(exact_matmul(x[row : row + 2], operand), whole[row : row + 2])


@FORMS
@pytest.mark.parametrize("is_kept", [False, True])
def test_segments_are_the_linears_of_each(form, is_kept):
    x = normal((7, 256), seed=1)
    weights = [(matrix(form, 10 * place), matrix(form, 10 * place + 1)) for place in range(3)]
    if is_kept:
        weights = [tuple(WideWeight(weight) for weight in own) for own in weights]
    counts = [4, 0, 3]
    parts = [
        torch.cat(linears_ref(rows, own, (None, None)), -1) for rows, own in zip(x.split(counts), weights, strict=True)
    ]
    assert_bitwise(segments_ref(x, weights, counts), torch.cat(parts))


@FORMS
def test_experts_together_are_the_pieces_and_the_single_ones(form):
    x, weights = normal((6, 256), seed=2), torch.rand(6, 2, generator=torch.Generator().manual_seed(3))
    experts = torch.tensor([[0, 3], [1, 2], [-1, 4], [0, 3], [EXPERTS, -1], [3, 4]])
    routed, shared = experts_of(form, 20, EXPERTS), experts_of("fp8", 80)
    whole = moe_ref(x, experts, weights, routed, shared, limit=LIMIT)
    parts = moe_parts_ref(x, experts, weights, routed, shared, limit=LIMIT)
    shared_out = torch.empty_like(x)
    moe_shared_ref(x, routed, shared, shared_out, top_k=2, limit=LIMIT)
    assert_bitwise(moe_fold_ref(parts, shared_out), whole)
    for token, chosen in enumerate(experts.tolist()):
        row = x[token : token + 1]
        total = torch.zeros(1, 256, dtype=torch.float64)
        for expert, weight in zip(chosen, weights[token], strict=True):
            if 0 <= expert < EXPERTS:
                matrices = [tuple(stack[expert] for stack in routed)]
                total += experts_ref(row, matrices, [1], LIMIT, weight.unsqueeze(0)).double()
        total = total.float() + experts_ref(row, [shared], [1], LIMIT, None).float()
        assert_bitwise(whole[token : token + 1], total.bfloat16())


def test_no_tokens_and_no_experts():
    routed, shared = experts_of("fp8", 20, EXPERTS), experts_of("fp8", 1)
    for num_tokens in (0, 3):
        x, weights = normal((num_tokens, 256), seed=2), torch.ones(num_tokens, 2)
        nobody = torch.full((num_tokens, 2), -1)
        parts = moe_parts_ref(x, nobody, weights, routed, shared, limit=LIMIT)
        assert_bitwise(parts, torch.zeros(num_tokens, 2, 256, dtype=torch.bfloat16))
        alone = experts_ref(x, [shared], [num_tokens], LIMIT, None)
        assert_bitwise(moe_ref(x, nobody, weights, routed, shared, limit=LIMIT), alone)
