"""`dsv4 render`: exact bytes on standard output; a mistake is a `ChatError`, which the command line prints."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dsv4.cli.render import render_command
from dsv4.text.chat import ChatError, encode_messages

FIXTURES = Path(__file__).parents[1] / "text" / "fixtures"
APP = typer.Typer()
APP.command()(render_command)


def render(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("number", "options"), [(2, ["--thinking"]), (4, [])])
def test_published_fixtures(number, options):
    result = render(FIXTURES / f"fixture_{number}_input.json", *options)
    assert result.exit_code == 0
    assert result.stdout_bytes == (FIXTURES / f"fixture_{number}_output.txt").read_bytes()


def test_object_with_tools_and_options(tmp_path):
    conversation = {
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a\r\n"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "object"},
        "reasoning_effort": "max",
    }
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(conversation), encoding="utf-8")
    assert render(file, "--thinking").stdout_bytes.decode() == encode_messages(
        conversation["messages"],
        thinking=True,
        tools=conversation["tools"],
        response_format=conversation["response_format"],
        reasoning_effort="max",
    )
    options = ["--thinking", "--profile", "final", "--reasoning-effort", "low", "--keep-thinking", "--no-bos"]
    assert render(file, *options).stdout_bytes.decode() == encode_messages(
        conversation["messages"],
        thinking=True,
        tools=conversation["tools"],
        response_format=conversation["response_format"],
        reasoning_effort="low",
        profile="final",
        drop_thinking=False,
        add_bos=False,
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not a JSON file"),
        (b"\xff", "not a JSON file"),
        (b"3", "expected a list of messages or an object with 'messages', found int"),
        (b"{}", "found no messages"),
        (b'{"messages": [], "model": "x"}', "found unknown model"),
        (b"[]", "messages: expected at least one message"),
        (b'[{"role": "robot"}]', "message 0: role: expected one of"),
    ],
)
def test_mistakes(tmp_path, content, expected):
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    result = render(file)
    assert isinstance(result.exception, ChatError)
    assert expected in str(result.exception)
    assert result.stdout_bytes == b""


def test_missing_file(tmp_path):
    result = render(tmp_path / "none.json")
    assert isinstance(result.exception, ChatError)
    assert "cannot be read: No such file" in str(result.exception)
