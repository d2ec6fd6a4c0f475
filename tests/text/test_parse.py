"""The parser of model output: exact where the protocol is followed, tolerant where it is not, indifferent to cuts."""

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.text.chat import encode_messages
from dsv4.text.parse import (
    ContentDelta,
    ParsedToolCall,
    ReasoningDelta,
    StreamParser,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    parse_completion,
)

EOS = "<｜end▁of▁sentence｜>"
D = "｜DSML｜"
CALL = (
    f'<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="a" string="true">x</{D}parameter>\n'
    f'<{D}parameter name="b" string="false">[1, 2]</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'
)
OPEN = f'<{D}tool_calls><{D}invoke name="f"'
PARSED = ParsedToolCall("f", '{"a": "x", "b": [1, 2]}')


def merged(events):
    """Adjacent deltas of the same kind joined."""
    result = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, (ReasoningDelta, ContentDelta)) and type(last) is type(event):
            result[-1] = type(event)(last.text + event.text)
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == event.index:
            result[-1] = ToolCallDelta(event.index, last.arguments + event.arguments)
        else:
            result.append(event)
    return result


def run(pieces, thinking):
    parser = StreamParser(thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def test_events_of_a_whole_message():
    assert merged(run([f"think</think>text\n\n{CALL}{EOS}"], True)) == [
        ReasoningDelta("think"),
        ContentDelta("text"),
        ToolCallStart(0, "f"),
        ToolCallDelta(0, '{"a": "x", "b": [1, 2]}'),
        ToolCallEnd(0, True),
    ]


def test_text_streams_as_soon_as_it_is_certain():
    parser = StreamParser(thinking=True)
    assert parser.feed("abc") == [ReasoningDelta("abc")]
    assert parser.feed("</thi") == []
    assert parser.feed("nk>def\n") == [ContentDelta("def")]
    assert parser.feed("\n<") == []
    assert parser.feed("b>") == [ContentDelta("\n\n<b>")]
    assert parser.feed(f"\n\n<{D}tool_calls>") == []
    assert parser.feed(f'<{D}invoke name="f">') == [ToolCallStart(0, "f")]
    assert merged(parser.feed(f'<{D}parameter name="a" string="true">say "')) == [ToolCallDelta(0, '{"a": "say \\"')]
    assert parser.feed("hi</") == [ToolCallDelta(0, "hi")]
    assert parser.feed("b>") == [ToolCallDelta(0, "</b>")]
    assert merged(parser.finish()) == [ToolCallDelta(0, '"}'), ToolCallEnd(0, False)]


def test_chat_mode_leaves_think_tags_alone():
    assert parse_completion("a</think>b", False).content == "a</think>b"
    assert parse_completion("a</think>b</think>c", True).content == "b</think>c"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL.replace("\n", ""), "", [PARSED]),
        (f"text\n{CALL}", "text", [PARSED]),
        (f"text{CALL}", "text", [PARSED]),
        (f"text\n\n\n{CALL}\n", "text\n", [PARSED]),
        (CALL.replace("\n", "\n \n"), "", [PARSED]),
        (f"{CALL}\n\nafter that\n", "\n\nafter that", [PARSED]),
        (f"{CALL}\n{CALL}", "", [PARSED, PARSED]),
        (f"{CALL} a\n\n{CALL}", " a", [PARSED, PARSED]),
        (CALL.replace(f"</{D}invoke>", ""), "", [PARSED]),
        (CALL.replace(f"\n<{D}invoke", f" well\n<{D}invoke"), " well", [PARSED]),
        (CALL.replace(' string="false"', ""), "", [PARSED]),
        (CALL.replace("[1, 2]", "[1, 2"), "", [ParsedToolCall("f", '{"a": "x", "b": "[1, 2"}')]),
        (CALL.replace("[1, 2]", "NaN"), "", [ParsedToolCall("f", '{"a": "x", "b": "NaN"}')]),
        (CALL.replace("[1, 2]", ""), "", [ParsedToolCall("f", '{"a": "x", "b": ""}')]),
        (CALL.replace("[1, 2]", "\n7\n"), "", [ParsedToolCall("f", '{"a": "x", "b": 7}')]),
        (CALL.replace(">x<", "><a href='b'>\n</a>\\<"), "", [
            ParsedToolCall("f", '{"a": "<a href=\'b\'>\\n</a>\\\\", "b": [1, 2]}')
        ]),
        (CALL.replace(">x<", f"><{D}invoke> </{D}tool_calls><"), "", [
            ParsedToolCall("f", f'{{"a": "<{D}invoke> </{D}tool_calls>", "b": [1, 2]}}')
        ]),
        (CALL.replace('invoke name="f"', "invoke"), (
            f'<{D}invoke>\n<{D}parameter name="a" string="true">x</{D}parameter>\n'
            f'<{D}parameter name="b" string="false">[1, 2]</{D}parameter>\n</{D}invoke>'
        ), []),
        (CALL.replace('parameter name="a" string="true"', "parameter"), f"<{D}parameter>x</{D}parameter>", [
            ParsedToolCall("f", '{"b": [1, 2]}')
        ]),
        (f"a <{D}invoke> b", f"a <{D}invoke> b", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_tolerance(text, content, calls):
    message = parse_completion(text, False)
    assert message.content == content
    assert list(message.tool_calls) == calls


@pytest.mark.parametrize(
    ("cut", "content", "calls"),
    [
        ("a <", "a <", []),
        ("a\n\n", "a\n\n", []),
        ("a </th", "a </th", []),
        (f"a\n\n<{D}tool_c", "a", []),
        (f"a<{D}tool_calls>\n<", "a", []),
        (f'a<{D}tool_calls>\n<{D}invoke name="f', "a", []),
        (f'{OPEN}>', "", [("{}", False)]),
        (f'{OPEN}><{D}parameter name="a" str', "", [("{}", False)]),
        (f'{OPEN}><{D}parameter name="a" string="true">x<', "", [('{"a": "x<"}', False)]),
        (f'{OPEN}><{D}parameter name="a" string="true">x</{D}', "", [('{"a": "x"}', False)]),
        (f'{OPEN}><{D}parameter name="a" string="false">[1', "", [('{"a": "[1"}', False)]),
        (f'{OPEN}></{D}invoke>', "", [("{}", True)]),
    ],
)  # fmt: skip
def test_truncated(cut, content, calls):
    message = parse_completion(cut, False)
    assert message.content == content
    assert [(call.arguments, call.is_complete) for call in message.tool_calls] == calls


def test_text_inside_a_call_comes_after_it():
    """Between a start and its end there are only arguments."""
    inside = CALL.replace(f"\n<{D}parameter", f" well\n<{D}parameter")
    for text in (inside, inside[: inside.index(f"</{D}invoke>")] + "\ufffd"):
        parser = StreamParser(thinking=False)
        kinds = [type(one) for one in merged(parser.feed(text) + parser.finish())]
        assert kinds == [ToolCallStart, ToolCallDelta, ToolCallEnd, ContentDelta]


def test_end_marker_is_dropped_only_at_the_end():
    assert parse_completion(f"a{EOS}", False).content == "a"
    assert parse_completion(f"a{EOS}b{EOS}{EOS}", False).content == f"a{EOS}b{EOS}"


def test_an_endless_header_is_text():
    text = f'<{D}tool_calls><{D}invoke name="' + "x" * 5000
    assert parse_completion(text, False).content == text.removeprefix(f"<{D}tool_calls>")


def test_one_parser_reads_one_completion():
    parser = StreamParser(thinking=False)
    parser.finish()
    with pytest.raises(ValueError, match="after finish"):
        parser.feed("a")
    with pytest.raises(ValueError, match="twice"):
        parser.finish()


FRAGMENTS = [
    f"<{D}tool_calls>", f"</{D}tool_calls>", f'<{D}invoke name="f">', f"<{D}invoke", f"</{D}invoke>",
    f'<{D}parameter name="a" string="true">', f'<{D}parameter name="b" string="false">', f'<{D}parameter name="c">',
    f"</{D}parameter>", "<", "</", D, "\n", "\n\n", " ", "x", "1", '"', ">", "</think>", "<think>", EOS, EOS[:9],
    ' name="', "é", "{}", CALL,
]  # fmt: skip
streams = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=16).map("".join)


