"""`topk_select` against its oracle: exactly the same indices, whatever the scores and however the work is divided."""

from dataclasses import replace

import pytest
import torch

from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.select import TopkConfig, launch_topk, topk_select, topk_select_ref
from dsv4.ops.select.kernel_list import LIST
from dsv4.testing.inputs import around, generator, kernel_device, poison
from dsv4.testing.numeric import assert_bitwise

INF, NAN = float("inf"), float("nan")
SHORT = TopkConfig()
LONE = TopkConfig(long_row=64, lone_rows=132, lone_keys=64, max_lone_keys=256, long_programs=4, long_warps=2)
SHARED = replace(LONE, lone_rows=0, long_keys=64, long_tile=64)
KEPT = replace(SHARED, long_tile=256)  # a program's columns stay in registers
ALONE = replace(SHARED, long_programs=1, short_row=64)  # one program a row, that waits for none


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


@pytest.mark.parametrize("k", [40, 64])
def test_a_row_of_one_program_with_a_bound(k):
    """1,024 columns have 128 maxima: enough for 64."""
    scores = hostile(1000, seed=k)
    scores[0] -= 2.0  # the k-th is negative, the first is not
    assert_selects(scores, k, SHORT)


@pytest.mark.parametrize(
    ("config", "num_columns", "k", "kinds"),
    [
        *((config, 257, 200, [1, 2, 6]) for config in (LONE, SHARED)),
        *((config, 1000, 12, [0, 5, 7]) for config in (LONE, SHARED)),
        (KEPT, 1000, 40, [1, 2]),
        (ALONE, 300, 40, [0, 1, 2, 6, 7]),
    ],
)
def test_spread_rows(config, num_columns, k, kinds):
    scores = hostile(num_columns)[kinds]
    spread = config.spread(*scores.shape, scores.device)
    assert (spread.programs, spread.is_few) == (config.long_programs, config is LONE)
    assert_selects(scores, k, config)


LONG = {"long_keys": 2048, "lone_keys": 2048, "max_lone_keys": 4096, "long_tile": 1024, "short_row": 64}


@pytest.mark.parametrize(("config", "programs", "num_better"), [(LONE, 2, 8), (SHARED, 1, 0), (SHARED, 2, 8)])
def test_spread_rows_with_more_equals_than_the_list_holds(config, programs, num_better):
    """Then programs exchange counts, digit by digit; `num_better` lie above the equals, on both sides of a chunk."""
    config = replace(config, long_programs=programs, **LONG)
    scores = torch.full((1, LIST + 100), -2.0, device=kernel_device())
    assert config.spread(*scores.shape, scores.device).programs == programs
    scores[0, 2 : 4 * num_better : 4] = 3.0
    scores[0, LIST + 50], scores[0, :2] = 4.0, -3.0
    found = launch_topk(scores, 12, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 12, ascending=True))


@pytest.mark.parametrize(("config", "programs"), [(LONE, 4), (SHARED, 1), (SHARED, 4)])
def test_spread_rows_whose_best_lie_side_by_side(config, programs):
    """Of a long list: more pass the bound than are looked at first. More of one program's part of the columns than are
    ranked at once, and ties among them.
    """
    config = replace(config, long_programs=programs, **LONG)
    scores = torch.randn(2, 8192, generator=generator(9))
    scores[:, 4000:6000] += 100.0
    scores[1] = (scores[1] * 64).round()
    scores = scores.to(kernel_device())
    found = launch_topk(scores, 900, None, True, config)
    assert_bitwise(found, topk_select_ref(scores, 900, ascending=True))


def test_what_is_spread():
    """Programs that wait for each other all run at once, and keep no more keys than they have registers for; where none
    waits there may be any number of rows. One program holds every row that is not spread.
    """
    config, device = TopkConfig(), kernel_device()
    limit = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    for num_rows in (1, 2, 3, 31, 32, 33, limit, 2 * limit, 2 * limit + 1, 4 * limit, 100_000):
        for num_columns in (1, config.long_row, config.long_row + 1, 16384, 16385, 65537, 262144, 1 << 20):
            spread = config.spread(num_rows, num_columns, device)
            if spread is None:
                assert num_columns <= config.short_row
                continue
            assert num_columns > config.long_row
            assert spread.programs == 1 or spread.programs * num_rows <= spread.resident * limit
            assert spread.programs.bit_count() == 1
            assert not spread.is_few or spread.programs * config.max_lone_keys >= num_columns
    assert config.spread(1, 262144, device) == (128, 1)
    assert config.spread(1, 1 << 20, device) == (128, config.resident)
    assert config.spread(16, 262144, device).programs * 16 > config.resident * limit // 2


@pytest.mark.parametrize("config", [SHORT, LONE, SHARED, ALONE])
def test_nothing_is_read_beyond_a_rows_length(config):
    scores = hostile(300)[[0, 2, 5]]
    lengths = torch.tensor([0, 17, 150], device=scores.device)
    clean = scores.clone()
    for row, length in enumerate(lengths.tolist()):
        scores[row, length:] = INF  # would win, if it were seen
        clean[row, length:] = -INF
    for ascending in (False, True):
        found = launch_topk(scores, 20, lengths, ascending, config)
        assert_bitwise(found, topk_select_ref(clean, 20, ascending=ascending))
        assert_bitwise(found, topk_select_ref(scores, 20, lengths=lengths, ascending=ascending))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_scores(dtype):
    scores = hostile(200)[:4].to(dtype)
    assert_bitwise(topk_select(scores, 30, ascending=True), topk_select_ref(scores, 30, ascending=True))


def test_empty():
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
        *((rows, 262144, 512) for rows in (1, 2, 16, 64, 300)),
        *((rows, 262144, 1024) for rows in (2, 3, 16, 300)),
        *((rows, 16384, 512) for rows in (1, 8, 32, 256, 300)),
        *((rows, 70001, 600) for rows in (1, 20)),
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
    shapes = [(1, 262144), (1, 16384), (4, 16384), (2, 100_000), (16, 262144), (64, 16384), (250, 16384)]
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
