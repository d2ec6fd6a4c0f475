"""Grammars are tried in processes of their own, and nobody waits for another's."""

import asyncio
import os
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_cases import TOKENIZER, chat_body

from dsv4.engine.grammar import check_program
from dsv4.engine.grammar.check import GrammarChecks
from dsv4.engine.grammar.errors import GrammarError
from dsv4.engine.link.grammars import GrammarQueue
from dsv4.engine.link.messages import RejectedGrammar, Submit
from dsv4.http.grammar.answer import AnswerRules, answer_grammar, symbols_of
from dsv4.http.grammar.structured import JsonRule
from dsv4.request import SamplingParams

HOSTILE = {"allOf": [{"type": "string", "pattern": f"^(a|b|ab)*{i}$"} for i in range(40)]}
CHAT = "/v1/chat/completions"


def schema_body(schema):
    return chat_body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def children(program):
    """Processes of this one that run a program."""
    found = []
    for one in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in one.read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended just now
                continue
            found += [pid] * (str(program).encode() in words)
    return found


def wait_for(is_true, seconds=20):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def slow_check(tmp_path, monkeypatch):
    """Checks of grammars with "slow" in them last for ever."""
    program = tmp_path / "check.py"
    program.write_text("import sys, time\ntime.sleep(600 if b'slow' in sys.stdin.buffer.read() else 0)\n")
    monkeypatch.setattr(check_program, "__file__", str(program))
    return program


def test_a_schema_that_would_take_all_memory_is_refused():
    """Patterns that must hold together cost exponentially."""
    grammar = answer_grammar(AnswerRules(thinking=False, content=JsonRule(HOSTILE)), symbols_of(TOKENIZER))
    with pytest.raises(GrammarError, match="too complex"):
        asyncio.run(GrammarChecks().check(grammar))


def test_a_grammar_seen_before_is_not_checked_again(monkeypatch):
    async def run(checks):
        await checks.check('start: "seen"')
        monkeypatch.setattr(check_program, "__file__", "/nonexistent.py")
        await checks.check('start: "seen"')
        with pytest.raises(GrammarError, match="too complex"):
            await checks.check('start: "unseen"')

    asyncio.run(run(GrammarChecks()))


def test_one_slow_grammar_holds_up_nobody_and_ends_with_its_client(live, slow_check):
    def leave():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(live.url + CHAT, json=schema_body({"const": "slow"}), timeout=3)

    leaving = threading.Thread(target=leave)
    leaving.start()
    wait_for(lambda: children(slow_check))
    assert live.post(CHAT, schema_body({"enum": ["a", "b"]})).status_code == 200
    assert children(slow_check), "the slow one is still being checked"
    leaving.join()
    wait_for(lambda: not children(slow_check))


class Client:
    """What `GrammarQueue` needs of one."""

    def __init__(self):
        self.compiling = {}


def test_grammars_are_compiled_beside_each_other_and_kept():
    """A slow one delays no other; a known one needs no thread; one that the client dropped is told to nobody."""
    calls, done, may_end = [], [], threading.Event()
    lock = threading.Lock()

    def constrain(lark, opening):
        with lock:
            calls.append(lark)
        if lark == "slow":
            may_end.wait(20)
        if lark == "wrong":
            raise ValueError("it is wrong")
        return lambda: f"a place in {lark}"

    commands = []
    queue, client = GrammarQueue(constrain, commands.append), Client()

    def compile_(first, lark, count=1):
        params = [SamplingParams()] * count
        message = Submit(first, [b""], [0] * count, params, lark)
        queue.compile(client, message, lambda client, message, made: done.append((message.first, made)))

    def settle(count):
        wait_for(lambda: len(commands) >= count)
        while commands:
            commands.pop(0)()

    compile_(0, "slow")
    compile_(1, "quick", count=2)
    settle(1)
    assert done == [(1, ["a place in quick"] * 2)]
    compile_(3, "quick")
    assert done.pop() == (3, ["a place in quick"]), "at once"
    assert calls.count("quick") == 1
    compile_(4, "wrong")
    settle(1)
    assert isinstance(done[-1][1], RejectedGrammar)
    assert queue.num_requests == 1
    client.compiling.clear()  # the client dropped it
    may_end.set()
    settle(1)
    assert [first for first, _ in done] == [1, 4]
    assert queue.num_requests == 0
    queue.close()
