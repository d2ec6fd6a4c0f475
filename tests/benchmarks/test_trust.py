"""One command for a GPU machine: which parts it has, how they end, and that a changed bit is red."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks.kernels import trust
from benchmarks.records import write_records
from dsv4.testing.inputs import kernel_device


def options(folder, **changes):
    return Namespace(**({"out": folder, "device": "cuda", "ptxas": None, "only": [], "seconds": 460} | changes))


def names(folder, **changes):
    return [part.name for part in trust.parts_of(options(folder, **changes))]


def test_parts(tmp_path):
    always = ["bits", "selftest", "broken"]
    assert names(tmp_path, device="cpu") == [*always, "digests"]
    assert names(tmp_path) == [*always, "op-tests", "tests", "digests"]
    other = [*always, "op-tests", "tests", "other-selftest", "times", "other-times"]
    assert names(tmp_path, ptxas=Path("other")) == other
    assert names(tmp_path, only=["digests"]) == ["digests"]
    parts = {part.name: part for part in trust.parts_of(options(tmp_path, ptxas=Path("other")))}
    assert parts["other-times"].environment["TRITON_PTXAS_PATH"] == "other"
    assert [name for name, part in parts.items() if part.is_timed] == ["times", "other-times"]
    assert parts["bits"].command[-6:-2] == ("--models", "50", "--seconds", "300")


def test_nothing_runs_beside_what_is_timed(tmp_path, monkeypatch):
    parts = [trust.Part("a", (), is_timed=True), trust.Part("b", ()), trust.Part("c", (), is_timed=True)]
    order = []

    def run_part(part, folder, ends):
        order.append(part.name)
        return {"part": part.name, "status": 0}

    monkeypatch.setattr(trust, "parts_of", lambda options: parts)
    monkeypatch.setattr(trust, "run_part", run_part)
    assert entry.main(["trust", "--out", str(tmp_path)]) == 0
    assert order == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [("print(1)", 60, 0), ("raise SystemExit(3)", 60, 3), ("while True: pass", 1, None)],
)
def test_how_a_part_ends_is_recorded(tmp_path, program, seconds, status):
    result = trust.run_part(trust.Part("one", ("-c", program)), tmp_path, trust.time.monotonic() + seconds)
    assert (result["part"], result["status"]) == ("one", status)
    assert (tmp_path / "one.txt").read_text() == ("1\n" if status == 0 else "")


def test_bits_and_times_under_two_assemblers_are_compared(tmp_path):
    for name, digest, median in (("times", "a", 10.0), ("other-times", "b", 20.0)):
        records = [
            {"op": "norm", "case": case, "digest": one, "median_us": us, "p10_us": us, "p90_us": us}
            for case, one, us in (("x", digest, 10.0), ("y", "c", median))
        ]
        assert trust.compared(tmp_path) is None
        write_records(tmp_path / f"{name}.jsonl", records, {"gpu": "H200"})
    found = trust.compared(tmp_path)
    assert (found["status"], found["changed"], found["slower"]) == (1, ["norm/x"], ["norm/y x 2.000"])


@pytest.mark.skipif(kernel_device().type != "cpu", reason="a part of its own on a GPU")
def test_kernels_broken_on_purpose_are_red_and_named():
    found = trust.broken("cpu")
    assert [one["shapes"] for one in found] == ["flash", "384"]
    for one in found:
        assert one["is_right"], one
        assert len(one["named"]) == 3


def test_a_red_part_is_the_command_s_status(tmp_path, monkeypatch):
    for code in (0, 1):
        monkeypatch.setattr(trust, "parts_of", lambda options, code=code: [trust.Part("p", ("-c", f"exit({code})"))])
        assert entry.main(["trust", "--device", "cpu", "--out", str(tmp_path)]) == code
        (summary,) = json.loads((tmp_path / "summary.json").read_text())
        assert summary["status"] == code
