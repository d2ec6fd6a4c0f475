"""What streams do while nothing comes, when too much comes, and what an answer that is sent whole holds until then."""

import asyncio
import time
import tracemalloc

import pytest
from server_cases import NAME, TOKENIZER

from dsv4.engine.link.stream import RequestStream, TokenEvent
from dsv4.engine.request import RequestAborted
from dsv4.http.apis.registry import GENERATING
from dsv4.http.apis.request_builder import Job, ModelInfo
from dsv4.http.body import validate
from dsv4.http.connection import OUTLET
from dsv4.http.streaming import STALLED, EventStream, StreamClock
from dsv4.http.telemetry.metrics import Metrics, RequestTimer
from dsv4.request import FinishReason, SamplingParams, TokenLogprobs
from dsv4.text.output import TextOutput

SERVED = ModelInfo(NAME, TOKENIZER, "f")
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
APIS = {api.path: api for api in GENERATING}


def job_of(**params):
    output = TextOutput([5], SamplingParams(max_tokens=10**6, seed=3, **params), eos_token_id=1, tokenizer=TOKENIZER)
    return Job((output,), 1, shows_logprobs="logprobs" in params)


def raw(text, reason=None):
    """A token whose text is one character, as it comes from the engine."""
    (token_id,) = TOKENIZER.encode(text)
    return 0, token_id, time.perf_counter(), reason


def assembler_of(job, path):
    return APIS[path].assembler(job, validate(APIS[path].request, {"model": NAME, **BODIES[path]}), SERVED)


class Client:
    """`run(act)`: a stream of a job to a client, while `act(stream)` plays the engine; its bodies, its end. It is the
    stream's outlet too: full after every piece, where `blocks`, until `free`."""

    def __init__(self, path, clock):
        self.path, self.clock = path, clock
        self.bodies, self.problems, self.cancelled = [], [], []
        self.metrics = Metrics(NAME)
        self.blocks = self.is_full = self.is_aborted = self.is_complete = False

    async def send(self, message):
        assert not self.is_full
        assert not message.get("body"), "pieces go to the outlet"
        self.is_complete = message.get("more_body") is False

    def write(self, body):
        assert not self.is_full
        self.bodies.append(body.decode())
        self.is_full = self.blocks

    def when_free(self, call):
        self.call = call

    def free(self):
        self.is_full = False
        self.call()

    def abort(self):
        self.is_aborted = True

    async def run(self, act):
        job = job_of()
        stream = RequestStream(job.outputs, lambda stream, choice: None, self.cancelled.append)
        timer = RequestTimer(self.metrics, 1, time.perf_counter())
        assembler = assembler_of(job, self.path)
        response = EventStream(stream, assembler, self.metrics, timer, self.clock, on_end=self.problems.append)
        task = asyncio.create_task(response({"extensions": {OUTLET: self}}, asyncio.Event().wait, self.send))
        await act(stream)
        await asyncio.wait_for(task, 20)


def give(stream, *items):
    """As the connection to the engine does with a message."""
    for item in items:
        stream.push(*item)
    stream.notify()


def run(path, clock, act):
    async def main():
        client = Client(path, clock)
        await client.run(lambda stream: act(client, stream))
        return client

    return asyncio.run(main())


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_says_that_it_lives(path):
    """While a long prompt is read, and between two tokens; nothing of the answer is lost or moved."""
    ping = 'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else ": ping\n\n"

    async def act(client, stream):
        await until(lambda: client.bodies.count(ping) >= 2)
        give(stream, raw("a"))
        await until(lambda: client.bodies[-1] != ping)
        await until(lambda: client.bodies[-1] == ping)
        give(stream, raw("b", FinishReason.LENGTH))

    client = run(path, StreamClock(30.0, ping_seconds=0.02, tick_seconds=0.01), act)
    assert client.problems == [None]
    assert client.cancelled == []
    text = "".join(body for body in client.bodies if body != ping)
    assert text.index('"a"') < text.index('"b"')


def test_a_busy_stream_says_nothing_else():
    async def act(client, stream):
        for _ in range(50):
            give(stream, raw("a"))
            await asyncio.sleep(0.002)
        give(stream, raw("b", FinishReason.LENGTH))

    client = run("/v1/chat/completions", StreamClock(30.0, ping_seconds=10.0, tick_seconds=0.001), act)
    assert all("ping" not in body for body in client.bodies)


