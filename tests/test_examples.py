"""The programs of examples/, run as they stand on the miniature; the client's against a live server."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
from server_fixtures import live, served_params

__all__ = ["live", "served_params"]  # fixtures
EXAMPLES = Path(__file__).parents[1] / "examples"
HAS_SERVER = all(importlib.util.find_spec(library) is not None for library in ("fastapi", "uvicorn", "openai"))


def run(name, *arguments):
    runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def test_offline(capsys):
    run("offline.py")
    out = capsys.readouterr().out
    assert "the scores of 12 tokens are those of the rollout, bit for bit" in out
    assert out.count("| length") == 2


def test_custom_op(capsys):
    run("custom_op.py")
    changed = re.search(r"other bits: (\d+)%", capsys.readouterr().out)
    assert changed is not None
    assert int(changed[1]) > 0, "the model did not call the op"


@pytest.mark.skipif(not HAS_SERVER, reason="the server's libraries are not installed")
def test_client(live, capsys):
    run("client.py", live.url)
    assert re.search(r"the sea is (calm|rough)\n", capsys.readouterr().out)


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES.rglob("*.py") if f'"{file.name}"' not in source] == []
