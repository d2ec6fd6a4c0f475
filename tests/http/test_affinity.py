"""Which requests belong to one conversation: every turn of it, whichever interface and client it comes through."""

import json

import pytest

from dsv4.http.affinity import conversation_key


def key_of(**fields):
    return conversation_key(json.dumps(fields).encode())


def user(text):
    return {"role": "user", "content": text}


FIRST, ANSWER, NEXT = user("Is it cold?"), {"role": "assistant", "content": "Yes."}, user("Sure?")
SYSTEM = {"role": "system", "content": "It is noon."}
PARTS = user([{"type": "text", "text": "Is it cold?", "cache_control": {"type": "ephemeral"}}])


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [FIRST]}, {"messages": [FIRST, ANSWER, NEXT]}),
        ({"messages": [SYSTEM, FIRST]}, {"messages": [{**SYSTEM, "content": "It is one."}, FIRST, ANSWER, NEXT]}),
        ({"messages": [FIRST], "system": "a"}, {"messages": [PARTS, ANSWER, NEXT], "system": [{"text": "b"}]}),
        ({"input": "Is it cold?"}, {"input": [FIRST, ANSWER, NEXT], "instructions": "Be brief."}),
        ({"input": [user([{"type": "input_text", "text": "Is it cold?"}])]}, {"input": "Is it cold?", "tools": []}),
        ({"prompt": "x" * 1024 + "a"}, {"prompt": "x" * 1024 + "ab"}),
        ({"prompt": [*range(256), 1]}, {"prompt": [*range(256), 2, 3]}),
        ({"prompt": ["Is it", "cold"]}, {"prompt": "Is it"}),
        ({"messages": [FIRST], "prompt_cache_key": "k"}, {"messages": [NEXT], "prompt_cache_key": "k"}),
    ],
)
def test_turns_share_a_key(first, later):
    assert key_of(**first) is not None
    assert key_of(**first) == key_of(**later)


def test_other_conversations_have_other_keys():
    keys = [
        key_of(messages=[FIRST]),
        key_of(messages=[NEXT]),
        key_of(messages=[FIRST], cache_salt="tenant"),
        key_of(messages=[FIRST], prompt_cache_key="k"),
        key_of(messages=[FIRST], prompt_cache_key="k", cache_salt="tenant"),
        key_of(prompt="Is it"),
        key_of(prompt=[1, 2, 3]),
        key_of(prompt="x" * 1023 + "a"),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000, b"{}", b'{"messages": 5}', b'{"messages": []}',
     b'{"messages": [{"role": "system", "content": "x"}]}', b'{"prompt": ""}',
     b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
     b'{"prompt": [{}]}', b'{"prompt_cache_key": ""}'],
)  # fmt: skip
def test_what_is_no_conversation_has_no_key(body):
    assert conversation_key(body) is None


def test_strange_bodies_have_some_key():
    """They will be refused; until then they must not do any harm."""
    assert key_of(messages=[5]) is not None
    assert key_of(messages=[user(None)]) is not None
    assert key_of(messages=[user([5, {"text": ["x"]}])]) is not None
    assert conversation_key(b'{"messages": [{"role": "user", "content": "\\ud800"}]}') is not None
