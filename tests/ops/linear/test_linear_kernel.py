"""The linear kernels: within the oracle's error, and the same bits for a row whatever the rows around it, the tile, the
splits' form, and whether its codes came from outside.
"""

from dataclasses import replace

import pytest
import torch
from quantised_weights import fp8_weight

from dsv4.formats.fp8 import fp8_block_quantize, fp8_quantize
from dsv4.formats.layouts import ShuffledTensor, shuffle
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation, QuantFormat, QuantTensor
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.linear import (
    LinearBundle,
    grouped_codes,
    grouped_codes_ref,
    grouped_linear,
    grouped_linear_ref,
    launch_grouped,
    launch_linears,
    launch_shuffled,
    linear,
    linear_ref,
    linears,
    linears_ref,
    num_splits,
    prepare_grouped,
    widened,
)
from dsv4.ops.linear import plan as linear_config
from dsv4.ops.norm import rms_norm
from dsv4.testing.inputs import kernel_device, normal, padded_rows, strided, transposed, wild
from dsv4.testing.numeric import (
    FP32_STEP,
    TENSOR_CORE_STEP,
    assert_bitwise,
    assert_close_to_oracle,
    assert_within_format,
)

BF16, FP32 = torch.bfloat16, torch.float32
# every tile, and with it both forms
ROW_TILES = [*linear_config.LINEAR_TILES.values(), linear_config.MANY_ROWS]
GROUPED_ROW_TILES = [*linear_config.GROUPED_TILES.values(), linear_config.GROUPED_MANY_ROWS]
SHUFFLED_ROW_TILES = [
    *linear_config.SHUFFLED_TILES.values(), linear_config.HALF_WAVES, linear_config.WHOLE_WAVES,
]  # fmt: skip


def codes_of(x):
    return QuantActivation(*fp8_quantize(x, ACTIVATION_GROUP))


def assert_follows_oracle(actual, x, weight, out_dtype):
    """fp64: exact products of the codes.

    A GPU's FP8 sums have 14 bits (their products are added in fixed point, 32 columns at a time): an fp32 result is
    judged by the bf16 result it becomes in the model. The interpreter adds in fp32 and is judged as fp32.
    """
    assert actual.dtype == out_dtype
    if isinstance(weight, QuantTensor) and actual.is_cuda:
        actual, out_dtype = actual.to(BF16), BF16

    def oracle(dtype):
        if dtype != torch.float64:
            return linear_ref(x, weight, dtype)
        plain = codes_of(x).dequantize() if isinstance(weight, QuantTensor) else x
        wide = weight.dequantize() if isinstance(weight, QuantTensor) else weight
        return plain.double() @ wide.double().T

    assert_close_to_oracle(actual, oracle, step=TENSOR_CORE_STEP if actual.is_cuda else FP32_STEP)


@pytest.mark.parametrize("fp32_scale", [False, True], ids=["e8m0", "fp32"])
@pytest.mark.parametrize(("num_rows", "width"), [(24, 128), (64, 384), (200, 256), (129, 2304)])
def test_fp8_follows_the_oracle(num_rows, width, fp32_scale):
    x, weight = wild((7, width), seed=1), fp8_weight(num_rows, width, fp32_scale)
    for out_dtype in (FP32, BF16):
        assert_follows_oracle(linear(x, weight, out_dtype), x, weight, out_dtype)


@pytest.mark.parametrize(("num_rows", "width"), [(24, 40), (64, 128), (130, 1100), (65, 1024), (3, 8)])
def test_bf16_follows_the_oracle(num_rows, width):
    x, weight = wild((7, width), seed=2), normal((num_rows, width), BF16, seed=3)
    for out_dtype in (FP32, BF16):
        assert_follows_oracle(linear(x, weight, out_dtype), x, weight, out_dtype)


def test_odd_widths_and_alignments():
    """The copy engine needs rows of 16 bytes at addresses of 16 bytes: the others are read another way."""
    x, weight = normal((5, 77), BF16, seed=4), normal((30, 77), BF16, seed=5)
    assert_follows_oracle(linear(x, weight, FP32), x, weight, FP32)
    shifted = normal((5, 129), BF16, seed=6)[:, 1:]
    weight = normal((30, 128), BF16, seed=7)
    assert_bitwise(linear(shifted, weight, FP32), linear(shifted.contiguous(), weight, FP32))


