"""The MoE kernels: weights decoded bit for bit, sublayers against the oracle, rows independent of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.formats.fp4 import mxfp4_quantize, nvfp4_quantize, pack_nibbles
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.layouts import shuffle
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.ops.arrivals import arrival_counters
from dsv4.ops.linear import linear_ref
from dsv4.ops.moe import (
    GemmConfig,
    MoeConfig,
    Ranges,
    fp4_linear,
    launch_fp4_linear,
    launch_moe,
    moe,
    moe_ref,
    prepare_experts,
)
from dsv4.ops.tl_fp4 import decode_tile, load_words
from dsv4.ops.tl_utils import KernelInputError, jit, tl
from dsv4.testing.inputs import generator, kernel_device, normal, padded_rows, poison, strided
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

LIMIT = 10.0
DIM, WIDTH, EXPERTS, TOP_K = 256, 128, 5, 2
# interpreted steps cost the same whatever their size: large blocks, few sub-tiles
PLAIN, WIDE = GemmConfig(block=64, unroll=1), GemmConfig(block=128, unroll=1)
ONE_TILE, MANY_TILES = MoeConfig(32, 32, WIDE, WIDE), MoeConfig(8, 8, PLAIN, WIDE)
SPLIT = MoeConfig(8, 8, replace(PLAIN, split=True), replace(WIDE, split=True))


def nvfp4(weight):
    data, scale, given = zip(*(nvfp4_quantize(matrix) for matrix in weight), strict=True)
    return QuantTensor(torch.stack(data), torch.stack(scale), QuantFormat.NVFP4, torch.stack(given))


def mxfp4(weight):
    return QuantTensor(*mxfp4_quantize(weight), QuantFormat.MXFP4)


def fp8(weight):
    return QuantTensor(*fp8_block_quantize(weight, (128, 128)), QuantFormat.FP8_BLOCK)


def experts_of(make, num_experts=EXPERTS, dim=DIM, width=WIDTH, seed=0):
    """(w1, w2, w3), plain numbers of which some products pass the limit."""
    shapes = ((width, dim), (dim, width), (width, dim))
    stack = () if num_experts is None else (num_experts,)
    scale = 0.25 * (256 / dim) ** 0.5
    return tuple(
        make(normal((*stack, *shape), torch.float32, seed=seed + index).cpu() * scale).to(kernel_device())
        for index, shape in enumerate(shapes)
    )


LAYERS = {
    name: (experts_of(make), experts_of(fp8, None, seed=10)) for name, make in (("nvfp4", nvfp4), ("mxfp4", mxfp4))
}
READY = {name: tuple(prepare_experts(part) for part in layer) for name, layer in LAYERS.items()}


def choices(tokens, num_experts=EXPERTS, top_k=TOP_K, seed=0):
    scores = torch.rand(tokens, num_experts, generator=generator(seed))
    return scores.topk(top_k).indices.sort(-1).values.to(kernel_device())


def inputs(tokens, dim=DIM, seed=0):
    x = normal((tokens, dim), seed=seed)
    weights = torch.rand(tokens, TOP_K, generator=generator(seed + 1)).to(x.device)
    return x, choices(tokens, seed=seed), weights


def assert_follows_oracle(out, x, experts, weights, layer):
    assert_close_to_oracle(out, lambda dtype: moe_ref(x.to(dtype), experts, weights, *layer, limit=LIMIT))


# ---- decode ----


@jit
def _decode_kernel(data_ptr, scale_ptr, out_ptr, K: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    first_row = tl.program_id(0) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    for k_tile in range(K // 128):
        words, low, high = load_words(data_ptr, scale_ptr, first_row, k_tile, K // 128, ROWS, FORMAT)
        tile = decode_tile(words, low, high, FORMAT)
        tl.store(out_ptr + rows[:, None] * K + k_tile * 128 + tl.arange(0, 128)[None, :], tile)


def decoded(weight, number, rows=64):
    """Values of a shuffled matrix as the kernels see them, times what the epilogue multiplies with."""
    ready = shuffle(weight)
    num_rows, num_cols = weight.shape
    out = torch.empty(num_rows, num_cols, dtype=torch.bfloat16, device=weight.device)
    _decode_kernel[(num_rows // rows,)](ready.data, ready.scale, out, K=num_cols, ROWS=rows, FORMAT=number)
    return out.float() * ready.out_scale


def all_nibbles(rows, cols):
    """Every nibble in every plane and word: the columns' order turns by one from row to row."""
    nibbles = (
        torch.arange(cols).unsqueeze(0) + torch.arange(cols).unsqueeze(0) // 16 + torch.arange(rows).unsqueeze(1)
    ) % 16
    return pack_nibbles(nibbles.to(torch.uint8))


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_every_nvfp4_scale_and_nibble(rows):
    """127 scales that are numbers (128 rows of one scale in all groups, then mixed), 16 nibbles."""
    scale = (torch.arange(128).unsqueeze(1) + torch.arange(16).unsqueeze(0) * 8) % 127
    weight = QuantTensor(
        all_nibbles(128, 256), scale.to(torch.uint8).view(torch.float8_e4m3fn), QuantFormat.NVFP4, torch.tensor(0.25)
    ).to(kernel_device())
    expected = weight.dequantize()
    assert_bitwise(decoded(weight, 0, rows) + 0.0, expected + 0.0)  # + 0.0: a hidden nibble loses the sign of its zero


