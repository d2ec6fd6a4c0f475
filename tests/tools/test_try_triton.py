"""What is said of another Triton: tried on reports, and on the installed version in place of another."""

import pytest

from tools import try_triton


def kernel(**changes):
    return {"case": "norm/1", "kernel": "k", "spill_bytes": 0, "sum_layouts": ["a"]} | changes


def test_what_differs_is_named():
    failure = {"case": "moe/1", "arch": 90, "error": "CompilationError: no such name"}
    other = [kernel(spill_bytes=8), kernel(case="norm/2", sum_layouts=["b"]), failure]
    found = try_triton.compare([kernel(), kernel(case="norm/2")], other)
    assert found == {
        "kernels": 2, "failed": ["moe/1: CompilationError: no such name"], "layouts": ["k of norm/2"],
        "spills": {"k of norm/1": [0, 8]},
    }  # fmt: skip
    lines = try_triton.lines_of({"triton": "9", "checks": 3, "red": ["batch norm"], **found})
    assert lines[0] == "Triton 9: 3 checks, 1 red; 2 kernels compiled, 1 cases not"
    assert lines[1:] == [
        "  red: batch norm", "  not compiled: moe/1: CompilationError: no such name",
        "  adds in other layouts: k of norm/2", "  spills 8 bytes, not 0: k of norm/1",
    ]  # fmt: skip


def test_the_installed_version_agrees_with_itself(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(try_triton, "install", lambda version, folder: None)
    modules = ["dsv4.testing.cases.norm"]
    found = try_triton.try_version("newest", try_triton.compiled(None, modules), modules, ["rms_norm"])
    assert found["checks"] >= 2
    assert found["kernels"] >= 1
    assert [found[name] for name in ("red", "failed", "layouts", "spills")] == [[], [], [], {}]
