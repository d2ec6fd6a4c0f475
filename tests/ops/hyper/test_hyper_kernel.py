"""The hyper-connection kernels: steps against their oracles, fused against unfused and every way of cutting a launch up
against every other bit for bit, and rows that do not know of each other.
"""

import pytest
import torch

from dsv4.formats.fp8 import fp8_fake_quantize, fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP
from dsv4.ops.hyper import (
    MAX_ROWS,
    TILES,
    HyperCall,
    HyperSettings,
    HyperTiles,
    hc_boundary,
    hc_enter,
    hc_enter_ref,
    hc_expand_ref,
    hc_head,
    hc_head_norm,
    hc_head_norm_ref,
    hc_head_ref,
    hc_post,
    hc_post_ref,
    hc_pre,
    hc_pre_ref,
    launch_hyper,
)
from dsv4.ops.hyper.kernel_few import FEW_ROWS
from dsv4.ops.hyper.kernel_many import SUB_ROWS, program_of_many
from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.norm import rms_norm, rms_norm_quant
from dsv4.testing.inputs import around, kernel_device, normal, strided, transposed, wild
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

EPS = {"hc_eps": 1e-6, "norm_eps": 1e-6}
QUICK = HyperSettings(num_iters=2, **EPS)  # the interpreter takes 4 ms an iteration and row
REAL = HyperSettings(num_iters=20, **EPS)
FIELDS = ("streams", "hidden", "post", "comb")


def mixing(width, num_mixes=24, seed=0):
    """fn, base, scale of a size that spreads the weights: mixes of about one."""
    fn = normal((num_mixes, 4 * width), torch.float32, seed) / (4 * width) ** 0.5
    base = normal((num_mixes,), torch.float32, seed + 1)
    return fn, base, normal((3 if num_mixes > 4 else 1,), torch.float32, seed + 2).abs() + 0.5


def sublayer(rows, width, seed=0):
    """Output, streams, post, comb of a sublayer. Every row has a magnitude of its own."""
    post = normal((rows, 4), torch.float32, seed + 2).sigmoid() * 2
    comb = normal((rows, 4, 4), torch.float32, seed + 3).softmax(-1)
    return wild((rows, width), seed=seed), wild((rows, 4, width), seed=seed + 1), post, comb


def assert_same(found, wanted, what=""):
    for name in FIELDS:
        assert_bitwise(getattr(found, name), getattr(wanted, name), f"{what} {name}")
    assert (found.quant is None) == (wanted.quant is None)
    if found.quant is not None:
        assert_bitwise(found.quant.codes, wanted.quant.codes, f"{what} codes")
        assert_bitwise(found.quant.scale, wanted.quant.scale, f"{what} scale")


def unfused(before, weights, norm, settings):
    """The chain of kernels that `hc_boundary` must equal: streams, hidden, codes, post, comb."""
    streams = hc_post(*before)
    hidden, post, comb = hc_pre(streams, *weights, num_iters=settings.num_iters, **EPS)
    if norm.shape[0] % 128:
        return streams, rms_norm(hidden, norm, EPS["norm_eps"]), None, post, comb
    plain, quant = rms_norm_quant(hidden, norm, EPS["norm_eps"], True)
    return streams, plain, quant, post, comb


def assert_equals_chain(found, chain):
    streams, hidden, quant, post, comb = chain
    assert_bitwise(found.streams, streams, "streams")
    assert_bitwise(found.post, post, "post")
    assert_bitwise(found.comb, comb, "comb")
    assert_bitwise(found.hidden, hidden, "hidden")
    if found.quant is not None:
        assert_bitwise(found.quant.codes, quant.codes, "codes")
        assert_bitwise(found.quant.scale, quant.scale, "scale")


def assert_pre_follows_oracle(streams, weights, num_iters):
    found = hc_pre(streams, *weights, num_iters=num_iters, **EPS)

    def oracle(place):
        return lambda dtype: hc_pre_ref(
            streams.to(dtype), *(weight.to(dtype) for weight in weights), num_iters=num_iters, **EPS
        )[place]

    assert_close_to_oracle(found[0], oracle(0), "hidden")
    assert_close_to_oracle(found[1], oracle(1), "post")
    assert_close_to_oracle(found[2], oracle(2), "comb")


def assert_post_follows_oracle(before):
    def oracle(dtype):
        wide = torch.promote_types(dtype, torch.float32)
        return hc_post_ref(before[0].to(dtype), before[1].to(dtype), before[2].to(wide), before[3].to(wide))

    assert_close_to_oracle(hc_post(*before), oracle)


# ---- steps against their oracles ----


