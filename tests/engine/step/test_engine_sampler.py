"""What the engine hands to the sampler: each request's own settings, step, prompt and counts."""

from dataclasses import replace

import pytest
import torch
from engine_cases import SMALL, encode, let_it_say

from dsv4.ops.sampling import HAS_PENALTIES, IN_PROMPT
from dsv4.request import DRAW_REALS, SamplingParams

RUNS_BOTH_WAYS = True


@pytest.fixture
def watched(make_llm):
    """(llm that says "aab" to seed 0 and "xyz" to seed 1, the rows and slots it drew from)."""
    llm = let_it_say(make_llm(), "aab", "xyz")
    say, seen = llm.model.context.ops.sample, []

    def sample(logits, rows, state):
        seen.append((rows, replace(state, token_counts=state.token_counts.clone())))
        return say(logits, rows, state)

    llm.model.context = replace(llm.model.context, backend=llm.model.context.backend.with_ops(sample=sample))
    return llm, seen


def test_settings_reach_the_sampler_row_by_row(watched):
    llm, seen = watched
    settings = {
        "temperature": (0.5, 0.0), "top_k": (7, 0), "top_p": (0.25, 1.0), "min_p": (0.0, 0.5),
        "repetition_penalty": (1.5, 1.0), "presence_penalty": (0.25, -1.0), "frequency_penalty": (2.0, 0.0),
    }  # fmt: skip
    assert set(settings) == {*DRAW_REALS, "top_k"}, "each number that a draw reads"
    params = [
        SamplingParams(seed=row, max_tokens=3, **{name: values[row] for name, values in settings.items()})
        for row in (0, 1)
    ]
    llm.generate(["pp", "qrr"], params)
    assert len(seen) == 3
    for step, (rows, state) in enumerate(seen):
        for name, values in settings.items():
            assert getattr(state, name)[rows.slots].tolist() == list(values), name
        assert state.seeds[rows.slots].tolist() == [0, 1]
        assert rows.steps(state).tolist() == [step, step]


def test_penalties_count_prompt_and_answer_apart(watched):
    llm, seen = watched
    params = [SamplingParams(seed=row, max_tokens=4, presence_penalty=1) for row in (0, 1)]
    llm.generate(["pp", "qr"], params)
    prompts, answers = ["pp", "qr"], ["aab.", "xyz."]
    for step, (rows, state) in enumerate(seen):
        assert state.flags[rows.slots].tolist() == [HAS_PENALTIES] * 2
        for row in (0, 1):
            counts = torch.zeros(SMALL.vocab_size, dtype=torch.int32)
            counts[encode(prompts[row])] = IN_PROMPT
            for token_id in encode(answers[row][:step]):
                counts[token_id] += 1
            assert torch.equal(state.token_counts[rows.slots[row]], counts)


def test_nothing_is_counted_for_who_does_not_ask(watched):
    llm, seen = watched
    llm.generate(["p", "q"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, frequency_penalty=1)])
    assert [state.flags[rows.slots].tolist() for rows, state in seen] == [[0, HAS_PENALTIES]] * 2


def test_the_step_counts_tokens_not_calls(make_llm):
    """A prompt read in pieces draws its first token at step 0 all the same."""
    llm = let_it_say(make_llm(max_chunk_tokens=2), "abc")
    assert llm.generate("long prompt", SamplingParams(max_tokens=3))[0].text == "abc"
