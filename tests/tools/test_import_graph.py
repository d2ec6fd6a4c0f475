"""What a file's behaviour can come from, and the tests that a change can turn red."""

import pytest

from tools.affected import ROOT, affected_tests, checkout
from tools.imports import ImportGraph

TREE = {
    "dsv4/__init__.py": "__version__ = '1'\nfrom dsv4.all import everything\n",
    "dsv4/all.py": "import dsv4.ops.a\nimport dsv4.ops.b\n",
    "dsv4/ops/__init__.py": "from dsv4.ops.a import one\nfrom .b import two as other\nfrom dsv4.ops.b import two\n",
    "dsv4/ops/a.py": "def f():\n    from dsv4.deep import x\n",
    "dsv4/ops/b.py": "",
    "dsv4/deep.py": "import torch\n",
    "tests/conftest.py": "",
    "tests/part/conftest.py": "from dsv4.ops.b import two\n",
    "tests/part/helpers.py": "from dsv4.ops import one\n",
    "tests/part/test_helped.py": "from helpers import x\n",
    "tests/part/test_version.py": "from dsv4 import __version__\nPAGE = 'docs/page.md'\n",
    "tests/test_alone.py": "import json\n",
    "tests/test_imports.py": "",
}


@pytest.fixture
def root(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def reached(root, module):
    return {str(path.relative_to(root)) for path in ImportGraph(root).files([module])}


def test_a_name_of_a_package_leads_to_where_it_comes_from(root):
    found = reached(root, "tests.part.test_helped")
    assert found == {
        "tests/part/test_helped.py", "tests/part/helpers.py", "dsv4/ops/__init__.py", "dsv4/ops/a.py", "dsv4/deep.py"
    }  # fmt: skip
    assert reached(root, "tests.part.test_version") == {"tests/part/test_version.py", "dsv4/__init__.py"}
    assert reached(root, "dsv4.all") >= {"dsv4/ops/a.py", "dsv4/ops/b.py", "dsv4/deep.py"}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("dsv4/deep.py", {"part/test_helped", "test_imports"}),
        ("dsv4/ops/b.py", {"part/test_helped", "part/test_version", "test_imports"}),  # both by the conftest
        ("tests/test_alone.py", {"test_alone", "test_imports"}),
        ("docs/page.md", {"part/test_version"}),
        ("docs/other.txt", {"part/test_version"}),  # its folder is mentioned
        ("nobody/knows.txt", set()),
        ("pyproject.toml", {"part/test_helped", "part/test_version", "test_alone", "test_imports"}),
    ],
)
def test_tests_of_a_change(root, changed, tests):
    assert affected_tests({changed}, ImportGraph(root)) == sorted(f"tests/{name}.py" for name in tests)


def test_imports_for_types_alone_lead_nowhere(root):
    face = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dsv4.deep import x\n"
    (root / "dsv4" / "face.py").write_text(face + "class Base: ...\ndef __getattr__(name): ...\n")
    for number, name in enumerate(("Base", "x")):
        (root / "dsv4" / f"user{number}.py").write_text(f"from dsv4.face import {name}\n")
    assert reached(root, "dsv4.user0") == {"dsv4/user0.py", "dsv4/face.py"}
    assert reached(root, "dsv4.user1") == {"dsv4/user1.py", "dsv4/face.py", "dsv4/deep.py"}


def test_folders_read_by_computed_names_and_programs_run_by_name_count():
    graph = checkout()
    assert "tests/ops/test_kernels_compile.py" in affected_tests({"dsv4/testing/cases/rows.py"}, graph)
    assert "tests/ops/test_op_registry.py" in affected_tests({"dsv4/ops/select/op.py"}, graph)
    assert "tests/cli/test_server_command.py" in affected_tests({"dsv4/http/server.py"}, graph)
    assert graph.root == ROOT