def test_every_mxfp4_scale_that_fits_and_nibble():
    scale = 60 + (torch.arange(128).unsqueeze(1) + torch.arange(8).unsqueeze(0)) % 126
    weight = QuantTensor(all_nibbles(128, 256), scale.to(torch.uint8), QuantFormat.MXFP4).to(kernel_device())
    assert_bitwise(decoded(weight, 1), weight.dequantize())


def test_every_fp8_code():
    codes = (torch.arange(256).unsqueeze(0) + torch.arange(128).unsqueeze(1)) % 256
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 101]], dtype=torch.uint8)
    weight = QuantTensor(codes, scale, QuantFormat.FP8_BLOCK).to(kernel_device())
    assert_bitwise(decoded(weight, 2), weight.dequantize())


# ---- the sublayer ----


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_follows_the_oracle(name, tokens):
    given = inputs(tokens, seed=tokens)
    out = launch_moe(*given, *READY[name], LIMIT, MANY_TILES)
    assert_follows_oracle(out, *given, LAYERS[name])
    if tokens == 1:
        assert_bitwise(moe(*given, *READY[name], limit=LIMIT), out, "as divided by default")


def test_any_division_gives_the_same_bits(monkeypatch):
    """Hidden rounded by its writer or its reader, tiles of 8 to 64 rows, pairs sorted by a launch, or two, or none."""
    given, layer = inputs(3, seed=40), READY["mxfp4"]
    expected = launch_moe(*given, *layer, LIMIT, MANY_TILES)
    assert_bitwise(launch_moe(*given, *layer, LIMIT, ONE_TILE), expected, "rounded by the writer")
    assert_bitwise(launch_moe(*given, *layer, LIMIT, SPLIT), expected, "ranges apart")
    monkeypatch.setattr("dsv4.ops.moe.NUM_COUNTERS", 0)
    assert_bitwise(launch_moe(*given, *layer, LIMIT, replace(ONE_TILE, rows=64)), expected, "sorted")
    monkeypatch.setattr("dsv4.ops.moe.COUNT_FIRST", 0)
    assert_bitwise(launch_moe(*given, *layer, LIMIT, MANY_TILES), expected, "counted and sorted")


@pytest.mark.parametrize("ranges", [Ranges(1, 2, 1, 2), Ranges(2, 1, 2, 1), Ranges(2, 4, 2, 3)])
def test_ranges_by_programs_or_in_one(ranges):
    """Sums of ranges, added by the last program to arrive or inside one. Three of two column tiles are two."""
    layer = tuple(prepare_experts(experts_of(make, count, 256, 256)) for make, count in ((nvfp4, 2), (fp8, None)))
    x, _, weights = inputs(1, seed=42)
    experts = torch.tensor([[0, 1]], device=x.device)
    block = GemmConfig(block=128, unroll=1)
    whole = launch_moe(x, experts, weights, *layer, LIMIT, MoeConfig(8, 8, block, block, ranges))
    block = replace(block, split=True)
    assert_bitwise(launch_moe(x, experts, weights, *layer, LIMIT, MoeConfig(8, 8, block, block, ranges)), whole)


