"""The storm of `benchmarks/load_server.py` in twenty seconds, with a restart: `make slow-test`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import load_server


@pytest.mark.slow
def test_a_short_storm(tmp_path):
    options = load_server.parse(["--seconds", "20", "--restarts", "1", "--workers", "16", "--slots", "8"])
    record, process = load_server.run(options, tmp_path)
    assert record["wrong"] == []
    assert record["outcomes"]["complete"] >= 5
    assert record["exit_codes"] == [0, 0]
    assert {one.process for one in process.samples} == {1, 2}
