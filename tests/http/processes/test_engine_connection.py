"""A front end's connection to its engine: lost, opened again, and never called sound while there is none."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from server_cases import TOKENIZER, make_llm

from dsv4.engine.link.messages import EngineLost
from dsv4.engine.link.thread import EngineThread
from dsv4.http import engine_connection as module
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.engine_side import engine_loop
from dsv4.http.processes.heartbeat import Heartbeat, PulseReader, make_pulse_file
from dsv4.request import SamplingParams
from dsv4.text.output import TextOutput


@pytest.fixture
def engine(served_params, monkeypatch):
    monkeypatch.setattr(module, "_WATCH_SECONDS", 0.01)
    thread = EngineThread(engine_loop(make_llm(served_params)))
    thread.start()
    yield thread
    assert thread.stop(10)


@pytest.fixture
def pulse(tmp_path):
    """Of an engine that lives."""
    make_pulse_file(tmp_path / "pulse")
    heart = Heartbeat(tmp_path / "pulse", lambda: None)
    yield PulseReader(tmp_path / "pulse")
    heart.stop()


@asynccontextmanager
async def opened(engine, pulse):
    connection = EngineConnection(engine.connect, pulse=pulse)
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def until(is_true, seconds=10):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def output(max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    return TextOutput([5], params, eos_token_id=1, tokenizer=TOKENIZER)


def test_a_client_that_the_engine_drops_comes_back(engine, pulse):
    """What it sent was malformed, or too much waited for it; the engine itself goes on."""

    async def main():
        async with opened(engine, pulse) as connection:
            lost = await connection.submit([output(500)])
            engine.loop._call(lambda: [engine.loop._lose(one) for one in list(engine.loop._clients)])
            events = [event async for event in lost]
            assert isinstance(events[-1].error, EngineLost)
            await until(lambda: connection.problem is None)
            again = await connection.submit([output(3)])
            return [event.token_id async for event in again], (await connection.stats()).num_aborted

    token_ids, num_aborted = asyncio.run(main())
    assert len(token_ids) == 3
    assert num_aborted == 1


def test_signs_of_life_do_not_hide_a_lost_connection(engine, pulse):
    async def main():
        async with opened(engine, pulse) as connection:
            assert await asyncio.to_thread(engine.stop, 10)
            await until(lambda: connection.problem is not None)
            for _ in range(20):
                await asyncio.sleep(0.02)  # looks at the pulse
                assert (connection.is_accepting, connection.has_failed) == (False, True)
            with pytest.raises(EngineLost, match="the engine has stopped"):
                await connection.submit([output(3)])

    asyncio.run(main())