@pytest.mark.parametrize("number_format", ["fp8", "bf16"])
def test_within_the_format_s_bound(number_format):
    x, wide = normal((9, 512), FP32, seed=8), normal((64, 512), FP32, seed=9)
    weight = wide.to(BF16)
    if number_format == "fp8":
        weight = QuantTensor(*fp8_block_quantize(wide, (128, 128)), QuantFormat.FP8_BLOCK)
    exact = x.double() @ wide.double().T
    assert_within_format(linear(x.to(BF16), weight, FP32), exact, number_format)
    if number_format == "fp8":  # one step in one scale in eight is seen
        wrong = weight.scale.clone()
        wrong[0, 0] += 1
        with pytest.raises(AssertionError, match="expected at most"):
            assert_within_format(linear(x.to(BF16), replace(weight, scale=wrong), FP32), exact, number_format)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_codes_from_outside_are_the_same_bits(num_tokens):
    """Quantised in the same launch, in one before it, or by a norm."""
    x, weight = wild((num_tokens, 256), seed=10), fp8_weight(72, 256)
    expected = linear(codes_of(x), weight, FP32)
    assert_bitwise(linear(x, weight, FP32), expected)
    assert linear(codes_of(x), weight).dtype == BF16
    for rows in (0, 1 << 20):
        tile = replace(linear_config.LINEAR_TILES[64], quantize_rows=rows)
        bundle = LinearBundle.build([weight])
        assert_bitwise(launch_linears(x, bundle, (FP32,), tile=tile)[0], expected, f"quantised up to {rows} rows")


def test_strides():
    x, weight = wild((6, 256), seed=11), fp8_weight(40, 256)
    one = linear(x[2:3], weight, FP32)
    assert_bitwise(linear(x[2:3].expand(6, 256), weight, FP32), one.expand(6, 40))
    plain = normal((40, 256), BF16, seed=12)
    assert_bitwise(linear(transposed(x), transposed(plain), FP32), linear(x, plain, FP32))


def mixed_bundle(width=256):
    weights = [
        fp8_weight(200, width, seed=13),
        normal((24, width), BF16, seed=14),
        fp8_weight(64, width, seed=15),
        normal((130, width), BF16, seed=16),
    ]
    return weights, LinearBundle.build(weights), (None, FP32, FP32, None)


@pytest.mark.parametrize("num_tokens", [1, 9, 70])
def test_a_bundle_is_its_weights_one_by_one(num_tokens):
    weights, bundle, dtypes = mixed_bundle()
    x = wild((num_tokens, 256), seed=17)
    results = linears(x, bundle, dtypes)
    for result, weight, dtype in zip(results, weights, dtypes, strict=True):
        assert result.is_contiguous()
        assert_bitwise(result, linear(x, weight, dtype))
        assert_follows_oracle(result, x, weight, dtype or BF16)
    for result, other in zip(results, linears(x, bundle, dtypes, codes_of(x)), strict=True):
        assert_bitwise(other, result, "with codes")
    for result, other in zip(results, linears(x, weights, dtypes), strict=True):
        assert_bitwise(other, result, "a list")


def test_a_bundle_s_views_are_its_weights():
    weights, bundle, dtypes = mixed_bundle()
    for view, weight in zip(bundle.weights, weights, strict=True):
        if isinstance(weight, QuantTensor):
            assert_bitwise(view.dequantize(), weight.dequantize())
            assert view.data.untyped_storage().data_ptr() == bundle.fp8.data.untyped_storage().data_ptr()
        else:
            assert_bitwise(view, weight)
    x = wild((3, 256), seed=18)
    for one, other in zip(linears_ref(x, bundle, dtypes), linears_ref(x, weights, dtypes, codes_of(x)), strict=True):
        assert_bitwise(one, other)


