"""The compile check refuses what compiles to nothing, and keeps its reports as long as they are good."""

import pytest

from tools.compiled import compile_check
from tools.compiled.compile_check import is_only_a_trap
from tools.compiled.disk_cache import DiskCache, content_key

NORM = "dsv4.testing.cases.norm"
KERNEL = ".visible .entry _kernel()\n.reqntid 256\n{{\n{body}\n}}\n"


@pytest.mark.parametrize("arguments", [f"90 --only a,b {NORM}", f"90 {NORM} --only a,b", f"--only a,b 90 {NORM}"])
def test_options_may_stand_anywhere(arguments):
    found = vars(compile_check.asked_for(arguments.split()))
    assert found == {"arch": 90, "modules": [NORM], "only": ["a", "b"]}
    assert vars(compile_check.asked_for(["90"])) == {"arch": 90, "modules": [], "only": None}


def test_help(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        compile_check.asked_for(["--help"])
    assert "--only CASE,..." in capsys.readouterr().out


def test_a_bare_trap_is_no_kernel():
    assert is_only_a_trap(KERNEL.format(body="\ttrap;"))


def test_a_kernel_may_hold_a_trap():
    assert not is_only_a_trap(KERNEL.format(body="\t@%p1 trap;\n\tst.global.b32 [%rd1], %r1;\n\tret;"))
    assert not is_only_a_trap(KERNEL.format(body="\tret;"))


FAILURE = {"case": "one", "arch": 90, "error": "no"}
REPORT = {
    "case": "one", "kernel": "k", "arch": 90, "target": "sm_90a", "num_warps": 4, "registers": 32, "spill_bytes": 0,
    "loop_spills": 0, "stack_bytes": 0, "shared_bytes": 0, "uses_wgmma": False, "uses_tcgen05": False,
    "uses_tma": False, "uses_cp_async": False, "sum_layouts": ["8xf32 #blocked"],
}  # fmt: skip


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """How often modules were compiled; `lines` is what comes of it."""
    calls = {"num": 0, "lines": [REPORT]}

    def compiled(arch, module, only):
        calls["num"] += 1
        return calls["lines"]

    monkeypatch.setattr(compile_check, "CACHE", DiskCache(tmp_path / "kept"))
    monkeypatch.setattr(compile_check, "_compiled_lines", compiled)
    return calls


def test_reports_are_kept_until_something_changes(compiles, monkeypatch):
    first = compile_check.reports(90, ["dsv4.testing.cases.rows"])
    assert compile_check.reports(90, ["dsv4.testing.cases.rows"]) == first
    assert compiles["num"] == 1
    compile_check.reports(90, [NORM])
    assert compiles["num"] == 2
    monkeypatch.setattr(compile_check, "ptxas_version", lambda arch: "another")
    compile_check.reports(90, ["dsv4.testing.cases.rows"])
    assert compiles["num"] == 3


def test_a_changed_source_is_compiled_again(compiles, tmp_path, monkeypatch):
    for name in ("dsv4/testing/cases/one.py", "tools/compiled/compile_check.py", "dsv4/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    case = tmp_path / "dsv4" / "testing" / "cases" / "one.py"
    case.write_text("import dsv4.other")
    monkeypatch.setattr(compile_check, "ROOT", tmp_path)
    for changed, num in ((None, 1), (case, 2), (tmp_path / "dsv4" / "other.py", 3), (tmp_path / "unrelated.py", 3)):
        if changed is not None:
            with changed.open("a") as file:
                file.write("\n# changed\n")
        compile_check.reports(90, ["dsv4.testing.cases.one"])
        assert compiles["num"] == num, changed


def test_failures_are_not_kept(compiles):
    compiles["lines"] = [REPORT, FAILURE]
    for num in (1, 2):
        compile_check.reports(90, ["dsv4.testing.cases.rows"])
        assert compiles["num"] == num


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    kept = DiskCache(tmp_path / "file" / "folder")
    kept.write("key", "text")
    assert kept.read("key") is None
    assert content_key("ab", "c") != content_key("a", "bc")
