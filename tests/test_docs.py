"""The examples people copy: Python blocks of the documents and commands of the README, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dsv4.serve.cli import main
from dsv4.testing import bench

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document, language):
    """(first line, text) of the fenced blocks of one language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [(text[: match.start(2)].count("\n"), match[2]) for match in BLOCK.finditer(text) if match[1] == language]


def run_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code, arguments


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with a model called `checkpoint` and a conversation, to run examples in."""
    monkeypatch.chdir(tmp_path)
    run_command("synth", "checkpoint", "--layers", "2")
    (tmp_path / "conversation.json").write_text('[{"role": "user", "content": "Hello"}]')
    return tmp_path


@pytest.mark.parametrize(("document", "least"), [("docs/api.md", 6), ("README.md", 1)])
def test_python_examples(workspace, capsys, document, least):
    """The blocks of a document are one program, cut into pieces."""
    found = blocks(document, "python")
    assert len(found) >= least
    names: dict[str, object] = {}
    for line, source in found:
        code = compile("\n" * line + source, str(ROOT / document), "exec")
        exec(code, names)
    if document == "docs/api.md":
        assert "prompt token 1 is 999999; ids are integers from 0 to 511" in capsys.readouterr().out


def test_commands_of_the_readme(workspace):
    commands = [
        shlex.split(line, comments=True)
        for _, text in blocks("README.md", "")
        for line in text.splitlines()
        if line.startswith("dsv4 ")
    ]
    assert {command[1] for command in commands} >= {"generate", "info", "plan", "render", "synth"}
    for command in commands:
        run_command(
            *(
                {"CHECKPOINT": "checkpoint", "FOLDER": "new", "TARGET": "quantised"}.get(word, word)
                for word in command[1:]
            )
        )
    assert (workspace / "new" / "config.json").exists()


def test_links_of_the_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [
        (document, target)
        for document in documents
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    ]
    assert len(links) >= 5
    assert [(document.name, target) for document, target in links if not (document.parent / target).exists()] == []


def test_the_measured_page_shows_the_records():
    """Renewed by `python benchmarks/bench_ops.py --markdown`."""
    records = bench.read_records(ROOT / "benchmarks" / "results" / "nvidia-h200.jsonl")
    expected = bench.markdown(bench.load_cases(bench.case_modules()), records)
    assert (ROOT / "docs" / "measured.md").read_text(encoding="utf-8") == expected
