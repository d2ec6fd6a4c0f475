"""`SamplingParams` and prompts: every field's limits, and a message that names the field and what was found."""

import math
from dataclasses import FrozenInstanceError, fields

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.request import FinishReason, RequestError, SamplingParams, check_params, check_prompt, check_token_ids

HUGE = 10**5000  # cannot be a float, and Python refuses to print it
NOT_A_NUMBER = [None, "1", "", [], math.nan, math.inf, -math.inf, True, False, HUGE, -HUGE, 1j]

BAD = {
    "n": [0, -1, 2**31, 1.0, *NOT_A_NUMBER],
    "max_tokens": [0, -1, 2**31, 1.0, 1.5, *NOT_A_NUMBER],
    "min_tokens": [-1, 129, 2**31, 1.0, *NOT_A_NUMBER],
    "temperature": [-1, -1e-9, 100.1, *NOT_A_NUMBER],
    "top_k": [-2, 2**31, 5.0, *NOT_A_NUMBER],
    "top_p": [0, 0.0, -0.5, 1.0000001, 2, *NOT_A_NUMBER],
    "min_p": [-0.1, 1.1, *NOT_A_NUMBER],
    "repetition_penalty": [0, 0.0, -1, 101, *NOT_A_NUMBER],
    "presence_penalty": [-100.5, 100.5, *NOT_A_NUMBER],
    "frequency_penalty": [-100.5, 100.5, *NOT_A_NUMBER],
    "seed": [-(2**63) - 1, 2**63, 0.0, *NOT_A_NUMBER[1:]],
    "stop": [None, 3, [""], ["a", ""], [3], [None], {"a"}, b"a", [b"a"], ""],
    "stop_token_ids": [None, 3, "1", [-1], [1.0], [True], ["1"], [None], {1}],
    "logit_bias": [
        3,
        "1",
        [],
        [(1, 2)],
        {-1: 0},
        {1.0: 0},
        {"1": 0},
        {True: 0},
        {None: 0},
        {1: 100.5},
        {1: -101},
        {1: True},
        *({1: value} for value in NOT_A_NUMBER),
    ],
    "allowed_token_ids": [3, "1", [], (), [-1], [1.0], [True], ["1"], [None], {1}],
    "bad_words_ids": [None, 3, "1", [()], [[]], [1], [[-1]], [[1, 1.0]], [[True]], [["1"]], [None], {1}],
    "prompt_logprobs": [-1, 101, 1.0, True, False, "3", [], math.nan, HUGE],
    "cache_salt": ["", 3, b"a", [], True],
    "ignore_eos": [None, 0, 1, "true", []],
    "routed_experts": [None, 0, 1, "true", []],
    "indexer_topk": [None, 0, 1, "true", []],
    "replay_start": [-1, 2**31, 1.0, *NOT_A_NUMBER],
    "priority": [-11, 11, 0.0, *NOT_A_NUMBER],
    "deadline": [0, 0.0, -1, 1e10, *NOT_A_NUMBER[1:]],
    "logprobs": [-1, 101, 1.0, True, False, "3", [], math.nan, HUGE],
}

GOOD = {
    "n": [1, 64],
    "max_tokens": [1, 2**31 - 1],
    "min_tokens": [0, 1, 128],
    "temperature": [0, 0.0, 1e-45, 1, 100],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "min_p": [0, 0.0, 1, 1.0],
    "repetition_penalty": [1e-3, 1, 100.0],
    "presence_penalty": [-100, 0, 100.0],
    "frequency_penalty": [-100.0, 0.5, 100],
    "seed": [None, -(2**63), -1, 0, 2**63 - 1],
    "logit_bias": [None, {}, {0: -100, 129279: 100.0}, {7: 0.5}],
    "allowed_token_ids": [None, (0,), (5, 129279)],
    "bad_words_ids": [(), ((0,),), ((5, 6), (129279,))],
    "prompt_logprobs": [None, 0, 100],
    "cache_salt": [None, "tenant"],
    "stop": [(), ("a",), ("\n\n", "End")],
    "stop_token_ids": [(), (0,), (5, 129279)],
    "ignore_eos": [True, False],
    "routed_experts": [True, False],
    "indexer_topk": [True, False],
    "replay_start": [0, 2**31 - 1],
    "priority": [-10, 0, 10],
    "deadline": [None, 1e-3, 30, 86400.0],
    "logprobs": [None, 0, 100],
}


