"""A live server on loopback over a very small model, in this process."""

import itertools
import threading
import time
from dataclasses import dataclass, replace

import httpx
import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.link.thread import EngineThread
from dsv4.http.address import address_url, take_address
from dsv4.http.engine_connection import EngineConnection
from dsv4.http.engine_side import engine_loop
from dsv4.http.lifecycle import make_uvicorn
from dsv4.http.server import create_app
from dsv4.http.settings import ServerConfig
from dsv4.llm import LLM
from dsv4.ops.sampling import allowed_logits
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.tokenizer import Tokenizer

# Two layers, one CSA and one HCA: every kind of cache row, and steps of a few milliseconds.
TWO_LAYERS = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_hash_layers=1, compress_ratios=(4, 128, 0),
    num_nextn_predict_layers=1, num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=4,
    moe_intermediate_size=128, index_n_heads=2, max_position_embeddings=4096,
)  # fmt: skip
# Enough where only the server matters, and faster: one layer, a window alone.
SERVED = replace(TWO_LAYERS, num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0)
NAME = "tiny"
HEADERS = {"authorization": "Bearer k"}  # of the servers that `start` starts
TOKENIZER = Tokenizer(byte_tokenizer(SERVED.vocab_size), "the byte tokenizer")


def make_llm(params, config=SERVED, **limits):
    """A cache and an engine of its own over shared parameters."""
    engine = EngineConfig(**{"max_context_tokens": 2048, "max_concurrent_requests": 8, **limits})
    return LLM.from_params(config, params, numerics="exact", dtype=torch.float32, tokenizer=TOKENIZER, engine=engine)


@dataclass
class LiveServer:
    llm: LLM
    app: object
    uvicorn: object
    thread: threading.Thread
    url: str
    client: httpx.Client  # one for all requests: making one costs more than most answers
    engine_thread: EngineThread
    recorder: object = None

    @property
    def engine(self):
        """`EngineLoop`"""
        return self.engine_thread.loop

    def get(self, path, **options):
        return self.client.get(path, **options)

    def post(self, path, body=None, **options):
        return self.client.post(path, json=body, **options)

    def chat(self, text="hi", **fields):
        return self.post("/v1/chat/completions", chat_body(text, **fields))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        """At the end nothing may be held any more."""
        if kind is None:
            self.wait_until_free()
        self.stop()

    def wait_until_free(self, seconds=10):
        """Every slot and block is free again, and the books agree."""
        deadline = time.monotonic() + seconds
        while self.engine.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.engine.num_open == 0
        assert self.llm.cache.num_free_slots == self.llm.cache.schema.num_slots
        assert self.llm.cache.num_free_blocks == self.llm.cache.schema.num_blocks
        self.llm.cache.check_integrity()

    def stop(self, seconds=30):
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the server did not stop"
        assert self.engine_thread.stop(seconds), "the engine did not stop"
        if self.recorder is not None:
            self.recorder.close()


def chat_body(text="hi", **fields):
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def start_server(llm, recorder=None, **settings):
    """A server on a free port, once it answers."""
    config = ServerConfig(**{"name": NAME, "port": 0, "drain_seconds": 20.0, **settings})
    engine = EngineThread(engine_loop(llm, max_waiting=config.max_waiting, recorder=recorder))
    engine.start()
    app = create_app(EngineConnection(engine.connect), llm.tokenizer, config)
    server, listener = make_uvicorn(app, config, log_level="ERROR"), take_address(config)
    url = address_url(config, listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    return LiveServer(llm, app, server, thread, url, httpx.Client(base_url=url, timeout=60), engine, recorder)


def let_it_say(llm, *answers, in_turn=False):
    """A request with seed s says `answers[s]` (text or ids), then ends, as far as its constraint allows. in_turn: the
    seed does not matter, the first request says the first answer, and so on."""
    tokenizer, eos = llm.tokenizer, llm.config.eos_token_id
    scripts = [tokenizer.encode(one, allow_special=True) if isinstance(one, str) else list(one) for one in answers]
    turns, turn_of = itertools.count(), {}

    def sample(logits, rows, state):
        chosen, seeds, slots = [], state.seeds[rows.slots].tolist(), rows.slots.tolist()
        logits = allowed_logits(logits, rows, state)
        for row, (slot, seed, step) in enumerate(zip(slots, seeds, rows.steps(state).tolist(), strict=True)):
            if in_turn and step == 0:
                turn_of[slot] = next(turns)
            script = [*scripts[turn_of.get(slot, seed) % len(scripts)], eos]
            wanted = script[min(step, len(script) - 1)]
            is_free = bool(torch.isfinite(logits[row, wanted]))
            chosen.append(wanted if is_free else int(logits[row].argmax()))
        token_ids = torch.tensor(chosen)
        state.last_tokens[rows.slots] = token_ids
        return token_ids

    llm.model.context = replace(llm.model.context, backend=llm.model.context.backend.with_ops(sample=sample))
    return llm
