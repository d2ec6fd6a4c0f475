"""`dsv4 bench serve`: loads are the same for a seed, times are the caller's, any server's stream is read, failures are
counted."""

import asyncio
import json
import pickle
import statistics
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli.main import app
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.tools.bench import client_process
from dsv4.tools.bench.client_process import Answer, Connection, Events, prompt_text
from dsv4.tools.bench.engine_target import EngineTarget
from dsv4.tools.bench.serve import beside, measure_load, spread
from dsv4.tools.bench.server_target import UrlTarget
from dsv4.tools.bench.workload import KINDS, SHAPES, Load, Observed, Timeline

CONFIG = ModelConfig.tiny(num_hidden_layers=1, compress_ratios=(0, 0), vocab_size=1000)


# ---- loads ----


def test_loads_are_the_same_for_a_seed():
    load = Load.of("sharegpt", requests=50, rate=10.0, seed=3)
    again = Load.of("sharegpt", requests=50, rate=10.0, seed=3)
    assert (load.sizes(), load.prompts(), load.arrivals()) == (again.sizes(), again.prompts(), again.arrivals())
    other = Load.of("sharegpt", requests=50, rate=10.0, seed=4)
    assert load.prompts() != other.prompts()
    assert load.arrivals() == sorted(load.arrivals())
    assert load.arrivals()[-1] == pytest.approx(5, rel=0.5)
    assert [len(prompt) for prompt in load.prompts()] == [size for size, _ in load.sizes()]


def test_shapes():
    assert set(Load.of("random", requests=9).sizes()) == {(1024, 128)}
    assert set(Load.of("fixed", 7, 3, requests=9).sizes()) == {(7, 3)}
    spread_out = Load.of("fixed", 100, 10, 0.5, requests=200).sizes()
    assert 50 <= min(prompt for prompt, _ in spread_out) < 60
    assert 140 < max(prompt for prompt, _ in spread_out) <= 150
    prompts, outputs = zip(*Load.of("sharegpt", requests=4000).sizes(), strict=True)
    assert min(prompts) >= 4
    assert max(prompts) <= 1024
    assert statistics.median(prompts) == pytest.approx(SHAPES["sharegpt"].prompt.median, rel=0.1)
    assert statistics.mean(outputs) > 1.2 * statistics.median(outputs)  # a long tail
    load = Load.of("fixed", 100, 10, 0.5, requests=50)
    assert load.max_context == max(map(sum, load.sizes()))
    assert Load.of("fixed", intruder=5000).max_context > 5000


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"requests": 0}, "requests"), ({"streams": 0}, "streams"), ({"rate": 0.0}, "rate"), ({"rate": -1.0}, "rate"),
        ({"kind": "talk"}, "kind"), ({"intruder": 0}, "intruder"), ({"prompt": 0}, "lengths"),
        ({"spread": 1.0}, "spread"), ({"shape": "round"}, "shape"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(wrong, named):
    with pytest.raises(ConfigError, match=f"{named} must be"):
        Load.of(**{"shape": "fixed", **wrong})


# ---- what is reported ----


def test_spread():
    assert spread([]) == {}
    found = spread([value / 1000 for value in range(1, 101)])
    assert found == {"p50": 50.5, "p90": 90.0, "p99": 99.0, "max": 100.0, "mean": 50.5}
    assert spread([0.001])["p99"] == 1.0


def test_gaps_beside_an_intruder():
    streams = [Timeline(0.0, [1.0, 2.0, 6.0, 7.0]), Timeline(0.0, [1.5, 3.5])]
    found = beside(Timeline(3.0, [5.0], num_prompt=9), streams)
    assert (found["first_token_ms"], found["prompt_tokens"]) == (2000, 9)
    assert (found["between_tokens_ms"]["max"], found["between_tokens_otherwise_ms"]["max"]) == (4000, 1000)
    assert found["between_tokens_ms"]["p50"] == 3000  # of 4 s and 2 s
    assert beside(Timeline(3.0, error="no"), streams) == {"error": "no"}


def test_nothing_came():
    class Silent:
        name = "silent"

        def run(self, load, on_done):
            return Observed([Timeline(0.0, error="no"), Timeline(0.0)])

    report, _ = measure_load(Silent(), Load(requests=2))
    assert (report.failed, report.tokens_per_second, report.first_token_ms) == (2, 0.0, {})
    assert report.errors == {"no": 1, "no text": 1}


# ---- the engine ----


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, dequantize_to=torch.float32)


def engine_target(params, num_requests=3):
    limits = EngineConfig(max_context_tokens=64, max_concurrent_requests=num_requests)
    llm = LLM.from_params(CONFIG, params, numerics="exact", engine=limits)
    return EngineTarget(llm.engine, "here", CONFIG.vocab_size), llm


