"""An engine in a thread with its clients, for tests of the socket between them."""

from contextlib import asynccontextmanager

from dsv4.engine.control import engine_info
from dsv4.engine.link.client import EngineClient
from dsv4.engine.link.loop import EngineLoop
from dsv4.engine.link.stream import ErrorEvent
from dsv4.engine.link.thread import EngineThread
from dsv4.request import SamplingParams
from dsv4.text.output import TextOutput


def start_engine(llm, **options):
    """`EngineThread` of an `LLM`, started."""
    thread = EngineThread(EngineLoop(llm.engine, engine_info(llm), llm.control, **options))
    thread.start()
    return thread


@asynccontextmanager
async def connected(thread):
    """A client of the thread, closed at the end."""
    client = await EngineClient.connect(thread.connect())
    try:
        yield client
    finally:
        client.close()


def output_of(llm, prompt, params=None, **fields):
    """What one request is answered into."""
    params = params or SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})
    return TextOutput(list(prompt), params, eos_token_id=llm.config.eos_token_id, tokenizer=llm.tokenizer)


async def read(stream):
    """Ids of each request of the group, and its error if it had one."""
    ids, errors = [[] for _ in stream.outputs], [None] * len(stream.outputs)
    async with stream:
        async for event in stream:
            if isinstance(event, ErrorEvent):
                errors[event.choice] = event.error
            elif event.token_id is not None:
                ids[event.choice].append(event.token_id)
    return ids, errors
