"""architectures.md shows its records, and these hold what was promised: everything compiled fits its chip."""

from __future__ import annotations

import pytest

from benchmarks import architectures
from dsv4.ops.lib.arch import ARCHITECTURES, Architecture

RECORDS = architectures.read_records()
MANY_TOKENS = "1x2048-at"  # scoring for many tokens holds the decoded keys: the one kernel that spills, not in decoding


def test_the_page_shows_the_records():
    assert architectures.markdown(RECORDS) == architectures.PAGE.read_text(encoding="utf-8")


def test_records_are_of_cases_there_are():
    keys = {case.key for case in architectures.table_cases()}
    for arch, cases in RECORDS["architectures"].items():
        assert int(arch) in ARCHITECTURES
        assert set(cases) <= keys


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_was_compiled_fits_and_does_not_spill(arch):
    for case, kernels in RECORDS["architectures"].get(str(arch), {}).items():
        assert isinstance(kernels, list), (case, kernels)
        for kernel, spilled, shared in kernels:
            assert shared <= Architecture(arch).shared_bytes, (case, kernel)
            assert spilled == 0 or MANY_TOKENS in case or arch not in (100, 103), (case, kernel)