@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_request_gets_all_its_tokens(params, rate):
    target, llm = engine_target(params)
    done = []
    load = Load.of("fixed", 9, 5, requests=7, streams=2, rate=rate)
    report, seen = measure_load(target, load, done.append)
    assert [len(one.tokens) for one in seen.timelines] == [5] * 7
    assert all(one.tokens == sorted(one.tokens) and one.tokens[0] >= one.started for one in seen.timelines)
    assert (sum(done), report.failed, report.errors) == (7, 0, {})
    assert (report.prompt_tokens, report.output_tokens) == (63, 35)
    assert 0 < report.host_share <= 1
    assert llm.engine.stats().num_finished == 7
    json.dumps(report.to_dict())


def test_a_closed_loop_keeps_its_number_and_an_intruder_comes_beside_it(params):
    target, llm = engine_target(params)
    step, running = llm.engine.step, []

    def watched():
        results = step()
        running.append(llm.engine.stats().num_running + llm.engine.stats().num_waiting)
        return results

    llm.engine.step = watched
    measure_load(target, Load.of("fixed", 4, 4, requests=6, streams=2))
    assert max(running) == 2
    load = Load.of("fixed", 4, 4, requests=6, streams=2, intruder=40, intruder_seconds=0.0)
    report, seen = measure_load(target, load)
    assert max(running) == 3
    assert len(seen.intruder.tokens) == 4
    assert len(seen.timelines) == 6
    assert report.intruder["first_token_ms"] > 0
    assert report.output_tokens == 24  # the intruder's are not counted


# ---- streams of servers ----

CHAT = {"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
EMPTY = {"choices": [{"delta": {"content": ""}, "finish_reason": None}]}
LAST = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}}


def event(value, separators=(",", ":")):
    return b"data: " + json.dumps(value, separators=separators).encode() + b"\n\n"


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_counted_wherever_a_stream_is_cut(separators, size):
    text = {"choices": [{"text": 'a "finish_reason": "stop", \\"text\\": ""', "finish_reason": None}]}
    values = (ROLE, CHAT, text, EMPTY, LAST, USAGE)
    data = b"".join(event(value, separators) for value in values) + b": comment\n\ndata: [DONE]\n\n"
    answer = Answer(0.0)
    events = Events(answer)
    for place in range(0, len(data), size):
        events.feed(data[place : place + size], float(place))
    assert len(answer.times) == 3  # the token without text yet is one too; the role and the end are not
    assert answer.usage == {"prompt": 11, "completion": 3}
    assert answer.is_complete
    assert answer.error is None


def test_named_events_are_counted():
    """Those of Responses and Messages: deltas with text are tokens, repeated whole texts are not."""
    answer = Answer(0.0)
    named = [
        ("response.created", {"response": {"usage": None}}),
        ("response.content_part.added", {"part": {"text": ""}}),
        ("response.reasoning_text.delta", {"delta": "a"}),
        ("response.output_text.delta", {"delta": "b", "logprobs": []}),
        ("response.output_text.delta", {"delta": ""}),
        ("response.output_text.done", {"text": "b"}),
        ("response.completed", {"response": {"usage": {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}}}),
    ]
    feed = Events(answer).feed
    for name, value in named:
        feed(f"event: {name}\ndata: {json.dumps({'type': name, **value})}\n\n".encode(), 1.0)
    assert (len(answer.times), answer.is_complete, answer.error) == (2, True, None)
    assert answer.usage == {"prompt": 4, "completion": 2}
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 128, "output_tokens": 1}
    cached = Answer(0.0)
    Events(cached).feed(f"event: message_delta\ndata: {json.dumps({'usage': usage})}\n\n".encode(), 0.0)
    assert cached.usage == {"prompt": 132, "completion": 1}
    failed = Answer(0.0)
    Events(failed).feed(b'event: response.failed\ndata: {"type":"response.failed"}\n\n', 0.0)
    assert "response.failed" in failed.error


@pytest.mark.parametrize("data", [event({"error": {"message": "busy"}}), b'event: error\ndata: {"type": "error"}\n\n'])
def test_an_error_in_a_stream(data):
    answer = Answer(0.0)
    Events(answer).feed(data, 0.0)
    assert "error" in answer.error
    assert not answer.times


def answered(*pieces, close=False):
    """What a connection makes of an answer that comes in pieces; the connection."""

    class Transport:
        def write(self, data):
            pass

        def close(self):
            pass

    async def run():
        connection, answer = Connection(), Answer(0.0)
        connection.connection_made(Transport())
        over = connection.ask(b"", answer)
        for piece in pieces:
            connection.data_received(piece)
        if close:
            connection.connection_lost(None)
        assert over.done()
        return connection, answer

    return asyncio.run(run())