@pytest.mark.parametrize("rows", around(4))
@pytest.mark.parametrize("width", [1, 255, 257, 1000])
def test_post(rows, width):
    assert_post_follows_oracle(sublayer(rows, width, seed=width))


@pytest.mark.parametrize("width", [32, 33, 160])
def test_pre(width):
    assert_pre_follows_oracle(wild((5, 4, width), seed=width), mixing(width), num_iters=3)


def test_pre_with_all_iterations_and_large_logits():
    """Weights near 0 and 1, where a sloppy exp or reciprocal shows."""
    fn, base, scale = mixing(64, seed=3)
    assert_pre_follows_oracle(normal((3, 4, 64), seed=4), (fn * 8, base * 4, scale), num_iters=20)


def test_one_iteration_is_a_softmax_and_a_column_step():
    assert_pre_follows_oracle(normal((2, 4, 32), seed=5), mixing(32), num_iters=1)


def test_head():
    streams, weights = wild((5, 4, 96), seed=6), mixing(96, num_mixes=4, seed=7)
    found = hc_head(streams, *weights, **EPS)
    assert_close_to_oracle(found, lambda dtype: hc_head_ref(streams.to(dtype), *(w.to(dtype) for w in weights), **EPS))


def test_mixes_keep_all_bits_of_fn():
    """fn needs all three of its parts: 1, 2^-9 and, in the last bits of an fp32 mantissa, 2^-22."""
    streams = torch.ones(1, 4, 32, dtype=torch.bfloat16, device=kernel_device())
    fn = torch.ones(24, 128, device=kernel_device())
    fn[:, ::2] += 2**-9 + 2**-22  # dots of 128 + 2^-3 + 2^-16, exact in fp32 whatever the order
    base, scale = torch.full((24,), -128.125, device=fn.device), torch.ones(3, device=fn.device)
    _, post, _ = hc_pre(streams, fn, base, scale, num_iters=1, hc_eps=1e-6, norm_eps=0.0)
    wanted = 2 * torch.sigmoid(torch.tensor(2**-16, dtype=torch.float64)).float()
    assert_bitwise(post, wanted.to(post.device).expand(1, 4))


# ---- fused against unfused ----


@pytest.mark.parametrize("dim", [2, 3], ids=["embedding", "streams"])
def test_entering(dim):
    """Both kinds of source, every result, and the codes of the rounded one."""
    shape = (5, 128) if dim == 2 else (5, 4, 128)
    source, weights, norm = wild(shape, seed=40 + dim), mixing(128, seed=41), normal((128,), seed=42)
    found = hc_enter(source, *weights, norm, QUICK, True)

    def oracle(name):
        return lambda dtype: getattr(
            hc_enter_ref(source.to(dtype), *(w.to(dtype) for w in weights), norm.to(dtype), QUICK, False), name
        )

    assert_bitwise(found.streams, hc_enter_ref(source, *weights, norm, QUICK, False).streams, "streams")
    for name in ("hidden", "post", "comb"):
        assert_close_to_oracle(getattr(found, name), oracle(name), name)
    codes, scale = fp8_quantize(found.hidden, ACTIVATION_GROUP)
    assert_bitwise(found.quant.codes, codes, "codes")
    assert_bitwise(found.quant.scale, scale, "scale")


@pytest.mark.parametrize("width", [33, 96])
def test_the_head_and_its_norm(width):
    streams, weights, norm = (
        wild((5, 4, width), seed=43),
        mixing(width, num_mixes=4, seed=44),
        normal((width,), seed=45),
    )
    found = hc_head_norm(streams, *weights, norm, **EPS)
    assert_close_to_oracle(
        found, lambda dtype: hc_head_norm_ref(streams.to(dtype), *(w.to(dtype) for w in weights), norm.to(dtype), **EPS)
    )


@pytest.mark.parametrize("rows", around(16))
def test_a_boundary_is_post_pre_and_norm(rows):
    before, weights, norm = sublayer(rows, 128, seed=rows), mixing(128), normal((128,), seed=9)
    assert_equals_chain(hc_boundary(*before, *weights, norm, QUICK, True), unfused(before, weights, norm, QUICK))


@pytest.mark.parametrize("rows", [3, 20], ids=["few", "many"])
def test_values_instead_of_codes(rows):
    """What the codes stand for, and nothing else changes."""
    before, weights, norm = sublayer(rows, 128, seed=rows), mixing(128), normal((128,), seed=9)
    found, plain = (hc_boundary(*before, *weights, norm, QUICK, False, has_rounded) for has_rounded in (True, False))
    assert_same(found, plain)
    assert plain.rounded is None
    assert_bitwise(found.rounded, fp8_fake_quantize(plain.hidden, ACTIVATION_GROUP))


