"""`topk_select` against its oracle: exactly the same indices, whatever the scores and however the work is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.ops.tl_utils import KernelInputError
from dsv4.ops.topk import TopkConfig, launch_topk, topk_select, topk_select_ref
from dsv4.ops.topk_grid_kernels import GRID_LIST
from dsv4.ops.topk_kernels import LIST
from dsv4.testing.inputs import around, generator, kernel_device, poison, strided, transposed
from dsv4.testing.numeric import assert_bitwise

INF, NAN = float("inf"), float("nan")
SHORT = TopkConfig()
ONE_CHUNK = TopkConfig(tile=128, max_chunks=1, short_row=64, maxima_tile=128, direct=64)
CHUNKS = TopkConfig(tile=64, max_chunks=4, short_row=64, maxima_tile=64, direct=64)
DIRECT = TopkConfig(tile=128, max_chunks=2, short_row=64, maxima_tile=128, direct=256)
SPREAD = TopkConfig(grid_row=64, grid_keys=64, max_grid_keys=256, grid_programs=4, grid_warps=2)
NEVER = 1 << 24  # columns: no row is spread


def hostile(num_columns, seed=0):
    """Rows of every kind: spread, with ties, with NaN and infinities, of both zeros, all equal, nearly empty, empty."""
    source = generator(seed)
    rows = torch.randn(8, num_columns, generator=source)
    rows[1] = (rows[1] * 2).round()
    rows[2, torch.rand(num_columns, generator=source) < 0.5] = NAN
    rows[2, torch.rand(num_columns, generator=source) < 0.1] = INF
    rows[3] = torch.where(torch.rand(num_columns, generator=source) < 0.5, 0.0, -0.0)
    rows[4] = -7.5
    rows[5] = 1 + rows[5] * 2.0**-20  # the same upper bits everywhere
    rows[6] = -INF
    rows[6, -1] = -3e38
    rows[7] = NAN
    return rows.to(kernel_device())


def assert_selects(scores, k, config, lengths=None):
    for ascending in (False, True):
        found = launch_topk(scores, k, lengths, ascending, config)
        assert_bitwise(
            found, topk_select_ref(scores, k, lengths=lengths, ascending=ascending), f"ascending {ascending}"
        )


@pytest.mark.parametrize("num_columns", around(128))
@pytest.mark.parametrize("k", [6, 200])
def test_one_program_a_row(num_columns, k):
    assert_selects(hostile(num_columns), k, SHORT)


@pytest.mark.parametrize(
    ("config", "num_columns", "k"), [(CHUNKS, 257, 40), (CHUNKS, 256, 256), (ONE_CHUNK, 255, 6), (DIRECT, 256, 40)]
)
def test_long_rows(config, num_columns, k):
    assert config.num_chunks(5, num_columns) == config.max_chunks
    assert_selects(hostile(num_columns)[[0, 1, 2, 5, 6]], k, config)


@pytest.mark.parametrize("config", [CHUNKS, ONE_CHUNK])
def test_the_maxima_let_little_pass(config):
    """k chosen of many spread scores: what the bound rejects must not be needed, wherever the best lie."""
    scores = torch.randn(2, 1000, generator=generator(3))
    scores[1] = scores[1].sort().values  # the best all in the last chunk
    assert_selects(scores.to(kernel_device()), 12, config)


@pytest.mark.parametrize("k", [40, 64])
def test_a_row_of_one_program_with_a_bound(k):
    """1,024 columns have 128 maxima: enough for 64."""
    scores = hostile(1000, seed=k)
    scores[0] -= 2.0  # the k-th is negative, the first is not
    assert_selects(scores, k, SHORT)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_lists_longer_than_their_places(is_sorted):
    """Many equals, or the best all in one of 64 chunks: lists are joined. Else they are selected as they lie."""
    config = TopkConfig(tile=64, max_chunks=64, short_row=64, maxima_tile=1024, direct=64, grid_row=NEVER)
    scores = torch.randn(1, 8192, generator=generator(4))
    assert config.num_chunks(*scores.shape) == 64
    scores = (scores.sort().values if is_sorted else (scores * 2).round()).to(kernel_device())
    found = launch_topk(scores, 100, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 100, ascending=True))


def test_more_equals_than_are_listed_at_once():
    config = TopkConfig(tile=2048, max_chunks=2, short_row=1024, direct=1024, grid_row=NEVER)
    scores = torch.full((1, LIST + 100), 2.0, device=kernel_device())
    assert config.num_chunks(*scores.shape) == 2
    scores[0, 7], scores[0, LIST] = 3.0, 1.0
    found = launch_topk(scores, 9, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 9, ascending=True))


@pytest.mark.parametrize(("num_columns", "k"), [(256, 40), (257, 200), (1000, 12)])
def test_spread_rows(num_columns, k):
    scores = hostile(num_columns)[[0, 1, 2, 5, 6]]
    assert SPREAD.spread(5, num_columns, scores.device) == 4
    assert_selects(scores, k, SPREAD)


@pytest.mark.parametrize("num_better", [0, 8])
def test_spread_rows_with_more_equals_than_the_list_holds(num_better):
    """Then programs exchange counts, digit by digit; `num_better` lie above the equals, on both sides of a chunk."""
    config = replace(SPREAD, grid_keys=2048, max_grid_keys=4096)
    scores = torch.full((1, GRID_LIST + 100), -2.0, device=kernel_device())
    assert config.spread(*scores.shape, scores.device) == 2
    scores[0, 2 : 4 * num_better : 4] = 3.0
    scores[0, GRID_LIST + 50], scores[0, :2] = 4.0, -3.0
    found = launch_topk(scores, 12, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 12, ascending=True))


def test_spread_rows_whose_best_lie_side_by_side():
    """Of a long list: more pass the bound than are looked at first."""
    config = replace(SPREAD, grid_keys=2048, max_grid_keys=4096)
    scores = torch.randn(1, 8192, generator=generator(9))
    scores[0, 4000:6000] += 100.0
    scores = scores.to(kernel_device())
    found = launch_topk(scores, 900, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 900, ascending=True))


def test_what_is_spread():
    """Never more programs than multiprocessors, and never more keys than a program holds."""
    config, device = TopkConfig(), kernel_device()
    limit = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    for num_rows in (1, 2, 3, 31, 32, 33, limit, limit + 1, 100_000):
        for num_columns in (1, config.grid_row, config.grid_row + 1, 16384, 65537, 262144, 1 << 20):
            programs = config.spread(num_rows, num_columns, device)
            assert programs * num_rows <= limit
            assert programs == 0 or programs * config.max_grid_keys >= num_columns > config.grid_row
    assert config.spread(1, 262144, device) == 128
    assert config.spread(1, 1 << 20, device) == 0


@pytest.mark.parametrize("config", [SHORT, CHUNKS, DIRECT, SPREAD])
def test_nothing_is_read_beyond_a_rows_length(config):
    scores = hostile(300)[[0, 1, 2, 5]]
    lengths = torch.tensor([0, 300, 17, 150], device=scores.device)
    clean = scores.clone()
    for row, length in enumerate(lengths.tolist()):
        scores[row, length:] = INF  # would win, if it were seen
        clean[row, length:] = -INF
    for ascending in (False, True):
        found = launch_topk(scores, 20, lengths, ascending, config)
        assert_bitwise(found, topk_select_ref(clean, 20, ascending=ascending))
        assert_bitwise(found, topk_select_ref(scores, 20, lengths=lengths, ascending=ascending))


@pytest.mark.parametrize("view", [lambda x: strided(x, 0), lambda x: strided(x, 1), transposed])
def test_strides(view):
    plain = hostile(100)[:3]
    scores = view(plain)
    assert not scores.is_contiguous()
    assert_bitwise(topk_select(scores, 10), topk_select_ref(plain, 10))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_scores(dtype):
    scores = hostile(200)[:4].to(dtype)
    assert_bitwise(topk_select(scores, 30, ascending=True), topk_select_ref(scores, 30, ascending=True))


def test_a_row_does_not_depend_on_the_batch():
    scores = hostile(200)
    whole = topk_select(scores, 12)
    order = torch.randperm(8, generator=generator(1)).to(scores.device)
    assert_bitwise(topk_select(scores[order], 12), whole[order])
    for row in (0, 4):
        assert_bitwise(topk_select(scores[row : row + 1], 12)[0], whole[row])


def test_empty():
    scores = torch.empty(0, 50, device=kernel_device())
    assert topk_select(scores, 7).shape == (0, 7)
    nothing = poison(torch.empty(3, 10, device=kernel_device()))
    assert topk_select(nothing, 0).shape == (3, 0)
    assert topk_select(nothing[:, :0], 5).shape == (3, 0)
    assert topk_select(nothing[:, :0], 5, ascending=True).tolist() == [[-1] * 5] * 3


def test_rejects():
    scores = torch.zeros(2, 8, device=kernel_device())
    for arguments, options, part in [
        ((scores.double(), 1), {}, "float64"),
        ((scores[0], 1), {}, r"\(8,\)"),
        ((scores, 1025), {}, "1025"),
        ((scores, 1), {"lengths": torch.zeros(3, dtype=torch.int64, device=scores.device)}, r"\(3,\)"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            topk_select(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [
        *((rows, 262144, k) for rows, k in ((1, 512), (2, 512), (2, 1024), (3, 1024), (16, 512), (300, 512))),
        *((rows, 16384, 512) for rows in (1, 8, 32, 300)),
        (1, 70001, 600),
    ],
)
def test_full_size(rows, columns, k):
    for kind in range(8):
        scores = hostile(columns, seed=rows)[kind : kind + 1].expand(rows, -1).contiguous()
        scores[-1] = scores[-1].roll(12345)
        for ascending in (False, True):
            found = topk_select(scores, k, ascending=ascending)
            assert_bitwise(found[[0, -1]], topk_select_ref(scores[[0, -1]], k, ascending=ascending))
            assert (found[:-1] == found[:1]).all()


@pytest.mark.gpu
def test_spread_rows_again_and_again():
    """Counters grow from launch to launch, with different numbers of programs in turn, and in a replayed graph."""
    shapes = [(1, 262144), (1, 16384), (4, 16384), (2, 100_000)]
    inputs = [torch.randn(*shape, generator=generator(7)).to(kernel_device()) for shape in shapes]
    expected = [topk_select_ref(scores, 512, ascending=True) for scores in inputs]
    for _ in range(50):
        for scores, picks in zip(inputs, expected, strict=True):
            assert_bitwise(topk_select(scores, 512, ascending=True), picks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [topk_select(scores, 512, ascending=True) for scores in inputs]
    for _ in range(50):
        for picks in found:
            picks.fill_(-5)
        graph.replay()
        for picks, right in zip(found, expected, strict=True):
            assert_bitwise(picks, right)
