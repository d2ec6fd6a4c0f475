"""The MoE kernels: weights decoded bit for bit, sublayers against the oracle, rows independent of the batch."""

from dataclasses import replace

import pytest
import torch
from quantised_weights import fp8, mxfp4, nvfp4

from dsv4.formats.fp4 import pack_nibbles
from dsv4.formats.fp8 import fp8_fake_quantize
from dsv4.formats.layouts import shuffle
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantFormat, QuantTensor
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.ops.lib.fp4 import decode_tile, load_words
from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.linear import linear_ref
from dsv4.ops.moe import (
    FEW_CONFIG,
    FEW_TOKENS,
    NARROW_ROWS,
    WIDE_CONFIG,
    Form,
    GemmConfig,
    MoeConfig,
    Ranges,
    fp4_linear,
    launch_fp4_linear,
    launch_moe,
    moe,
    moe_ref,
    pick_moe_config,
    prepare_experts,
)
from dsv4.ops.moe.kernel_products import in_order
from dsv4.testing.inputs import generator, kernel_device, normal, padded_rows, poison, strided
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

LIMIT = 10.0
DIM, WIDTH, EXPERTS, TOP_K = 256, 128, 5, 2
ONE = GemmConfig(unroll=1)  # a column tile a step
FEW = MoeConfig(Form.FEW, 8, 8, ONE, ONE)
NARROW = MoeConfig(Form.NARROW, 8, 8, ONE, ONE)
WIDE = MoeConfig(Form.WIDE, 32, 32, ONE, ONE)
# two sub-tiles of rows, the shared expert's hidden rounded by its writer
ROUNDED = MoeConfig(Form.NARROW, 16, 32, ONE, ONE, rounds_shared=True)


def experts_of(make, num_experts=EXPERTS, dim=DIM, width=WIDTH, seed=0):
    """(w1, w2, w3), plain numbers of which some products pass the limit."""
    shapes = ((width, dim), (dim, width), (width, dim))
    stack = () if num_experts is None else (num_experts,)
    scale = 0.25 * (256 / dim) ** 0.5
    return tuple(
        make(normal((*stack, *shape), torch.float32, seed=seed + index) * scale) for index, shape in enumerate(shapes)
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


# ---- the order of products ----


@jit
def _order_kernel(x_ptr, out_ptr, C: tl.constexpr, ORDER: tl.constexpr):
    places = tl.arange(0, 2)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out_ptr + places, in_order(tl.load(x_ptr + places), ORDER))


def columns_in_order(order):
    x = torch.arange(256, dtype=torch.int32, device=kernel_device())
    out = torch.empty_like(x)
    _order_kernel[(1,)](x, out, C=128, ORDER=order)
    return out.tolist()


def test_product_order_takes_16_of_32_columns_with_bit_1_clear_then_16_with_it_set():
    sets = [
        [col for col in range(first, first + 32) if (col >> 1) % 2 == bit]
        for first in range(0, 256, 32)
        for bit in (0, 1)
    ]
    assert columns_in_order(1) == [col for cols in sets for col in cols]
    assert columns_in_order(0) == list(range(256))


def test_operand_order_has_both_pairs_of_one_mma_then_those_of_the_next():
    """Of 32 columns a thread has four neighbours of each half; an MMA takes a pair of both."""
    threads = [first + 4 * thread for first in range(0, 256, 32) for thread in range(4)]
    pairs = [own + 2 * mma + half for own in threads for mma in range(2) for half in (0, 16)]
    assert columns_in_order(2) == [col for pair in pairs for col in (pair, pair + 1)]


@pytest.mark.parametrize("make", [nvfp4, mxfp4], ids=["nvfp4", "mxfp4"])
def test_every_column_meets_its_weight(make):
    """Row n of the weight is 2^(n % 3) at column n alone, in the wide form."""
    values = 2.0 ** (torch.arange(256) % 3)
    weight = make(torch.diag(values).unsqueeze(0))[0].to(kernel_device())
    x = (torch.arange(3 * 256, device=weight.device).reshape(3, 256) % 127 + 1).bfloat16()
    out = launch_fp4_linear(x, shuffle(weight), torch.float32, 16, ONE, wide=True)
    assert_bitwise(out, linear_ref(x, weight, torch.float32))