def test_a_tile_that_is_at_most_half_full_is_a_smaller_one(monkeypatch):
    """Sorted: of 11 rows of one expert and 2 of another, tiles of 16 rows, with ranges in one program or apart."""
    x, _, weights = inputs(11, seed=43)
    experts = torch.tensor([[1, -1]], device=x.device).repeat(11, 1)
    experts[3:5, 1] = 3
    expected = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, MANY_TILES)
    monkeypatch.setattr("dsv4.ops.moe.NUM_COUNTERS", 20)  # enough for the blocks of tiles, not for those of tokens
    for config in (replace(MANY_TILES, rows=16), replace(SPLIT, rows=16)):
        assert_bitwise(launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, config), expected, str(config))


def test_counters_are_set_back():
    given = inputs(3, seed=41)
    launch_moe(*given, *READY["nvfp4"], LIMIT, SPLIT)
    assert not arrival_counters("moe", given[0].device).any()
    assert not arrival_counters("moe gate and up", given[0].device).any()


def test_a_wrong_expert_would_be_seen():
    x, experts, weights = inputs(9, seed=3)
    wrong = experts.clone()
    wrong[4, 0] = (set(range(EXPERTS)) - set(experts[4].tolist())).pop()
    out = launch_moe(x, wrong, weights, *READY["nvfp4"], LIMIT, ONE_TILE)
    with pytest.raises(AssertionError, match="error"):
        assert_follows_oracle(out, x, experts, weights, LAYERS["nvfp4"])


def test_all_tokens_on_two_experts():
    x, _, weights = inputs(9, seed=4)
    experts = torch.tensor([[1, 3]], device=x.device).repeat(9, 1)
    out = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, MANY_TILES)
    assert_follows_oracle(out, x, experts, weights, LAYERS["nvfp4"])


def test_a_row_does_not_depend_on_the_batch():
    x, experts, weights = inputs(10, seed=5)
    layer = READY["nvfp4"]
    whole = launch_moe(x, experts, weights, *layer, LIMIT, MANY_TILES)
    order = torch.randperm(10, generator=generator(6)).to(x.device)
    turned = launch_moe(x[order], experts[order], weights[order], *layer, LIMIT, MANY_TILES)
    assert_bitwise(turned, whole[order], "permuted")
    single = launch_moe(x[9:], experts[9:], weights[9:], *layer, LIMIT, MANY_TILES)
    assert_bitwise(single, whole[9:], "alone")
    wide = padded_rows(x, 3)
    more = torch.cat((experts, torch.full((3, TOP_K), -1, device=x.device)))
    weights = torch.cat((weights, torch.full((3, TOP_K), float("nan"), device=x.device)))
    poison(wide[10:])
    assert_bitwise(launch_moe(wide, more, weights, *layer, LIMIT, MANY_TILES)[:10], whole, "padded")


def test_a_choice_left_out_is_a_choice_of_weight_zero():
    x, experts, weights = inputs(3, seed=7)
    fewer, zeros = experts.clone(), weights.clone()
    fewer[0, 0], fewer[1, 1], fewer[2] = -1, EXPERTS, -1
    zeros[0, 0] = zeros[1, 1] = 0.0
    zeros[2] = 0.0
    found = launch_moe(x, fewer, weights, *READY["nvfp4"], LIMIT, ONE_TILE)
    expected = launch_moe(x, experts, zeros, *READY["nvfp4"], LIMIT, ONE_TILE)
    assert_bitwise(found + 0.0, expected + 0.0)


def test_strided_inputs_and_int32_experts():
    x, experts, weights = inputs(2, seed=8)
    expected = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, ONE_TILE)
    found = launch_moe(strided(x, 0), strided(experts.int(), 0), strided(weights, 1), *READY["nvfp4"], LIMIT, ONE_TILE)
    assert_bitwise(found, expected)


def test_no_tokens():
    x, experts, weights = inputs(3)
    assert moe(x[:0], experts[:0], weights[:0], *READY["nvfp4"], limit=LIMIT).shape == (0, DIM)


def test_the_limit_is_used():
    given = inputs(2, seed=9)
    x, experts, weights = given
    out = launch_moe(*given, *READY["nvfp4"], 0.5, ONE_TILE)
    assert_close_to_oracle(
        out, lambda dtype: moe_ref(x.to(dtype), experts, weights, *LAYERS["nvfp4"], limit=0.5)
    )  # fmt: skip


