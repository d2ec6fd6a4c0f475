"""Every sampling field of a request reaches `SamplingParams` as it should; the engine's own tests say what it does."""

import pytest
from server_cases import NAME, SERVED, TOKENIZER, make_llm

from dsv4.engine.control import engine_info
from dsv4.http.apis.chat.request import ChatRequest
from dsv4.http.apis.completions.request import CompletionRequest
from dsv4.http.apis.request_builder import RequestBuilder
from dsv4.http.body import validate
from dsv4.http.settings import ServerConfig
from dsv4.request import DRAW_REALS, SamplingParams


@pytest.fixture(scope="module")
def jobs(served_params):
    return RequestBuilder(engine_info(make_llm(served_params)), TOKENIZER, ServerConfig(name=NAME))


@pytest.fixture
def sampled(jobs):
    """`sampled(fields)`: the parameters of every choice a request with these fields becomes."""

    def run(fields, prompt=None):
        if prompt is None:
            chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "seed": 0, **fields}
            job = jobs.chat(validate(ChatRequest, chat))
        else:
            job = jobs.completion(validate(CompletionRequest, {"model": NAME, "prompt": prompt, "seed": 0, **fields}))
        return [output.params for output in job.outputs]

    return run


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {"5": -100, "299": 2.5}}, {"logit_bias": {5: -100, 299: 2.5}}),
        ({"logit_bias": {}}, {}),
        ({"min_tokens": 3}, {"min_tokens": 3}),
        ({"allowed_token_ids": [5, 6]}, {"allowed_token_ids": (5, 6)}),
        ({"stop_token_ids": [9]}, {"stop_token_ids": (9,)}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
        ({"priority": -3}, {"priority": -3}),
        ({"cache_salt": "tenant"}, {"cache_salt": "tenant"}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": -1}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
    ],
)
@pytest.mark.parametrize("prompt", [None, "ab"])
def test_fields_arrive(sampled, fields, expected, prompt):
    (params,) = sampled({"max_tokens": 8, **fields}, prompt)
    assert params == SamplingParams(**{"max_tokens": 8, "seed": 0, **expected})


@pytest.mark.parametrize("name", DRAW_REALS)
def test_every_number_of_a_draw_arrives(sampled, name):
    """0.5 is within the limits of all of them, and the default of none."""
    (params,) = sampled({"max_tokens": 8, name: 0.5})
    assert params == SamplingParams(max_tokens=8, seed=0, **{name: 0.5})


def test_bad_words_are_banned_with_and_without_a_space(sampled):
    (params,) = sampled({"max_tokens": 8, "bad_words": ["no", " way"]})
    words = {TOKENIZER.decode(ids) for ids in params.bad_words_ids}
    assert words == {"no", " no", " way"}


def test_choices_have_seeds_of_64_bits(sampled):
    assert [one.seed for one in sampled({"seed": 2**63 - 1, "n": 3})] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [one.seed for one in sampled({"seed": -1, "n": 2})] == [-1, 0]


@pytest.mark.parametrize(
    ("fields", "tokens", "logprobs", "prompt_logprobs"),
    [
        ({"echo": True, "logprobs": 1, "max_tokens": 1}, 1, 1, 1),  # as lm-eval asks
        ({"echo": True, "logprobs": 0, "max_tokens": 0}, 0, 0, 0),
        ({"echo": True, "max_tokens": 0}, 0, None, 0),
        ({"max_tokens": 0, "prompt_logprobs": 3}, 0, None, 3),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 16, 2, 5),
        ({"echo": True}, 16, None, None),
        ({}, 16, None, None),
    ],
)
def test_scores(sampled, fields, tokens, logprobs, prompt_logprobs):
    for params in sampled(fields, ["ab", "cd"]):
        found = (params.max_tokens, params.logprobs, params.prompt_logprobs)
        assert found == (tokens, logprobs, prompt_logprobs)


def test_a_begin_marker_comes_only_when_asked_for(jobs):
    for asked, first in ((None, []), (False, []), (True, [TOKENIZER.special_id("<｜begin▁of▁sentence｜>")])):
        request = validate(CompletionRequest, {"model": NAME, "prompt": "ab", "add_special_tokens": asked})
        output = jobs.completion(request).outputs[0]
        assert list(output.prompt_ids) == [*first, *TOKENIZER.encode("ab")]
    assert SERVED.vocab_size > 258
