"""Random lives of an engine whose requests share prefixes: a real grammar, several answers to one prompt, preemption,
aborts, evictions, restarts from files. Every answer must be that of a cold run: tokens, log-probabilities, text.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bare import bare
from engine_cases import SMALL, finish
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_prefix_cache import poison

from dsv4.cache.tiers.host import UNIT_BYTES
from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.llm import LLM
from dsv4.loader.write.synth import random_params
from dsv4.request import SamplingParams
from dsv4.text.byte_tokenizer import byte_tokenizer
from dsv4.text.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="grammars come with the server's libraries")
from dsv4.engine.grammar.compiler import GrammarCompiler

CONFIG = replace(SMALL, num_hidden_layers=2, compress_ratios=(4, 128), num_nextn_predict_layers=0)
GRAMMARS = {"list": 'start: "[" NUM ("," NUM)* "]"\nNUM: /[0-9]{1,3}/', "word": 'start: ("ja" | "nein" | " ")+'}
LIMITS = {"max_context_tokens": 512, "max_concurrent_requests": 3, "snapshot_interval_tokens": 256}


def random_ids(seed, length):
    return torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# near the ends of blocks, so that a few drawn tokens pass one; two of them part in their second block
STEM = random_ids(1, 380)
PROMPTS = [STEM[:124], STEM[:254], STEM[:257], STEM[:380], [*STEM[:180], *random_ids(2, 75)], random_ids(3, 126)]


class World:
    """The model, its grammars, and what cold runs have answered. Made once."""

    def __init__(self):
        self.params = random_params(CONFIG)
        self.tokenizer = Tokenizer(byte_tokenizer(CONFIG.vocab_size), "the byte tokenizer")
        self.grammars = GrammarCompiler(
            self.tokenizer, vocab_size=CONFIG.vocab_size, eos_token_id=CONFIG.eos_token_id
        )  # fmt: skip
        self.cold_llm = self.make(prefix_cache_bytes=0)
        self._answers = {}

    def make(self, **limits):
        return LLM.from_params(
            CONFIG, self.params, tokenizer=self.tokenizer, engine=EngineConfig(**LIMITS | limits), fingerprint="life"
        )  # fmt: skip

    def prepare(self, engine, prompt, params, grammar):
        rule_of = None if grammar is None else self.grammars.compile(GRAMMARS[grammar]).constraint()
        return engine.prepare(prompt, params, rule_of)

    def cold(self, prompt, params, grammar):
        plain = replace(params, cache_salt=None, priority=0)
        key = (tuple(prompt), plain, grammar)
        if key not in self._answers:
            engine = self.cold_llm.engine
            request = self.prepare(engine, prompt, plain, grammar)
            engine.submit(request)
            finish(engine)
            self._answers[key] = request.completion()
        return self._answers[key]


WORLD: list[World] = []


def world():
    if not WORLD:
        WORLD.append(World())
    return WORLD[0]


class EngineLife(RuleBasedStateMachine):
    folder = None

    @initialize(
        overlap=st.booleans(), num_blocks=st.sampled_from([5, 8, 16]), num_snapshots=st.sampled_from([1, 3, 12]),
        host_units=st.sampled_from([0, 8, 80]), has_disk=st.booleans(), chunk=st.sampled_from([90, 512]),
    )  # fmt: skip
    def begin(self, overlap, num_blocks, num_snapshots, host_units, has_disk, chunk):
        self.folder = Path(tempfile.mkdtemp())
        self.overlap = overlap
        size = world().cold_llm.cache.schema.bytes_per_snapshot
        self.limits = {
            "num_blocks": num_blocks, "prefix_cache_bytes": num_snapshots * size + 4096, "max_chunk_tokens": chunk,
            "cache_host_bytes": host_units * UNIT_BYTES, "verify_hits": 0.2,
        }  # fmt: skip
        if has_disk and host_units:
            self.limits["cache_dir"] = str(self.folder)
        self.asked = []  # (request, prompt, params, grammar)
        self.done = []  # prompts with their answers
        self._open()

    def _open(self):
        self.llm = world().make(**self.limits)
        self.engine = Engine(self.llm.model, self.llm.cache, overlap=self.overlap)

    def teardown(self):
        if self.folder is not None:
            self._drain()
            assert self.llm.cache.num_free_blocks == self.llm.cache.schema.num_blocks
            assert self.engine.stats().num_wrong_hits == 0
            self.llm.close()
            shutil.rmtree(self.folder)

    # ---- requests ----

    @rule(
        prompt=st.sampled_from(PROMPTS), grammar=st.sampled_from([None, "list", "word"]), count=st.integers(1, 3),
        salt=st.sampled_from([None, None, "x"]), priority=st.sampled_from([0, 0, 1]),
    )  # fmt: skip
    def ask(self, prompt, grammar, count, salt, priority):
        """`count` answers to one prompt, each with the seed after the last one's."""
        for seed in range(count):
            params = SamplingParams(
                max_tokens=6, temperature=1.0, seed=seed, logprobs=2, cache_salt=salt, priority=priority
            )
            request = world().prepare(self.engine, prompt, params, grammar)
            self.engine.submit(request)
            self.asked.append((request, prompt, params, grammar))

    @precondition(lambda self: self.done)
    @rule(data=st.data(), grammar=st.sampled_from([None, "list"]), count=st.integers(1, 2))
    def ask_on(self, data, grammar, count):
        """The next turn of a conversation."""
        history = data.draw(st.sampled_from(self.done))
        self.ask([*history, 66, 67], grammar, count, None, 0)

    @rule(
        prompt=st.sampled_from(PROMPTS[1:]),
        grammars=st.sampled_from([(None, "list"), ("word", "word"), ("list", None)]),
    )  # fmt: skip
    def ask_twice(self, prompt, grammars):
        """The second one finds what the first has left, under another rule or the same."""
        for grammar in grammars:
            self.ask(prompt, grammar, 1, None, 0)
            self._drain()

    @rule(count=st.sampled_from([1, 2, 5, 20]))
    def step(self, count):
        for _ in range(count):
            if self.engine.has_work:
                self.engine.step()
                self.engine.check_integrity()
                poison(self.llm.cache)
        self._compare()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        given = data.draw(st.sampled_from(self.asked))
        self.engine.abort(given[0])
        self.asked.remove(given)

    # ---- what may happen to a cache ----

    @precondition(lambda self: self.done)
    @rule(num_blocks=st.integers(1, 16))
    def evict(self, num_blocks):
        self.llm.cache.prefix.tree.make_room(num_blocks)

    @precondition(lambda self: self.done)
    @rule()
    def be_idle(self):
        self._drain()
        while self.engine.has_idle_work:
            self.engine.idle_step()
        assert self.engine.stats().num_wrong_hits == 0

    @precondition(lambda self: self.done and "cache_dir" in self.limits)
    @rule()
    def restart(self):
        self._drain()
        self.llm.close()
        self._open()

    def _drain(self):
        while self.engine.has_work:
            self.step(20)
        self._compare()

    # ---- what must hold ----

    def _compare(self):
        for given in [one for one in self.asked if one[0].is_done]:
            request, prompt, params, grammar = given
            assert request.error is None
            completion = request.completion()
            assert completion == world().cold(prompt, params, grammar)
            self.asked.remove(given)
            if len(prompt) < 400:
                self.done.append([*prompt, *completion.token_ids])

    @invariant()
    def books_are_right(self):
        if self.folder is not None:
            self.engine.check_integrity()


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(max_examples=6, stateful_step_count=10, deadline=None)


