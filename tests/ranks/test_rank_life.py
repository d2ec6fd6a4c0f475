"""Five processes with everything at once: each request has the tokens and log-probabilities of one process, alone."""

import json
import pickle
import random
from dataclasses import replace

import pytest
import torch
from load_cases import Alternating, Request, assert_as_alone, random_requests, run_wave, runs_alone
from rank_cases import SMALL

from dsv4 import LLM, EngineConfig
from dsv4.engine.grammar.compiler import GrammarCompiler
from dsv4.loader.write.synth import write_checkpoint
from dsv4.text.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.processes
SIZE = 5
LIMITS = EngineConfig(max_context_tokens=320, max_concurrent_requests=2 * SIZE, num_blocks=3, max_chunk_tokens=64)


class Ruled(Request):
    """With a grammar, which goes to the request's rank, or a rule in Python, which stays on rank 0."""

    def rule(self):
        if not self.has_rule:
            return None
        return Alternating() if self.arrival % 2 else RULES.compile("start: /[^q]*/").constraint()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("life") / "small", SMALL)
    (path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(SMALL.vocab_size)))
    return path


def requests_of(seed):
    """Random ones, some of which begin with one long text."""
    chance, found = random.Random(seed), random_requests()[:40]
    shared = tuple(chance.randrange(2, SMALL.vocab_size) for _ in range(140))
    return [
        Ruled(
            shared + one.prompt if place % 5 == 0 else one.prompt, replace(one.params, deadline=None), one.arrival,
            one.abort_at, one.has_rule,
        )
        for place, one in enumerate(found)
    ]  # fmt: skip


def test_random_arrivals_on_five_processes(folder):
    global RULES
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = LLM(folder, engine=EngineConfig(max_context_tokens=320, max_concurrent_requests=1))
    RULES = GrammarCompiler(alone.tokenizer, vocab_size=SMALL.vocab_size, eos_token_id=SMALL.eos_token_id)
    with LLM(folder, engine=LIMITS, gpus=SIZE, drafts=2) as llm:
        engine, chance = llm.engine, random.Random(3)
        for requests in (requests_of(1)[:1], requests_of(1), requests_of(1)[::-5]):  # four idle ranks; all; prefixes
            found = [pickle.loads(one) for one in run_wave(engine, requests, chance)]
            assert_as_alone(found, runs_alone(requests, alone.engine))
        engine.check_integrity()
        stats, on_each = engine.stats(), [engine.own.stats(), *(one.load.stats for one in engine.remotes)]
    torch.set_num_threads(before)
    assert all(one.num_finished > 2 for one in on_each), "every rank had requests"
    assert min(stats.num_preemptions, stats.num_prefix_hits, stats.drafts.num_verified) > 0
    assert stats.num_prompt_tokens > 64 * len(on_each)