# ---- the sublayer ----


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_follows_the_oracle(name, tokens):
    given = inputs(tokens, seed=tokens)
    out = launch_moe(*given, *READY[name], LIMIT, FEW)
    assert_follows_oracle(out, *given, LAYERS[name])
    if tokens == 1:
        assert_bitwise(moe(*given, *READY[name], limit=LIMIT), out, "as divided by default")
    else:
        assert_bitwise(launch_moe(*given, *READY[name], LIMIT, WIDE), out, "wide")
        assert_bitwise(launch_moe(*given, *READY[name], LIMIT, ROUNDED), out, "narrow")


def test_any_division_gives_the_same_bits(monkeypatch):
    """Hidden rounded by its writer or its reader, tiles of 8 or 16 rows, pairs sorted by a launch, or two, or none."""
    given, layer = inputs(3, seed=40), READY["mxfp4"]
    expected = launch_moe(*given, *layer, LIMIT, FEW)
    assert_bitwise(launch_moe(*given, *layer, LIMIT, NARROW), expected, "rounded by the reader")
    assert_bitwise(launch_moe(*given, *layer, LIMIT, ROUNDED), expected, "rounded by the writer")
    monkeypatch.setattr("dsv4.ops.moe.launch.COUNT_FIRST", 0)
    assert_bitwise(launch_moe(*given, *layer, LIMIT, WIDE), expected, "counted and sorted")


def test_halves_of_several_column_tiles():
    """Four of them, two and four ranges: the first half's sums are set aside where its last range ends."""
    layer = tuple(prepare_experts(experts_of(make, count, 128, 512)) for make, count in ((nvfp4, 2), (fp8, None)))
    x, _, weights = inputs(2, 128, seed=45)
    experts = torch.tensor([[0, 1], [1, -1]], device=x.device)
    for ranges in (Ranges(1, 2, 2, 2), Ranges(1, 2, 1, 4)):
        expected = launch_moe(x, experts, weights, *layer, LIMIT, replace(FEW, ranges=ranges))
        found = launch_moe(x, experts, weights, *layer, LIMIT, replace(NARROW, ranges=ranges))
        assert_bitwise(found, expected, str(ranges))


def test_the_form_follows_the_number_of_tokens():
    assert pick_moe_config(FEW_TOKENS, 6, 256, 2048) == FEW_CONFIG
    assert pick_moe_config(FEW_TOKENS, 32, 256, 2048).form is Form.NARROW, "more choices than a CTA looks through"
    assert pick_moe_config(NARROW_ROWS, 6, 8, 2048).form is Form.NARROW
    assert pick_moe_config(NARROW_ROWS, 6, 8, 2048).rows == 16
    assert pick_moe_config(NARROW_ROWS + 1, 6, 256, 2048) == WIDE_CONFIG
    assert pick_moe_config(NARROW_ROWS + 1, 6, 256, 128).form is Form.NARROW
    assert pick_moe_config(4096, 6, 256, 2048) == WIDE_CONFIG, "other sizes than those that tiles were timed with"
    assert pick_moe_config(4096, 6, 256, 2048, has_tiles=True).form is Form.TILES


@pytest.mark.parametrize("counts", [(1, 17, 0, 9, 33), (16, 24, 8, 25, 32)])
def test_wide_tiles_of_every_fullness(counts):
    """Tiles of 32 rows, at most half full ones computed as 16: the last row of each expert has the bits of FEW."""
    experts = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts)).unsqueeze(1).to(kernel_device())
    x, weights = normal((len(experts), DIM), seed=51), torch.ones(experts.shape, device=experts.device)
    out = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, WIDE)
    last = torch.tensor([sum(counts[: index + 1]) - 1 for index in range(EXPERTS)], device=x.device)
    expected = launch_moe(x[last], experts[last], weights[last], *READY["nvfp4"], LIMIT, FEW)
    assert_bitwise(out[last], expected)


