"""What travels between an engine and its clients: any cut of the bytes, damaged and hostile ones."""

import random
import socket
import struct

import msgspec
import pytest
from engine_cases import assert_all_free
from hypothesis import given
from hypothesis import strategies as st
from link_cases import start_engine

from dsv4.engine.link.messages import (
    FROM_ENGINE,
    LAST_HANDLE,
    MAX_MESSAGE_BYTES,
    TO_ENGINE,
    Cancel,
    Control,
    ControlFailed,
    EngineBusy,
    EngineInfo,
    EngineLost,
    EngineStopped,
    Finish,
    Frames,
    Hello,
    Record,
    RejectedGrammar,
    Reply,
    Step,
    Submit,
    encode,
    end_of,
    error_in,
    error_of,
    free_handles,
    pack_error,
    pack_ids,
    pack_logprobs,
    pack_reply,
    unpack_ids,
    unpack_logprobs,
)
from dsv4.engine.request import DeadlinePassed, RequestAborted, RequestFailed, WeightsIncomplete
from dsv4.loader.header import CheckpointError
from dsv4.request import RequestError, SamplingParams, TokenLogprobs

PARAMS = SamplingParams(
    stop=("end", "é"), logit_bias={5: -1.5}, bad_words_ids=((1, 2), (3,)), deadline=2.5, seed=-(2**63)
)
MESSAGES = [
    Submit(3, [pack_ids([1, 2]), pack_ids([])], [0, 0, 1], [PARAMS, SamplingParams(), PARAMS], "start: /a/", [7]),
    Cancel([1, 2]),
    Finish([]),
    Control(0, "stats"),
    Record(b"\x00\xff"),
    Control(3, "update_weights", {"source": "folder", "clear_cache": True}),
]


def frames_of(data, cuts):
    """The bodies that come out when `data` arrives in pieces."""
    frames, found, start = Frames(), [], 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        found += [bytes(body) for body in frames.feed(data[start:cut])]
        start = cut
    return found


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_frames_survive_any_cut(bodies, cuts):
    data = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    assert frames_of(data, cuts) == bodies


