"""`dsv4 serve` as processes: each of them killed, stopped or slow, and what becomes of the others."""

import os
import re
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from server_cases import HEADERS
from server_fixtures import IMPATIENT
from server_processes import (
    CHAT,
    Stream,
    descendants,
    engine_of,
    front_ends_of,
    holder,
    is_running,
    num_files,
    wait_for,
)

from dsv4.http.processes import supervisor as supervisor_module

TOLD_SECONDS = 2.0  # an engine that died or hangs is known to every client by then
SLACK_SECONDS = 1.0  # of a machine that runs other tests
LONG = [{"role": "user", "content": "x" * 600}]  # several blocks of the prefix cache


def live(url):
    return httpx.get(f"{url}/live", headers=HEADERS).json()


def until_served(send):
    """What `send` gets, sent again as a client would: front ends hear from the engine one after the other."""
    until = time.monotonic() + 10
    while (found := send()) is None and time.monotonic() < until:
        time.sleep(0.05)
    return found


def text_of(url):
    """Of a stream; None where there is no engine."""
    stream = Stream(url, max_tokens=100)
    stream.join(60)
    return None if stream.error == "engine_lost" else stream.text


def metric(url, name):
    """The sum over labels."""
    text = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def streams_on_both(url, pids, max_tokens=1000):
    """Long streams, at least one on each of these front ends; by the front end's process id."""
    found = {pid: [] for pid in pids}
    for _ in range(40):
        stream = Stream(url, max_tokens=max_tokens).started()
        found[holder(url, stream.port, pids)].append(stream)
        if all(found.values()):
            return found
    raise AssertionError("every connection went to the same front end")


def ask(url, **fields):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "ignore_eos": True, **fields}
    return httpx.post(url + CHAT, json=body, headers=HEADERS, timeout=60)


def answer_of(url, **fields):
    """None where there is no engine."""
    response = ask(url, **fields)
    return None if response.status_code == 503 else response.json()


