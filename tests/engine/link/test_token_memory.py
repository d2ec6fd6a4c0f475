"""What a token costs in memory until it is an answer's: in the engine, and in a stream that nobody reads."""

import tracemalloc

from link_cases import output_of

from benchmarks.free_model import free_llm
from dsv4.config import EngineConfig
from dsv4.engine.link.stream import RequestStream
from dsv4.request import SamplingParams

NUM_REQUESTS = 8
NUM_TOKENS = 1000


def grown(work):
    """Bytes that `work()` leaves held, once it has run for the second time."""
    work()
    before = tracemalloc.get_traced_memory()[0]
    work()
    return tracemalloc.get_traced_memory()[0] - before


def test_the_engine_holds_an_id_of_four_bytes():
    """And what the prefix cache knows of a block of 128."""
    llm = free_llm(EngineConfig(max_context_tokens=8192, max_concurrent_requests=NUM_REQUESTS))
    engine, params = llm.engine, SamplingParams(max_tokens=8000, ignore_eos=True, seed=1)
    requests = [engine.add([5] * 16, params) for _ in range(NUM_REQUESTS)]

    def decode():
        for _ in range(NUM_TOKENS):
            engine.step()

    tracemalloc.start()
    try:
        held = grown(decode) / (NUM_REQUESTS * NUM_TOKENS)
    finally:
        tracemalloc.stop()
    assert requests[0].num_output > 2 * NUM_TOKENS - 10
    assert held < 12, f"{held:.1f} bytes a token"


def test_a_token_that_waits_for_its_reader_is_a_few_numbers():
    llm = free_llm(EngineConfig(max_context_tokens=8192, max_concurrent_requests=1))
    stream = RequestStream([output_of(llm, [5])], lambda stream, choice: None, lambda stream: None)

    def push():
        for place in range(NUM_TOKENS):
            stream.push(0, 400 + place % 100, 0.5 + place)
            stream.notify()

    tracemalloc.start()
    try:
        held = grown(push) / NUM_TOKENS
    finally:
        tracemalloc.stop()
    assert held < 24, f"{held:.1f} bytes a token"
    assert len(stream.read()) == 2 * NUM_TOKENS
