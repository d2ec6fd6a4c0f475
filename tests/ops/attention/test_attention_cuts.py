"""Sparse attention kernels, however keys are cut among programs: the same bits, and which cut a call takes."""

from dataclasses import replace

import pytest
import torch
from attention_cases import COLUMNS, HCA, RUNS, SHORT_RUN, SPLIT, WHOLE, assert_follows_oracle, case_of, of_tokens, run

from dsv4.ops.attention import PLAN, launch
from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, RUN
from dsv4.ops.attention.kernel_attend import WHOLE as ONE_RUN
from dsv4.testing.inputs import kernel_device, poison
from dsv4.testing.numeric import assert_bitwise


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What is allocated and not written is NaN: results and what parts store."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        found = empty(*args, **kwargs)
        poison(found)
        return found

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def long_and_short():
    """Of runs of three tiles: three runs; one, then two with one key in the second; one of the window alone; between
    them padding.
    """
    case = case_of([(0, 128 * 320 - 1, 1), (2, 128 * 65 - 2, 2), (3, 5, 1)], ratio=HCA, padding=2)
    return of_tokens(case, torch.tensor([0, 4, 1, 2, 5, 3], device=kernel_device()))


@pytest.mark.usefixtures("poisoned_memory")
def test_runs_of_tiles():
    case = long_and_short()
    found = assert_follows_oracle(case, SPLIT, SHORT_RUN)
    assert_bitwise(run(case, RUNS, SHORT_RUN), found, "a program a run")
    for max_states in (18, 7, 1):
        # the second token of a request finds the row of the first in the range before
        in_ranges = run(case, RUNS._replace(max_states=max_states), SHORT_RUN)
        assert_bitwise(in_ranges, found, f"{max_states // 3 or 1} queries at a time")


@pytest.mark.usefixtures("poisoned_memory")
def test_a_query_of_one_run_does_not_see_the_room_for_more():
    case = long_and_short()
    found = run(case, RUNS, SHORT_RUN)
    narrow = case | {"batch": replace(case["batch"], block_table=case["batch"].block_table[:, :64].contiguous())}
    for token in (2, 5):  # the last position that sees 64 entries, and so the last of one run; one that sees none
        alone = of_tokens(narrow, torch.tensor([token], device=kernel_device()))
        assert_bitwise(run(alone, WHOLE, SHORT_RUN), found[token : token + 1], "one program, one launch")


@pytest.mark.usefixtures("poisoned_memory")
def test_runs_of_picks_and_two_blocks_of_heads():
    case = case_of([(1, 2000, 1), (0, 7, 1)], k=150, heads=65, padding=1)
    found = assert_follows_oracle(case, RUNS, SHORT_RUN)
    assert_bitwise(run(case, SPLIT, SHORT_RUN), found)
    assert_bitwise(run(case, RUNS._replace(max_states=8), SHORT_RUN), found)