def test_all_that_is_ready_is_one_send():
    async def act(client, stream):
        await asyncio.sleep(0)
        give(stream, *[raw("a")] * 20)
        assert client.bodies[0].count("data: ") == 20, "written before the handler of the engine's message ends"
        give(stream, raw("b"))
        give(stream, raw("c", FinishReason.LENGTH))

    client = run("/v1/chat/completions", StreamClock(30.0), act)
    assert len(client.bodies) == 3
    for tally, count in (
        (client.metrics.delivery, 22),
        (client.metrics.inter_token, 21),
        (client.metrics.first_token, 1),
    ):
        samples = {(one.name, one.labels.get("le")): one.value for one in next(tally.collect()).samples}
        counted = [value for (name, bound), value in samples.items() if bound == "+Inf" or name.endswith("_count")]
        assert counted == [count, count]


def test_a_client_that_takes_nothing_is_found_by_the_clock():
    """Between two ticks there is no timer; a client that takes its bytes in time is left alone. What comes meanwhile
    waits as tokens, and is written at once."""

    async def act(client, stream):
        give(stream, raw("a"))
        await until(lambda: client.bodies)
        client.blocks = True
        for text in "bcd":
            give(stream, raw(text))
            await asyncio.sleep(0.02)
        assert len(client.bodies) == 2
        client.free()  # in time
        assert client.bodies[2].count("data: ") == 2
        assert client.is_full
        give(stream, raw("e"))

    client = run("/v1/chat/completions", StreamClock(0.2, tick_seconds=0.02), act)
    assert client.problems == [STALLED]
    assert client.is_aborted
    assert not client.is_complete
    assert len(client.bodies) == 3
    assert len(client.cancelled) == 1
    assert client.metrics.disconnects._value.get() == 1


def test_a_client_that_takes_the_end_late_is_waited_for():
    async def act(client, stream):
        client.blocks = True
        give(stream, raw("a", FinishReason.LENGTH))
        await until(lambda: client.bodies)
        assert client.bodies[0].endswith("[DONE]\n\n")
        await asyncio.sleep(0.05)
        assert client.problems == []
        client.free()

    client = run("/v1/chat/completions", StreamClock(30.0), act)
    assert client.problems == [None]
    assert client.is_complete


def test_a_mistake_in_one_answer_is_not_the_others():
    """An assembler that raises ends its own stream; the handler of the engine's messages goes on."""

    async def main():
        client = Client("/v1/chat/completions", StreamClock(30.0))

        async def act(stream):
            await asyncio.sleep(0)
            give(stream, (0, -5, 0.0))  # no token has such an id

        with pytest.raises(ValueError, match="must not be negative"):
            await client.run(act)
        return client

    client = asyncio.run(main())
    assert client.problems == ["disconnected"]
    assert len(client.cancelled) == 1


def test_what_came_before_an_error_is_sent():
    async def act(client, stream):
        give(stream, raw("a"), (0, None, 0.0, RequestAborted("gone")))

    client = run("/v1/chat/completions", StreamClock(30.0), act)
    assert client.problems == ["request_aborted"]
    assert '"content":"a"' in client.bodies[0]
    assert "gone" in client.bodies[0]


# 256 answers of 16K tokens are to stay below 200 MB: 47 bytes a token
_MAX_BYTES = 12
_MAX_SCORED_BYTES = 110  # with five of the most likely beside each


def keep(path, num_top, num_tokens):
    """An answer of letters, kept to be sent whole."""
    job = job_of() if num_top is None else job_of(logprobs=num_top)
    assembler = assembler_of(job, path)
    for place in range(num_tokens):
        best = None if num_top is None else TokenLogprobs(7, -0.5, tuple((one, -place / 7) for one in range(num_top)))
        _, token_id, seconds, _ = raw("abcde fghij\n"[place % 12])
        assembler.keep(TokenEvent(0, token_id, job.outputs[0].take(token_id, best), best, None, seconds))
    return job, assembler


@pytest.mark.parametrize(("num_top", "limit"), [(None, _MAX_BYTES), (5, _MAX_SCORED_BYTES)])
@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_holds_ids_and_text(path, num_top, limit):
    """The JSON that it becomes at its end is not counted, nor what the interpreter keeps for the next objects."""
    num_tokens = 4000
    tracemalloc.start()
    try:
        keep(path, num_top, num_tokens)
        before = tracemalloc.get_traced_memory()[0]
        kept = keep(path, num_top, num_tokens)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept[0].outputs[0].num_output == num_tokens
    assert held / num_tokens < limit, f"{held / num_tokens:.1f} bytes a token"
