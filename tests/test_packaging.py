"""What a wheel would hold, without building one: one miniature, one version."""

import re
import tomllib
from pathlib import Path

import dsv4
from dsv4.loader.shipped import DEFAULT_SHIPPED, NVFP4_TWIN

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dsv4.__version__"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == dsv4.__version__


def test_a_wheel_has_one_miniature():
    settings = PROJECT["tool"]["setuptools"]
    assert settings["packages"]["find"]["exclude"] == ["dsv4.demo*"]  # else its folders count as packages
    patterns = settings["package-data"]["dsv4"]
    held = {file for pattern in patterns for file in (ROOT / "dsv4").glob(pattern)}
    folder = ROOT / "dsv4" / "demo" / DEFAULT_SHIPPED
    assert {file for file in held if file.parent == folder} == set(folder.iterdir())
    assert not any(NVFP4_TWIN in file.parts for file in held)
    assert sum(file.stat().st_size for file in held) < 16_000_000
