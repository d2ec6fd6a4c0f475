"""The router's kernels: the choice bit for bit, the gate product by policy, and every division of the work alike."""

import pytest
import torch

from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.lib.invariant import rows_matmul, sqrt_softplus
from dsv4.ops.router import GATE_CONFIGS, activation_topk, activation_topk_ref, launch_route, route, route_ref
from dsv4.ops.router.launch import _gate_products
from dsv4.testing.inputs import generator, kernel_device, normal, strided, transposed
from dsv4.testing.numeric import ORACLE_FACTOR, assert_bitwise, assert_close_to_oracle

INF, NAN = float("inf"), float("nan")
CHOICE = {"top_k": 6, "scale": 1.5}


def assert_choice(logits, bias, **options):
    """The oracle runs on the CPU: there a running sum is kept in fp64, as the kernel keeps it."""
    experts, weights = activation_topk(logits, bias, **options)
    expected, expected_weights = activation_topk_ref(logits.cpu(), None if bias is None else bias.cpu(), **options)
    assert_bitwise(experts.cpu(), expected, "experts")
    assert_bitwise(weights.cpu(), expected_weights, "weights")


# ---- choice ----


@pytest.mark.parametrize("num_experts", [8, 255, 384])
@pytest.mark.parametrize("has_bias", [True, False])
def test_choice(num_experts, has_bias):
    logits = normal((5, num_experts), torch.float32, seed=num_experts) * 6
    bias = normal((num_experts,), torch.float32, seed=1) if has_bias else None
    assert_choice(logits, bias, **CHOICE)
    assert_choice(strided(logits, 1), bias, top_k=1, scale=2.5)


def test_choice_of_extremes():
    """Ties go to the lower expert; any finite logit has a score; NaN is chosen last."""
    logits = normal((10, 64), torch.float32, seed=2)
    logits[0] = 3.0
    logits[1] = -100.0
    logits[2] = 3e38
    logits[3] = -1e4  # every score is 0, the weights are 0 / 0
    logits[4] = NAN
    logits[5, 7:] = NAN
    logits[6, 50] = INF
    logits[7] = -INF
    logits[8] = torch.linspace(-206.0, -150.0, 64)
    logits[9, ::2] = logits[9, 1::2]
    assert_choice(logits, None, **CHOICE)
    assert_choice(logits, torch.zeros(64, device=logits.device), **CHOICE)
    assert activation_topk(logits[:1], None, **CHOICE)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_the_bias_moves_the_choice_only():
    logits = normal((3, 32), torch.float32, seed=3)
    bias = torch.zeros(32, device=logits.device)
    bias[[3, 9]] = 100.0
    experts, weights = activation_topk(logits, bias, top_k=2, scale=1.0)
    assert experts.tolist() == [[3, 9]] * 3
    chosen = sqrt_softplus(logits[:, [3, 9]]).cpu()
    assert_bitwise(weights.cpu(), chosen / chosen.cumsum(-1)[:, -1:])


# ---- gate product ----


def exact_scores(x, gate):
    """Scores in fp64, and how far scores of fp32 sums may be from them."""
    exact = sqrt_softplus(rows_matmul(x.double(), gate.double()))
    if len(x) == 0:
        return exact, 0.0
    return exact, ORACLE_FACTOR * (sqrt_softplus(rows_matmul(x, gate)) - exact).abs().max()


def inputs(rows, width=300, num_experts=72, seed=0):
    """Sizes off every tile; no choice is closer than fp32 sums can tell apart."""
    x = normal((rows, width), seed=seed)
    gate = normal((num_experts, width), seed=seed + 1) * 0.05
    bias = normal((num_experts,), torch.float32, seed=seed + 2) * 0.1
    token_ids = torch.randint(0, 30, (rows,), generator=generator(seed)).to(x.device)
    exact, error = exact_scores(x, gate)
    best = (exact + bias).sort(-1, descending=True).values
    assert (best[:, 5] - best[:, 6] > 2 * error).all()
    return x, gate, bias, token_ids


def assert_routes(x, gate, bias, table, token_ids, config=None):
    if config is None:
        experts, weights = route(x, gate, bias, table, token_ids, **CHOICE)
    else:
        experts, weights = launch_route(x, gate, bias, table, token_ids, *CHOICE.values(), config)

    def oracle(dtype):
        return route_ref(x.to(dtype), gate, bias, table, token_ids, **CHOICE)

    assert_bitwise(experts, oracle(torch.float32)[0], "experts")
    assert_close_to_oracle(weights, lambda dtype: oracle(dtype)[1], "weights")
    return experts, weights


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_dense(rows):
    x, gate, bias, token_ids = inputs(rows, seed=10 + rows)
    assert_routes(x, gate, bias, None, token_ids)


@pytest.mark.parametrize("config", GATE_CONFIGS.values(), ids=str)
def test_every_division_gives_the_same_bits(config):
    x, gate, bias, token_ids = inputs(18, seed=3)
    found = assert_routes(x, gate, bias, None, token_ids, config)
    for left, right in zip(found, route(x, gate, bias, None, token_ids, **CHOICE), strict=True):
        assert_bitwise(left, right)


