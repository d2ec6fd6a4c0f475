"""Single operations against the vectors in dsv4/testing/data: codes and casts bitwise, products within one rounding."""

import json

import pytest
import torch

from dsv4.config import RopeScaling
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.attention import attend_ref
from dsv4.ops.hyper import hc_split_ref
from dsv4.ops.lib.hadamard import hadamard_ref
from dsv4.ops.linear import linear_ref
from dsv4.ops.rows import rope_frequencies, rope_tables
from dsv4.testing.shipped_data import OP_VECTORS
from dsv4.testing.shipped_data import op_vectors as vectors


def bf16_steps(got, want):
    """Largest distance in units of the last place of bf16."""
    assert got.dtype == want.dtype == torch.bfloat16
    ulp = torch.finfo(torch.bfloat16).eps * want.double().abs().clamp_min(torch.finfo(torch.bfloat16).tiny)
    return ((got.double() - want.double()).abs() / ulp).max().item()


def test_every_vector_is_used():
    used = {
        "fp8_act_128", "fp8_fake_64", "fp4_fake_32",  # tests/formats
        "hadamard_128", "linear_fp8", "linear_mxfp4", "linear_nvfp4", "sinkhorn", "sparse_attention",
        "rope_plain", "rope_yarn",
    }  # fmt: skip
    assert used == set(json.loads(OP_VECTORS.with_suffix(".json").read_text()))


def test_hadamard_is_bitwise():
    case = vectors("hadamard_128")
    assert torch.equal(hadamard_ref(case["x"]), case["y"])


def test_hadamard_is_its_own_inverse():
    x = torch.randn(5, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard_ref(hadamard_ref(x)), x)


def weight_of(case, name):
    if name == "linear_fp8":
        return QuantTensor(case["weight"], case["scale"].view(torch.uint8), QuantFormat.FP8_BLOCK)
    if name == "linear_mxfp4":
        return QuantTensor(case["weight"].view(torch.uint8), case["scale"].view(torch.uint8), QuantFormat.MXFP4)
    return QuantTensor(case["weight"], case["weight_scale"], QuantFormat.NVFP4, case["weight_scale_2"])


@pytest.mark.parametrize("name", ["linear_fp8", "linear_mxfp4", "linear_nvfp4"])
def test_linear(name):
    """The sums differ in order only, so a result may fall one bf16 step to the other side."""
    case = vectors(name)
    assert bf16_steps(linear_ref(case["x"], weight_of(case, name)), case["y"]) <= 1


@pytest.mark.parametrize("name", ["linear_fp8", "linear_mxfp4"])
def test_linear_quantises_its_input(name):
    """The same product without FP8 input is far away, so the test above proves that it is there."""
    case = vectors(name)
    unquantised = linear_ref(case["x"], weight_of(case, name).dequantize(torch.float32))
    assert bf16_steps(unquantised, case["y"]) > 8


def test_sinkhorn():
    case = vectors("sinkhorn")
    got = hc_split_ref(case["mixes"], case["base"], case["scale"], 20, 1e-6)
    for name, value in zip(("pre", "post", "comb"), got, strict=True):
        torch.testing.assert_close(value, case[name], rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)


def test_sinkhorn_ends_on_columns():
    """Columns sum to one more exactly than rows: the order of the two steps is visible."""
    case = vectors("sinkhorn")
    _, _, comb = hc_split_ref(case["mixes"].double(), case["base"].double(), case["scale"].double(), 2, 1e-6)
    columns, rows = (comb.sum(1) - 1).abs().max(), (comb.sum(2) - 1).abs().max()
    assert columns < rows


def test_sparse_attention():
    case = vectors("sparse_attention")
    indices = case["indices"].long()  # [Q, N]
    times = (indices.unsqueeze(-1) == torch.arange(len(case["kv"]))).sum(1)  # [Q, keys]
    got = attend_ref(case["q"], case["kv"], times, case["sink"])
    # probabilities are rounded to bf16 before they meet the values, in another order of sums: a few steps of the result
    error = (got.double() - case["y"].double()).norm() / case["y"].double().norm()
    assert error <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(
    ("name", "theta", "scaling"), [("rope_plain", 10000.0, None), ("rope_yarn", 160000.0, RopeScaling())]
)
def test_rope_tables(name, theta, scaling):
    """One fp32 step of the cosine at most: the angle itself is the published fp32 product."""
    case = vectors(name)
    cos, sin = rope_tables(case["positions"], rope_frequencies(64, theta, scaling))
    assert (cos - case["cos"]).abs().max() <= torch.finfo(torch.float32).eps
    assert (sin - case["sin"]).abs().max() <= torch.finfo(torch.float32).eps


def test_yarn_frequencies_as_published():
    freqs = rope_frequencies(64, 160000.0, RopeScaling())
    known = {0: 1.0, 1: 0.687656, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 25: 5.372313e-6, 31: 5.680529e-7}
    for place, value in known.items():
        assert float(f"{freqs[place]:.7g}") == pytest.approx(value, rel=1e-6)