def only_rounding():
    """A query for which half of every output is a sum that cancels. What is left of it is rounding, and so it shows in
    which order things were added, which 16 bits of anything else would hide.
    """
    num_entries = 320
    case = case_of([(1, 128 * num_entries - 1, 1)], ratio=HCA)
    case["window"].positions[:] = -1
    case["q"][..., 64:] = 0.0
    case["rows"].data[:, 64:] = 0
    places = case["batch"].block_table[1, :num_entries].long()
    first, second = places[: num_entries // 2], places[num_entries // 2 :]
    data, scales = case["entries"].rows.data, case["entries"].rows.scales
    data[second] = data[first]
    data[second, :, 65::2] ^= 0x80  # signs of the rope values
    scales[second] = scales[first]
    return case | {"freqs": None}


@pytest.mark.usefixtures("poisoned_memory")
def test_columns_take_any_tiles_and_follow_no_address_that_nobody_stored():
    """Queries of two to seven tiles in a table with room for eight, padding first and last."""
    case = case_of([(0, 128 * 310, 1), (3, 128 * 40, 1), (1, 20, 1)], ratio=HCA, padding=2)
    case = of_tokens(case, torch.tensor([3, 0, 1, 2, 4], device=kernel_device()))
    found = run(case)
    for share in (1, 3, 8):
        plan = type("Shared", (type(COLUMNS),), {"share": lambda self, *counts, share=share: share})()
        assert_bitwise(run(case, plan), found, f"{share} tiles a program")


def test_columns_agree_where_only_rounding_is_left(monkeypatch):
    case = only_rounding()
    found = run(case, SPLIT)
    assert_bitwise(run(case, COLUMNS), found)

    class Swapped:
        """The sums of columns with two tiles exchanged. The first two alone would not show: a + b is b + a."""

        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(tiles, *args, **kwargs):
                order = torch.tensor([0, 1, 2, 5, 4, 3, 6], device=kernel_device())
                self.kernel[grid](type(tiles)(*(state[order].contiguous() for state in tiles)), *args, **kwargs)

            return launch

    monkeypatch.setattr(launch, "_pv_accumulate_kernel", Swapped(launch._pv_accumulate_kernel))
    assert not torch.equal(run(case, COLUMNS)[..., 64:], found[..., 64:]), "another order is other bits"


class Tampered:
    """The fold with something done to what it is given."""

    def __init__(self, kernel, change):
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            for state in args[0]:
                self.change(state)
            self.kernel[grid](*args, **kwargs)

        return launch


def test_cuts_agree_where_only_rounding_is_left(monkeypatch):
    case = only_rounding()
    found = run(case, SPLIT, SHORT_RUN)
    assert_bitwise(run(case, RUNS, SHORT_RUN), found)
    assert not torch.equal(run(case, SPLIT, 4)[..., 64:], found[..., 64:]), "other runs are other bits"

    def swap_runs(state):
        state[:3] = state[[2, 1, 0]]  # the first two alone would not show: a + b is b + a

    monkeypatch.setattr(launch, "_combine_kernel", Tampered(launch._combine_kernel, swap_runs))
    assert not torch.equal(run(case, RUNS, SHORT_RUN)[..., 64:], found[..., 64:]), "another order is other bits"


def test_a_lost_run_is_seen(monkeypatch):
    case = case_of([(1, 128 * 130 - 1, 1)], ratio=HCA)

    def lose_last_run(state):
        state[1] = -1.0e30 if state.dim() == 2 else 0.0

    assert_follows_oracle(case, RUNS, SHORT_RUN)
    monkeypatch.setattr(launch, "_combine_kernel", Tampered(launch._combine_kernel, lose_last_run))
    with pytest.raises(AssertionError):
        assert_follows_oracle(case, RUNS, SHORT_RUN)


def test_what_a_program_takes():
    """The fastest of what was measured. Tiles of a table with room for a million tokens: 2 + 128, 256K: 34. Pro has two
    blocks of heads and 18 tiles with picks, Flash has 10.
    """
    cuts = {num: PLAN.cut(num, 130, RUN) for num in (1, 4, 5, 8, 16, 32, 64, 110, 130, 200, 264, 8192)}
    assert [num for num, cut in cuts.items() if cut == BY_TILE] == [1, 4, 5]
    assert [num for num, cut in cuts.items() if cut == BY_RUN] == [8, 16, 32, 64, 110, 130, 200, 264, 8192]
    assert [PLAN.cut(num, 34, RUN) for num in (16, 64)] == [BY_TILE, BY_RUN]
    assert [PLAN.cut(num, 10, RUN) for num in (1, 8, 13)] == [BY_TILE] * 3
    assert [PLAN.cut(num, 10, RUN) for num in (16, 24, 32, 48, 64, 80, 160)] == [BY_COLUMNS] * 7
    assert [PLAN.cut(num, 10, RUN) for num in (96, 112, 128, 200, 256, 8192)] == [ONE_RUN] * 6
    assert [PLAN.cut(num, 18, RUN) for num in (2, 8, 16, 64, 128)] == [BY_TILE] * 2 + [BY_COLUMNS] * 2 + [ONE_RUN]
    assert [PLAN.share(num, 10) for num in (16, 32, 64, 80)] == [1, 2, 3, 4]
    assert PLAN._replace(max_states=127).cut(4, 34, RUN) == BY_RUN, "136 tiles are too many states"
    assert [PLAN.range_tokens(num) for num in (8, 16, 24, 4096, 9999)] == [528, 264, 176, 1, 1]


def test_more_multiprocessors_take_more_queries_in_smaller_parts():
    """48 queries of ten tiles: 240 programs of two tiles fill 132 multiprocessors, 480 of one tile need 264."""
    assert [PLAN._replace(multiprocessors=num).share(48, 10) for num in (132, 264)] == [2, 1]
    assert [PLAN._replace(multiprocessors=num).cut(112, 10, RUN) for num in (132, 264)] == [ONE_RUN, BY_COLUMNS]
