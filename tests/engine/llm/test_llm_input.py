"""What `LLM` accepts and refuses; after every refusal the cache is as it was and the next call works."""

import numpy
import pytest
import torch
from engine_cases import ONE_LAYER, SMALL, assert_all_free, encode, let_it_say

from dsv4 import LLM, EngineConfig
from dsv4.cache.errors import CacheError, OutOfBlocks
from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.write.synth import random_params
from dsv4.request import RequestError, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1)


@pytest.fixture
def refused(make_llm):
    """`refused(call, message, **how to make the llm)`: the call fails so, and leaves no trace."""

    def check(call, message, error=RequestError, **making):
        llm = let_it_say(make_llm(**making), "ab")
        with pytest.raises(error, match=message):
            call(llm)
        assert_all_free(llm)
        assert llm.generate([3], ONE_TOKEN)[0].token_ids == (2 + ord("a"),)

    return check


# ---- prompts ----


@pytest.mark.parametrize(
    "prompts", ["?!", ["?!"], encode("?!"), [encode("?!")], tuple(encode("?!")), numpy.array(encode("?!")),
                torch.tensor(encode("?!")), torch.tensor([encode("?!")]), [torch.tensor(encode("?!"))]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_one_prompt_in_every_form(make_llm, prompts):
    done = let_it_say(make_llm(), "ab").generate(prompts, SamplingParams(max_tokens=2))
    assert [(one.prompt_token_ids, one.text) for one in done] == [(tuple(encode("?!")), "ab")]


def test_several_prompts_of_both_kinds_with_their_own_params(make_llm):
    llm = let_it_say(make_llm(), "first", "second")
    params = [SamplingParams(seed=1, max_tokens=3), SamplingParams(seed=0, max_tokens=4), SamplingParams(max_tokens=1)]
    done = llm.generate(["?", [5, 6], torch.tensor([7])], params)
    assert [one.text for one in done] == ["sec", "firs", "f"]
    assert [one.prompt_token_ids for one in done] == [tuple(encode("?")), (5, 6), (7,)]
    assert [one.text for one in llm.generate(["?", "!"], ONE_TOKEN)] == ["f", "f"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        (["ok", ""], "the prompt is empty"),
        ([3, 300], "prompt token 1 is 300; ids are integers from 0 to 299"),
        ([[3], [4, -1]], "prompt token 1 is -1"),
        ([3, True], "prompt token 1 is True"),
        ([3, 1.5], "prompt 0 must be text or a list of token ids, found 3"),
        (["a", 5], "prompt 1 must be text or a list of token ids, found 5"),
        (["a", None], "prompt 1 must be text"),
        ([[3.5]], "prompt token 0 is 3.5"),
        (None, "prompts must be text"),
        (7, "prompts must be text"),
        (b"abc", "prompts must be text"),
        ({"a": 1}, "prompts must be text"),
        ("x" * 512, "the prompt has 512 tokens; max_context_tokens is 512"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_prompts_refused(refused, prompts, message):
    refused(lambda llm: llm.generate(prompts, ONE_TOKEN), message, error=ValueError)


@pytest.mark.parametrize("prompt", ["", [], [300], "x" * 512])
def test_a_stream_refuses_at_once(refused, prompt):
    refused(lambda llm: llm.stream(prompt), "the prompt |prompt token 0")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([ONE_TOKEN], "2 prompts, but 1 SamplingParams; give one, or one per prompt"),
        ([ONE_TOKEN] * 3, "2 prompts, but 3 SamplingParams"),
        ([], "2 prompts, but 0 SamplingParams"),
        ([ONE_TOKEN, None], "params must be one SamplingParams, or a list of them"),
        ({"max_tokens": 3}, "params must be one SamplingParams"),
    ],
)
def test_params_refused(refused, params, message):
    refused(lambda llm: llm.generate(["a", "b"], params), message)


def test_without_a_tokenizer(refused, make_llm):
    plain = {"with_tokenizer": False}
    refused(lambda llm: llm.generate("abc"), "no tokenizer.json; pass the prompt as a list of token ids", **plain)
    refused(lambda llm: llm.generate([[3], "abc"]), "no tokenizer.json", **plain)
    refused(lambda llm: llm.stream([3]), "no tokenizer.json, so there is no text to stream", **plain)
    refused(lambda llm: llm.generate([3], SamplingParams(stop="x")), "stop strings need a tokenizer", **plain)
    done = make_llm(with_tokenizer=False).generate([3, 4], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert done.text is None
    assert len(done.token_ids) == 3


def test_a_request_that_could_never_have_its_blocks(refused):
    params = SamplingParams(max_tokens=300)
    refused(
        lambda llm: llm.generate("ab", params), "may reach 302 tokens, which need 3 cache blocks of 2", num_blocks=2
    )


# ---- looking inside ----

IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("chunks", [[], [5, 0], [6], [2, 2], [-1, 6], [2.0, 3.0], ["5"], [True, 4, None]])
def test_bad_chunks(refused, chunks):
    for call in (lambda llm: llm.logits(IDS, chunks), lambda llm: llm.mtp_logits([4, *IDS], chunks)):
        refused(call, "chunks must be positive integers that sum to 5, found ", model="exact")


@pytest.mark.parametrize("ids", [[5, 300], [5, -1], [5, "6"], [5, True], [5, 2.0], [5, None]])
def test_ids_outside_the_vocabulary(refused, ids):
    streams = torch.zeros(2, SMALL.hc_mult, SMALL.hidden_size)
    calls = [
        lambda llm: llm.logits(ids),
        lambda llm: llm.logits(ids, [1, 1]),
        lambda llm: llm.trace(ids),
        lambda llm: llm.mtp_logits(ids),
        lambda llm: llm.layer(0, streams, ids),
    ]
    for call in calls:
        refused(call, "token 1 is .*; ids are integers from 0 to 299", model="exact")


def test_lengths(refused):
    streams = torch.zeros(0, SMALL.hc_mult, SMALL.hidden_size)
    for call in (
        lambda llm: llm.logits([]),
        lambda llm: llm.trace([]),
        lambda llm: llm.mtp_logits([]),
        lambda llm: llm.layer(0, streams, []),
    ):
        refused(call, "token_ids is empty", model="exact")
    refused(lambda llm: llm.mtp_logits([5]), "mtp_logits needs at least two tokens, found 1", model="exact")
    too_long = "may reach 513 tokens, max_context_tokens is 512"
    refused(lambda llm: llm.logits([5] * 513), too_long, error=CacheError)


def test_layer_refuses(refused):
    streams = torch.zeros(5, SMALL.hc_mult, SMALL.hidden_size)
    for layer_idx in (-1, 3, 1.0, None):
        refused(lambda llm, idx=layer_idx: llm.layer(idx, streams, IDS), "layer_idx must be from 0 to 2", model="exact")
    wrong = r"streams must be \[5, 4, 128\] for 5 tokens, found \[4, 4, 128\]"
    refused(lambda llm: llm.layer(0, streams[:4], IDS), wrong, model="exact")


def test_no_mtp_block(refused):
    refused(lambda llm: llm.mtp_logits(IDS), "no MTP block")


def test_looking_inside_beside_an_open_stream(make_llm):
    llm = let_it_say(make_llm(max_concurrent_requests=2, num_blocks=2), "abcdef")
    expected = llm.logits(IDS)
    stream = llm.stream("????", SamplingParams(max_tokens=6))
    text = next(stream)
    assert torch.equal(llm.logits(IDS), expected)
    text += next(stream)
    with pytest.raises(OutOfBlocks):
        llm.logits([5] * 256)
    assert text + "".join(stream) == "abcdef"


def test_results_have_their_stated_shapes(make_llm):
    llm = make_llm("exact")
    logits = llm.logits(torch.tensor(IDS))
    assert logits.shape == (5, 300)
    assert logits.dtype == torch.float32
    assert torch.equal(llm.logits(IDS, [1, 3, 1]), logits)
    assert llm.mtp_logits(IDS).shape == (4, 300)
    layers = llm.trace(IDS)
    assert [layer.entries is not None for layer in layers] == [False, True, False]
    assert {tuple(layer.streams.shape) for layer in layers} == {(5, SMALL.hc_mult, SMALL.hidden_size)}
    again = llm.layer(1, layers[0].streams, IDS)
    assert torch.equal(again.streams, layers[1].streams), "one block alone gives what the whole model gave there"
    assert torch.equal(again.experts, layers[1].experts)


# ---- making one ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "fast"}, "numerics must be 'official' or 'exact', found 'fast'"),
        ({"numerics": "official", "dtype": torch.float32}, "numerics='official' computes in bfloat16"),
        ({"numerics": "exact", "dtype": torch.float16}, "dtype must be float64, float32 or bfloat16"),
        ({"device": "tpu"}, "device must be 'cpu' or 'cuda', found 'tpu'"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda', found 'meta'"),
        ({"device": None}, "device must be 'cpu' or 'cuda', found None"),
        ({"device": "cuda:99"}, "device 'cuda:99': this machine has"),
    ],
)
def test_options_are_checked_before_anything_is_read(tmp_path, options, message):
    with pytest.raises(RequestError, match=message):
        LLM(tmp_path / "does not exist", **options)


def test_limits_beyond_the_model(models):
    config, params, _ = models["one layer"]
    with pytest.raises(ConfigError, match="max_context_tokens must be at most .* 1024, found 2048"):
        LLM.from_params(config, params, numerics="exact", engine=EngineConfig(max_context_tokens=2048))
    limits = LLM.from_params(config, params, numerics="exact").cache.limits
    assert limits.max_context_tokens == ONE_LAYER.max_position_embeddings, "the default follows a short model"


def test_widths_that_cannot_be_quantised_are_named():
    """`official` needs whole groups of 128 channels; `exact` takes any width."""
    config = ModelConfig.tiny(
        num_hidden_layers=2, compress_ratios=(0, 4), num_nextn_predict_layers=0, moe_intermediate_size=96,
        head_dim=96, index_topk=4,
    )  # fmt: skip
    params = random_params(config, with_mtp=False, dequantize_to=torch.float32)
    exact = LLM.from_params(config, params, numerics="exact")
    assert exact.logits(list(range(9))).shape == (9, config.vocab_size)
    wide = ModelConfig.tiny(
        num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0, moe_intermediate_size=96
    )
    with pytest.raises(RequestError, match="moe_intermediate_size is 96"):
        LLM.from_params(wide, random_params(wide, with_mtp=False))
