"""What stands in deploy/: as far as it can be checked without Docker, systemd or Grafana running."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer.main

from dsv4.cli.main import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def serve_options():
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def instructions():
    """The Dockerfile as (name, rest) pairs, lines joined and comments dropped."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def test_the_dockerfile():
    found = instructions()
    names = [name for name, _ in found]
    assert names[0] == "FROM"
    assert set(names) <= {
        "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT",
    }  # fmt: skip
    version = re.search(r"python:(\d+)\.(\d+)-", found[0][1])
    assert (int(version[1]), int(version[2])) >= (3, 11)
    copied = [path for name, rest in found if name == "COPY" for path in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= set(copied), "setuptools reads them"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(ignored)
    assert any("'.[serve]'" in rest for name, rest in found if name == "RUN")
    assert "serve" in project["optional-dependencies"]
    entry = json.loads(next(rest for name, rest in found if name == "ENTRYPOINT"))
    assert entry[:2] == ["dsv4", "serve"]
    assert {word for word in entry if word.startswith("--")} <= serve_options()
    installs = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
    assert all("--constraint constraints.txt" in rest for rest in installs), "the versions that were tested"
    assert names.index("USER") < names.index("ENTRYPOINT"), "not as root"


def test_the_unit():
    text = (DEPLOY / "dsv4.service").read_text()
    start = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1])
    assert start[1] == "serve"
    assert {word for word in start if word.startswith("--")} <= serve_options()
    assert "\nRestartPreventExitStatus=2\n" in text, "a wrong option"


def test_caches_lie_where_they_may_be_written_and_are_kept():
    """The unit's user has no home that it may write to, and a container's is gone with it."""
    unit = (DEPLOY / "dsv4.service").read_text()
    folder = f"/var/cache/{re.search(r'^CacheDirectory=(.*)$', unit, re.MULTILINE)[1]}"
    found = instructions()
    assert ("VOLUME", folder) in found
    image = " ".join(rest for name, rest in found if name == "ENV").split()
    of_unit = " ".join(re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)).split()
    for settings in (image, of_unit):
        given = dict(pair.split("=", 1) for pair in settings)
        for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
            assert Path(given[name]).is_relative_to(folder), name


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path):
    """With a program that exists here in the place of ours."""
    unit = tmp_path / "dsv4.service"
    unit.write_text((DEPLOY / "dsv4.service").read_text().replace("/opt/dsv4/bin/dsv4", shutil.which("true")))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    about = [line for line in ran.stderr.splitlines() if "dsv4.service" in line]
    assert (ran.returncode, about) == (0, [])
    judge = ["systemd-analyze", "security", "--offline=yes", "--threshold=40", "--no-pager", unit]
    judged = subprocess.run(judge, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout.splitlines()[-1]


def test_no_folder_can_hide_an_editable_install(tmp_path):
    """`pip install -e .` leads Python to the checkout by its path. With a finder instead (setuptools' usual way), a
    checkout called dsv4 would hide the package from a Python that runs in the folder above it."""
    checkout = tmp_path / "dsv4"
    (checkout / "dsv4").mkdir(parents=True)
    (checkout / "dsv4" / "__init__.py").write_text('__version__ = "0"\nhere = True\n')
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    program = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, check=True)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    program = f"import site; site.addsitedir({str(site)!r}); import dsv4; assert dsv4.here"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, ''); {program}"]
    ran = subprocess.run(alone, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_installs_that_are_named_exist():
    """dsv4 is installed from a checkout; no package index has it. Where it is installed, its extras can be added
    (`how_to_install`)."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "dsv4").rglob("*.py")]
    documents.remove(ROOT / "dsv4" / "loader" / "shipped.py")
    wrong = [file.name for file in documents if re.search(r"pip install[^\n`]*['\" ]dsv4", file.read_text("utf-8"))]
    assert wrong == []