def test_an_fp8_bundle_takes_codes_alone():
    bundle = LinearBundle.build([fp8_weight(70, 256, seed=19), fp8_weight(24, 256, seed=20)])
    x = wild((5, 256), seed=21)
    for one, other in zip(linears(codes_of(x), bundle, (None, FP32)), linears(x, bundle, (None, FP32)), strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("kind", ["fp8", "fp8 with fp32 scales", "bf16"])
@pytest.mark.parametrize(("rank", "width"), [(64, 256), (128, 2304), (72, 384), (24, 128)])
def test_grouped_follows_the_oracle(rank, width, kind):
    x = normal((5, 3, width), BF16, seed=22)
    weight = normal((3 * rank, width), BF16, seed=23)
    if kind != "bf16":
        weight = fp8_weight(3 * rank, width, kind != "fp8", seed=24)
    ready = prepare_grouped(weight, 3)
    assert isinstance(ready, ShuffledTensor) == (rank % 64 == 0 and kind == "fp8")

    def oracle(dtype):
        if dtype != torch.float64:
            return grouped_linear_ref(x, weight)
        plain = weight.dequantize(BF16) if isinstance(weight, QuantTensor) else weight
        return torch.einsum("tgk,grk->tgr", x.double(), plain.double().unflatten(0, (3, rank)))

    assert_close_to_oracle(grouped_linear(x, ready), oracle)
    assert_bitwise(grouped_linear_ref(x, ready), grouped_linear_ref(x, weight))


def few_grouped(num_tokens, width=2304, rank=64, num_groups=2):
    weight = fp8_weight(num_groups * rank, width, seed=41)
    weight.scale[0, 1] += 60  # scales that are far apart
    return normal((num_tokens, num_groups, width), BF16, seed=42), weight, shuffle(weight)


@pytest.mark.parametrize("num_tokens", [1, 17, 70])
def test_a_shuffled_weight_is_the_weight(num_tokens):
    """Two splits of 9 tiles."""
    x, weight, ready = few_grouped(num_tokens)
    assert num_splits(*weight.shape, "grouped") == 2
    assert_bitwise(widened(ready), weight.dequantize(BF16))
    result = launch_shuffled(x, ready)
    assert_close_to_oracle(result, lambda dtype: grouped_linear_ref(x.to(dtype), weight).to(dtype))
    assert_bitwise(launch_shuffled(strided(x, 0), ready), result, "strided")
    assert_bitwise(launch_shuffled(transposed(x), ready), result, "transposed")
    assert_bitwise(grouped_linear(padded_rows(x, 3), ready)[:num_tokens], result, "padded")
    x[0, 1, 5] = float("nan")
    spoilt = launch_shuffled(x, ready)
    assert spoilt[0, 1].isnan().all()
    assert_bitwise(spoilt[0, 0], result[0, 0])
    assert_bitwise(spoilt[1:], result[1:])
    assert (arrival_counters("linear", x.device) == 0).all()


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 2304), (5, 256), (17, 256)], ids=["splits", "none", "many"])
def test_codes_of_a_grouped_result(num_tokens, width):
    """Codes made by the last of two tiles, or in a launch of their own, are those of the result."""
    x, weight, ready = few_grouped(num_tokens, width, rank=128)
    hostile = (strided(x, 0), padded_rows(x, 2), wild(x.shape, BF16, seed=45)) if width == 256 else ()
    for place, given in enumerate((x, *hostile)):
        found, expected = grouped_codes(given, ready), codes_of(grouped_linear(given, ready).flatten(1))
        assert_bitwise(found.codes, expected.codes, f"codes {place}")
        assert_bitwise(found.scale, expected.scale, f"scales {place}")
    oracle, expected = grouped_codes_ref(x, weight), codes_of(grouped_linear_ref(x, weight).flatten(1))
    assert_bitwise(oracle.codes, expected.codes)
    assert grouped_codes(x[:0], ready).codes.shape == (0, 256)
    assert (arrival_counters("linear", x.device) == 0).all()


