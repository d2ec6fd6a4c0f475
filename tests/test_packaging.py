"""The version stands in one place, and is the one the changelog speaks of. A wheel has what the package names."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import dsv4
from dsv4.loader.shipped import how_to_install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dsv4.__version__"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == dsv4.__version__


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What a wheel of this tree installs, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "dsv4", source / "dsv4", ignore=kept)
    for name in ("pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, source)
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(site, program):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import dsv4; assert dsv4.__file__.startswith(sys.path[0])\n"
    ran = subprocess.run(
        [sys.executable, "-c", code + program], cwd=site.parent, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return ran.stdout + ran.stderr


def test_a_wheel_has_what_it_names(installed):
    assert (installed / "dsv4" / "py.typed").is_file()
    shipped = sorted(path.parent.name for path in installed.glob("dsv4/demo/*/config.json"))
    assert shipped == ["flash-mini", "flash-mini-dspark"]
    text = " ".join(run(installed, "from dsv4.cli.main import main; main(['--help'])").split())
    assert f"a shipped one ({', '.join(shipped)})" in text
    assert list(installed.rglob("page.html"))


def test_a_message_says_how_to_install_where_it_is(installed):
    asked = "from dsv4.loader.shipped import how_to_install; print(how_to_install('serve'))"
    assert run(installed, asked) == "pip install 'dsv4[serve]'\n"
    assert how_to_install("serve") == f"pip install -e '.[serve]' in {ROOT}"
