"""Attention of many queries on Hopper, in Gluon: what it takes, and the bits of the kernels that run in the interpreter
too.
"""

import pytest
import torch
from attention_cases import CSA, HCA, RUNS, WHOLE, always, case_of, of_tokens, run

from dsv4.ops.attention import PAIRS_PLAN, PLAN, launch
from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, IN_PAIRS, RUN
from dsv4.ops.lib.arch import architecture
from dsv4.testing.cases.rows import ENTRY
from dsv4.testing.inputs import kernel_device
from dsv4.testing.numeric import assert_bitwise

PAIRS = always(IN_PAIRS)._replace(pairs=True)
CASES = {
    # ten tiles; holes in the picks, picks that are not visible; a chunk that begins inside the ring, one without
    "csa": lambda: case_of([(0, 40000, 1), (1, 9000, 8), (2, 3000, 150), (3, 0, 30)], k=512, fmt=ENTRY, heads=64),
    "csa, an odd number of tiles, two blocks of heads": lambda: case_of(
        [(1, 2000, 40), (0, 7, 9), (3, 126, 3)], k=150, fmt=ENTRY, heads=128, padding=1
    ),
    "hca, from two tiles to sixteen": lambda: case_of(
        [(2, 3000, 40), (3, 128 * 890 - 2, 4), (0, 5, 200), (1, 128 * 65 - 3, 6)], ratio=HCA, fmt=ENTRY, heads=64
    ),
    "hca, heads that are not whole blocks": lambda: case_of(
        [(2, 3000, 40), (3, 128 * 200 - 2, 4), (0, 5, 1)], ratio=HCA, fmt=ENTRY, heads=70, padding=2
    ),
    "window": lambda: case_of([(2, 300, 150), (0, 5, 1), (1, 0, 3)], fmt=ENTRY, heads=64, padding=2)
    | {"entries": None, "picks": None},
    "padding alone": lambda: case_of([], fmt=ENTRY, heads=64, padding=200),
}  # fmt: skip


def test_hopper_takes_it_and_the_interpreter_never():
    q = torch.zeros(2, 64, 512, dtype=torch.bfloat16, device=kernel_device())
    is_hopper = architecture().number == 90
    assert launch.takes_pairs(q, 128, RUN) == is_hopper
    assert not launch.takes_pairs(q, 128, RUN + 1), "a run ends inside a pair"
    assert not launch.takes_pairs(q, 133, RUN), "a window ends inside a tile"
    assert not launch.takes_pairs(q[..., :128], 128, RUN), "another kind of rows"
    shifted = torch.zeros(2 * 64 * 520, dtype=torch.bfloat16, device=kernel_device())[4:]
    assert not launch.takes_pairs(shifted.as_strided((2, 64, 512), (64 * 512, 512, 1)), 128, RUN), "at odd places"
    assert not launch.takes_pairs(shifted[4:].as_strided((2, 64, 512), (64 * 516, 516, 1)), 128, RUN), "odd heads"


def test_when_pairs_are_taken():
    """Flash has 10 tiles with picks, Pro 18 and two blocks of heads; 130 are a million tokens of an HCA layer."""
    assert not PLAN.pairs
    cuts = [PAIRS_PLAN.cut(num, 10, RUN) for num in (1, 16, 64, 96, 8192)]
    assert cuts == [BY_TILE, BY_COLUMNS, BY_COLUMNS, IN_PAIRS, IN_PAIRS]
    assert [PAIRS_PLAN.cut(num, 18, RUN) for num in (2, 512, 16384)] == [BY_TILE, IN_PAIRS, IN_PAIRS]
    assert [PAIRS_PLAN.cut(num, 130, RUN) for num in (1, 16, 2048)] == [BY_TILE, BY_RUN, IN_PAIRS]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "is_turned"), [*((name, True) for name in CASES), ("csa", False)])
def test_bits_of_the_kernel_for_any_gpu(name, is_turned):
    case = CASES[name]()
    case["q"] *= 3  # highest logits that change from tile to tile
    if not is_turned:
        case["freqs"] = None
    assert_bitwise(run(case, PAIRS), run(case, WHOLE))


@pytest.mark.gpu
@pytest.mark.parametrize("run_tiles", [RUN, 4])
def test_bits_of_runs(run_tiles):
    """One run, one that is just full, two with one tile in the second, many; and several queries for every program."""
    chunks = [(0, 1048500, 40), (1, 128 * 1024 - 3, 140), (2, 128 * 128 - 2, 4), (3, 0, 200)]
    case = case_of(chunks, ratio=HCA, fmt=ENTRY, heads=64, padding=3)
    assert_bitwise(run(case, PAIRS, run_tiles), run(case, RUNS._replace(max_states=4096), run_tiles))


@pytest.mark.gpu
def test_queries_do_not_depend_on_each_other():
    case = CASES["csa"]()
    found = run(case, PAIRS)
    for tokens in ([0], [1, 2, 3], range(9, 159)):
        some = torch.tensor(list(tokens), device=kernel_device())
        assert_bitwise(run(of_tokens(case, some), PAIRS), found[some], "in another batch")


@pytest.mark.gpu
def test_a_key_that_is_not_finite_reaches_those_that_read_it_alone():
    case = case_of([(1, 700, 140), (0, 5, 1)], ratio=CSA, k=70, fmt=ENTRY, heads=64)
    case["rows"].scales[60] = 255
    case["q"][20] = float("inf")
    assert_bitwise(run(case, PAIRS), run(case, WHOLE))
