"""The experts' kernels for many tokens on Hopper, in Gluon: what they take, what surrounds them, and on a GPU their
bits, which are those of kernel_wide.py (`test_real_sizes` in test_moe_kernel.py compares them with few tokens too).
"""

import pytest
import torch

from dsv4.formats.tensors import QuantFormat
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture, architecture
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe import NARROW_ROWS, TILES_CONFIG, WIDE_CONFIG, Form, launch_moe
from dsv4.ops.moe import launch as moe_launch
from dsv4.ops.moe.many import launch_dense, launch_tiles
from dsv4.testing.cases.moe import LIMIT, MODELS, random_layer, random_weight
from dsv4.testing.inputs import kernel_device, normal
from dsv4.testing.numeric import assert_bitwise

SMALL_LAYER = random_layer("small", QuantFormat.NVFP4, kernel_device())


def test_hopper_takes_it_and_the_interpreter_never(monkeypatch):
    def gates(model, number_format):
        return random_layer(model, number_format, torch.device("meta"), 2)[0][0]

    timed = [gates(model, fmt) for model in ("flash", "pro") for fmt in (QuantFormat.NVFP4, QuantFormat.MXFP4)]
    assert launch_tiles.takes_tiles(timed[0]) == (architecture().number == 90)
    for number in ARCHITECTURES:
        monkeypatch.setattr(launch_tiles, "architecture", lambda number=number: Architecture(number))
        assert all(launch_tiles.takes_tiles(weight) == (number == 90) for weight in timed)
        assert not launch_tiles.takes_tiles(gates("small", QuantFormat.NVFP4)), "not timed"


@pytest.mark.parametrize(("tokens", "has_tiles"), [(NARROW_ROWS, False), (1365, False), (1366, True), (8192, True)])
def test_it_is_chosen_for_many_tokens(tokens, has_tiles, monkeypatch):
    """Where it was faster: not in place of the wide form's tiles of 32 rows."""
    monkeypatch.setattr(launch_tiles, "architecture", lambda: Architecture(90))
    x, experts = torch.empty(tokens, 4096, device="meta"), torch.empty(tokens, 6, device="meta")
    routed = random_layer("flash", QuantFormat.NVFP4, torch.device("meta"))[0]
    assert (moe_launch.config_for(x, experts, routed).form is Form.TILES) is has_tiles
    quarter = random_layer("flash", QuantFormat.NVFP4, torch.device("meta"), 64)[0]
    form = moe_launch.config_for(x, experts, quarter, 4).form
    assert (form is Form.TILES) is has_tiles, "a rank has a quarter of the pairs"


@pytest.mark.parametrize("shape", [(2, 320, 1024), (2, 256, 384)], ids=["half a tile", "as many steps as stages"])
def test_what_it_cannot_do_is_refused(shape):
    weight = random_weight(shape, QuantFormat.NVFP4, torch.device("meta"))
    rows = torch.empty(4, 1024, device="meta")
    with pytest.raises(KernelInputError, match=r"multiples of 256 rows, more than 384 columns, found 1 of \(2, "):
        launch_tiles.launch_tiles(rows, rows, rows, None, (weight,), LIMIT, 0)


def test_what_the_shared_experts_kernel_cannot_do_is_refused():
    rows = torch.empty(4, 1280, device="meta")
    for shape, num_ranges in (((320, 1024), 2), ((256, 1280), 2), ((256, 1024), 3)):
        weight = random_weight(shape, QuantFormat.FP8_BLOCK, torch.device("meta"))
        wanted = rf"256 rows and 512 columns, {num_ranges} ranges of whole steps, found 1 of \({shape[0]}, {shape[1]}\)"
        with pytest.raises(KernelInputError, match=wanted):
            launch_dense.launch_dense(rows, rows, rows, (weight,), LIMIT, num_ranges)