def chunked(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = [event(CHAT), event(CHAT)[:9], event(CHAT)[9:], b"data: [DONE]\n\n"]


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_a_chunked_answer_however_it_is_cut(size):
    whole = HEAD + chunked(*BODY)
    connection, answer = answered(*(whole[place : place + size] for place in range(0, len(whole), size)))
    assert (len(answer.times), answer.error, connection.is_open) == (2, None, True)


def test_other_ends_of_an_answer():
    plain = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(BODY)
    connection, answer = answered(plain, close=True)
    assert (len(answer.times), answer.error, connection.is_open) == (2, None, False)
    _, answer = answered(HEAD + chunked(*BODY)[:-20], close=True)
    assert answer.error == "cut off"
    _, answer = answered(HEAD + chunked(*BODY[:-1]))
    assert answer.error == "ended without its last event"
    busy = b'{"error": "busy"}'
    refused = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(busy), busy)
    for pieces in ((refused,), (refused[:5], refused[5:50], refused[50:])):
        connection, answer = answered(*pieces)
        assert (answer.error, connection.is_open) == (f"status 503: {busy.decode()}", True)
    _, answer = answered(b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(busy))
    assert answer.error == f"status 400: {busy.decode()}"


# ---- any server ----


class FakeServer(ThreadingHTTPServer):
    """Three tokens to every request, in chunks; `plan(number)` may say otherwise: "refuse", "cut" or "close"."""

    def __init__(self, plan=lambda number: ""):
        super().__init__(("127.0.0.1", 0), FakeAnswers)
        self.asked, self.keys, self.num_connections, self.plan = [], [], 0, plan
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class FakeAnswers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.num_connections += 1

    def log_message(self, *arguments):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if not body.get("stream"):
            num_words = len(body["messages"][0]["content"].split()) if "messages" in body else 0
            usage = {"prompt_tokens": 5 + 2 * num_words}  # two tokens a word, and five around them
            answer = json.dumps({"data": [{"id": "theirs"}], "usage": usage}).encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
            return
        self.server.asked.append(body)
        self.server.keys.append(self.headers.get("authorization"))
        how = self.server.plan(len(self.server.asked))
        parts = [event(ROLE), *[event(CHAT)] * 3, event(LAST), event(USAGE), b"data: [DONE]\n\n"]
        answers = {
            "refuse": b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy",
            "cut": HEAD + chunked(*parts[:2])[:-5],
        }
        self.wfile.write(answers.get(how, HEAD + chunked(*parts)))
        self.close_connection = how in ("cut", "close")

    do_GET = do_POST


@pytest.fixture
def serve():
    running = []

    def start(plan=lambda number: ""):
        running.append(FakeServer(plan))
        return running[-1]

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_any_server(serve, kind):
    server, done = serve(), []
    load = Load.of("fixed", 25, 3, requests=7, streams=3, kind=kind)
    report, seen = measure_load(UrlTarget(f"{server.url}/v1", api_key="secret", processes=2), load, done.append)
    assert [len(one.tokens) for one in seen.timelines] == [3] * 7
    assert (report.failed, report.output_tokens, report.prompt_tokens, sum(done)) == (0, 21, 77, 7)
    assert report.clients["processes"] == 2
    assert set(server.keys) == {"Bearer secret"}
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in server.asked} == {("theirs", 3, True)}
    by_place = {body["seed"]: body for body in server.asked}
    assert sorted(by_place) == list(range(7))
    if kind == "chat":  # 25 tokens are ten of this server's words and five around them
        assert by_place[3]["messages"][0]["content"] == prompt_text(0, 3, 10)
    else:
        assert [by_place[place]["prompt"] for place in range(7)] == load.prompts()


def test_connections_are_kept_and_replaced(serve):
    server = serve()
    measure_load(UrlTarget(server.url, "m", processes=1), Load(requests=9, streams=2))
    assert server.num_connections == 2
    closing = serve(lambda number: "close")  # after every answer, without a word in its head
    report, _ = measure_load(UrlTarget(closing.url, "m", processes=1), Load(requests=9, streams=2))
    assert (report.failed, report.output_tokens) == (0, 27)