@pytest.mark.parametrize(("num_snapshots", "num_host_hits"), [(1, 2), (12, 1)])
def test_several_answers_under_a_grammar_from_every_tier(tmp_path, num_snapshots, num_host_hits):
    """The same request four times: nobody has seen its prompt, the device has it, host memory, and a file. (To verify a
    hit takes a snapshot: where there is only one, the device has lost it afterwards.)"""
    size = world().cold_llm.cache.schema.bytes_per_snapshot
    limits = {
        "prefix_cache_bytes": num_snapshots * size + 4096, "cache_host_bytes": 80 * UNIT_BYTES, "verify_hits": 0.34,
        "cache_dir": str(tmp_path),
    }  # fmt: skip
    many = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed, logprobs=2) for seed in range(3)]
    expected = [world().cold(STEM, params, "list") for params in many]
    assert len({one.token_ids for one in expected}) == 3
    assert all(world().tokenizer.decode(one.token_ids).startswith("[") for one in expected)
    llm = world().make(**limits)
    hits = []
    for tier in ("none", "device", "host", "disk"):
        if tier == "host":
            llm.cache.prefix.tree.make_room(llm.cache.schema.num_blocks)
        if tier == "disk":
            llm.close()
            llm = world().make(**limits)
        requests = [world().prepare(llm.engine, STEM, params, "list") for params in many]
        for request in requests:
            llm.engine.submit(request)
        finish(llm.engine)
        assert [request.completion() for request in requests] == bare(expected), tier
        assert [one.num_cached_tokens for one in requests] == [0 if tier == "none" else 256, 256, 256]
        stats = llm.engine.stats()
        hits.append((stats.num_prefix_hits, stats.num_prefix_host_hits, stats.num_prefix_disk_hits))
        while llm.engine.has_idle_work:
            llm.engine.idle_step()
        llm.engine.check_integrity()
    assert hits == [(2, 0, 0), (5, num_host_hits - 1, 0), (8, num_host_hits, 0), (3, 0, 1)]
    assert llm.engine.stats().num_wrong_hits == 0
    llm.close()