@pytest.mark.parametrize("ranges", [Ranges(1, 2, 1, 2), Ranges(2, 1, 2, 1), Ranges(2, 4, 2, 3)])
def test_ranges_by_programs_or_in_one(ranges):
    """Sums of ranges, added by the last CTA to arrive or inside one. Three of two column tiles are two."""
    layer = tuple(prepare_experts(experts_of(make, count, 256, 256)) for make, count in ((nvfp4, 2), (fp8, None)))
    x, _, weights = inputs(1, seed=42)
    experts = torch.tensor([[0, 1]], device=x.device)
    whole, *others = (
        launch_moe(x, experts, weights, *layer, LIMIT, replace(config, ranges=ranges)) for config in (NARROW, FEW, WIDE)
    )
    for config, found in zip((FEW, WIDE), others, strict=True):
        assert_bitwise(found, whole, str(config.form))


def test_a_tile_that_is_at_most_half_full_is_a_smaller_one():
    """Sorted: of 11 rows of one expert and 2 of another, tiles of 16 rows; where CTAs look for rows, of 8."""
    x, _, weights = inputs(11, seed=43)
    experts = torch.tensor([[1, -1]], device=x.device).repeat(11, 1)
    experts[3:5, 1] = 3
    expected = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, NARROW)
    for config in (replace(NARROW, rows=16), FEW):
        assert_bitwise(launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, config), expected, str(config))


def test_counters_are_set_back():
    given = inputs(3, seed=41)
    launch_moe(*given, *READY["nvfp4"], LIMIT, FEW)
    assert not arrival_counters("moe", given[0].device).any()
    assert not arrival_counters("moe gate and up", given[0].device).any()


def test_a_wrong_expert_would_be_seen():
    x, experts, weights = inputs(9, seed=3)
    wrong = experts.clone()
    wrong[4, 0] = (set(range(EXPERTS)) - set(experts[4].tolist())).pop()
    out = launch_moe(x, wrong, weights, *READY["nvfp4"], LIMIT, WIDE)
    with pytest.raises(AssertionError, match="error"):
        assert_follows_oracle(out, x, experts, weights, LAYERS["nvfp4"])


def test_all_tokens_on_two_experts():
    x, _, weights = inputs(9, seed=4)
    experts = torch.tensor([[1, 3]], device=x.device).repeat(9, 1)
    out = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, NARROW)
    assert_follows_oracle(out, x, experts, weights, LAYERS["nvfp4"])


@pytest.mark.parametrize("config", [ROUNDED, WIDE])
def test_a_row_does_not_depend_on_the_batch(config):
    x, experts, weights = inputs(10, seed=5)
    layer = READY["nvfp4"]
    whole = launch_moe(x, experts, weights, *layer, LIMIT, config)
    order = torch.randperm(10, generator=generator(6)).to(x.device)
    turned = launch_moe(x[order], experts[order], weights[order], *layer, LIMIT, config)
    assert_bitwise(turned, whole[order], "permuted")
    single = launch_moe(x[9:], experts[9:], weights[9:], *layer, LIMIT, config)
    assert_bitwise(single, whole[9:], "alone")
    wide = padded_rows(x, 3)
    more = torch.cat((experts, torch.full((3, TOP_K), -1, device=x.device)))
    weights = torch.cat((weights, torch.full((3, TOP_K), float("nan"), device=x.device)))
    poison(wide[10:])
    assert_bitwise(launch_moe(wide, more, weights, *layer, LIMIT, config)[:10], whole, "padded")


