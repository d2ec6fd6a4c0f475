"""Kernels compiled here are found by another Triton: under its names, without its compiler."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# launches a norm's kernels again, as another build of Triton; says what its compiler was asked for
AGAIN = """
import sys
from triton.runtime import cache
cache.triton_key = lambda: "another Triton"
from pathlib import Path
from dsv4.tools import kernel_archive
if sys.argv[1] == "unpack":
    kernel_archive.unpack(Path(sys.argv[2]), Path(sys.argv[3]))
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
knobs.cache.dir = sys.argv[3]
made, make = [], CUDABackend.make_cubin
CUDABackend.make_cubin = lambda self, *arguments: made.append(1) or make(self, *arguments)
import torch
from dsv4.ops.norm import rms_norm
from tools.compiled.compile_check import offline
with offline(90) as compiled:
    rms_norm(torch.empty(3, 512, dtype=torch.bfloat16, device="meta"), None, 1e-6)
print(len(compiled), len(made))
"""


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    run("tools/compile_ahead.py", "cases", folder / "cache", "--op", "rms_norm")
    said = run("-m", "dsv4", "kernels", "pack", folder / "kernels.tar.xz", "--cache", folder / "cache")
    return folder / "kernels.tar.xz", int(said.split()[0])


def test_binaries_alone_are_packed(packed):
    file, count = packed
    with tarfile.open(file) as archive:
        names = archive.getnames()
        manifest = json.load(archive.extractfile("manifest.json"))
    assert count == len(manifest["kernels"]) == sum(name.endswith(".cubin") for name in names) > 3
    assert {Path(name).suffix for name in names} == {".cubin", ".json"}
    assert manifest["targets"] == ["cuda 90"]
    assert set(manifest["kernels"]) == {name.split("/")[0] for name in names if "/" in name}


def test_another_triton_finds_them_and_compiles_nothing(packed, tmp_path):
    assert run("-c", AGAIN, "unpack", packed[0], tmp_path / "with") == "1 0\n"
    assert run("-c", AGAIN, "leave", packed[0], tmp_path / "without") == "1 1\n", "else this test could not fail"


def test_tests_compile_what_they_would_launch(tmp_path):
    test = "tests/ops/norm/test_norm_kernel.py"
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.compile_ahead", "--compile-into", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, *map(str, options), test, "-k", "every_width"], cwd=ROOT, env=environment, check=False
    )
    assert len(list(tmp_path.glob("*/*.cubin"))) == len((tmp_path / "keys.jsonl").read_text().splitlines()) > 3
