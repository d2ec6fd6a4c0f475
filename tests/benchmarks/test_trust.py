"""One command for a GPU machine: which parts it has, how they end, and that a changed bit is red."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks.kernels import trust
from benchmarks.records import write_records


def options(folder, **changes):
    return Namespace(**({"out": folder, "device": "cuda", "ptxas": None, "only": [], "seconds": 460} | changes))


def names(folder, **changes):
    return [part.name for part in trust.parts_of(options(folder, **changes))]


def test_parts(tmp_path):
    assert names(tmp_path, device="cpu") == ["bits", "selftest", "digests", "broken"]
    assert names(tmp_path) == ["bits", "selftest", "digests", "broken", "tests"]
    assert names(tmp_path, ptxas=Path("other")) == [*names(tmp_path), "other-selftest", "other-digests"]
    assert names(tmp_path, only=["digests"]) == ["digests"]
    *_, other = trust.parts_of(options(tmp_path, ptxas=Path("other")))
    assert other.environment["TRITON_PTXAS_PATH"] == "other"


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [("print(1)", 60, 0), ("raise SystemExit(3)", 60, 3), ("while True: pass", 1, None)],
)
def test_how_a_part_ends_is_recorded(tmp_path, program, seconds, status):
    result = trust.run_part(trust.Part("one", ("-c", program)), tmp_path, trust.time.monotonic() + seconds)
    assert (result["part"], result["status"]) == ("one", status)
    assert (tmp_path / "one.txt").read_text() == ("1\n" if status == 0 else "")


def test_bits_under_two_assemblers_are_compared(tmp_path):
    for name, digest in (("digests", "a"), ("other-digests", "b")):
        records = [{"op": "norm", "case": "x", "digest": digest}, {"op": "norm", "case": "y", "digest": "c"}]
        assert trust.compared(tmp_path) is None
        write_records(tmp_path / f"{name}.jsonl", records, {"gpu": "H200"})
    found = trust.compared(tmp_path)
    assert (found["status"], found["changed"]) == (1, ["norm/x"])


def test_a_red_part_is_the_command_s_status(tmp_path, monkeypatch):
    for code in (0, 1):
        monkeypatch.setattr(trust, "parts_of", lambda options, code=code: [trust.Part("p", ("-c", f"exit({code})"))])
        assert entry.main(["trust", "--device", "cpu", "--out", str(tmp_path)]) == code
        (summary,) = json.loads((tmp_path / "summary.json").read_text())
        assert summary["status"] == code