def test_a_shuffled_weight_s_other_sizes():
    x, _, ready = few_grouped(3, width=2176)  # 17 tiles: splits of 9 and 8
    plain = widened(ready)
    exact = [integers(x.shape, 8, seed=43), integers(plain.shape, 8, seed=44)]
    scale = torch.full((1, 17), 127, dtype=torch.uint8, device=x.device)
    codes = QuantTensor(exact[1].to(torch.float8_e4m3fn), scale, QuantFormat.FP8_BLOCK)
    for tile in SHUFFLED_ROW_TILES[:1]:
        assert_bitwise(launch_shuffled(exact[0], shuffle(codes), tile), grouped_linear_ref(exact[0], codes))
    for tile in (GROUPED_ROW_TILES[0], GROUPED_ROW_TILES[-1]):
        assert_bitwise(launch_grouped(*exact, tile), grouped_linear_ref(*exact))
    assert launch_shuffled(x[:0], ready).shape == (0, 2, 64)
    with pytest.raises(KernelInputError, match="expected groups of whole tiles"):
        launch_shuffled(x.flatten(0, 1).unflatten(0, (-1, 1)).expand(6, 4, 2176), ready)


def test_two_row_tiles_a_program():
    """128 outputs of a shuffled weight at once; where a group has fewer, 64."""
    for rank in (128, 64):
        x, _, ready = few_grouped(17, rank=rank)
        tile = linear_config.LinearTile(128, 16, 8, 2, 2)
        assert_bitwise(launch_shuffled(x, ready, tile), launch_shuffled(x, ready), f"groups of {rank}")


def test_grouped_strides_and_odd_widths():
    x, weight = normal((5, 2, 77), BF16, seed=25), normal((2 * 24, 77), BF16, seed=26)
    assert_close_to_oracle(grouped_linear(x, weight), lambda dtype: grouped_linear_ref(x.to(dtype), weight.to(dtype)))
    assert_bitwise(grouped_linear(strided(x, 0), weight), grouped_linear(x, weight))
    assert_bitwise(grouped_linear(transposed(x), weight), grouped_linear(x, weight))
    # a NaN in one group stays in that group of that token
    x[3, 1, 0] = float("nan")
    is_nan = grouped_linear(x, weight).isnan()
    assert is_nan[3, 1].all()
    assert is_nan.sum() == 24


def test_nan_rows_stay_in_their_row():
    weight = fp8_weight(40, 256)
    for kind in (weight, normal((40, 256), BF16, seed=27)):
        x = normal((20, 256), BF16, seed=28)
        clean = linear(x, kind, FP32)
        x[7] = float("nan")
        x[11, 3] = float("inf")
        others = [row for row in range(20) if row not in (7, 11)]
        result = linear(x, kind, FP32)
        assert_bitwise(result[others], clean[others])
        assert result[7].isnan().all()


def integers(shape, limit, seed):
    values = torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(BF16).to(kernel_device())


