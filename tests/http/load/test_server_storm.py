"""The storm of `python -m benchmarks storm` in twenty seconds, with a restart, and with kills: `make slow-test`."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import parse


@pytest.mark.slow
def test_a_short_storm(tmp_path):
    storm, options = parse("storm", ["--seconds", "20", "--restarts", "1", "--workers", "16", "--slots", "8"])
    record, process = storm.run(options, tmp_path)
    assert record["wrong"] == []
    assert record["outcomes"]["complete"] >= 5
    assert record["exit_codes"] == [0, 0]
    assert {one.process for one in process.samples} == {1, 2}


@pytest.mark.slow
def test_a_short_storm_with_kills(tmp_path):
    storm, options = parse("storm", ["--seconds", "25", "--kills", "4", "--workers", "16", "--slots", "8"])
    record, _ = storm.run(options, tmp_path)
    assert record["wrong"] == []
    assert record["outcomes"]["complete"] >= 5
    assert record["exit_codes"] == [0]
    assert sum(record["kills"].values()) == 4
