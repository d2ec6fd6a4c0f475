"""Forms of kernels for architectures that lack something, run in the interpreter: the same codes, the same bits."""

import pytest
import torch

from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.attention import launch_attention, pick_plan
from dsv4.ops.attention.plan import HALVES_PLAN, PAIRS_PLAN, PLAN, TILES_PLAN
from dsv4.ops.lib import arch
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture, architecture, code_tensor, overlapping
from dsv4.ops.lib.codecs import e4m3_bytes, e4m3_values, round_e4m3
from dsv4.ops.lib.guard import IS_INTERPRETED, jit, tl
from dsv4.ops.linear import linear, linears
from dsv4.ops.norm import rms_norm_quant
from dsv4.testing.cases.attention import CSA, build_inputs
from dsv4.testing.cases.rows import SMALL_ENTRY
from dsv4.testing.inputs import elementwise_block, kernel_device, normal, whole_blocks, wild
from dsv4.testing.numeric import assert_bitwise

interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU has its own architecture")


@jit
def _bytes_kernel(x_ptr, codes_ptr, values_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = e4m3_bytes(tl.load(x_ptr + places))
    tl.store(codes_ptr + places, codes)
    tl.store(values_ptr + places, e4m3_values(codes))


@jit
def _round_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, round_e4m3(tl.load(x_ptr + places)))


def every_boundary():
    """All codes, the middles between neighbours, a step of fp32 to either side, and what is no number."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = torch.cat((numbers, middles))
    beside = [torch.nextafter(exact, torch.full_like(exact, side)) for side in (-1e3, 1e3)]
    special = torch.tensor([float("nan"), 0.0, -0.0, 1e-12, -1e-12, 448.0, -448.0])
    return torch.cat((exact, *beside, special)).clamp(-448, 448).to(kernel_device())


def test_codes_by_integer_arithmetic_are_the_type_s():
    x = every_boundary()
    padded = whole_blocks(x)
    codes = torch.empty(padded.shape, dtype=torch.uint8, device=x.device)
    values = torch.empty_like(padded)
    block = elementwise_block()
    _bytes_kernel[(padded.numel() // block,)](padded, codes, values, BLOCK=block, enable_fp_fusion=False)
    expected = x.to(torch.float8_e4m3fn)
    is_number = ~x.isnan()
    assert_bitwise(codes[: x.numel()][is_number], expected.view(torch.uint8)[is_number])
    assert_bitwise(values[: x.numel()], expected.float())
    assert values[: x.numel()][~is_number].isnan().all()


@pytest.fixture
def ampere(monkeypatch):
    """What a GPU without E4M3, copy engine and overlap runs."""
    monkeypatch.setattr(arch, "INTERPRETED", 80)


@interpreted
def test_the_interpreter_stands_for_what_it_is_told(ampere):
    assert architecture() == Architecture(80)
    assert overlapping() == {}
    codes = torch.zeros(2, dtype=torch.float8_e4m3fn)
    assert code_tensor(codes).dtype == torch.uint8
    assert code_tensor(torch.zeros(2)).dtype == torch.float32


@interpreted
def test_rounding_without_the_type(ampere):
    x = every_boundary()
    padded = whole_blocks(x)
    out = torch.empty_like(padded)
    _round_kernel[(padded.numel() // elementwise_block(),)](padded, out, BLOCK=elementwise_block())
    assert_bitwise(out[: x.numel()], x.to(torch.float8_e4m3fn).float())


@interpreted
def test_linear_layers_without_the_type(monkeypatch):
    """bf16 products of the codes' values: exact, as those of the codes, and summed alike here."""
    x = wild((20, 256), seed=1)
    weight = QuantTensor(*fp8_block_quantize(normal((72, 256), torch.float32), (128, 128)), QuantFormat.FP8_BLOCK)
    plain, codes = rms_norm_quant(x, None, 1e-6, True)
    expected = [linear(given, weight, torch.float32) for given in (x[:5], x, codes)]
    (together,) = linears(plain, [weight], (torch.float32,), codes)
    monkeypatch.setattr(arch, "INTERPRETED", 80)
    found_plain, found_codes = rms_norm_quant(x, None, 1e-6, True)
    assert_bitwise(found_plain, plain)
    assert_bitwise(found_codes.codes.view(torch.uint8), codes.codes.view(torch.uint8))
    for given, wanted in zip((x[:5], x, codes), expected, strict=True):
        assert_bitwise(linear(given, weight, torch.float32), wanted)
    assert_bitwise(linears(plain, [weight], (torch.float32,), codes)[0], together)


def test_attention_takes_fewer_heads_where_shared_memory_or_registers_are_few():
    plans = {number: pick_plan(Architecture(number)) for number in ARCHITECTURES}
    assert plans == {
        80: HALVES_PLAN, 89: TILES_PLAN, 90: PAIRS_PLAN, 100: HALVES_PLAN, 103: HALVES_PLAN, 120: TILES_PLAN
    }  # fmt: skip
    assert pick_plan(Architecture(0)) == PLAN
    assert pick_plan(Architecture(100), 148) == HALVES_PLAN._replace(multiprocessors=148, max_states=32 * 148)


@pytest.fixture(scope="module")
def attention():
    """Arguments of two queries with 18 heads, and what they give on Hopper."""
    torch.manual_seed(0)
    inputs = build_inputs(3, 64, SMALL_ENTRY, CSA, 512, 2, 1, kernel_device())
    inputs |= {"q": inputs["q"].repeat(1, 6, 1), "sink": inputs["sink"].repeat(6)}
    return inputs, launch_attention(PLAN, **inputs)


@interpreted
@pytest.mark.parametrize("plan", [HALVES_PLAN, TILES_PLAN], ids=["halves", "tiles"])
def test_attention_of_fewer_heads_has_the_same_bits(attention, plan):
    """Tiles in ranges of one query."""
    inputs, expected = attention
    assert_bitwise(launch_attention(plan._replace(max_states=6), **inputs), expected)