@pytest.mark.parametrize("tile", [*ROW_TILES[-3:]], ids=["weights first", "tokens first", "walking the splits"])
def test_tiles_and_forms_agree(tile):
    """Integers small enough that every sum is exact in any order: only a wrong place or scale can change a bit. That
    the order is the same too, the tests on a GPU show with ordinary values.
    """
    width = 2432  # three splits of either, the last ones shorter
    assert num_splits(200, width, "fp8") == 3
    assert num_splits(130, width, "plain") == 3
    weights = []
    for index, num_rows in enumerate((200, 64)):
        codes = integers((num_rows, width), 8, seed=index).to(torch.float8_e4m3fn)
        scale = 127 + integers((-(-num_rows // 128), width // 128), 2, seed=index + 5).to(torch.uint8)
        weights.append(QuantTensor(codes, scale, QuantFormat.FP8_BLOCK))
    weights += [integers((24, width), 8, seed=2), integers((130, width), 8, seed=3)]
    bundle, dtypes = LinearBundle.build(weights), (BF16, FP32, FP32, BF16)
    x = integers((20, width), 8, seed=29)
    for result, weight, dtype in zip(launch_linears(x, bundle, dtypes, tile=tile), weights, dtypes, strict=True):
        assert_bitwise(result, linear_ref(x, weight, dtype))


def test_the_counters_are_set_back():
    weight = fp8_weight(64, 4096)
    x = normal((3, 4096), BF16, seed=30)
    first = linear(x, weight, FP32)
    assert (arrival_counters("linear", x.device) == 0).all()
    assert_bitwise(linear(x, weight, FP32), first)


def test_rows_do_not_depend_on_the_batch():
    x, weight = wild((19, 2304), seed=31), fp8_weight(72, 2304)
    plain = normal((72, 2304), BF16, seed=32)
    order = torch.randperm(19).to(x.device)
    for kind in (weight, plain):
        whole = linear(x, kind, FP32)
        assert_bitwise(linear(x[order], kind, FP32), whole[order], "permuted")
        assert_bitwise(linear(padded_rows(x, 9), kind, FP32)[:19], whole, "padded")


def test_other_formats_go_to_the_oracle():
    x = normal((3, 128), FP32, seed=33)
    weight = normal((20, 128), FP32, seed=34)
    assert_bitwise(linear(x, weight), linear_ref(x, weight))
    assert_bitwise(grouped_linear(x.unflatten(0, (3, 1)), weight), grouped_linear_ref(x.unflatten(0, (3, 1)), weight))


def test_what_cannot_be_done_is_said():
    x, weight = normal((3, 256)), fp8_weight(40, 256)
    with pytest.raises(KernelInputError, match=r"expected an input \[T, 256\], found \(3, 128\)"):
        linear(x[:, :128], weight)
    with pytest.raises(ValueError, match="found FP8 codes"):
        linear(codes_of(x), normal((40, 256)))
    with pytest.raises(ValueError, match="of one scale dtype"):
        LinearBundle.build([weight, fp8_weight(40, 256, True)])
    with pytest.raises(ValueError, match="of one width"):
        LinearBundle.build([weight, normal((40, 128))])
    with pytest.raises(KernelInputError, match="expected 1 output dtypes, found 2"):
        linears(x, LinearBundle.build([weight]), (None, None))
    with pytest.raises(KernelInputError, match=r"expected a weight \[3 \* R, 256\]"):
        grouped_linear(x.unsqueeze(1).expand(3, 3, 256), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("fp32_scale", [False, True], ids=["e8m0", "fp32"])
@pytest.mark.parametrize(("num_rows", "width"), [(1024, 4096), (512, 7168), (8192, 1024), (4096, 8192), (1000, 1536)])
def test_rows_are_the_same_bits_from_1_to_512(num_rows, width, fp32_scale):
    """Every number of rows against one launch of 4,096: another tile, another order of operands, another form."""
    x, weight = normal((4096, width), seed=35), fp8_weight(num_rows, width, fp32_scale)
    codes = codes_of(x)
    whole = linear(codes, weight, FP32)
    assert_follows_oracle(whole[:300], x[:300], weight, FP32)
    for num_tokens in [*range(1, 66), *range(66, 513, 31), 511, 512, 513]:
        part = QuantActivation(codes.codes[:num_tokens], codes.scale[:num_tokens])
        assert_bitwise(linear(part, weight, FP32), whole[:num_tokens], f"{num_tokens} rows")
    for num_tokens in (1, 16, 17, 100):
        assert_bitwise(linear(x[:num_tokens], weight, FP32), whole[:num_tokens], f"{num_tokens} rows, quantised")


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1024, 4096), (256, 7168), (8200, 1024), (64, 4096)])
def test_bf16_rows_are_the_same_bits_from_1_to_512(num_rows, width):
    x, weight = normal((4096, width), seed=36), normal((num_rows, width), seed=37)
    whole = linear(x, weight, FP32)
    assert_follows_oracle(whole[:300], x[:300], weight, FP32)
    for num_tokens in [*range(1, 66), *range(66, 513, 31), 511, 512, 513]:
        assert_bitwise(linear(x[:num_tokens], weight, FP32), whole[:num_tokens], f"{num_tokens} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("is_shuffled", [True, False], ids=["shuffled", "bf16"])
@pytest.mark.parametrize(("num_groups", "rank", "width"), [(8, 1024, 4096), (16, 1024, 4096), (3, 320, 2176)])
def test_grouped_rows_are_the_same_bits(num_groups, rank, width, is_shuffled):
    """Of the shuffled weight in every tile, and of the bf16 weight that many rows make of it."""
    x, weight = normal((2048, num_groups, width), seed=38), fp8_weight(num_groups * rank, width)
    ready = prepare_grouped(weight, num_groups)
    assert isinstance(ready, ShuffledTensor)
    ready = ready if is_shuffled else widened(ready)
    whole = grouped_linear(x, ready)
    assert_close_to_oracle(whole[:16], lambda dtype: grouped_linear_ref(x[:16].to(dtype), weight).to(dtype))
    for num_tokens in [*range(1, 66), *range(66, 513, 31), 511, 512, 513]:
        assert_bitwise(grouped_linear(x[:num_tokens], ready), whole[:num_tokens], f"{num_tokens} rows")


@pytest.mark.gpu
def test_grouped_groups_that_end_inside_a_tile():
    x, weight = normal((600, 8, 4096), seed=38), fp8_weight(8 * 1000, 4096)
    assert prepare_grouped(weight, 8) is weight
    whole = grouped_linear(x, weight)
    assert_close_to_oracle(whole[:16], lambda dtype: grouped_linear_ref(x[:16].to(dtype), weight).to(dtype))
    for num_tokens in (1, 16, 17, 64, 65, 512):
        assert_bitwise(grouped_linear(x[:num_tokens], weight), whole[:num_tokens], f"{num_tokens} rows")


@pytest.mark.gpu
def test_the_attention_bundle_at_every_size():
    rows, plain_rows = (1024, 512), (1024, 1024, 256, 256, 64)
    weights = [fp8_weight(n, 4096, seed=n) for n in rows] + [normal((n, 4096), seed=n + 1) for n in plain_rows]
    bundle, dtypes = LinearBundle.build(weights), (BF16, BF16, FP32, FP32, FP32, FP32, BF16)
    x = normal((1024, 4096), seed=39)
    whole = linears(x, bundle, dtypes)
    for result, weight, dtype in zip(whole, weights, dtypes, strict=True):
        assert_bitwise(result, linear(x, weight, dtype))
    for num_tokens in (1, 2, 16, 17, 33, 64, 65, 300, 512, 513):
        for part, one in zip(linears(x[:num_tokens], bundle, dtypes), whole, strict=True):
            assert_bitwise(part, one[:num_tokens], f"{num_tokens} rows")


@pytest.mark.gpu
def test_grouped_tiles_agree():
    """The shuffled weight, and the same as bf16: products with the first operand in registers or in shared memory."""
    x, weight = normal((513, 8, 4096), seed=40), shuffle(fp8_weight(8192, 4096))
    plain = widened(weight)
    expected = launch_shuffled(x, weight, SHUFFLED_ROW_TILES[0])
    for tile in SHUFFLED_ROW_TILES:
        assert_bitwise(launch_shuffled(x, weight, tile), expected, f"{tile.outputs} x {tile.tokens}, shuffled")
    for tile in GROUPED_ROW_TILES:
        assert_bitwise(launch_grouped(x, plain, tile), expected, f"{tile.outputs} x {tile.tokens}")


@pytest.mark.gpu
def test_norms_that_begin_early_behind_products():
    """A norm may begin before the product it reads has ended: in a graph, again and again, the same bits as with every
    launch waited for.
    """
    weights = [fp8_weight(4096, 4096, seed=45), fp8_weight(4096, 4096, seed=46)]
    grouped = shuffle(fp8_weight(4096, 1024, seed=47))
    x = normal((5, 4096), seed=48)

    def chain(after_each):
        y = x
        for step in range(12):
            y = linear(y, weights[step % 2])
            after_each()
            y = rms_norm(y, None, 1e-6)
            after_each()
            y = grouped_linear(y.unflatten(1, (4, 1024)), grouped).flatten(1)
            after_each()
            y = rms_norm(y, None, 1e-6)
            after_each()
        return y

    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all()
    assert_bitwise(chain(lambda: None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(lambda: None)
    for _ in range(20):
        result.zero_()
        graph.replay()
        assert_bitwise(result, expected)