def test_parts_of_both_kernels_are_summed(monkeypatch):
    """Parts in place of both kernels' results, and NaN where there are none: the bits of one launch for all."""
    dim, _, num_experts, top_k = MODELS["small"]
    config, layer = WIDE_CONFIG, SMALL_LAYER
    x, weights = normal((9, dim), seed=1), torch.rand(9, top_k, device=kernel_device())
    experts = torch.stack([torch.randperm(num_experts) for _ in range(9)])[:, :top_k].to(x.device)
    experts[3, 1], experts[5], experts[7, 0] = -1, -1, num_experts
    expected = launch_moe(x, experts, weights, *layer, LIMIT, config)
    parts = launch_moe(x, experts, weights, *layer, LIMIT, config, has_shared=False).flatten(0, 1)
    shared = torch.empty_like(x)
    launch_moe(x, torch.full_like(experts, -1), weights, *layer, LIMIT, config, has_routed=False, out=shared)
    is_part = ((experts >= 0) & (experts < num_experts)).flatten()
    calls = []

    def routed_stand_in(x, out, weights, order, matrices, *rest):
        calls.append(("routed", len(matrices)))
        out.fill_(float("nan"))
        if len(matrices) == 1:
            out[: len(is_part)][is_part] = parts[is_part]

    def shared_stand_in(x, out, partials, matrices, limit, num_ranges):
        assert (x.shape[0], out.shape[0], *matrices[0].shape) == (9, 9, out.shape[1], x.shape[1])
        calls.append(("shared", len(matrices), num_ranges))
        out.copy_(shared) if len(matrices) == 1 else out.fill_(float("nan"))

    monkeypatch.setattr(moe_launch, "launch_tiles", routed_stand_in)
    monkeypatch.setattr(moe_launch, "launch_dense", shared_stand_in)
    assert_bitwise(launch_moe(x, experts, weights, *layer, LIMIT, TILES_CONFIG), expected)
    assert calls == [("routed", 2), ("routed", 1), ("shared", 2, 2), ("shared", 1, 1)], "I = 128: one range"


# ---- on a GPU ----


def hostile_layer(model, number_format, num_experts):
    """Random weights; scales of all sizes, so that some gates pass the limit, some are far below zero."""
    layer = random_layer(model, number_format, kernel_device(), num_experts)
    for weight in layer[0]:
        low, high = (0x80, 0xA8) if number_format is QuantFormat.NVFP4 else (244, 253)
        codes = weight.scale.view(torch.uint8)
        codes.copy_(torch.randint(low, high, codes.shape, dtype=torch.uint8, device=codes.device))
        weight.out_scale.mul_(0.5 + torch.rand_like(weight.out_scale))
    for weight in layer[1]:
        exponents = torch.randint(243, 251, weight.scale.shape, device=weight.scale.device).int()
        weight.scale.copy_(exponents * 0x00800080)
        weight.out_scale.mul_(0.5 + torch.rand_like(weight.out_scale))
    return layer


def hostile_inputs(model, tokens, num_experts, is_skewed):
    """Chosen evenly, or by some tokens none and of experts the last most, the first never; columns of all sizes."""
    dim, device = MODELS[model][0], kernel_device()
    x, scores = torch.randn(tokens, dim, device=device).bfloat16(), torch.rand(tokens, num_experts, device=device)
    if is_skewed:
        scores = scores**3 + torch.linspace(0, 1, num_experts, device=device) ** 4
        scores[:, 0] = -1.0
        x[::3] *= torch.exp2(torch.randint(-20, 20, (dim,), device=device).float()).bfloat16()
    experts = scores.topk(6).indices.sort(-1).values
    if is_skewed:
        experts[::7, 2], experts[5 % tokens] = -1, -1
    return x, experts, torch.rand(tokens, 6, device=device)


def taken_layer(model, number_format, num_experts):
    if not architecture().has_wide_kernels:
        pytest.skip("needs a Hopper")
    torch.manual_seed(1)
    return hostile_layer(model, number_format, num_experts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "number_format", "num_experts"),
    [("flash", QuantFormat.NVFP4, 32), ("flash", QuantFormat.MXFP4, 32), ("pro", QuantFormat.NVFP4, 12)],
)
def test_its_bits_are_those_of_the_wide_form(model, number_format, num_experts):
    layer, config = taken_layer(model, number_format, num_experts), WIDE_CONFIG
    sizes = ((1, False), (7, True), (129, False), (512, True), (600, False), (1500, True), (2048, False), (4096, False))
    sizes = (*sizes, (4099, True), (8192, False))
    for tokens, is_skewed in sizes:
        given = hostile_inputs(model, tokens, num_experts, is_skewed)
        wanted = launch_moe(*given, *layer, LIMIT, config)
        assert_bitwise(launch_moe(*given, *layer, LIMIT, TILES_CONFIG), wanted, f"{tokens} tokens")
        is_used = given[1] >= 0
        parts = [launch_moe(*given, *layer, LIMIT, one, has_shared=False) for one in (config, TILES_CONFIG)]
        assert_bitwise(parts[1][is_used], parts[0][is_used], f"parts of {tokens} tokens")
    nobody = torch.full_like(given[1], -1)
    both = [launch_moe(given[0], nobody, given[2], *layer, LIMIT, one) for one in (config, TILES_CONFIG)]
    assert_bitwise(both[1], both[0], "nobody is chosen")
    alike = torch.arange(6, device=nobody.device).expand_as(nobody)
    both = [launch_moe(given[0], alike, given[2], *layer, LIMIT, one) for one in (config, TILES_CONFIG)]
    assert_bitwise(both[1], both[0], "all choose the same")
    alone = nobody.clone()
    alone[:, 3] = num_experts - 1
    both = [launch_moe(given[0], alone, given[2], *layer, LIMIT, one) for one in (config, TILES_CONFIG)]
    assert_bitwise(both[1], both[0], "all choose one expert alone")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "is_skewed"), [(600, False), (1500, True), (4096, False), (4099, True)])