@pytest.fixture
def folder(monkeypatch):
    """Where temporary files go: a short name, as a Unix socket's must be."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield made


def test_front_ends_and_engines_that_die_are_started_again(start, folder, tmp_path):
    """One server through its life, as starting one takes seconds."""
    options = ("--front-ends", "2", "--restart", "--requests", "64", "--max-waiting", "4", "--cache-dir")
    running, url, log = start(*options, str(tmp_path / "prefixes"))
    everyone = [running.pid, *descendants(running)]
    one, other = front_ends_of(running)
    engine = first_engine = engine_of(running)
    files = {pid: num_files(pid) for pid in (running.pid, engine, one, other)}

    # metrics are those of all front ends, whichever is asked
    solo = Stream(url, max_tokens=100)
    solo.join()
    assert solo.is_complete
    for _ in range(6):
        ask(url, n=2)
    time.sleep(1.5)
    assert {metric(url, "dsv4_request_success_total") for _ in range(6)} == {13.0}

    first = ask(url, messages=LONG, temperature=0, seed=1).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    # a front end dies: its clients lose their connection, the others nothing
    streams = streams_on_both(url, (one, other))
    kept = Stream(url, max_tokens=100)
    while holder(url, kept.started().port, (one, other)) != other:
        kept = Stream(url, max_tokens=100)
    num_lost = len(streams[one])
    os.kill(one, signal.SIGKILL)
    for stream in streams[one]:
        stream.join(10)
        assert stream.error is not None
        assert not stream.is_complete
    wait_for(lambda: metric(url, "dsv4_requests_aborted_total") >= num_lost, 10)
    kept.join(60)
    assert (kept.text, kept.is_complete) == (solo.text, True)
    assert all(stream.is_alive() for stream in streams[other])
    wait_for(lambda: len(front_ends_of(running)) == 2)
    (new,) = set(front_ends_of(running)) - {other}
    assert metric(url, "dsv4_request_success_total") >= 13, "what the dead one had counted stays counted"
    everyone.append(new)

    # the engine dies: every client is told in time, and it comes again with its prefix files
    whole = Stream(url, stream=False, max_tokens=1000)
    wait_for(lambda: live(url)["running"] >= len(streams[other]) + 1)
    died = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for stream in (*streams[other], whole):
        stream.join(20)
        assert stream.error == "engine_lost"
        assert stream.end_time - died < TOLD_SECONDS + SLACK_SECONDS
    refused = ask(url)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
    assert (httpx.get(f"{url}/ready").status_code, httpx.get(f"{url}/health").status_code) == (503, 503)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
    assert until_served(lambda: text_of(url)) == solo.text
    second = until_served(lambda: answer_of(url, messages=LONG, temperature=0, seed=1))
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    engine = engine_of(running)
    everyone.append(engine)

    # the engine hangs: the same, and it goes on when it can
    stuck = Stream(url, max_tokens=1000).started()
    hung = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    stuck.join(20)
    assert stuck.error == "engine_lost"
    assert stuck.end_time - hung < TOLD_SECONDS + SLACK_SECONDS
    assert ask(url).json()["error"]["code"] == "engine_lost"
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 10)
    assert until_served(lambda: text_of(url)) == solo.text
    wait_for(lambda: live(url)["running"] == 0, 10)

    # descriptors do not grow
    for _ in range(8):
        ask(url)
    wait_for(lambda: num_files(other) <= files[other] + 4, 10)
    assert num_files(running.pid) <= files[running.pid] + 2
    assert num_files(engine) <= files[first_engine] + 4

    # and it all ends, leaving nothing
    (room,) = Path(folder).iterdir()
    assert stat.S_IMODE(room.stat().st_mode) == 0o700
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    assert not room.exists()
    assert not any(map(is_running, everyone))
    port = int(url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        pass
    text = log.read_text()
    assert "a front end has died (killed by SIGKILL)" in text
    assert "the engine has died (killed by SIGKILL)" in text
    assert "the engine runs again" in text
    assert "the engine answers again" in text
    assert "Traceback" not in text


def test_an_engine_that_dies_ends_the_server(start):
    running, url, log = start("--front-ends", "2")
    everyone = descendants(running)
    stream = Stream(url, max_tokens=1000).started()
    died = time.monotonic()
    os.kill(engine_of(running), signal.SIGKILL)
    stream.join(20)
    assert stream.error == "engine_lost"
    assert stream.end_time - died < TOLD_SECONDS + SLACK_SECONDS
    assert running.wait(15) == 1
    assert not any(map(is_running, everyone))
    assert "the engine has died (killed by SIGKILL) and all requests with it; the server ends" in log.read_text()


def test_an_engine_that_dies_in_a_drain_is_no_good_end(start):
    running, url, log = start("--drain-seconds", "600")
    stream = Stream(url, max_tokens=3500).started()
    engine = engine_of(running)
    running.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503, 10)
    os.kill(engine, signal.SIGKILL)
    assert running.wait(15) == 1
    stream.join(10)
    assert stream.error == "engine_lost"
    assert "the engine has died (killed by SIGKILL) and the requests that were being finished" in log.read_text()


def test_a_front_end_that_hangs_is_replaced_and_what_runs_is_finished(start):
    """Then SIGTERM: streams of both front ends come to their end."""
    running, url, log = start("--front-ends", "2", "--drain-seconds", "600", program=IMPATIENT)
    one, other = front_ends_of(running)
    os.kill(one, signal.SIGSTOP)
    wait_for(lambda: one not in front_ends_of(running) and len(front_ends_of(running)) == 2, 30)
    assert "a front end has given no sign of life for 2 s and is killed" in log.read_text()
    (new,) = set(front_ends_of(running)) - {other}
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 10)
    streams = {}
    while not streams or not all(any(one.is_alive() for one in found) for found in streams.values()):
        streams = streams_on_both(url, (new, other), max_tokens=500)
    running.send_signal(signal.SIGTERM)
    for stream in (one for found in streams.values() for one in found):
        stream.join(120)
        assert (stream.is_complete, stream.error) == (True, None)
    assert running.wait(15) == 0


def test_nobody_survives_the_supervisor(start):
    running, url, _ = start("--front-ends", "2")
    everyone = descendants(running)
    Stream(url, max_tokens=1000).started()
    running.kill()
    running.wait()
    wait_for(lambda: not any(map(is_running, everyone)), 5)


def test_a_step_that_does_not_end_is_ended(start):
    """By its clock: every step takes longer than this."""
    running, url, log = start("--step-seconds", "0.000001")
    stream = Stream(url, max_tokens=1000)
    assert running.wait(30) == 1
    stream.join(10)
    assert stream.error == "engine_lost"
    assert "(--step-seconds); it is killed" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait(start, number):
    running, url, _ = start("--drain-seconds", "600")
    everyone = descendants(running)
    stream = Stream(url, max_tokens=3500).started()
    for pid in everyone:  # as a terminal sends it to all
        os.kill(pid, number)
    running.send_signal(number)
    wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503, 10)
    assert stream.is_alive(), "it is being finished"
    running.send_signal(number)
    assert running.wait(15) == (130 if number == signal.SIGINT else 0)
    stream.join(10)
    assert stream.error == "shutting_down"
    assert not any(map(is_running, everyone))


def test_front_ends_that_cannot_start_end_the_server(dsv4, checkpoint, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_FRONT_END", "dsv4.no_such_module")
    ran = dsv4("serve", "--model", checkpoint, "--port", "0")
    assert ran.code == 1
    assert "front ends end before they can serve" in ran.err