@pytest.mark.parametrize(("name", "tokens"), [("nvfp4", 1), ("mxfp4", FEW_TOKENS)])
def test_an_input_that_is_rounded_already(name, tokens):
    """The same bits as rounded here. It is all that the shared expert reads."""
    x, experts, weights = inputs(tokens)
    rounded, nobody = fp8_fake_quantize(x, ACTIVATION_GROUP), torch.full_like(experts, -1)
    out = moe(x, experts, weights, *READY[name], limit=LIMIT)
    assert_bitwise(moe(x, experts, weights, *READY[name], limit=LIMIT, rounded=strided(rounded, 0)), out)
    shared = moe(x, nobody, weights, *READY[name], limit=LIMIT)
    assert_bitwise(
        moe(torch.full_like(x, torch.nan), nobody, weights, *READY[name], limit=LIMIT, rounded=rounded), shared
    )


def test_many_tokens_are_rounded_by_a_launch_of_their_own():
    x, experts, weights = inputs(FEW_TOKENS + 1)
    found = moe(x, experts, weights, *READY["nvfp4"], limit=LIMIT, rounded=torch.full_like(x, torch.nan))
    assert_bitwise(found, moe(x, experts, weights, *READY["nvfp4"], limit=LIMIT))


@pytest.mark.parametrize("config", [FEW, WIDE])
def test_a_choice_left_out_is_a_choice_of_weight_zero(config):
    x, experts, weights = inputs(3, seed=7)
    fewer, zeros = experts.clone(), weights.clone()
    fewer[0, 0], fewer[1, 1], fewer[2] = -1, EXPERTS, -1
    zeros[0, 0] = zeros[1, 1] = 0.0
    zeros[2] = 0.0
    found = launch_moe(x, fewer, weights, *READY["nvfp4"], LIMIT, config)
    expected = launch_moe(x, experts, zeros, *READY["nvfp4"], LIMIT, config)
    assert_bitwise(found + 0.0, expected + 0.0)
    assert_follows_oracle(found, x, fewer, weights, LAYERS["nvfp4"])


def test_strided_inputs_and_int32_experts():
    x, experts, weights = inputs(2, seed=8)
    expected = launch_moe(x, experts, weights, *READY["nvfp4"], LIMIT, WIDE)
    found = launch_moe(strided(x, 0), strided(experts.int(), 0), strided(weights, 1), *READY["nvfp4"], LIMIT, WIDE)
    assert_bitwise(found, expected)


def test_the_limit_is_used():
    given = inputs(2, seed=9)
    x, experts, weights = given
    out = launch_moe(*given, *READY["nvfp4"], 0.5, WIDE)
    assert_close_to_oracle(
        out, lambda dtype: moe_ref(x.to(dtype), experts, weights, *LAYERS["nvfp4"], limit=0.5)
    )  # fmt: skip


def test_rejects():
    x, experts, weights = inputs(3)
    routed, shared = READY["nvfp4"]
    with pytest.raises(KernelInputError, match="expected weights from prepare_experts, found QuantTensor"):
        launch_moe(x, experts, weights, *LAYERS["nvfp4"], LIMIT, WIDE)
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
    for other in ({"num_warps": 2}, {"unroll": 2}):
        with pytest.raises(KernelInputError, match="expected whole warp groups"):
            replace(WIDE, down=replace(ONE, **other))
    with pytest.raises(KernelInputError, match="16 token rows"):
        replace(WIDE, rows=8)
    with pytest.raises(KernelInputError, match="tiles of 8 token rows"):
        replace(FEW, rows=16)
    many = inputs(65)
    with pytest.raises(KernelInputError, match="expected few tokens, found 65 with 130 choices"):
        launch_moe(*many, routed, shared, LIMIT, FEW)


# ---- one linear ----