def test_a_boundary_of_a_width_off_the_tile():
    before, weights, norm = sublayer(3, 100, seed=10), mixing(100), normal((100,), seed=11)
    found = hc_boundary(*before, *weights, norm, REAL, False)
    assert found.quant is None
    assert_equals_chain(found, unfused(before, weights, norm, REAL))


def test_entering_from_an_embedding_is_expanding_first():
    embedding, weights, norm = wild((3, 96), seed=12), mixing(96), normal((96,), seed=13)
    streams = hc_expand_ref(embedding, 4)
    hidden, post, comb = hc_pre(streams, *weights, num_iters=2, **EPS)
    chain = streams, rms_norm(hidden, norm, 1e-6), None, post, comb
    assert_equals_chain(hc_enter(embedding, *weights, norm, QUICK, False), chain)
    from_streams = hc_enter(streams, *weights, norm, QUICK, False)
    assert from_streams.streams is streams
    assert_equals_chain(from_streams, chain)


def test_a_head_with_its_norm():
    streams, weights, norm = wild((3, 4, 96), seed=14), mixing(96, num_mixes=4), normal((96,), seed=15)
    assert_bitwise(
        hc_head_norm(streams, *weights, norm, **EPS), rms_norm(hc_head(streams, *weights, **EPS), norm, 1e-6)
    )


# ---- however it is cut up, whoever else is there ----


@pytest.fixture(scope="module")
def few_at_a_time():
    """A call of two tiles of SUB_ROWS tokens and its results FEW_ROWS at a time."""
    rows = SUB_ROWS + 2
    before, weights, norm = sublayer(rows, 64, seed=16), mixing(64), normal((64,), seed=17)
    call = HyperCall(before[1], *weights, QUICK, norm, False, before[0], before[2], before[3])
    return call, {start: launch_hyper(call.rows(start, start + FEW_ROWS)) for start in range(0, rows, FEW_ROWS)}


@pytest.mark.parametrize(
    "tiles",
    [*TILES.values(), HyperTiles(tile_rows=32, finish_rows=32, lag=3), HyperTiles(tile_rows=32, finish_rows=1, lag=1)],
)
def test_many_at_a_time_are_few_at_a_time(tiles, few_at_a_time):
    call, parts = few_at_a_time
    found = launch_hyper(call, tiles)
    for start, wanted in parts.items():
        for name in FIELDS:
            rows = getattr(found, name)[start : start + FEW_ROWS]
            assert_bitwise(rows, getattr(wanted, name), f"{name} from row {start}")


@pytest.mark.parametrize("num_tiles", [1, 2, 5])
@pytest.mark.parametrize("lag", [1, 3, 8])
def test_every_program_of_many_comes_once_and_in_order(num_tiles, lag):
    """A tile's finishers come after its step 1, or they would wait for programs that cannot start."""
    num_splits, num_finishers = 3, 2
    places = torch.full((num_tiles * (num_splits + num_finishers), 3), -1, dtype=torch.int32, device=kernel_device())
    _places_kernel[(len(places),)](places, num_tiles, lag, NUM_SPLITS=num_splits, NUM_FINISHERS=num_finishers)
    found = [tuple(place) for place in places.tolist()]
    step1 = {(0, tile, place) for tile in range(num_tiles) for place in range(num_splits)}
    finishers = {(1, tile, place) for tile in range(num_tiles) for place in range(num_finishers)}
    assert len(found) == len(set(found))
    assert set(found) == step1 | finishers
    for tile in range(num_tiles):
        when = [
            [order for order, (kind, of, _) in enumerate(found) if (kind, of) == (wanted, tile)] for wanted in (0, 1)
        ]
        assert max(when[0]) < min(when[1])


@jit
def _places_kernel(places_ptr, num_tiles, lag, NUM_SPLITS: tl.constexpr, NUM_FINISHERS: tl.constexpr):
    is_finisher, tile, place = program_of_many(num_tiles, lag, NUM_SPLITS, NUM_FINISHERS)
    row_ptr = places_ptr + tl.program_id(0) * 3
    tl.store(row_ptr, is_finisher.to(tl.int32))
    tl.store(row_ptr + 1, tile)
    tl.store(row_ptr + 2, place)


def test_launches_leave_nothing_behind():
    """Counters and words outlive a launch: the same call again, with other rows and shapes in between."""
    before, weights, norm = sublayer(2, 64, seed=20), mixing(64), normal((64,), seed=21)
    first = hc_boundary(*before, *weights, norm, QUICK, False)
    hc_boundary(*sublayer(17, 64, seed=24), *weights, norm, QUICK, False)
    hc_boundary(*sublayer(1, 64, seed=25), *weights, norm, QUICK, False)
    head = mixing(96, num_mixes=4)
    hc_head(wild((17, 4, 96)), *head, **EPS)
    hc_head(wild((1, 4, 64)), *mixing(64, num_mixes=4), **EPS)
    assert_same(hc_boundary(*before, *weights, norm, QUICK, False), first)


