"""Drafts change nothing: tokens and log-probabilities are those without drafts, bit for bit, whatever the drafts are.

Drafts forced right, wrong, random, right up to any place, and real ones of MTP and DSpark; every number of them,
another in every step; beside prompts, in graphs, preempted, from cached prefixes; greedy, sampled, with penalties.
"""

import asyncio
import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from bare import bare
from draft_cases import CONFIGS, MOST, ForcedDrafts, drafting_llm, plain_llm, prompt_of, run, truth_of
from test_runner import FakeGraph

from dsv4.async_llm import AsyncLLM
from dsv4.http.telemetry.metrics import Metrics
from dsv4.http.telemetry.shared_metrics import SharedMetrics
from dsv4.ops import TORCH
from dsv4.request import SamplingParams

PARAMS = [
    SamplingParams(max_tokens=11, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=2**40, temperature=0.8, top_p=0.9, logprobs=0, ignore_eos=True),
    SamplingParams(
        max_tokens=13, seed=5, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 1.5}, logprobs=1,
        prompt_logprobs=2,
    ),
]  # fmt: skip
PROMPTS = [prompt_of(length) for length in (5, 122, 17)]


@cache
def expected(kind="mtp"):
    """Without drafts; each request alone."""
    llm = plain_llm(kind)
    return [run(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def check(kind, choice, **options):
    llm = drafting_llm(kind, choice, **options)
    assert run(llm, PROMPTS, PARAMS, lambda engine: engine.check_integrity()) == expected(kind)
    return llm.engine


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("drafts", [slow("right"), slow("wrong"), slow("random"), "partly", "real"])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_whatever_the_drafts_are(kind, drafts):
    choice, most = ForcedDrafts(MOST[kind], drafts, truth_of(expected(kind))), MOST[kind]
    stats = check(kind, choice).stats()
    assert stats.num_output_tokens == sum(len(one.token_ids) for one in expected(kind))
    counts = {"right": {most}, "wrong": {0}, "partly": set(range(most + 1))}
    if drafts in counts:
        assert {accepted for verified, accepted in choice.outcomes if verified == most} == counts[drafts]
    if drafts == "right":
        assert stats.drafts.tokens_per_step > 3


@pytest.mark.parametrize(
    "limits",
    [
        slow({"max_chunk_tokens": 7}),
        slow({"num_blocks": 2, "max_chunk_tokens": 24}),
        {"num_blocks": 2, "max_chunk_tokens": 24, "overlap": True},
    ],
)
def test_another_number_in_every_step(limits):
    """Beside prompts in small chunks, and where blocks are scarce; overlapped where a step asks for none."""
    engine = check("mtp", ForcedDrafts(3, "partly", truth_of(expected()), random_count=True, seed=1), **limits)
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in limits)


@pytest.mark.parametrize("kind", ["mtp", slow("dspark")])
def test_in_graphs(kind):
    """Static buffers with padding, of every number of rows: nothing of a step before is left in them."""
    choice = ForcedDrafts(MOST[kind], "partly", truth_of(expected(kind)), random_count=True, seed=2)
    engine = check(kind, choice, capture=FakeGraph(), buckets=(2, 4, 12))
    assert engine.runner.num_replays > 2 * engine.runner.num_direct


@pytest.mark.parametrize("kind", ["mtp", slow("dspark")])
def test_chunks_of_a_prompt_in_graphs(kind):
    """A captured step that draws nothing: what an earlier one drew is gone from memory, and nobody misses it."""
    choice = ForcedDrafts(MOST[kind], "partly", truth_of(expected(kind)))
    engine = check(kind, choice, capture=FakeGraph(), buckets=(4, 16, 32), max_chunk_tokens=16)
    assert engine.runner.num_direct == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_every_residue(kind):
    """A request from 100 to 240 tokens: every accepted count at every residue of 4, all residues of 128, and many turns
    of the window of 16."""
    prompt = prompt_of(100, seed=4)
    params = SamplingParams(max_tokens=140, seed=8, logprobs=0, ignore_eos=True, frequency_penalty=0.4)
    plain = run(plain_llm(kind), [prompt], [params])
    choice = ForcedDrafts(MOST[kind], "partly", truth_of(plain))
    seen, record = set(), choice.record

    def note(num_drafts, num_accepted):
        seen.add((llm.engine.scheduler.running[0].num_processed % 4, num_accepted))
        record(num_drafts, num_accepted)

    choice.record = note
    llm = drafting_llm(kind, choice)
    assert run(llm, [prompt], [params]) == plain
    assert len(seen) > 2 * MOST[kind]


def test_prefix_hits():
    """The second time, prompts come out of the prefix cache, snapshots taken while drafts were verified among them."""
    prompts = [prompt_of(140), prompt_of(140)[:130] + prompt_of(6)]
    params = [SamplingParams(max_tokens=9, seed=seed, logprobs=0, ignore_eos=True) for seed in range(2)]
    plain = run(plain_llm(prefix_cache_bytes=0), prompts, params)
    choice = ForcedDrafts(3, "partly", truth_of(plain), random_count=True)
    llm = drafting_llm("mtp", choice)
    assert run(llm, prompts, params) == plain
    assert run(llm, prompts, params) == plain
    assert llm.engine.stats().num_prefix_hits >= 3
    llm.engine.check_integrity()


@pytest.mark.parametrize("ending", [{"max_tokens": 5}, {"stop_token_ids": "drawn"}])
def test_an_end_among_the_drafts(ending):
    """A step verifies drafts beyond the end: nothing behind it is told, counted or kept."""
    whole = expected()[0]
    if ending.get("stop_token_ids") == "drawn":
        ending = {"stop_token_ids": (whole.token_ids[6],)}
    params = [SamplingParams(**{**PARAMS[0].__dict__, **ending})]
    plain = run(plain_llm(), PROMPTS[:1], params)
    choice = ForcedDrafts(3, "right", truth_of([whole]))
    llm = drafting_llm("mtp", choice)
    assert run(llm, PROMPTS[:1], params) == plain
    assert llm.engine.stats().num_output_tokens == len(plain[0].token_ids)
    assert llm.engine.stats().drafts.num_accepted <= len(plain[0].token_ids) - 1
    assert llm.cache.num_free_slots == 4


def test_a_request_that_has_no_next_token_fails_alone(monkeypatch):
    """NaN logits in a row behind an accepted draft: the request fails there, with what it had, the other goes on."""
    llm = drafting_llm("mtp", ForcedDrafts(3, "right", truth_of(expected())))
    sick, well = (llm.engine.prepare(PROMPTS[place], PARAMS[place]) for place in (0, 2))
    for request in (sick, well):
        llm.engine.submit(request)
    forward = llm.engine.runner.forward
    calls = []

    def poisoned(batch, draw_rows):
        made = forward(batch, draw_rows)
        calls.append(made)
        if len(calls) == 2:
            made.logits[2] = float("nan")  # the newest token's row and that of the first draft are sound
        return made

    monkeypatch.setattr(llm.engine.runner, "forward", poisoned)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    assert sick.error == f"the model gave no numbers (NaN logits) for the token at position {len(PROMPTS[0]) + 3}"
    assert tuple(sick.output_ids) == expected()[0].token_ids[:3]
    assert well.completion() == bare(expected()[2])


def test_events_of_a_step_with_several_tokens():
    """Every token's event has its own log-probabilities, and only the last one an end."""
    llm = drafting_llm("mtp", ForcedDrafts(3, "right", truth_of(expected())))

    async def read():
        async with AsyncLLM.over(llm) as engine:
            return [event async for event in engine.stream(PROMPTS[0], PARAMS[0])]

    events = asyncio.run(read())
    assert tuple(event.token_id for event in events) == expected()[0].token_ids
    assert tuple(event.logprobs for event in events) == expected()[0].logprobs
    assert [event.finish_reason for event in events] == [None] * 10 + ["length"]
    assert (
        'dsv4_spec_decode_num_accepted_tokens_total{model_name="m"} 7.0'
        in SharedMetrics(Metrics("m"), "m").text(llm.engine.stats()).decode()
    )


def test_experts_of_rejected_rows_are_not_told():
    llm, seen = drafting_llm("mtp", ForcedDrafts(3, "partly", truth_of(expected()))), []
    llm.engine.observers.append(lambda chosen: seen.append(chosen.shape[1]))
    run(llm, PROMPTS[:2], PARAMS[:2])
    fed = sum(len(PROMPTS[place]) + len(expected()[place].token_ids) - 1 for place in range(2))
    assert sum(seen) == fed


def penalties_forget_the_drafts(patch, llm):
    sample = llm.model.context.ops.sample

    def forgetful(logits, rows, state):
        nothing = None if rows.drafts is None else torch.full_like(rows.drafts, -1)
        return sample(logits, replace(rows, drafts=nothing), state)

    patch.setattr(llm.model, "context", replace(llm.model.context, backend=TORCH.with_ops(sample=forgetful)))


def drafts_are_counted_twice(patch, llm):
    sample = llm.model.context.ops.sample

    def counting(logits, rows, state):
        drawn = sample(logits, rows, state)
        state.token_counts[rows.slots[rows.slots >= 0], drawn[rows.slots >= 0]] += 1
        return drawn

    patch.setattr(llm.model, "context", replace(llm.model.context, backend=TORCH.with_ops(sample=counting)))


def a_draft_too_many_stays(patch, llm):
    patch.setattr("dsv4.engine.engine.num_accepted", lambda piece, found: min(len(found) - 1, 1))


def noise_of_the_first_row(patch, llm):
    build = llm.engine._builder.build

    def wrong(plan, **options):
        step = build(plan, **options)
        first = dict(zip(step.fed.slots.tolist(), step.fed.positions, strict=True))
        positions = torch.stack([first[slot] for slot in step.draw_slots.tolist()]) if first else step.draw_positions
        return replace(step, draw_positions=positions)

    patch.setattr(llm.engine._builder, "build", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [penalties_forget_the_drafts, drafts_are_counted_twice, a_draft_too_many_stays, noise_of_the_first_row]
)
def test_planted_mistakes_show(mistake, monkeypatch):
    llm = drafting_llm("mtp", ForcedDrafts(3, "partly", truth_of(expected())))
    mistake(monkeypatch, llm)
    try:
        found = run(llm, PROMPTS, PARAMS)
    except (AssertionError, RuntimeError, ValueError):
        return  # noticed by the engine itself
    assert found != expected()


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("seed", range(2))
def test_loads_at_random(kind, seed):
    """Up to eight requests of every kind that come at random, limits at random, every kind of draft."""
    source = random.Random(seed)
    prompts = [prompt_of(source.choice((1, 3, 30, 127, 128, 129, 200)), seed=source.random()) for _ in range(8)]
    params = [
        SamplingParams(
            max_tokens=source.randint(1, 60), seed=place, temperature=source.choice((0.0, 0.5, 1.0, 1.7)),
            top_p=source.choice((1.0, 0.9)), top_k=source.choice((0, 5)), logprobs=source.choice((None, 0, 4)),
            presence_penalty=source.choice((0.0, 0.9)), repetition_penalty=source.choice((1.0, 1.2)),
            min_tokens=source.choice((0, 0, 1)), ignore_eos=source.random() < 0.5, priority=source.randint(0, 1),
        )
        for place in range(8)
    ]  # fmt: skip
    plain = [run(plain_llm(kind), [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    for drafts in ("right", "wrong", "random", "partly", "real"):
        choice = ForcedDrafts(MOST[kind], drafts, truth_of(plain), random_count=source.random() < 0.5, seed=seed)
        llm = drafting_llm(
            kind, choice, max_concurrent_requests=source.randint(1, 8),
            num_blocks=source.choice((3, 4, 40)), max_chunk_tokens=source.choice((9, 64, 300)),
            capture=source.choice((None, FakeGraph())), buckets=(4, 16, 64), overlap=source.random() < 0.5,
        )  # fmt: skip
        assert run(llm, prompts, params, lambda engine: engine.check_integrity()) == plain
