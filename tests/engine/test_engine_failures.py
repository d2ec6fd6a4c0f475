"""What goes wrong for one request: it ends with a clear error, the others go on, and everything is free again."""

import numpy as np
import pytest
import torch
from bare import bare
from engine_cases import SMALL, assert_all_free

from dsv4.engine.engine import Engine
from dsv4.engine.request import DeadlinePassed, RequestFailed
from dsv4.engine.step.constraint import ConstraintError, num_words
from dsv4.llm import LLM
from dsv4.request import RequestError, SamplingParams

RUNS_BOTH_WAYS = True

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def expected(make_llm):
    return make_llm().generate([5, 6], PARAMS)[0]


def run(engine):
    while engine.has_work:
        engine.step()
        engine.check_integrity()


class Rule:
    """Allows everything, until it misbehaves in its third step."""

    def __init__(self, allowed=None, accept=None):
        self.num_accepted = 0
        self._allowed, self._accept = allowed, accept

    def allowed(self):
        if self.num_accepted == 2 and self._allowed is not None:
            return self._allowed()
        return np.full(num_words(SMALL.vocab_size), -1, dtype=np.int32)

    def accept(self, token_id):
        self.num_accepted += 1
        if self.num_accepted == 3 and self._accept is not None:
            self._accept()


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("rule", "message", "num_output"),
    [
        (lambda: Rule(allowed=raising(KeyError("state"))), "the constraint raised KeyError: 'state'", 2),
        (lambda: Rule(accept=raising(RecursionError("deep"))), "the constraint raised RecursionError: deep", 3),
        (lambda: Rule(allowed=lambda: np.ones(7, dtype=np.int32)), "gave int32 [7], not int32 [10]", 2),
        (lambda: Rule(allowed=lambda: np.ones(10, dtype=np.bool_)), "gave bool [10], not int32 [10]", 2),
        (lambda: Rule(allowed=lambda: np.zeros(10, dtype=np.int32)), "allows no token", 2),
        (lambda: Rule(allowed=raising(ConstraintError("the rule is broken"))), "the rule is broken", 2),
    ],
)
def test_a_rule_that_misbehaves_fails_its_request_alone(make_llm, expected, rule, message, num_output):
    llm = make_llm()
    bad, good = llm.engine.prepare([5, 6], PARAMS, rule()), llm.engine.prepare([5, 6], PARAMS)
    llm.engine.submit(bad)
    llm.engine.submit(good)
    run(llm.engine)
    with pytest.raises(RequestFailed) as failed:
        bad.completion()
    assert message in str(failed.value)
    assert bad.num_output == num_output
    assert good.completion() == bare(expected)
    assert llm.engine.stats().num_failed == 1


def test_a_deadline_ends_its_request_alone(make_llm, expected):
    llm = make_llm()
    clock = [50.0]
    engine = llm.engine = Engine(llm.model, llm.cache, clock=lambda: clock[0])
    late = engine.add([5, 6], SamplingParams(max_tokens=8, ignore_eos=True, deadline=2.5))
    good = engine.add([5, 6], PARAMS)
    while engine.has_work:
        engine.step()
        clock[0] += 1
    with pytest.raises(DeadlinePassed, match="deadline of 2.5 s passed with 3 of at most 8 tokens written"):
        late.completion()
    assert tuple(late.output_ids) == expected.token_ids[:3], "what it had written is there"
    assert good.completion() == bare(expected)


def test_blocks_held_outside_the_engine_fail_who_needs_them(make_llm, expected):
    llm = make_llm(num_blocks=2)
    outside = llm.cache.admit(200)
    llm.cache.prepare_forward([outside], [0], [100])
    grows = llm.engine.add([5] * 125, SamplingParams(max_tokens=60, ignore_eos=True))
    good = llm.engine.add([5, 6], PARAMS)
    run(llm.engine)
    with pytest.raises(RequestFailed, match="no cache block is free for token 131: the request holds 1 of 2"):
        grows.completion()
    assert good.completion() == bare(expected)
    llm.cache.release(outside)


def test_aborting_from_within_a_step(make_llm, expected):
    llm = make_llm()
    first, second = llm.engine.add([5, 6], PARAMS), llm.engine.add([5, 6], PARAMS)
    llm.engine.observers.append(lambda chosen: llm.engine.abort(first) if first.num_output == 3 else None)
    run(llm.engine)
    assert (first.is_aborted, first.num_output, first.error) == (True, 3, None)
    assert second.completion() == bare(expected)
    assert_all_free(llm)


def test_no_room_at_the_start_is_told_as_a_mistake_in_the_limits(monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")

    monkeypatch.setattr("dsv4.llm.KVCacheManager", full)
    with pytest.raises(RequestError, match="no room for the cache .*`dsv4 plan`. CUDA out of memory. Tried to"):
        LLM()
