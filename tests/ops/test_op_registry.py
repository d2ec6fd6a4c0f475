"""Nothing of an op is forgotten: every field of `OpSet`, and every op that only others use, has a tested contract, a
test of its kernel, a benchmark case, and with it a compile check. The registries look for modules themselves; this
looks at what they found.
"""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import test_kernels_compile
from test_op_contracts import PAIRS

from dsv4.ops import OpSet
from dsv4.testing.bench import case_modules, load_cases
from dsv4.testing.op_call import op_modules

FOLDER = Path(__file__).parent
FAMILY = {oracle.removesuffix("_ref").split(".")[1]: oracle.split(".")[0] for oracle in PAIRS}
OPS = sorted({field.name for field in fields(OpSet)} | set(FAMILY))
CASES = load_cases(case_modules())


def imported_by_tests(family):
    """Names that the tests of a family take from `dsv4.ops`."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in (FOLDER / family).glob("test_*.py")]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports if (node.module or "").startswith("dsv4.ops") for alias in node.names}


def missing(op):
    """What an op lacks."""
    lacks = []
    if op not in FAMILY:
        lacks.append("contract: no oracle and kernel of one family")
    elif op not in imported_by_tests(FAMILY[op]):
        lacks.append(f"test of its kernel in tests/ops/{FAMILY[op]}")
    keys = [case.key for case in CASES if case.op == op]
    if not keys:
        lacks.append("benchmark case")
    if not keys or not set(keys) <= set(test_kernels_compile.CASES):
        lacks.append("compile check")
    return lacks


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_complete(op):
    assert missing(op) == []


def test_a_forgotten_op_is_noticed(monkeypatch):
    assert [line.split(":")[0] for line in missing("planted")] == ["contract", "benchmark case", "compile check"]
    monkeypatch.setitem(FAMILY, "planted", "norm")
    assert missing("planted")[0] == "test of its kernel in tests/ops/norm"
    monkeypatch.setattr(test_kernels_compile, "CASES", [])
    assert missing("rms_norm") == ["compile check"]


def test_every_family_has_its_tests_and_cases():
    """A folder of `dsv4/ops` with kernels has one of tests and a file of cases of its name."""
    families = {module.__name__.split(".")[2] for module in op_modules() if ".kernel_" in module.__name__}
    assert families == set(FAMILY.values())
    assert {module.rsplit(".", 1)[1] for module in case_modules()} == families
    assert all(list((FOLDER / family).glob("test_*.py")) for family in families | {"lib", "torch_library"})