def test_fused_is_the_chain():
    x, gate, bias, token_ids = inputs(5, seed=4)
    unsplit = next(config for config in GATE_CONFIGS.values() if not config.is_split)
    logits = _gate_products(x, gate, unsplit)[0]
    assert_close_to_oracle(logits, lambda dtype: rows_matmul(x.to(dtype), gate), "logits")
    chain = activation_topk(logits, bias, **CHOICE)
    for left, right in zip(route(x, gate, bias, None, token_ids, **CHOICE), chain, strict=True):
        assert_bitwise(left, right)


def test_fp16_and_strides():
    x, gate, bias, token_ids = inputs(4, seed=7)
    expected = route(x, gate, bias, None, token_ids, **CHOICE)
    views = strided(x, 0), transposed(gate), strided(bias, 0), strided(token_ids, 0)
    for left, right in zip(route(*views[:3], None, views[3], **CHOICE), expected, strict=True):
        assert_bitwise(left, right)
    assert_routes(x.half(), gate.half(), bias, None, token_ids)


# ---- hash layers ----


def test_hash():
    x, gate, _, token_ids = inputs(9, seed=8)
    table = torch.randint(0, 72, (30, 6), generator=generator(9)).to(x.device)
    table[token_ids[0]] = torch.tensor([5, 5, 70, 0, 70, 5], device=x.device)
    experts, _ = assert_routes(x, gate, None, table, token_ids)
    assert experts[0].tolist() == [0, 5, 5, 5, 70, 70]
    # any bias is ignored
    assert_bitwise(route(x, gate, x[0, :72].float(), table, token_ids, **CHOICE)[0], experts)


def test_an_unknown_token_reads_nothing():
    x, gate, _, token_ids = inputs(5, seed=8)
    table = torch.randint(0, 72, (30, 6), generator=generator(9)).to(x.device)
    expected = route(x, gate, None, table, token_ids, **CHOICE)
    token_ids[1], token_ids[3] = -1, 30
    experts, weights = route(x, gate, None, table, token_ids, **CHOICE)
    assert (experts[[1, 3]] == -1).all()
    assert (weights[[1, 3]] == 0).all()
    assert_bitwise(weights[[0, 2, 4]], expected[1][[0, 2, 4]])


def test_rejects():
    x, gate, bias, token_ids = inputs(3)
    table = torch.zeros(30, 6, dtype=torch.int64, device=x.device)
    quantised = QuantTensor(gate.to(torch.float8_e4m3fn), bias, QuantFormat.FP8_BLOCK)
    for arguments, part in [
        ((x, quantised, bias, None, token_ids), "plain gate weight, found fp8"),
        ((x.float(), gate, bias, None, token_ids), "float32"),
        ((x, gate[:, :-1], bias, None, token_ids), r"\(72, 299\)"),
        ((x, gate, bias[:-1], None, token_ids), r"\(71,\)"),
        ((x, gate, bias, table[:, :5], token_ids), r"\(30, 5\)"),
        ((x, gate, bias, None, token_ids[:2]), r"\(2,\)"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            route(*arguments, **CHOICE)
    with pytest.raises(KernelInputError, match="found 72 and 73"):
        route(x, gate, bias, None, token_ids, top_k=73, scale=1.0)
    with pytest.raises(KernelInputError, match="float64"):
        activation_topk(torch.zeros(2, 4, dtype=torch.float64, device=kernel_device()), None, top_k=1, scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "num_experts"), [(4096, 256), (7168, 384)])
def test_full_size(width, num_experts):
    x = normal((4096, width), seed=1)
    gate = normal((num_experts, width), seed=2) * 0.02
    bias = normal((num_experts,), torch.float32, seed=3) * 0.1
    token_ids = torch.zeros(4096, dtype=torch.int64, device=x.device)
    experts, weights = route(x, gate, bias, None, token_ids, **CHOICE)
    exact, error = exact_scores(x, gate)
    # a choice that differs from the exact one is a tie as far as fp32 sums can tell
    ranked = exact + bias
    cut = ranked.sort(-1, descending=True).values[:, 5:6]
    assert (ranked.gather(-1, experts) >= cut - 2 * error).all()
    chosen = exact.gather(-1, experts)

    def oracle(dtype):
        if dtype == torch.float64:
            return chosen / chosen.sum(-1, keepdim=True) * 1.5
        scores = sqrt_softplus(rows_matmul(x, gate).to(dtype)).gather(-1, experts)
        return scores / scores.sum(-1, keepdim=True) * 1.5

    assert_close_to_oracle(weights, oracle, "weights")
    for rows in (1, 3, 16, 17, 64, 65, 512, 513, 1000):
        start = 4096 - rows
        part = route(x[start:], gate, bias, None, token_ids[start:], **CHOICE)
        assert_bitwise(part[0], experts[start:], f"experts of {rows} rows")
        assert_bitwise(part[1], weights[start:], f"weights of {rows} rows")