@pytest.mark.parametrize("make", [nvfp4, mxfp4], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("rows", "out_dtype"), [(1, None), (17, torch.float32)])
def test_linear(make, rows, out_dtype):
    weight = make(normal((1, 96, 256), torch.float32, seed=1).cpu())[0].to(kernel_device())
    x = normal((rows, 256), seed=2)
    out = launch_fp4_linear(x, shuffle(weight), out_dtype, 16, ONE)
    assert out.dtype == (out_dtype or torch.bfloat16)
    assert_close_to_oracle(out.bfloat16(), lambda dtype: linear_ref(x.to(dtype), weight))
    assert_bitwise(launch_fp4_linear(x, shuffle(weight), out_dtype, 32, ONE, wide=True), out, "wide")


def test_linear_with_columns_beside_the_tile():
    weight = nvfp4(normal((1, 40, 160), torch.float32, seed=3).cpu())[0].to(kernel_device())
    wide = torch.full((3, 320), float("nan"), dtype=torch.bfloat16, device=kernel_device())
    wide[:, :160] = normal((3, 160), seed=4)
    out = fp4_linear(wide[:, :160], shuffle(weight))
    assert_close_to_oracle(out, lambda dtype: linear_ref(wide[:, :160].to(dtype), weight))
    assert_bitwise(launch_fp4_linear(wide[:, :160], shuffle(weight), None, 32, ONE, wide=True), out, "wide")
    assert fp4_linear(wide[:0, :160], shuffle(weight)).shape == (0, 40)


def test_linear_rejects():
    weight = shuffle(LAYERS["nvfp4"][0][0][0])
    with pytest.raises(KernelInputError, match=r"expected x \[T, 256\]"):
        fp4_linear(normal((2, 128)), weight)
    with pytest.raises(KernelInputError, match="NVFP4 or MXFP4 weight"):
        fp4_linear(normal((2, 256)), READY["nvfp4"][1][0])


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dim", "width"), [("nvfp4", 4096, 2048), ("mxfp4", 4096, 2048), ("nvfp4", 7168, 3072)]
)
def test_real_sizes(name, dim, width):
    """Rows of 1 to 4,096 tokens are the same bits, narrow and wide; a few of them against the oracle."""
    make = {"nvfp4": nvfp4, "mxfp4": mxfp4}[name]
    layer = experts_of(make, 8, dim, width), experts_of(fp8, None, dim, width, seed=10)
    ready = tuple(prepare_experts(part) for part in layer)
    x = normal((4096, dim), seed=1)
    x[::3] *= torch.exp2(torch.randint(-20, 20, (dim,), generator=generator(4)).to(x.device)).bfloat16()
    experts = choices(4096, 8, 6, seed=2)
    experts[600:700] = experts[600]  # many on the same, the others empty
    experts[5, 2:] = -1
    weights = torch.rand(4096, 6, generator=generator(3)).to(x.device)
    few = [(x[at : at + 16], experts[at : at + 16], weights[at : at + 16]) for at in range(0, 4096, 16)]
    whole = torch.cat([moe(*given, *ready, limit=LIMIT) for given in few])
    for tokens in (1, 2, 5, 9, 21, 22, 64, 100, 256, 511, 512, 600, 4096):
        given = x[:tokens], experts[:tokens], weights[:tokens]
        assert_bitwise(moe(*given, *ready, limit=LIMIT), whole[:tokens], f"{tokens} tokens")
        assert_bitwise(launch_moe(*given, *ready, LIMIT, WIDE_CONFIG), whole[:tokens], f"{tokens} tokens, wide")
    assert_bitwise(moe(x[500:], experts[500:], weights[500:], *ready, limit=LIMIT), whole[500:], "the last")
    rows = [1, 2, 4, 5, 7, 8]
    assert_follows_oracle(whole[rows], x[rows], experts[rows], weights[rows], layer)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [nvfp4, mxfp4], ids=["nvfp4", "mxfp4"])
def test_linear_of_many_rows(make):
    weight = shuffle(make(normal((1, 4096, 2048), torch.float32, seed=1))[0])
    x = normal((600, 2048), seed=2)
    few = torch.cat([fp4_linear(x[at : at + 16], weight) for at in range(0, 600, 16)])
    assert_bitwise(fp4_linear(x, weight), few)