def test_the_shared_expert_alone_has_the_bits_of_the_wide_form(tokens, is_skewed):
    """Nobody is chosen, so that no part hides another, or routed experts do not run at all."""
    layer = taken_layer("flash", QuantFormat.NVFP4, 8)
    x, experts, weights = hostile_inputs("flash", tokens, 8, is_skewed)
    nobody, forms = torch.full_like(experts, -1), (WIDE_CONFIG, TILES_CONFIG)
    found = [launch_moe(x, nobody, weights, *layer, LIMIT, form) for form in forms]
    assert found[0].float().abs().max() > 0
    assert_bitwise(found[1], found[0], "nobody is chosen")
    alone = [torch.empty_like(x) for _ in forms]
    for form, out in zip(forms, alone, strict=True):
        launch_moe(x, nobody, weights, *layer, LIMIT, form, has_routed=False, out=out)
    assert_bitwise(alone[0], found[0], "of the shared expert alone")
    assert_bitwise(alone[1], found[0], "of the shared expert alone, in tiles")


@pytest.mark.gpu
@pytest.mark.parametrize("number_format", [QuantFormat.NVFP4, QuantFormat.MXFP4])
def test_parts_go_to_the_ranks_of_their_tokens(number_format):
    layer = taken_layer("flash", number_format, 64)
    given = hostile_inputs("flash", 4096, 64, is_skewed=True)
    is_used = given[1] >= 0
    wanted = launch_moe(*given, *layer, LIMIT, WIDE_CONFIG, has_shared=False)
    for num_ranks in (1, 4):
        shares = [torch.full_like(part, float("nan")) for part in wanted.chunk(num_ranks)]
        peer_buffers = torch.tensor([share.data_ptr() for share in shares], device=wanted.device)
        launch_moe(*given, *layer, LIMIT, TILES_CONFIG, has_shared=False, peer_buffers=peer_buffers)
        found = torch.cat(shares)
        assert_bitwise(found[is_used], wanted[is_used], f"{num_ranks} ranks")
        assert found[~is_used].isnan().all(), "a pair without an expert has no part"


@pytest.mark.gpu
def test_few_experts_with_many_rows():
    layer = taken_layer("flash", QuantFormat.NVFP4, 8)
    given = hostile_inputs("flash", 4096, 8, is_skewed=True)
    found = [launch_moe(*given, *layer, LIMIT, form) for form in (WIDE_CONFIG, TILES_CONFIG)]
    assert_bitwise(found[1], found[0])


@pytest.mark.gpu
def test_tiles_of_every_fullness():
    """Experts with 1, 2, ... 260 rows: products of every width, with rows to spare and without."""
    layer, num_experts = taken_layer("flash", QuantFormat.NVFP4, 260), 260
    counts = torch.arange(1, num_experts + 1)
    flat = torch.arange(num_experts).repeat_interleave(counts)
    flat = torch.cat((flat, flat.new_full((-len(flat) % 6,), -1)))
    experts = flat[torch.randperm(len(flat))].view(-1, 6).to(kernel_device())
    x, weights = torch.randn(len(experts), 4096, device=experts.device).bfloat16(), torch.rand_like(experts.float())
    found = [launch_moe(x, experts, weights, *layer, LIMIT, one) for one in (WIDE_CONFIG, TILES_CONFIG)]
    assert_bitwise(found[1], found[0])


@pytest.mark.gpu
def test_a_graph_of_it_replays():
    """Programs that stay leave nothing behind: with other tokens and choices each time."""
    layer, given = taken_layer("flash", QuantFormat.NVFP4, 16), hostile_inputs("flash", 700, 16, is_skewed=True)
    launch_moe(*given, *layer, LIMIT, TILES_CONFIG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_moe(*given, *layer, LIMIT, TILES_CONFIG)
    for seed in range(4):
        torch.manual_seed(seed)
        for kept, fresh in zip(given, hostile_inputs("flash", 700, 16, seed % 2), strict=True):
            kept.copy_(fresh)
        graph.replay()
        assert_bitwise(out, launch_moe(*given, *layer, LIMIT, WIDE_CONFIG), f"replay {seed}")