def test_a_length_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match="a message of"):
        list(Frames().feed(struct.pack("<I", MAX_MESSAGE_BYTES + 1)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_messages_to_the_engine_arrive_as_they_were(message):
    (body,) = frames_of(encode(message), [])
    assert TO_ENGINE.decode(body) == message


def test_messages_from_the_engine_arrive_as_they_were():
    scores = pack_logprobs([TokenLogprobs(3, -0.25, ((4, -0.125), (5, -8.0)))])
    step = Step(1.5, pack_ids([1]), pack_ids([9]), [1], [], [(pack_ids([0]), scores)], [end_of(1, RequestFailed("x"))])
    for message in (Hello(EngineInfo("f", 300, 1, 512, 4, 16, "whole")), step, pack_reply(7, {"a": [1]})):
        (body,) = frames_of(encode(message), [])
        assert FROM_ENGINE.decode(body) == message
    assert msgspec.msgpack.decode(pack_reply(7, {"a": [1]}).payload) == {"a": [1]}
    assert isinstance(message, Reply)


float32 = st.floats(width=32, allow_nan=False)


@given(st.integers(0, 5).flatmap(lambda top: st.lists(
    st.builds(TokenLogprobs, st.integers(0, LAST_HANDLE), float32,
              st.lists(st.tuples(st.integers(0, LAST_HANDLE), float32), min_size=top, max_size=top).map(tuple)),
    min_size=1, max_size=6)))  # fmt: skip
def test_logprobs_are_exact(scored):
    assert unpack_logprobs(pack_logprobs(scored)) == scored


@given(st.lists(st.integers(0, LAST_HANDLE)))
def test_ids_are_exact(token_ids):
    assert unpack_ids(pack_ids(token_ids)) == token_ids


@pytest.mark.parametrize(
    "kind",
    [RequestFailed, DeadlinePassed, RequestAborted, EngineBusy, EngineStopped, EngineLost, RequestError,
     RejectedGrammar],
)  # fmt: skip
def test_errors_keep_their_type(kind):
    found = error_of(end_of(5, kind("why")))
    assert type(found) is kind
    assert str(found) == "why"


@pytest.mark.parametrize(
    "error", [CheckpointError("x"), WeightsIncomplete("y"), RequestError("z", field="mode"), OSError("no disk")]
)
def test_errors_of_commands_keep_their_type(error):
    (body,) = frames_of(encode(pack_error(7, error)), [])
    found = error_in(FROM_ENGINE.decode(body))
    if isinstance(error, OSError):
        assert (type(found), str(found)) == (ControlFailed, "OSError: no disk")
    else:
        assert (type(found), str(found)) == (type(error), str(error))
        assert getattr(found, "field", None) == getattr(error, "field", None)
    assert error_in(pack_reply(1, None)) is None


def test_an_error_keeps_its_field_and_a_subclass_its_base():
    class TooLong(RequestError):
        pass

    found = error_of(end_of(5, TooLong("why", field="prompt")))
    assert (type(found), found.field) == (RequestError, "prompt")


# ---- hostile clients ----


def exchange(thread, data):
    """Send bytes to the engine; what it answers before it closes the socket, or the Hello if it does not."""
    with thread.connect() as ours:
        ours.settimeout(10)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := ours.recv(1 << 16):
            answer += piece
        return answer


def submit_bytes(**fields):
    good = {"first": 0, "prompts": [pack_ids([5, 6])], "owners": [0], "params": [SamplingParams(max_tokens=2)]}
    return encode(Submit(**{**good, **fields}))


HOSTILE = {
    "no prompt of that number": submit_bytes(owners=[1]),
    "a negative owner": submit_bytes(owners=[-1]),
    "fewer owners than requests": submit_bytes(owners=[]),
    "no request": submit_bytes(owners=[], params=[]),
    "half an id": submit_bytes(prompts=[b"\x01\x02\x03"]),
    "a negative handle": submit_bytes(first=-1),
    "a handle beyond int32": submit_bytes(first=2**31),
    "the last handles": submit_bytes(first=LAST_HANDLE, owners=[0, 0], params=[SamplingParams()] * 2),
    "a handle in use": submit_bytes() + submit_bytes(),
    "a huge length": b"\xff\xff\xff\xff",
    "no MessagePack": struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "an unknown message": struct.pack("<I", 2) + msgspec.msgpack.encode([99]),
    "a command to no engine": encode(Control(1, "explode")) + b"\xff\xff\xff\xff",
    "a message of ours": encode(Hello(EngineInfo("f", 1, 1, 1, 1, 1))),
}
REFUSED = {
    "an id outside the vocabulary": submit_bytes(prompts=[pack_ids([5, 300])]),
    "a negative id": submit_bytes(prompts=[pack_ids([-5])]),
    "a question without an answer": encode(Control(1, "secrets")),
    "an empty prompt": submit_bytes(prompts=[b""]),
    "a stop id outside the vocabulary": submit_bytes(params=[SamplingParams(stop_token_ids=(300,))]),
    "a grammar without a compiler": submit_bytes(grammar="start: /a/"),
    "handles nobody has": encode(Cancel([5, -1, 2**40])) + encode(Finish([7])),
}


@pytest.mark.parametrize("data", [*HOSTILE.values(), *REFUSED.values()], ids=[*HOSTILE, *REFUSED])
def test_no_bytes_end_the_engine(make_llm, data):
    llm = make_llm()
    thread = start_engine(llm)
    exchange(thread, data)
    assert thread.is_alive
    assert exchange(thread, encode(Control(1, "stats"))), "it answers the next client"
    assert thread.stop(10)
    assert thread.error is None
    assert_all_free(llm)


def test_damaged_messages_do_not_end_the_engine(make_llm):
    """Valid streams with bytes changed, cut out and repeated."""
    llm = make_llm(max_context_tokens=64)
    thread, chance = start_engine(llm, max_waiting=8), random.Random(5)
    good = (
        submit_bytes()
        + encode(Control(1, "stats"))
        + encode(Cancel([0]))
        + encode(Record(b"x"))
        + submit_bytes(first=9)
    )
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data))
            change = chance.randrange(3)
            if change == 0:
                data[place] = chance.randrange(256)
            elif change == 1:
                del data[place : place + chance.randrange(1, 8)]
            else:
                data[place:place] = data[place : place + chance.randrange(1, 8)]
        exchange(thread, bytes(data))
        assert thread.is_alive
    assert thread.stop(10)
    assert thread.error is None
    assert_all_free(llm)


@pytest.mark.parametrize(
    ("start", "count", "used", "first"),
    [
        (5, 2, {}, 5),
        (5, 2, {6}, 7),
        (LAST_HANDLE, 1, {}, LAST_HANDLE),
        (LAST_HANDLE, 2, {0, 3}, 1),
        (LAST_HANDLE + 1, 3, {0, 1, 2, 4}, 5),
        (LAST_HANDLE, 1, {LAST_HANDLE, 0}, 1),
    ],
)
def test_handles_begin_again_and_pass_those_in_use(start, count, used, first):
    assert free_handles(start, count, used) == first
