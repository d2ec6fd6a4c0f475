"""Benchmark arithmetic, records and comparison; timing itself needs a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import records as files
from benchmarks.kernels import ops
from benchmarks.kernels.ops import Ceiling
from dsv4.cli.bench import CHECKOUT
from dsv4.cli.main import app
from dsv4.testing import bench
from dsv4.testing.bench import BenchCase, BenchError, Work

H200 = ops.CEILINGS["H200"]
CASE = BenchCase("norm", "1x2", {"rows": 1}, lambda device: Work(lambda: None, 0, 0))


def work(read=0, written=0, flops=0, flops_format="bf16"):
    return Work(lambda: None, read, written, flops, flops_format)


def test_floor_is_bytes_at_read_speed_or_operations():
    assert H200.floor_us(work(read=4_630_000)) == pytest.approx(1.0)
    assert H200.floor_us(work(read=2_315_000, written=2_315_000)) == pytest.approx(1.0)
    assert H200.floor_us(work(read=1, flops=792_000_000)) == pytest.approx(1.0)
    assert H200.floor_us(work(read=1, flops=1_392_000_000, flops_format="fp8")) == pytest.approx(1.0)


def test_limit_reproduces_both_measured_bandwidths():
    assert H200.limit_us(work(read=4_630_000)) == pytest.approx(1.0)
    assert H200.limit_us(work(read=2_130_000, written=2_130_000)) == pytest.approx(1.0)


def test_summary_of_times():
    times = [10.0] * 50 + [12.0] * 49 + [100.0]
    ceiling = Ceiling(read=1e12, copy=1e12, flops={})
    record = ops.summarise(CASE, work(read=4_000_000, written=1_000_000), times, 1.5, ceiling)
    assert (record["median_us"], record["p10_us"], record["p90_us"]) == (11.0, 10.0, 12.0)
    assert record["floor_us"] == 5.0
    assert record["times_floor"] == 2.2
    assert record["ceiling_percent"] == 45.5
    assert (record["op"], record["case"], record["samples"], record["launch_us"]) == ("norm", "1x2", 100, 1.5)
    assert "norm/1x2" in ops.table([record])


def test_an_unknown_chip_has_no_ceiling():
    assert ops.ceiling_of("NVIDIA H200") is H200
    with pytest.raises(BenchError, match="no measured ceiling for 'NVIDIA Foo'; known: H200"):
        ops.ceiling_of("NVIDIA Foo")


def record(case, median, p10, p90, gpu="H200"):
    return {"op": "norm", "case": case, "median_us": median, "p10_us": p10, "p90_us": p90, "gpu": gpu}


def write(path, *records):
    files.write_records(path, records, {"commit": "abc"})
    return path


def test_records_are_appended_and_the_last_one_counts(tmp_path):
    path = write(tmp_path / "new" / "file.jsonl", record("a", 1, 1, 1), record("b", 2, 2, 2))
    write(path, record("a", 3, 3, 3))
    records = files.read_records(path)
    assert {key: value["median_us"] for key, value in records.items()} == {"norm/a": 3, "norm/b": 2}
    assert records["norm/a"]["commit"] == "abc"


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"op": "x"}'])
def test_a_damaged_record_file_is_named_with_its_line(tmp_path, text):
    path = write(tmp_path / "file.jsonl", record("a", 1, 1, 1))
    path.write_text(path.read_text() + text)
    with pytest.raises(BenchError, match=r"file.jsonl:2: not a benchmark record"):
        files.read_records(path)


def test_comparison_needs_both_the_median_and_the_spread():
    old = {"norm/a": record("a", 10, 9, 11), "norm/b": record("b", 10, 9, 11), "norm/c": record("c", 10, 9, 11)}
    new = {"norm/a": record("a", 12, 11.5, 13), "norm/b": record("b", 12, 10.5, 13), "norm/c": record("c", 5, 5, 5)}
    comparisons = files.compare(old, new)
    assert {item.key: item.is_regression for item in comparisons} == {"norm/a": True, "norm/b": False, "norm/c": False}
    assert comparisons[-1].key == "norm/c"
    assert comparisons[-1].ratio == 0.5


def test_commits_of_one_file_are_compared_bits_too(tmp_path):
    path = tmp_path / "file.jsonl"
    for commit, median, digest in (("abc1", 10, "x"), ("def2", 5, "y"), ("fed3", 5, "x")):
        files.write_records(path, [record("a", median, 1, 1) | {"digest": digest}], {"commit": commit})
    old, new, last = (files.read_records(path, commit=name) for name in ("abc", "def", "fed"))
    (change,) = files.compare(old, new)
    assert (change.ratio, change.has_other_bits) == (0.5, True)
    assert not files.compare(old, last)[0].has_other_bits
    del last["norm/a"]["digest"]  # an older record
    assert files.compare(old, last)[0].has_other_bits is None
    with pytest.raises(BenchError, match="expected a record file or a commit with records in .*, found 'nothing'"):
        files.read_records(path, commit="nothing")


def test_what_cannot_be_compared():
    with pytest.raises(BenchError, match="no case in common"):
        files.compare({"norm/a": record("a", 1, 1, 1)}, {"norm/b": record("b", 1, 1, 1)})
    with pytest.raises(BenchError, match="expected records of one chip, found 'H200' and 'B200'"):
        files.compare({"norm/a": record("a", 1, 1, 1)}, {"norm/a": record("a", 1, 1, 1, gpu="B200")})


def test_every_case_builds_and_counts_its_bytes():
    cases = bench.load_cases(bench.case_modules())
    assert {"rms_norm", "rms_norm_quant", "rope", "rope_inverse"} <= {case.op for case in cases}
    for case in cases:
        built = case.build(torch.device("meta"))
        assert built.bytes_read + built.bytes_written > 0
        assert H200.floor_us(built) > 0


def test_a_case_may_not_appear_twice():
    module = bench.case_modules()[0]
    with pytest.raises(BenchError, match="expected every case once"):
        bench.load_cases([module, module])


def run_script(*arguments):
    command = [sys.executable, "-m", "benchmarks", "ops", *map(str, arguments)]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)


def test_the_script_compares_without_a_gpu(tmp_path):
    old = write(tmp_path / "old.jsonl", record("a", 10, 9, 11))
    new = write(tmp_path / "new.jsonl", record("a", 20, 19, 21))
    worse, better = run_script("--compare", old, new), run_script("--compare", new, old)
    assert (worse.returncode, better.returncode) == (1, 0)
    assert "x 2.000  SLOWER" in worse.stdout
    assert "x 2.000  SLOWER" in run_script("--compare", old, "abc", "--out", new).stdout  # a commit in a file


def test_the_command_passes_its_options_on(monkeypatch):
    seen = []
    answer = subprocess.CompletedProcess([], 7)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: seen.append(command) or answer)
    options = ["--op", "rope", "--compare", "a", "b", "--help"]
    assert CliRunner().invoke(app, ["bench", "ops", *options]).exit_code == 7
    assert seen == [[sys.executable, "-P", "-m", "benchmarks", "ops", *options]]


def test_the_script_selects_cases():
    cases = bench.load_cases(bench.case_modules())
    assert {case.op for case in ops.select(cases, ["rope"], None)} == {"rope"}
    assert all("x512" in case.name for case in ops.select(cases, None, "x512"))
    with pytest.raises(BenchError, match="no case of nothing; there are"):
        ops.select(cases, ["nothing"], None)
    with pytest.raises(BenchError, match="no case contains 'nothing'"):
        ops.select(cases, None, "nothing")


def test_provenance_names_the_commit():
    commit = files.current_commit()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=files.ROOT, capture_output=True, text=True).stdout.strip()
    assert commit.rstrip("+") == (head or "unknown")
    assert files._output(["no-such-program"]) == "unknown"
    assert json.dumps(commit)
    assert Path(files.ROOT / "dsv4").is_dir()


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["mini", "free"])
def test_the_server_benchmark_runs(preset, tmp_path):
    out = tmp_path / "records.jsonl"
    command = [sys.executable, "-m", "benchmarks", "server", "--preset", preset, "--small", "--device", "cpu"]
    ran = subprocess.run(
        [*command, "--section", "streams", "--section", "short", "--out", str(out)], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    alone = {
        (one["section"], one["load"]["streams"]): one["tokens_per_second"]
        for one in records
        if one["kind"] == "serve_engine"
    }
    served = [one for one in records if one["kind"] == "serve"]
    assert {one["section"] for one in served} == {"streams", "short"}
    for one in served:
        assert one["failed"] == 0
        expected = one["tokens_per_second"] / alone[one["section"], one["load"]["streams"]]
        assert one["share_of_engine"] == pytest.approx(expected, abs=0.002)
