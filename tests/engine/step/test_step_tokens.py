"""What a step gives, and that a step over many requests that decode runs no more Python than one over few."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_cases import finish

from dsv4.engine.run.bucket import Draws, Forwarded
from dsv4.engine.step.tokens import Results
from dsv4.request import FinishReason, SamplingParams, TokenLogprobs

RUNS_BOTH_WAYS = True


def test_tokens_of_a_step(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    plain = [llm.engine.add([5, place], params) for place in (6, 7)]
    listed = llm.engine.add([5, 8], SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2))
    scored = llm.engine.add([5, 9], SamplingParams(max_tokens=0, prompt_logprobs=0))
    found, ended, tuples = Counter(), [], []
    while llm.engine.has_work:
        step = llm.engine.step()
        assert (step.token_ids.dtype, len(step.token_ids)) == (np.int32, len(step))
        for place, (request, token_id) in enumerate(zip(step.requests, step.token_ids.tolist(), strict=True)):
            assert request.output_ids[found[request]] == token_id
            assert step.logprobs.get(place) == (request.logprobs[found[request]] if request is listed else None)
            found[request] += 1
        for place, reason in step.last_tokens().items():
            assert (reason, found[step.requests[place]]) == (FinishReason.LENGTH, step.requests[place].num_output)
        ended += step.ended
        tuples.append(step.requests)
    assert found == {plain[0]: 4, plain[1]: 4, listed: 3}
    assert (set(ended), len(ended)) == ({*plain, listed, scored}, 4)
    decoding = [requests for requests in tuples if len(requests) == 3][1:]
    assert len(decoding) == 2
    assert decoding[0] is decoding[1], "the same requests are the same tuple"


def test_who_ended_without_a_token(make_llm, monkeypatch):
    llm, now = make_llm(max_concurrent_requests=2), [0.0]
    llm.engine._clock = lambda: now[0]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    late = llm.engine.add([5], SamplingParams(max_tokens=40, ignore_eos=True, deadline=3))
    dropped, stopped, lost = (llm.engine.add([5, place], params) for place in (6, 7, 8))
    llm.engine.step()
    llm.engine.abort(dropped)
    assert llm.engine.step().ended == ()
    now[0] = 3.0
    assert llm.engine.step().ended == (late,)
    llm.engine.step()
    llm.engine.finish(stopped)
    assert llm.engine.step().ended == ()
    monkeypatch.setattr(llm.model, "forward", lambda *arguments: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(RuntimeError, match="device lost"):
        llm.engine.step()
    assert llm.engine.take_results().ended == (lost,)
    assert lost.is_aborted
    assert not llm.engine.take_results()


def test_results_of_several_kinds_in_one_step():
    first, second, third = object(), object(), object()
    results, listed = Results(), TokenLogprobs(4, -1.0, ())
    results.append(third, 3, None)
    results.append(third, 4, listed)
    results.add((first, second), np.array([1, 2]))
    results.append(third, 4, listed)
    made = results.take()
    assert made.requests == (third, third, first, second, third)
    assert made.token_ids.tolist() == [3, 4, 1, 2, 4]
    assert made.logprobs == {1: listed, 4: listed}
    assert not results
    assert len(results.take()) == 0


def lines_of_a_step(llm, num_requests):
    """Lines of Python that run in a step in which nothing but decoding happens."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [llm.engine.add([5, 6, place + 7], params) for place in range(num_requests)]
    runner = llm.engine.runner
    runner.forward = lambda batch, draw_rows: Forwarded(torch.empty(0), torch.empty(0), ())
    runner.draw = lambda forwarded, rows, num_top: Draws(torch.full_like(rows.slots, 7))
    for _ in range(8):
        llm.engine.step()
    counted: Counter[str] = Counter()

    def count(frame, event, argument):
        counted[event] += "dsv4" in frame.f_code.co_filename
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        step = llm.engine.step()
    finally:
        sys.settrace(before)
    assert step.token_ids.tolist() == [7] * num_requests
    for request in requests:
        llm.engine.abort(request)
    finish(llm.engine)
    return counted["line"]


def test_a_decode_step_does_not_loop_over_requests(make_llm):
    lines = [lines_of_a_step(make_llm(max_concurrent_requests=24), count) for count in (2, 24)]
    assert lines[0] == lines[1] > 0


def test_a_step_never_waits_long_for_a_file(make_llm, monkeypatch):
    """The head of the queue waits until its prefix is read; whoever runs goes on, and so does the caller."""
    llm, waits = make_llm(), []
    match = llm.cache.match
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    running = llm.engine.add([5], params)
    llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.cache, "match", lambda chain: replace(match(chain), loading=256))
        patch.setattr(llm.cache, "wait_for_files", waits.append)
        head, dropped = llm.engine.add([5, 6], params), llm.engine.add([7, 8], params)
        while not running.is_done:
            llm.engine.step()
        assert waits == []
        while len(waits) < 3:
            assert not llm.engine.step()
        assert max(waits) <= 0.001
        assert head.slot is dropped.slot is None
        llm.engine.abort(dropped)
        assert llm.engine.has_work
    finish(llm.engine)
    assert (head.num_output, dropped.num_output, waits[3:]) == (6, 0, [])
