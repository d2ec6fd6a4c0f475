"""Everything that says whether a GPU and its compilers can be trusted, in one command.

    python -m benchmarks trust --out FOLDER [--ptxas FILE] [--kernels FILE ...]
    python -m benchmarks trust --out FOLDER --device cpu       the same on the interpreter and the oracles, small

| part | what it runs |
|---|---|
| broken | three kernels broken on purpose, at Flash's shapes and at 384 columns: each must be red and named |
| bits | 50 random whole models, in one go and in pieces; red if fewer were compared |
| selftest | `dsv4 selftest`, with Triton's own ptxas |
| digests | the bits of every benchmark case |
| op-tests, tests | the tests of every op with compiled kernels, and the tests marked gpu: `make gpu-test` |

With --ptxas: other-selftest is the self-test under that assembler. In place of digests, times and other-times measure
bits and times of every case under each of the two, and both are compared.

Parts run beside each other, but those that measure times: these come last, one by one, with as many seconds again for
each. `--kernels`: files of `dsv4 kernels pack`, so that little is left to compile. What a part prints is in FOLDER.
Exit status 1 if something is red or did not end in time. A time that differs is no fault.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ODD_SIZES = {"hidden_size": 384, "num_attention_heads": 6, "n_routed_experts": 5, "index_n_heads": 3}


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]  # arguments of Python
    environment: dict[str, str] = field(default_factory=dict)
    is_timed: bool = False  # then nothing runs beside it


def parts_of(options: argparse.Namespace) -> list[Part]:
    """In the order in which they begin."""
    folder, is_gpu = options.out.resolve(), options.device == "cuda"
    device = ("--device", options.device)
    small = () if is_gpu else ("--quick",)
    # `bits` begins nothing after its seconds, and a family of models takes about a minute
    many = ("--models", "50", "--seconds", str(options.seconds - 160))
    models = many if is_gpu else ("--models", "1", "--tokens", "30")
    parts = [
        Part("bits", ("-m", "benchmarks", "bits", *device, *models, "--out", f"{folder}/bits.jsonl")),
        Part("selftest", ("-m", "dsv4", "selftest", "--json", "--no-keep", *small)),
        Part("broken", ("-m", "benchmarks", "trust", "--broken", *device, "--out", str(folder))),
    ]
    if is_gpu:
        no_bits = "not test_random_models_in_pieces"  # the part above
        tests = "-m", "pytest", "-q", "-p", "no:cacheprovider"
        parts.append(Part("op-tests", (*tests, "tests/ops", "tests/testing")))
        parts.append(Part("tests", (*tests, "-m", "gpu", "-k", no_bits)))
    measured = "-m", "benchmarks", "ops", "--samples", "20", "--out"
    if options.ptxas is None:
        parts.append(Part("digests", (*measured, f"{folder}/digests.jsonl", "--digests", *device)))
    else:
        # a cache of its own: Triton's key has the version of ptxas, and two processes would wait for one another
        other = {"TRITON_PTXAS_PATH": str(options.ptxas), "TRITON_CACHE_DIR": f"{folder}/other-cache"}
        parts += [
            Part("other-selftest", ("-m", "dsv4", "selftest", "--json", "--no-keep"), other),
            Part("times", (*measured, f"{folder}/times.jsonl"), is_timed=True),
            Part("other-times", (*measured, f"{folder}/other-times.jsonl"), other, is_timed=True),
        ]
    return [part for part in parts if not options.only or part.name in options.only]


def run_part(part: Part, folder: Path, ends: float) -> dict[str, Any]:
    """What it prints goes into the folder; cut off at `ends`, by the clock of `time.monotonic`."""
    began = time.monotonic()
    with (folder / f"{part.name}.txt").open("w") as printed, (folder / f"{part.name}.err").open("w") as errors:
        try:
            code = subprocess.run(
                [sys.executable, *part.command], cwd=ROOT, env=os.environ | part.environment, stdout=printed,
                stderr=errors, timeout=max(ends - began, 1.0),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    result = {"part": part.name, "status": code, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(result), flush=True)
    return result


def compared(folder: Path) -> dict[str, Any] | None:
    """Bits and times under both assemblers. Other bits are red; of times the worst are shown."""
    from benchmarks import records

    files = [folder / "times.jsonl", folder / "other-times.jsonl"]
    if not all(file.exists() for file in files):
        return None
    found = records.compare(*map(records.read_records, files))
    changed = [item.key for item in found if item.has_other_bits]
    slower = [f"{item.key} x {item.ratio:.3f}" for item in found if item.is_regression]  # worst first
    return {
        "part": "assemblers", "status": int(bool(changed)), "summary": records.summary(found), "changed": changed,
        "slower": slower[:20],
    }  # fmt: skip


# ---- kernels broken on purpose ----


def broken(device_name: str) -> list[dict[str, Any]]:
    """At two shapes, three mistakes each: an error of a scale, an order that follows the number of rows, a tail."""
    from dsv4.tools.selftest import choose_device

    device = choose_device()  # before what follows imports Triton
    import torch

    from dsv4.config import ModelConfig
    from dsv4.loader.write.synth import write_checkpoint
    from dsv4.ops import TORCH, TRITON
    from dsv4.testing import mistakes
    from dsv4.tools.selftest.report import Status
    from dsv4.tools.selftest.run import SelftestOptions, run_selftest

    sound = TRITON if device_name == "cuda" else TORCH
    results = []
    for name in ("flash", "384"):
        # without a GPU the cases are small, and a model runs on the oracles
        backend = TRITON if name == "flash" else sound
        wrong = {
            "rms_norm_quant": mistakes.wrong_scale(backend.ops), "sparse_attention": mistakes.masked_tail(backend.ops),
        }  # fmt: skip
        if name == "flash":
            wrong["linear"] = mistakes.linear_follows_rows(backend.ops)
        else:
            wrong["hc_enter"] = mistakes.follows_rows(backend.ops)
        with tempfile.TemporaryDirectory() as folder:
            model = None if name == "flash" else Path(folder) / "model"
            if model is not None:
                write_checkpoint(model, ModelConfig.tiny(**ODD_SIZES), experts="nvfp4")
            only = () if model is not None else tuple(wrong)
            options = SelftestOptions(
                device.type == "cpu" and model is None, only, backend.with_ops(**wrong), is_kept=False, model=model
            )
            with torch.no_grad():
                report = run_selftest(device, options)
        named = report.ops_with(Status.FAILED)
        results.append(
            {"shapes": name, "broken": sorted(wrong), "named": named, "checks": len(report.checks),
             "is_right": named == sorted(wrong)}
        )  # fmt: skip
    return results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a folder for everything printed, and summary.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ptxas", type=Path, help="another assembler, to be compared with Triton's own")
    parser.add_argument("--kernels", type=Path, action="append", default=[], help="compiled elsewhere; repeatable")
    parser.add_argument("--seconds", type=int, default=460, help="what has not ended then is cut off")
    parser.add_argument("--only", action="append", default=[], help="only this part; repeatable")
    parser.add_argument("--broken", action="store_true", help="that part alone, in this process")


def main(options: argparse.Namespace) -> int:
    if options.broken:
        results = broken(options.device)
        print(json.dumps(results, indent=1))
        return int(not all(one["is_right"] for one in results))
    options.out.mkdir(parents=True, exist_ok=True)
    for file in options.kernels:
        subprocess.run([sys.executable, "-m", "dsv4", "kernels", "unpack", str(file.resolve())], cwd=ROOT, check=True)
    with ThreadPoolExecutor(5 if options.device == "cuda" else 1) as lanes:
        parts, ends = parts_of(options), time.monotonic() + options.seconds
        beside = [part for part in parts if not part.is_timed]
        results = list(lanes.map(lambda part: run_part(part, options.out, ends), beside))
    alone = [part for part in parts if part.is_timed]
    results += [run_part(part, options.out, time.monotonic() + options.seconds) for part in alone]
    assemblers = compared(options.out)
    results += [] if assemblers is None else [assemblers]
    (options.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results[-1] if assemblers else {"parts": len(results)}))
    return int(any(one["status"] != 0 for one in results))
