"""Whether the kernels work with other versions of Triton, on a machine without a GPU.

    python tools/try_triton.py [--json FILE] [--module MODULE ...] [VERSION ...]      default: the newest there is

Each version is installed into a folder of its own, beside the installed torch. There the interpreter runs the
self-test's small shapes, and every kernel of the benchmark cases is compiled for Hopper; a launch that leaves a choice
to Triton's defaults (a warning) is a failure. A kernel is then compared with the same one of the installed version:
does it add in other layouts, which may change bits, and does it spill more, which costs time?
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ARCHITECTURE = "90"
Report = dict[str, Any]


def install(version: str, folder: str) -> None:
    wanted = "triton" if version == "newest" else f"triton=={version}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wanted]
    subprocess.run(command, check=True)


def _run(folder: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [folder] if folder else []
    unset = {"TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
    command = [sys.executable, "-W", "error::UserWarning:triton.knobs", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def selftest(folder: str | None, ops: list[str]) -> Report:
    chosen = [part for op in ops for part in ("--op", op)]
    run = _run(folder, "-m", "dsv4", "selftest", "--quick", "--json", *chosen)
    if run.returncode == 2 or not run.stdout.startswith("{"):
        sys.exit(f"the self-test could not run:\n{run.stderr[-2000:]}")
    found: Report = json.loads(run.stdout)
    return found


def compiled(folder: str | None, modules: list[str]) -> list[Report]:
    """Reports of as few cases as launch every kernel (`CompileReport`, or what failed)."""
    module = "tools.compiled.compile_check"
    run = _run(folder, "-m", module, ARCHITECTURE, "--only", "as few as there can be", *modules)
    if run.returncode:
        sys.exit(f"the compile check could not run:\n{run.stderr[-2000:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def compare(own: list[Report], other: list[Report]) -> Report:
    """Kernels that failed, that add in other layouts than their own, and that spill more: their bytes before and
    after."""
    of_case = {(one["case"], one["kernel"]): one for one in own if "error" not in one}
    found: Report = {"kernels": 0, "failed": [], "layouts": [], "spills": {}}
    for one in other:
        if "error" in one:
            found["failed"].append(f"{one['case']}: {one['error'][-300:]}")
            continue
        found["kernels"] += 1
        before = of_case.get((one["case"], one["kernel"]))
        name = f"{one['kernel']} of {one['case']}"
        if before is not None and before["sum_layouts"] != one["sum_layouts"]:
            found["layouts"].append(name)
        if before is not None and before["spill_bytes"] < one["spill_bytes"]:
            found["spills"][name] = [before["spill_bytes"], one["spill_bytes"]]
    return found


def try_version(version: str, own: list[Report], modules: list[str], ops: list[str]) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        install(version, folder)
        report = selftest(folder, ops)
        found = compare(own, compiled(folder, modules))
    failed = [f"{check['part']} {check['name']}" for check in report["checks"] if check["status"] == "failed"]
    return {"triton": report["machine"]["triton"], "checks": len(report["checks"]), "red": failed, **found}


def lines_of(found: Report) -> list[str]:
    lines = [
        f"Triton {found['triton']}: {found['checks']} checks, {len(found['red'])} red; "
        f"{found['kernels']} kernels compiled, {len(found['failed'])} cases not"
    ]
    lines += [f"  red: {name}" for name in found["red"]] + [f"  not compiled: {text}" for text in found["failed"]]
    lines += [f"  adds in other layouts: {name}" for name in found["layouts"]]
    spills = found["spills"].items()
    return lines + [f"  spills {after} bytes, not {before}: {name}" for name, (before, after) in spills]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=["newest"], help="as 3.9.0, or newest")
    parser.add_argument("--json", type=Path, help="a file for what was found")
    parser.add_argument("--module", action="append", default=[], help="as dsv4.testing.cases.norm; repeatable")
    parser.add_argument("--op", action="append", default=[], help="only these ops in the self-test; repeatable")
    options = parser.parse_args()
    print(f"installed: Triton {importlib.metadata.version('triton')}", flush=True)
    own, tried = compiled(None, options.module), []
    for version in options.versions:
        tried.append(try_version(version, own, options.module, options.op))
        print(*lines_of(tried[-1]), sep="\n", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
    return 1 if any(one["red"] or one["failed"] for one in tried) else 0


if __name__ == "__main__":
    sys.exit(main())
