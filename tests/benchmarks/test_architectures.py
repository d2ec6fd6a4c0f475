"""architectures.md shows its records, and these hold what was promised: everything compiled fits its chip."""

import ast
from pathlib import Path

import pytest

from benchmarks.kernels import architectures
from benchmarks.kernels.ops import CEILINGS
from dsv4.ops.lib import arch
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture

RECORDS = architectures.read_records()
MANY_TOKENS = "1x2048-at"  # scoring for many tokens holds the decoded keys: the one kernel that spills, not in decoding


def test_the_page_shows_the_records():
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert architectures.markdown(RECORDS, page) == page


def test_records_are_of_cases_there_are():
    keys = {case.key for case in architectures.table_cases()}
    for number, cases in RECORDS["architectures"].items():
        assert int(number) in ARCHITECTURES
        assert set(cases) <= keys


@pytest.mark.parametrize("number", ARCHITECTURES)
def test_what_was_compiled_fits_and_does_not_spill(number):
    for case, kernels in RECORDS["architectures"].get(str(number), {}).items():
        assert isinstance(kernels, list), (case, kernels)
        for kernel, spilled, shared in kernels:
            assert shared <= Architecture(number).shared_bytes, (case, kernel)
            assert spilled == 0 or MANY_TOKENS in case or number not in (100, 103), (case, kernel)


# ---- other Hoppers ----


def test_choices_follow_the_number_of_multiprocessors():
    chosen = {name: architectures.choices(chip) for name, chip in architectures.CHIPS.items()}
    assert chosen["H100"] == chosen["H800"] == chosen["H200"], "they have as many"
    other = {what for what, form in chosen["H20"].items() if form != chosen["H200"][what]}
    assert {what.split(",")[0].split(" of ")[0] for what in other} >= {"attention", "index scores", "top-k", "wo_a"}


def test_floors_follow_memory_and_products():
    for case, floor in architectures.floors().items():
        assert floor["H100"] == floor["H800"], case
        assert floor["H200"] <= floor["H100"] <= floor["H100 PCIe"], case
        assert floor["H200"] < floor["H20"], case
    assert architectures.CHIPS["H200"].ceiling.read == CEILINGS["H200"].read


def test_no_kernel_counts_on_an_h200():
    """132 stands in one place; a plan made for another chip has another count."""
    for path in Path(arch.__file__).parents[1].rglob("*.py"):
        numbers = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert (132 in numbers) == (path == Path(arch.__file__)), path