def test_failures_are_counted_by_what_they_say(serve):
    server = serve(lambda number: {2: "refuse", 3: "cut"}.get(number, ""))
    report, _ = measure_load(UrlTarget(server.url, "m", processes=3), Load(requests=6, streams=1))
    assert report.clients["processes"] == 1, "each would have a request under way"
    assert report.errors == {"status 503: busy": 1, "cut off": 1}
    assert (report.failed, report.output_tokens) == (2, 12)
    refusing = serve(lambda number: "refuse")
    ran = CliRunner().invoke(app, ["bench", "serve", refusing.url, "--requests", "2", "--streams", "2"])
    assert (ran.exit_code, "2 x status 503: busy" in ran.output) == (1, True)


def test_open_loop_and_intruder(serve):
    server = serve()
    load = Load.of("fixed", 5, 3, requests=8, rate=40.0, intruder=600, intruder_seconds=0.05)
    report, seen = measure_load(UrlTarget(server.url, "m", only_standard=True), load)
    assert report.failed == 0
    arrivals = load.arrivals()
    starts = [one.started - seen.timelines[0].started for one in seen.timelines]
    assert starts == pytest.approx([due - arrivals[0] for due in arrivals], abs=1e-6)
    (long,) = [body for body in server.asked if len(body["prompt"]) > 5]
    assert len(long["prompt"]) == 600
    assert not any("ignore_eos" in body for body in server.asked)
    assert report.intruder["first_token_ms"] > 0


def test_a_client_needs_nothing_but_python():
    """It must start in a moment: no torch, nothing of this package."""
    program = (
        f"import sys; sys.argv = ['x']; exec(compile(open({client_process.__file__!r}).read(), 'c', 'exec'), "
        "{'__name__': 'c'}); print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'dsv4')])"
    )
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_client_that_dies_is_noticed(serve, monkeypatch):
    server = serve()
    target = UrlTarget(server.url, "m", processes=1)
    monkeypatch.setattr(pickle, "dump", lambda work, file: file.write(b"nonsense"))
    with pytest.raises(RuntimeError, match="a client process did not start"):
        target.run(Load(requests=1))


def test_the_miniature_server():
    """The project's own server over a very small model: every token is seen, by its own count."""
    pytest.importorskip("starlette")
    from server_cases import SERVED, make_llm, start_server

    server = start_server(make_llm(random_params(SERVED, dequantize_to=torch.float32)), api_key="k")
    try:
        for kind in KINDS:
            load = Load.of("fixed", 30, 6, requests=6, streams=3, kind=kind, temperature=1.0)
            extra = {"stop_sequences": ["~~"]} if kind == "messages" else {"top_k": 5}
            report, seen = measure_load(UrlTarget(server.url, api_key="k", processes=2, extra=extra), load)
            assert report.errors == {}
            assert report.output_tokens == 36
            assert abs(report.prompt_tokens - 180) <= 6 * 5  # a word is five tokens of its tokenizer
            assert all(one.num_output == 6 for one in seen.timelines)
            assert all(0 < len(one.tokens) <= 6 for one in seen.timelines)
    finally:
        server.stop()


# ---- the command ----


def test_the_command(serve):
    server = serve()
    arguments = f"bench serve {server.url} --requests 3 --streams 2 --output 3 --api chat".split()
    arguments += ["--extra", '{"top_k": 5}']
    shown = CliRunner().invoke(app, [*arguments, "--intruder", "50", "--intruder-seconds", "0"])
    assert shown.exit_code == 0, shown.output
    for words in ("first token", "tokens/s out", "beside the intruder", "the intruder's first token came after"):
        assert words in shown.output
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert (found["kind"], found["failed"], found["load"]["requests"]) == ("serve", 0, 3)
    assert {body["top_k"] for body in server.asked} == {5}


def test_a_picture_of_the_waits(serve, tmp_path, monkeypatch):
    server, picture = serve(), tmp_path / "waits.png"
    arguments = ["bench", "serve", server.url, "--requests", "3", "--streams", "2", "--plot", str(picture)]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = CliRunner().invoke(app, arguments)
    assert "plots need matplotlib" in str(ran.exception)
    assert server.asked == []  # said before anything is measured
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--api", "chat"], "--api needs the URL of a server"),
        (["tiny", "--extra", "{}"], "--extra needs the URL of a server"),
        (["http://127.0.0.1:1", "--extra", "[1]"], "--extra must be a JSON object"),
        (["http://127.0.0.1:1", "--extra", "{top_k"], "--extra must be JSON such as"),
        (["ftp://127.0.0.1"], "the URL must be like http://127.0.0.1:8000, found 'ftp://127.0.0.1'"),
        (["http://127.0.0.1:1"], "does not answer as an OpenAI server"),
        (["--shape", "round"], "shape must be one of fixed, random, sharegpt, found 'round'"),
        (["tiny", "--experts", "int4"], "--experts must be one of"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    ran = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert isinstance(ran.exception, ConfigError)
    assert message in str(ran.exception)
