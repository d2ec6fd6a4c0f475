"""Constraints, failures of one request among others, and what the engine counts."""

import numpy as np
import pytest
from bare import bare
from engine_cases import SMALL, assert_all_free, encode, finish

from dsv4.engine.request import RequestFailed
from dsv4.engine.step.constraint import pack_tokens
from dsv4.request import SamplingParams

RUNS_BOTH_WAYS = True

EOS = SMALL.eos_token_id


class Spelling:
    """Allows one text, then the end."""

    def __init__(self, text):
        self.ids = [*encode(text), EOS]
        self.place = 0

    def allowed(self):
        mask = np.zeros(SMALL.vocab_size, dtype=np.bool_)
        if self.place < len(self.ids):
            mask[self.ids[self.place]] = True
        return pack_tokens(mask)

    def accept(self, token_id):
        assert token_id == self.ids[self.place]
        self.place += 1


def run(llm, *requests):
    for request in requests:
        llm.engine.submit(request)
    finish(llm.engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_decides_what_can_be_drawn(make_llm, temperature):
    llm = make_llm()
    params = SamplingParams(max_tokens=20, temperature=temperature, repetition_penalty=1.5, top_k=3)
    free = llm.engine.prepare([5, 6], params)
    bound = llm.engine.prepare([5, 6], params, Spelling("abracadabra"))
    run(llm, bound, free)
    assert (llm.tokenizer.decode(bound.output_ids[:-1]), bound.finish_reason) == ("abracadabra", "stop")
    assert free.completion() == bare(make_llm().generate([5, 6], params)[0]), "the other one is not touched"


def test_logprobs_are_the_models_not_the_constraints(make_llm):
    llm = make_llm()
    bound = llm.engine.prepare([5, 6], SamplingParams(max_tokens=3, logprobs=2), Spelling("abc"))
    run(llm, bound)
    rows = llm.logits([5, 6, *bound.output_ids]).double().log_softmax(-1).float()
    assert [one.logprob for one in bound.logprobs] == [rows[1 + i, bound.output_ids[i]].item() for i in range(3)]


def test_logits_that_are_no_numbers_fail_their_request_alone(make_llm, monkeypatch):
    llm = make_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = make_llm().generate([5, 9], params)[0]
    logits = llm.model.logits
    poisoned = llm.engine.prepare([5, 8], params)

    def poison(streams):
        values = logits(streams)
        if poisoned.num_output == 3 and poisoned.slot is not None:
            values[1, 200] = float("nan")
        return values

    monkeypatch.setattr(llm.model, "logits", poison)
    good = [llm.engine.prepare([5, 9], params) for _ in range(2)]
    run(llm, good[0], poisoned, good[1])
    assert [one.completion() for one in good] == bare([expected, expected])
    with pytest.raises(RequestFailed, match=r"NaN logits.* position \d"):
        poisoned.completion()
    assert poisoned.num_output >= 3
    assert_all_free(llm)


def test_statistics(make_llm):
    llm = make_llm(max_concurrent_requests=2, prefix_cache_bytes=0)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    requests = [llm.engine.add(list(range(2, 2 + length)), params) for length in (10, 140, 5)]
    before = llm.engine.stats()
    assert (before.num_waiting, before.num_running, before.num_slots, before.num_steps) == (3, 0, 2, 0)
    llm.engine.step()
    during = llm.engine.stats()
    assert (during.num_waiting, during.num_running, during.num_prompt_tokens) == (1, 2, 150)
    assert (during.num_blocks_used, during.num_blocks) == (3, llm.cache.schema.num_blocks)
    llm.engine.abort(requests[1])
    finish(llm.engine)
    after = llm.engine.stats()
    assert (after.num_finished, after.num_aborted, after.num_failed) == (2, 1, 0)
    assert after.num_prompt_tokens == 155
    assert after.num_output_tokens == sum(request.num_output for request in requests) >= 6
    assert (after.num_blocks_used, after.num_running, after.num_waiting) == (0, 0, 0)


def test_observers_come_and_go_one_by_one(make_llm, monkeypatch):
    llm = make_llm()
    always, once = [], []

    def only_once(chosen):
        once.append(chosen)
        llm.engine.observers.remove(only_once)

    llm.engine.observers += [only_once, always.append]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.generate([5, 6, 7], params)
    assert (len(once), len(always)) == (1, 3)
    shapes = [(llm.config.num_hidden_layers, length, llm.config.num_experts_per_tok) for length in (3, 1, 1)]
    assert [tuple(chosen.shape) for chosen in always] == shapes
    llm.engine.observers.remove(always.append)
    assert llm.engine.observers == []
    monkeypatch.setattr("dsv4.engine.run.in_flight.torch", None)  # stacks what observers are told
    llm.generate([5, 6, 7], params)
    assert len(always) == 3