# ---- strides, nothing, and mistakes ----


def test_strides_and_alignment_do_not_matter():
    before, weights, norm = sublayer(3, 64, seed=22), mixing(64), normal((64,), seed=23)
    wanted = hc_boundary(*before, *weights, norm, QUICK, False)
    odd = [strided(before[0], 0), strided(before[1], 1), transposed(before[2]), transposed(before[3])]
    shifted = torch.empty(norm.numel() + 1, dtype=norm.dtype, device=norm.device)[1:].copy_(norm)
    assert not any(x.is_contiguous() for x in odd)
    assert_same(
        hc_boundary(*odd, transposed(weights[0]), strided(weights[1], 0), weights[2], shifted, QUICK, False), wanted
    )
    assert_bitwise(hc_post(*odd), wanted.streams)


def test_what_cannot_be_done_is_said():
    out, streams, post, comb = sublayer(2, 64)
    (fn, base, scale), norm = mixing(64), normal((64,))

    def pre(streams=streams, fn=fn, base=base, scale=scale, num_iters=2):
        return hc_pre(streams, fn, base, scale, num_iters=num_iters, **EPS)

    with pytest.raises(KernelInputError, match=r"found \(2, 4, 64\) of torch.float32"):
        pre(streams.float())
    with pytest.raises(KernelInputError, match=r"expected streams \[T, 4, D\].* found \(2, 3, 64\)"):
        pre(streams[:, :3])
    with pytest.raises(KernelInputError, match=r"fn: expected \(24, 256\) of torch.float32, found \(23, 256\)"):
        pre(fn=fn[:23])
    with pytest.raises(KernelInputError, match=r"base: .* found \(24,\) of torch.bfloat16"):
        pre(base=base.bfloat16())
    with pytest.raises(KernelInputError, match=r"scale: expected \(3,\)"):
        pre(scale=scale[:1])
    with pytest.raises(KernelInputError, match="codes or their values to be asked for, found both"):
        hc_boundary(out, streams, post, comb, fn, base, scale, norm, QUICK, True, True)
    with pytest.raises(KernelInputError, match="at least one Sinkhorn iteration, found 0"):
        pre(num_iters=0)
    with pytest.raises(KernelInputError, match=r"post: expected \(2, 4\) of torch.float32, found \(2, 3\)"):
        hc_post(out, streams, post[:, :3], comb)
    with pytest.raises(KernelInputError, match=r"sublayer output: expected \(2, 64\)"):
        hc_boundary(out[:1], streams, post, comb, fn, base, scale, norm, QUICK, False)
    with pytest.raises(KernelInputError, match=r"expected a norm of shape \(64,\), found \(63,\)"):
        hc_enter(streams, fn, base, scale, norm[:63], QUICK, False)
    with pytest.raises(KernelInputError, match="multiple of 128 columns, found 64"):
        hc_enter(streams, fn, base, scale, norm, QUICK, True)


# ---- real sizes ----


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 7168])
def test_real_widths_follow_the_oracles(width):
    before, weights = sublayer(37, width, seed=width), mixing(width)
    assert_post_follows_oracle(before)
    assert_pre_follows_oracle(before[1], weights, num_iters=20)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 7168])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1000, MAX_ROWS + 1])
def test_real_boundaries_are_post_pre_and_norm(width, rows):
    before, weights, norm = sublayer(rows, width, seed=rows), mixing(width), normal((width,), seed=1)
    whole = hc_boundary(*before, *weights, norm, REAL, True)
    assert_equals_chain(whole, unfused(before, weights, norm, REAL))
    for row in {0, rows // 2, rows - 1}:
        alone = hc_boundary(*(x[row : row + 1] for x in before), *weights, norm, REAL, True)
        for name in FIELDS:
            assert_bitwise(getattr(alone, name)[0], getattr(whole, name)[row], f"row {row} alone: {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 600])
def test_a_thousand_launches_agree(rows):
    """Whoever arrives last, whoever waits for whom: the same bits."""
    before, weights, norm = sublayer(rows, 4096, seed=2), mixing(4096), normal((4096,), seed=3)
    first = hc_boundary(*before, *weights, norm, REAL, False)
    for _ in range(1000):
        again = hc_boundary(*before, *weights, norm, REAL, False)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in FIELDS)
