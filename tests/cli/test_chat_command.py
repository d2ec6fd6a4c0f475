"""`dsv4 chat`: the conversation, its commands, what is shown and what is kept."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dsv4.cli.chat import read_message, run_chat
from dsv4.cli.chat_session import ChatSession
from dsv4.config import EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import RequestError, SamplingParams
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.chat import ChatOptions, encode_messages
from dsv4.text.parse import ContentDelta
from dsv4.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0,
    num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=4, moe_intermediate_size=128,
)  # fmt: skip
TOKENIZER = Tokenizer(byte_tokenizer(CONFIG.vocab_size), "the byte tokenizer")


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, dequantize_to=torch.float32)


@pytest.fixture
def make_session(params):
    """`make_session(*answers)`: a session whose model gives one answer per turn."""

    def make(*answers, thinking=False, context=1024, system=None, max_tokens=200):
        llm = LLM.from_params(
            CONFIG, params, numerics="exact", tokenizer=TOKENIZER,
            engine=EngineConfig(max_context_tokens=context, max_concurrent_requests=1),
        )  # fmt: skip
        scripts = [[*TOKENIZER.encode(answer, allow_special=True), CONFIG.eos_token_id] for answer in answers]
        session = ChatSession(
            llm, ChatOptions(thinking=thinking), SamplingParams(max_tokens=max_tokens), seed=0, system=system
        )

        def sample(logits, rows, state):
            turn = sum(message["role"] == "assistant" for message in session.messages)
            return torch.tensor([scripts[turn][rows.steps(state).item()]])

        llm.model.context = replace(llm.model.context, backend=llm.model.context.backend.with_ops(sample=sample))
        return session

    return make


def talk(session, *lines):
    """What a conversation of these lines prints: answers, and notes."""
    out, notes, given = io.StringIO(), io.StringIO(), iter([*lines, None])
    run_chat(session, lambda: next(given), Console(file=out, width=200), Console(file=notes, width=200))
    return out.getvalue(), notes.getvalue()


def test_answers_and_history(make_session):
    session = make_session("Hello!", "Fine.", system="Be kind.")
    out, _ = talk(session, "Hi", "", "How are you?")
    assert out == "Hello!\nFine.\n"
    assert [(message["role"], message["content"]) for message in session.messages] == [
        ("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "How are you?"),
        ("assistant", "Fine."),
    ]  # fmt: skip
    assert session.llm.cache.num_free_slots == 1


def test_thinking_is_dimmed_and_kept_apart(make_session):
    session = make_session("hm, hm</think>Yes.", thinking=True)
    out = io.StringIO()
    given = iter(["Well?", None])
    console = Console(file=out, force_terminal=True, color_system="standard", width=200)
    run_chat(session, lambda: next(given), console, Console(file=io.StringIO()))
    plain = out.getvalue()
    assert "\x1b[2;3m" in plain, "dim and italic"
    assert plain.rstrip().endswith("Yes.")
    assert "</think>" not in plain
    assert session.messages[-1]["reasoning"] == "hm, hm"
    assert session.messages[-1]["content"] == "Yes."


def test_commands(make_session, tmp_path):
    session = make_session("One.", "One.", system="S")
    file = tmp_path / "talk.json"
    _, notes = talk(session, "a", f"/save {file}", "/reset", "/help", "/nonsense", "/save", "/save /nowhere/x", "b")
    assert "3 messages written" in notes
    assert "forgotten" in notes
    assert "/save FILE" in notes
    assert "there is no /nonsense" in notes
    assert "/save needs the name of a file" in notes
    assert "/nowhere/x cannot be written" in notes
    assert [message["content"] for message in session.messages] == ["S", "b", "One."]
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert encode_messages(saved).endswith("One.<｜end▁of▁sentence｜>"), "dsv4 render reads it"


def test_quit(make_session):
    out, _ = talk(make_session("One."), "/quit", "a")
    assert out == ""


def test_the_answers_limit_is_said(make_session):
    out, notes = talk(make_session("abcdef", max_tokens=3), "x")
    assert out == "abc\n"
    assert "cut at its limit" in notes


def test_ctrl_c_ends_the_answer_and_keeps_what_came(make_session, monkeypatch):
    session = make_session("abcdefgh", "ok")
    step, count = session.llm.engine.step, 0

    def interrupted():
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(session.llm.engine, "step", interrupted)
    out, notes = talk(session, "x", "y")
    assert "stopped" in notes
    assert out == "abc\nok\n"
    assert [message["content"] for message in session.messages] == ["x", "abc", "y", "ok"]
    assert session.llm.cache.num_free_slots == 1


def test_a_conversation_that_is_too_long(make_session):
    session = make_session("ok", "ok", context=64)
    _, notes = talk(session, "x" * 100)
    assert "no room for an answer" in notes
    assert session.messages == []
    with pytest.raises(RequestError, match="/reset"):
        list(session.ask("x" * 100))
    assert talk(session, "x")[0] == "ok\n"


def test_leaving_an_answer_early_keeps_what_came(make_session):
    session = make_session("abcdef")
    events = session.ask("x")
    assert next(events) == ContentDelta("a")
    events.close()
    assert session.messages[-1]["content"] == "a"
    assert session.llm.cache.num_free_slots == 1


def test_lines_from_a_pipe(checkpoint, tmp_path):
    """The whole command: two lines in, two answers out, nothing else on stdout."""
    file = tmp_path / "talk.json"
    ran = subprocess.run(
        [sys.executable, "-m", "dsv4", "chat", "--model", str(checkpoint), "--max-tokens", "3", "--seed", "1",
         "--context", "512"],
        input=f"hello\nagain\n/save {file}\n".encode(), capture_output=True, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode()
    saved = json.loads(file.read_text())
    answers = "".join(message["content"] + "\n" for message in saved if message["role"] == "assistant")
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2
    assert ran.stdout.decode("utf-8") == answers


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one\\", "two\\", "", "three"], ["one\ntwo\n", "three"]),
        (['"""', "def f():", "    return 1", '"""', "next"], ["def f():\n    return 1", "next"]),
        (['"""one', "", 'two"""', "next"], ["one\n\ntwo", "next"]),
        (['"""one line"""'], ["one line"]),
        (['"""cut', "off"], ["cut\noff"]),
        (["last\\"], ["last"]),
        ([], []),
    ],
)
def test_messages_of_several_lines(lines, messages):
    rest, prompts = iter(lines), []

    def read_line(prompt):
        prompts.append(prompt)
        line = next(rest, None)
        if line is None:
            raise EOFError
        return line

    found = []
    while (message := read_message("> ", "... ", read_line)) is not None:
        found.append(message)
    assert found == messages
    if lines == ["one", "two"]:
        assert prompts == ["> "] * 3


def test_a_message_of_several_lines_is_no_command(make_session):
    session = make_session("fine")
    messages = iter(["/reset\nthe clock", None])
    run_chat(session, lambda: next(messages), Console(file=io.StringIO()), Console(file=io.StringIO()))
    assert session.messages[0] == {"role": "user", "content": "/reset\nthe clock"}
