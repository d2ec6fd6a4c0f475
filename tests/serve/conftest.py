"""The command line in this process, and a checkpoint written by it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dsv4.serve.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def dsv4(capfdbinary):
    """`dsv4("plan", "flash")`: exit code, stdout and stderr of a command."""

    def run(*arguments):
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Outcome(ended.value.code or 0, out.decode("utf-8"), err.decode("utf-8"))

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Two layers (window, CSA) and an MTP block, with a byte tokenizer. Tests copy it before they damage it."""
    folder = tmp_path_factory.mktemp("models") / "small"
    with pytest.raises(SystemExit) as ended:
        main(["synth", str(folder), "--layers", "2"])
    assert not ended.value.code
    return folder
