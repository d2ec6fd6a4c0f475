"""`python -m benchmarks server`, small: that it runs, and writes what its shares can be computed from again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