def test_rejects():
    x, experts, weights = inputs(3)
    routed, shared = READY["nvfp4"]
    with pytest.raises(KernelInputError, match="expected weights from prepare_experts, found QuantTensor"):
        launch_moe(x, experts, weights, *LAYERS["nvfp4"], LIMIT, ONE_TILE)
    with pytest.raises(KernelInputError, match="in bf16, found torch.float32"):
        moe(x.float(), experts, weights, routed, shared, limit=LIMIT)
    with pytest.raises(KernelInputError, match=r"expected experts and weights \[3, k\]"):
        moe(x, experts[:2], weights, routed, shared, limit=LIMIT)
    with pytest.raises(KernelInputError, match="int32 or int64"):
        moe(x, experts.to(torch.int16), weights, routed, shared, limit=LIMIT)
    with pytest.raises(KernelInputError, match=r"expected a weight \(5, 128, 256\), found \(5, 256, 128\)"):
        moe(x, experts, weights, (routed[0], routed[1], routed[1]), shared, limit=LIMIT)
    with pytest.raises(KernelInputError, match="one FP4 format"):
        moe(x, experts, weights, (routed[0], READY["mxfp4"][0][1], routed[2]), shared, limit=LIMIT)
    flat = tuple(replace(weight, shape=weight.shape[1:]) for weight in routed)
    with pytest.raises(KernelInputError, match="expected a shared expert in FP8"):
        moe(x, experts, weights, routed, flat, limit=LIMIT)


# ---- one linear ----


@pytest.mark.parametrize("make", [nvfp4, mxfp4])
@pytest.mark.parametrize(("rows", "out_dtype"), [(1, None), (17, torch.float32)])
def test_linear(make, rows, out_dtype):
    weight = make(normal((1, 96, 256), torch.float32, seed=1).cpu())[0].to(kernel_device())
    x = normal((rows, 256), seed=2)
    out = launch_fp4_linear(x, shuffle(weight), out_dtype, 16, PLAIN)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert_close_to_oracle(out.bfloat16(), lambda dtype: linear_ref(x.to(dtype), weight))


def test_linear_with_columns_beside_the_tile():
    weight = nvfp4(normal((1, 40, 160), torch.float32, seed=3).cpu())[0].to(kernel_device())
    wide = torch.full((3, 320), float("nan"), dtype=torch.bfloat16, device=kernel_device())
    wide[:, :160] = normal((3, 160), seed=4)
    out = fp4_linear(wide[:, :160], shuffle(weight))
    assert_close_to_oracle(out, lambda dtype: linear_ref(wide[:, :160].to(dtype), weight))
    assert fp4_linear(wide[:0, :160], shuffle(weight)).shape == (0, 40)


def test_linear_rejects():
    weight = shuffle(LAYERS["nvfp4"][0][0][0])
    with pytest.raises(KernelInputError, match=r"expected x \[T, 256\]"):
        fp4_linear(normal((2, 128)), weight)
    with pytest.raises(KernelInputError, match="NVFP4 or MXFP4 weight"):
        fp4_linear(normal((2, 256)), READY["nvfp4"][1][0])


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("dim", "width"), [(4096, 2048), (7168, 3072)])
def test_real_sizes(name, dim, width):
    """Rows of 1 to 513 tokens are the same bits; a few of them against the oracle."""
    make = {"nvfp4": nvfp4, "mxfp4": mxfp4}[name]
    layer = experts_of(make, 8, dim, width), experts_of(fp8, None, dim, width, seed=10)
    ready = tuple(prepare_experts(part) for part in layer)
    x = normal((513, dim), seed=1)
    experts = choices(513, 8, 6, seed=2)
    weights = torch.rand(513, 6, generator=generator(3)).to(x.device)
    whole = moe(x, experts, weights, *ready, limit=LIMIT)
    for tokens in (1, 2, 5, 9, 16, 21, 22, 64, 100, 256, 512):
        given = x[:tokens], experts[:tokens], weights[:tokens]
        assert_bitwise(moe(*given, *ready, limit=LIMIT), whole[:tokens], f"{tokens} tokens")
    assert_bitwise(moe(x[500:], experts[500:], weights[500:], *ready, limit=LIMIT), whole[500:], "the last")
    rows = slice(0, 8)
    assert_follows_oracle(whole[rows], x[rows], experts[rows], weights[rows], layer)