@pytest.mark.thorough
@settings(max_examples=500)
@given(text=streams, cuts=st.lists(st.integers(0, 400), max_size=12), thinking=st.booleans())
@example(text=f"a</think>\n\n{CALL}\n\n{CALL}x{EOS}", cuts=[], thinking=True)
def test_cuts_do_not_matter(text, cuts, thinking):
    whole = merged(run([text], thinking))
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    assert "".join(pieces) == text
    assert merged(run(pieces, thinking)) == whole
    assert merged(run(list(text), thinking)) == whole


@given(text=streams, thinking=st.booleans())
def test_every_call_is_whole_json(text, thinking):
    events = run([text], thinking)
    starts = [event.index for event in events if isinstance(event, ToolCallStart)]
    assert starts == [event.index for event in events if isinstance(event, ToolCallEnd)] == list(range(len(starts)))
    for call in parse_completion(text, thinking).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


# ---- round trip with the encoder ----

plain = st.text(st.characters(codec="utf-8"), max_size=12) | st.lists(
    st.sampled_from(["\n", "<", ">", "</", "a", '"', "\\", "｜", " "]), max_size=8
).map("".join)
names = st.text(st.characters(codec="utf-8", exclude_characters='"'), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(max_examples=300)
@given(
    reasoning=plain,
    content=plain,
    calls=st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3),
    thinking=st.booleans(),
)
def test_round_trip(reasoning, content, calls, thinking):
    question = {"role": "user", "content": "q"}
    tool_calls = [{"name": name, "arguments": arguments} for name, arguments in calls]
    answer = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": tool_calls}
    prompt = encode_messages([question], thinking=thinking)
    rendered = encode_messages([question, answer], thinking=thinking)
    assert rendered.startswith(prompt)
    message = parse_completion(rendered.removeprefix(prompt), thinking)
    assert message.reasoning == (reasoning if thinking else "")
    assert message.content == content
    assert [(call.name, json.loads(call.arguments), call.is_complete) for call in message.tool_calls] == [
        (name, arguments, True) for name, arguments in calls
    ]
    assert encode_messages([question, message.to_message()], thinking=thinking) == rendered
