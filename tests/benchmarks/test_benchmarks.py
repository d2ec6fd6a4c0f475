"""`python -m benchmarks`: every module is listed and explains itself; sessions keep records; a server's processes are
counted."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as entry
from benchmarks import runner, server_goals, serving
from benchmarks.runner import Session, is_bad
from dsv4.testing.model_cuts import CutModel

FOLDER = Path(entry.__file__).parent
IS_BENCHMARK = re.compile(r"^def (run\(session|main\(options)", re.MULTILINE)


def test_every_benchmark_is_listed(capsys):
    assert set(entry.CASES) == {file.stem for file in FOLDER.rglob("*.py") if IS_BENCHMARK.search(file.read_text())}
    assert entry.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in entry.CASES)
    assert entry.main(["nothing"]) == 2
    assert "no 'nothing'; there are ops, bits, " in capsys.readouterr().err


@pytest.mark.parametrize("name", entry.CASES)
def test_every_benchmark_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as ended:
        entry.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m benchmarks {name}" in capsys.readouterr().out


def session_of(tmp_path, *arguments, line=None):
    parser = argparse.ArgumentParser()
    runner.add_common_options(parser, ("one", "two"))
    options = parser.parse_args(["--device", "cpu", "--out", str(tmp_path / "records.jsonl"), *arguments])
    return Session("name", options, line)


def test_a_session_keeps_its_records(tmp_path, capsys):
    def fails():
        raise RuntimeError("out of memory")

    session = session_of(tmp_path, "--section", "two", line=lambda record: f"value {record['value']}")
    assert (session.wants("one"), session.wants("two")) == (False, True)
    session.attempt("good", lambda value: {"kind": "it", "value": value}, 7)
    session.attempt("bad", fails)
    session.attempt("several", lambda: [{"kind": "it", "value": 1}, {"kind": "it", "value": 2}])
    written = [json.loads(text) for text in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in written] == ["it", "error", "it", "it"]
    assert written[1]["error"] == "RuntimeError: out of memory"
    assert all({"gpu", "torch", "python"} <= set(record) for record in written)
    printed = capsys.readouterr().out
    assert "value 7" in printed
    late = session_of(tmp_path, "--seconds", "-1")
    late.attempt("never", fails)
    assert late.records == [{"kind": "skipped", "what": "never"}]


class FakeMeter:
    """Clocks that fall while power rises."""

    def __init__(self):
        self.reads = 0

    def read(self):
        self.reads += 1
        return {"sm_mhz": 1980.0 - 10 * self.reads, "watts": 600.0 + self.reads}


def test_records_have_the_clocks_and_the_power_of_their_measurement(tmp_path):
    session = session_of(tmp_path)
    session.meter, session.facts = FakeMeter(), {"experts": "mxfp4"}

    def measure():
        while session.meter.reads < 3:
            time.sleep(0.001)
        return [{"kind": "one"}, {"kind": "two"}]

    session.attempt("it", measure)
    one, two = session.records
    assert one["load_of_gpu"] == two["load_of_gpu"]
    assert one["experts"] == "mxfp4"
    clock, power = one["load_of_gpu"]["sm_mhz"], one["load_of_gpu"]["watts"]
    assert clock["max"] == 1970.0
    assert clock["min"] <= clock["median"] - 10 <= 1950.0
    assert power["min"] == 601.0 < power["median"] < power["max"]


def test_a_model_of_some_layers_in_both_formats(tmp_path, capsys):
    out = tmp_path / "model.jsonl"
    options = ["--preset", "tiny", "--device", "cpu", "--repeats", "1", "--experts", "mxfp4,nvfp4", "--layers", "3"]
    options += ["--section", "prefill", "--section", "decode", "--prefill", "40", "--chunk", "24", "--contexts", "64"]
    assert entry.main(["model", *options, "--batches", "1", "--out", str(out)]) == 0
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert {(record["kind"], record["experts"]) for record in records} == {
        (kind, experts) for kind in ("decode", "layer", "prefill") for experts in ("mxfp4", "nvfp4")
    }
    assert {(r["tokens"], r["chunk"], r["layers"]) for r in records if r["kind"] == "prefill"} == {(40, 24, 3)}
    assert "3 layers, batch 1, ctx 64: a step " in capsys.readouterr().out


def test_bits_of_a_random_model(tmp_path, capsys, monkeypatch):
    out = tmp_path / "bits.jsonl"
    options = ["bits", "--device", "cpu", "--tokens", "12", "--models", "1", "--out", str(out)]
    assert entry.main(options) == 0
    assert capsys.readouterr().out.endswith("1 models, 0 with rows that differ\n")
    monkeypatch.setattr(CutModel, "differing_rows", lambda self, cut: [3] if cut.beside else [])
    monkeypatch.setattr(CutModel, "first_difference", lambda self, cut: f"an op, beside {len(cut.beside)}")
    assert entry.main(options) == 1
    good, bad = (json.loads(text) for text in out.read_text().splitlines())
    assert good["differing_rows"] == {"tokens": 0, "chunks": 0, "batch": 0}
    assert (bad["wrong"], bad["first"][:13]) == (1, "batch: an op,")
    assert "batch: an op," in capsys.readouterr().out


def test_fewer_models_than_were_asked_for_are_red(capsys):
    options = ["bits", "--device", "cpu", "--seconds", "-1"]
    assert entry.main([*options, "--models", "9"]) == 1
    assert "0 of 9 models were compared" in capsys.readouterr().out
    assert entry.main(options) == 0
    assert capsys.readouterr().out.endswith("0 models, 0 with rows that differ\n")


def test_a_server_over_a_free_model(tmp_path, capsys):
    out = tmp_path / "server.jsonl"
    options = ["--streams", "3", "--section", "streams", "--kinds", "chat", "--processes", "1", "--step-ms", "20"]
    assert entry.main(["server", "--preset", "free", "--small", "--device", "cpu", "--out", str(out), *options]) == 0
    alone, served = (json.loads(text) for text in out.read_text().splitlines())
    assert (alone["kind"], served["kind"], served["load"]["kind"]) == ("serve_engine", "serve", "chat")
    assert alone["failed"] == served["failed"] == 0
    assert alone["output_tokens"] == served["output_tokens"] == 3 * 6
    assert alone["tokens_per_second"] <= 1.5 * 3 / 20e-3, "a step takes its time"
    assert set(served["cpu_seconds"]) >= {"1 front_end"}
    assert served["very_first_ms"] > 0
    assert "cpu_us_per_token" in capsys.readouterr().out


def test_goals_are_held_against_records():
    def record(kind, section, streams, rate, between, **fields):
        waits = {"p50": between, "p90": between, "p99": 3 * between}
        return {
            "kind": kind, "section": section, "load": {"streams": streams, "kind": "chat"}, "tokens_per_second": rate,
            "between_tokens_ms": waits, "first_token_ms": {"p50": 7.0}, "host_ms": {"p50": 1.0}, **fields,
        }  # fmt: skip

    records = [
        record("serve_engine", "steady", 256, 1000.0, 4.0, layers=4),
        record("serve", "steady", 256, 960.0, 4.1, layers=4, share_of_engine=0.96, cpu_us_per_token=40.0),
        record("serve", "steady", 256, 960.0, 4.1, layers=34, share_of_engine=0.5, cpu_us_per_token=1.0),
        record("serve_engine", "streams", 1024, 1000.0, 4.0, layers=4),
        record("serve", "streams", 1024, 960.0, 4.1, layers=4),
        {"kind": "error", "what": "x"},
    ]
    rows = [line.split() for line in server_goals.table(records)[2:]]
    assert [(row[0], row[2], row[-3], row[-1]) for row in rows] == [
        ("4", "256", "0.96", "met"), ("4", "256", "40", "missed"), ("4", "1024", "1", "met")
    ]  # fmt: skip


def test_bad_records():
    good = {"kind": "x", "is_same_as_without": True, "same_bits": {"chunked": True}, "is_finite": True, "wrong": 0}
    assert not is_bad(good)
    assert is_bad({"kind": "error"})
    for name, value in (("is_same", False), ("same_bits", {"a": True, "b": False}), ("is_finite", False), ("wrong", 2)):
        assert is_bad(good | {name: value})


def test_all_processes_of_a_family_are_counted():
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import time\\nend = time.process_time() + 0.3\\nwhile time.process_time() < end: pass\\ntime.sleep(60)'])\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        server = serving.ServerProcess.__new__(serving.ServerProcess)
        server.process = process
        deadline = time.monotonic() + 30
        while sum(server.cpu_seconds().values()) < 0.3 and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = serving.family(process.pid)
        assert pids[0] == process.pid
        assert len(pids) == 2
        mine, child = server.cpu_seconds().values()
        assert child >= 0.25 > mine
        assert process.pid in serving.family(os.getpid())
    finally:
        for pid in serving.family(process.pid)[::-1]:
            os.kill(pid, 9)
        process.wait()
