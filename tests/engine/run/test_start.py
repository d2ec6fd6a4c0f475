"""A start's phases, what it shows, and work beside it."""

import logging
import threading

import pytest

from dsv4.engine.run.start import Start
from dsv4.loader import progress as progress_module


def test_phases_are_timed_and_logged(caplog):
    start = Start()
    with caplog.at_level(logging.INFO, logger="dsv4.engine"):
        for name in ("read", "prepare", "read"):
            with start.phase(name) as tell:
                tell("layers", 1, 2)
        with pytest.raises(KeyError, match="x"), start.phase("capture"):
            raise KeyError("x")
    assert list(start.seconds) == ["read", "prepare"]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["read", "prepare", "read"]
    assert start.text.partition(" s: ")[2].startswith("read 0.0, prepare 0.0")


def test_work_beside_a_phase():
    """It begins at once, is waited for, and says how far it is."""
    start, may_end, told = Start(), threading.Event(), []
    assert not start.join(lambda *at: None), "nothing was begun"

    def work(tell):
        tell("compiling", 3, 7)
        assert may_end.wait(10)

    start.beside("compile", work)
    with start.phase("read"):
        assert not start.beside_seconds

    def hear(*at):
        told.append(at)
        may_end.set()

    while not told:
        assert start.join(hear)
    assert told[0] in (("compiling", 3, 7), ("", 0, 1))
    assert "compile 0" in start.text.partition("read")[2]


def test_work_that_fails_is_only_a_note(caplog):
    start = Start()

    def work(tell):
        raise ValueError("no such thing")

    with caplog.at_level(logging.WARNING, logger="dsv4.engine"):  # a server elsewhere may have set its own
        start.beside("compile", work)
        assert not start.join(lambda *at: None), "it must be done again"
    assert "compile beside the reading failed: ValueError: no such thing" in caplog.text


def test_a_service_says_how_far_a_warm_up_is(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress_module._LOG, "info", lambda text, *values: lines.append(text % values))
    with Start(True).phase("warm-up") as tell:
        for done in range(1, 11):
            clock[0] += 4
            tell("first calls", done, 10)
    assert lines[:3] == ["first calls: 3 of 10", "first calls: 6 of 10", "first calls: 9 of 10"]
