"""The storm of `python -m benchmarks storm` in twenty seconds, with a restart, and with kills: `make slow-test`."""

import asyncio
import time

import pytest

from benchmarks.__main__ import parse
from benchmarks.storm_clients import Storm


@pytest.mark.parametrize("outcome", ["DIFFERENT FROM SOLO", "HALF A REQUEST WAS ANSWERED", "CUT OFF", "STATUS 500"])
@pytest.mark.parametrize("begins", ["before", "meanwhile", "never"])
def test_a_restart_excuses_lost_answers_and_no_wrong_ones(monkeypatch, outcome, begins):
    clients = Storm("http://nowhere", [], [], 60.0, {"stream": 1})

    async def answer(client, chance):
        clients._end = time.monotonic()
        if begins == "meanwhile":
            clients.begin_restart()
            clients.is_restarting = False
        return outcome

    monkeypatch.setattr(clients, "_stream", answer)
    clients.is_restarting = begins == "before"
    asyncio.run(clients.run(1))
    is_excused = begins != "never" and outcome in ("CUT OFF", "STATUS 500")
    assert clients.wrong == ([] if is_excused else [f"stream: {outcome}"])
    assert clients.outcomes == {"lost or refused while restarting" if is_excused else outcome: 1}


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