def test_every_field_is_covered():
    names = {spec.name for spec in fields(SamplingParams)}
    assert set(BAD) == names
    assert set(GOOD) == names


@pytest.mark.parametrize("name", BAD)
def test_nonsense_is_refused_by_name(name):
    for value in BAD[name]:
        with pytest.raises(RequestError, match=f"^{name} must .*found ") as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 300
        assert caught.value.field == name


@pytest.mark.parametrize("name", GOOD)
def test_the_limits_themselves_are_accepted(name):
    for value in GOOD[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def built(values):
    try:
        return SamplingParams(**values), None
    except RequestError as error:
        return None, str(error)


@given(st.dictionaries(st.sampled_from([spec.name for spec in fields(SamplingParams)]), JSON, max_size=4))
def test_anything_is_accepted_whole_or_refused_by_name(values):
    params, message = built(values)
    if params is None:
        assert message.split()[0] in values
        return
    for name, value in values.items():
        held = getattr(params, name)
        assert held == (tuple(value) if isinstance(value, list) else value) or held in ((value,), 0)


def test_one_stop_string_and_lists():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(3, 4)))


def test_lists_of_lists_and_mappings_are_copied():
    bias, words = {3: 1.5}, [[1, 2], [3]]
    params = SamplingParams(logit_bias=bias, bad_words_ids=words, allowed_token_ids=[1, 3])
    bias[3] = -1.0
    words[0].append(9)
    assert params.logit_bias == {3: 1.5}
    assert (params.bad_words_ids, params.allowed_token_ids) == (((1, 2), (3,)), (1, 3))
    assert hash(params) == hash(SamplingParams(logit_bias={}, bad_words_ids=[[1, 2], [3]], allowed_token_ids=(1, 3)))


def test_top_k_of_minus_one_keeps_all():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_nothing_is_written_only_where_a_score_is_asked_for():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(RequestError, match="^max_tokens must be at least 1 unless prompt_logprobs"):
        SamplingParams(max_tokens=0, logprobs=1)
    with pytest.raises(RequestError, match=r"^min_tokens must be at most max_tokens \(0\), found 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, min_tokens=1)


def test_params_are_frozen_and_named():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().seed = 3
    with pytest.raises(TypeError):
        SamplingParams(64)
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


@pytest.mark.parametrize(
    ("change", "has_penalties"),
    [
        ({}, False),
        ({"temperature": 0, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -1}, True),
    ],
)
def test_penalties_are_noticed(change, has_penalties):
    assert SamplingParams(**change).has_penalties is has_penalties


def test_finish_reasons_are_plain_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]
    assert FinishReason.STOP == "stop"


# ---- prompts ----


def test_ids_outside_the_vocabulary():
    for token_id in (-1, 10, 2**70, HUGE, 1.0, "1", None, True, False, [1], math.nan):
        with pytest.raises(RequestError, match=r"^prompt token 2 is .*; ids are integers from 0 to 9$") as caught:
            check_prompt([0, 9, token_id, 3], 10, 100)
        assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": [9, 10]}, {"allowed_token_ids": [10]}, {"bad_words_ids": [[1], [2, 10]]},
               {"logit_bias": {3: 1, 10: -1}}],
)  # fmt: skip
def test_ids_in_parameters_outside_the_vocabulary(fields):
    params = SamplingParams(**fields)
    check_params(params, 11)
    with pytest.raises(RequestError, match=rf"^{next(iter(fields))} holds 10; ids are integers from 0 to 9$") as caught:
        check_params(params, 10)
    assert caught.value.field == next(iter(fields))


def test_ids_of_other_libraries_become_plain_integers():
    for ids in (numpy.array([3, 0, 9]), torch.tensor([3, 0, 9]), (3, 0, 9), range(3, 6)):
        checked = check_token_ids(ids, 10, "token")
        assert checked == [int(token_id) for token_id in ids]
        assert all(type(token_id) is int for token_id in checked)
    with pytest.raises(RequestError, match="token 0"):
        check_token_ids(torch.tensor([0.5]), 10, "token")


def test_lengths():
    with pytest.raises(RequestError, match="the prompt is empty"):
        check_prompt([], 10, 100)
    assert check_prompt([1] * 99, 10, 100) == [1] * 99
    with pytest.raises(RequestError, match="the prompt has 100 tokens; max_context_tokens is 100"):
        check_prompt([1] * 100, 10, 100)
