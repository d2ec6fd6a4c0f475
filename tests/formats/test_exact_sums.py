"""Sums without rounding: the grid, products in any order, weights that keep their operands."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.formats.exact_sums import GRID_BITS, RUN, in_runs, largest_of, on_grid, weight_operand
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import QuantActivation, QuantFormat, QuantTensor, WideWeight, as_loaded, operand_of
from dsv4.ops.lib.invariant import exact_average, exact_dots, exact_matmul, rows_matmul
from dsv4.testing.numeric import assert_bitwise

SEEDS = st.integers(0, 2**32 - 1)


def wild(*shape, seed, spread=40):
    """bf16 numbers whose exponents differ by up to `spread`."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread // 2, spread // 2, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).bfloat16()


def dots_of(q, keys):
    return exact_dots(q, keys, largest_of(keys))


def average_of(weights, keys):
    return exact_average(weights, keys, largest_of(keys))


@settings(max_examples=10)
@given(SEEDS, st.integers(2, GRID_BITS))
def test_a_grid_has_so_many_bits(seed, bits):
    x = wild(2, RUN, seed=seed).double()
    found = on_grid(x, bits)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((found - x).abs() <= largest * 2.0 ** (1 - bits)).all()
    for row in found.tolist():
        numbers = [Fraction(value) for value in row]
        step = min((abs(value) for value in numbers if value), default=Fraction(1))
        while any((value / step).denominator > 1 for value in numbers):
            step /= 2
        assert max(abs(value / step) for value in numbers) <= 2**bits


def test_what_is_short_enough_stays_as_it_is():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = codes[codes.isfinite()][:RUN] + 0.0  # without a negative zero
    for scale in (2.0**-127, 1.0, 2.0**100):
        assert_bitwise(on_grid(finite * scale), finite * scale)
    zeros = torch.zeros(3, RUN, dtype=torch.float64)
    assert_bitwise(on_grid(zeros), zeros)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_spoils_its_own_run_only(bad):
    x = torch.ones(2, 2 * RUN, dtype=torch.bfloat16)
    x[1, 3] = bad
    found = on_grid(in_runs(x))
    assert found[1, 0].isnan().all()
    assert found[0].eq(1).all()
    assert found[1, 1].eq(1).all()


@pytest.mark.parametrize("width", [1, 64, 128, 129, 384])
@settings(max_examples=3)
@given(seed=SEEDS)
def test_a_product_is_its_exact_sum_run_by_run(width, seed):
    x, weight = wild(2, width, seed=seed), wild(2, width, seed=seed + 1)
    found = rows_matmul(x, weight)
    rows, operand = on_grid(in_runs(x)), weight_operand(weight)
    for row in range(2):
        for column in range(2):
            total = 0.0
            for run in range(operand.shape[0]):
                pairs = zip(rows[row, run].tolist(), operand[run, :, column].tolist(), strict=True)
                exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
                assert Fraction(float(exact)) == exact, "a sum over a run is an fp64 number"
                total += float(exact)
            assert found[row, column].item() == total


@settings(max_examples=10)
@given(SEEDS)
def test_no_order_of_columns_and_no_number_of_rows_matters(seed):
    x, weight = wild(33, RUN, seed=seed), wild(40, RUN, seed=seed + 1)
    whole = rows_matmul(x, weight)
    order = torch.randperm(RUN, generator=torch.Generator().manual_seed(seed))
    assert_bitwise(rows_matmul(x[:, order], weight[:, order]), whole)
    for rows in (slice(0, 1), slice(5, 9), slice(32, 33)):
        assert_bitwise(rows_matmul(x[rows], weight), whole[rows])
    keys = weight.double()
    q, weights = x.unflatten(0, (3, 11)), torch.rand(3, 11, 40, dtype=torch.float64).bfloat16().double()
    dots, average = dots_of(q, keys), average_of(weights, keys)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    assert_bitwise(dots_of(q[1:2], keys[shuffled]), dots[1:2][..., shuffled])
    assert_bitwise(average_of(weights[1:2][..., shuffled], keys[shuffled]), average[1:2])


@settings(max_examples=10)
@given(SEEDS)
def test_keys_that_weigh_nothing_change_nothing(seed):
    keys = wild(300, RUN, seed=seed).double()
    weights = torch.rand(2, 3, 300, dtype=torch.float64).bfloat16().double()
    weights[..., 100:] = 0
    assert_bitwise(average_of(weights, keys), average_of(weights[..., :100], keys[:100]))


def test_a_zero_has_one_sign():
    x = torch.zeros(2, 3 * RUN, dtype=torch.bfloat16)
    for width in (RUN, 2 * RUN, 3 * RUN):
        for rows in (1, 2):
            found = rows_matmul(x[:rows, :width], -torch.ones(5, width))
            assert_bitwise(found, torch.zeros(rows, 5, dtype=torch.float64))


def test_many_rows_are_taken_in_parts(monkeypatch):
    x, operand = on_grid(in_runs(wild(10, RUN, seed=1))), weight_operand(wild(4, RUN, seed=2))
    whole = exact_matmul(x, operand)
    monkeypatch.setattr("dsv4.ops.lib.invariant.PRODUCT_BYTES", 100)
    assert_bitwise(exact_matmul(x, operand), whole)


def fp8_weight(rows, seed):
    return QuantTensor(
        *fp8_block_quantize(wild(rows, 256, seed=seed, spread=6).float(), (128, 128)), QuantFormat.FP8_BLOCK
    )


def test_a_kept_operand_is_the_weight_s():
    weight = fp8_weight(128, 1)
    wide = WideWeight(weight)
    assert_bitwise(operand_of(wide), operand_of(weight))
    assert operand_of(wide) is operand_of(wide)
    assert as_loaded(wide) is weight
    assert as_loaded(weight) is weight
    assert wide.nbytes == operand_of(wide).numel() * 8


def test_a_joined_operand_is_those_of_its_weights():
    first, second = WideWeight(fp8_weight(128, 1)), WideWeight(fp8_weight(256, 2))
    joined = first.joined_operand((second,))
    assert_bitwise(joined, torch.cat((first.operand, second.operand), -1))
    assert first.joined_operand((second,)) is joined
    assert first.joined_operand(()) is first.operand


def test_a_matrix_of_a_stack_is_kept_once():
    stack = WideWeight(torch.randn(3, 8, 128))
    assert stack[1] is stack[1]
    assert_bitwise(stack[1].operand, weight_operand(stack.source[1]))


def test_runs_of_an_activation_are_its_values():
    x = wild(3, 256, seed=4, spread=6)
    made = QuantActivation.of(x)
    again = QuantActivation(made.codes, made.scale)
    assert_bitwise(made.runs, again.runs)
    assert_bitwise(made.runs.flatten(-2), made.dequantize().double())
