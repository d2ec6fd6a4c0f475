"""Biases, bans and least lengths, and prompts that are scored: each alone, among others, in turn and overlapped."""

from dataclasses import replace

import pytest
import torch
from bare import bare
from engine_cases import SMALL, assert_all_free, finish

from dsv4.engine.request import RequestFailed
from dsv4.engine.run.warmup_requests import rehearse_requests
from dsv4.ops.sampling import sampled_logprobs_ref
from dsv4.request import FinishReason, SamplingParams

RUNS_BOTH_WAYS = True
EOS = SMALL.eos_token_id
PROMPT = [5, 6, 7]


def serve(llm, *requests):
    """Completions of (prompt, params) pairs that run together."""
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_decides(make_llm, temperature):
    params = SamplingParams(max_tokens=4, temperature=temperature, logit_bias={77: 100.0}, ignore_eos=True)
    plain = SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True)
    biased, free = serve(make_llm(), (PROMPT, params), (PROMPT, plain))
    assert biased.token_ids == (77,) * 4
    assert free == make_llm().generate(PROMPT, plain)[0]


def test_allowed_tokens_and_the_end(make_llm):
    params = SamplingParams(max_tokens=30, allowed_token_ids=(20, 21, 22), seed=3)
    done = make_llm().generate(PROMPT, params)[0]
    ends = [EOS] if done.finish_reason is FinishReason.STOP else []
    assert set(done.token_ids) <= {20, 21, 22, *ends}
    endless = make_llm().generate(PROMPT, SamplingParams(max_tokens=30, allowed_token_ids=(20, 21), ignore_eos=True))[0]
    assert set(endless.token_ids) == {20, 21}


def test_bad_words_are_never_completed(make_llm):
    plain = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    said = list(make_llm().generate(PROMPT, plain)[0].token_ids)
    for word in ([said[0]], said[2:4], said[5:8], [*PROMPT[-1:], said[0]]):
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, bad_words_ids=(word,))
        bad, free = serve(make_llm(), (PROMPT, params), (PROMPT, plain))
        written = [*PROMPT, *bad.token_ids]
        assert not any(written[i : i + len(word)] == word for i in range(len(PROMPT) - len(word) + 1, len(written)))
        assert list(free.token_ids) == said


def test_no_end_before_the_least_length(make_llm):
    bias = {EOS: 100.0}
    short = SamplingParams(max_tokens=9, logit_bias=bias)
    late = SamplingParams(max_tokens=9, min_tokens=5, logit_bias=bias)
    by_id = SamplingParams(max_tokens=9, min_tokens=5, logit_bias={44: 100.0}, stop_token_ids=(44,))
    found = serve(make_llm(), (PROMPT, short), (PROMPT, late), (PROMPT, by_id))
    assert [len(done.token_ids) for done in found] == [1, 6, 6]
    assert [done.finish_reason for done in found] == [FinishReason.STOP] * 3
    assert 44 not in found[2].token_ids[:5]


def test_a_request_whose_rules_allow_nothing_fails_alone(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=4, allowed_token_ids=(20,), bad_words_ids=((20,),), ignore_eos=True)
    stuck = llm.engine.add(PROMPT, params)
    free = llm.engine.add(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    finish(llm.engine)
    assert stuck.error == "the request's biases and rules together allow no token"
    assert free.completion() == bare(make_llm().generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))[0])
    assert_all_free(llm)


# ---- scores ----


@pytest.mark.parametrize("model", ["one layer", "official"])
@pytest.mark.parametrize("chunk", [512, 7])
def test_a_text_scores_as_it_was_generated(make_llm, model, chunk):
    """Bit for bit, alone or beside others, however the prompt is cut."""
    llm = make_llm(model, max_chunk_tokens=chunk)
    params = SamplingParams(max_tokens=70, seed=2, logprobs=3, ignore_eos=True)
    generated = llm.generate(PROMPT, params)[0]
    text = [*PROMPT, *generated.token_ids]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=3)
    scored, again, _ = serve(
        llm,
        (text, asked),
        (text[:-1], SamplingParams(max_tokens=2, prompt_logprobs=0)),
        ([9], replace(params, max_tokens=12)),
    )
    assert scored.prompt_logprobs[0] is None
    assert scored.prompt_logprobs[len(PROMPT) :] == generated.logprobs
    assert (scored.token_ids, scored.finish_reason) == ((), FinishReason.LENGTH)
    assert [one.logprob for one in again.prompt_logprobs[1:]] == [one.logprob for one in scored.prompt_logprobs[1:-1]]
    assert all(one.top == () for one in again.prompt_logprobs[1:])


def test_scores_of_whole_chunks(make_llm):
    """Rows of several prompts are scored together, in pieces of 256 and 64: each as in a prompt that is alone, in
    chunks of 64, and as its logits say."""
    together, alone = (
        make_llm(max_context_tokens=512, max_chunk_tokens=size, prefix_cache_bytes=0) for size in (512, 64)
    )
    texts = [torch.arange(3, 3 + length).remainder(200).tolist() for length in (2, 64, 65, 257, 322)]
    params = [SamplingParams(max_tokens=0, prompt_logprobs=count) for count in (0, 3, 0, 0, 2)]
    found = together.generate(texts, params)
    for text, one, completion in zip(texts, params, found, strict=True):
        assert completion == alone.generate(text, one)[0]
        assert [scored.token_id for scored in completion.prompt_logprobs[1:]] == text[1:]
        logits = together.logits(text)[:-1]
        wanted = sampled_logprobs_ref(logits, torch.tensor(text[1:]), one.prompt_logprobs)
        assert [scored.logprob for scored in completion.prompt_logprobs[1:]] == wanted[0].tolist()
        top_ids = [[token_id for token_id, _ in scored.top] for scored in completion.prompt_logprobs[1:]]
        assert top_ids == wanted[1].tolist()


def test_a_score_that_is_no_number(make_llm):
    """The request fails, and says where; the one beside it does not."""
    llm = make_llm()
    embed = llm.model.weights.embed.clone()
    embed[77] = float("nan")
    llm.model.weights = replace(llm.model.weights, embed=embed)
    good, _ = llm.start([9, 10, 11], SamplingParams(max_tokens=0, prompt_logprobs=0))
    bad, output = llm.start([9, 77, 11], SamplingParams(max_tokens=0, prompt_logprobs=0))
    while not (good.is_done and bad.is_done):
        llm.step()
    assert good.completion().prompt_logprobs[1].logprob < 0
    with pytest.raises(RequestFailed, match="no numbers .NaN logits. for the token at position 2"):
        output.completion()
    assert_all_free(llm)


def test_scoring_by_name(make_llm):
    llm = make_llm()
    generated = llm.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True))[0]
    first, second = llm.score([[*PROMPT, *generated.token_ids], [9]], num_top=2)
    assert first[len(PROMPT) :] == generated.logprobs
    assert second == (None,)


def test_a_rehearsal_leaves_nothing_behind(make_llm):
    llm = make_llm("official", max_concurrent_requests=3)
    expected = make_llm("official").generate(PROMPT, SamplingParams(max_tokens=4, seed=1))
    seen = []
    llm.engine.observers.append(seen.append)
    rehearse_requests(llm.engine)
    assert seen
    assert llm.engine.observers == [seen.append], "only its own is removed"
    llm.engine.observers.clear()
    assert_all_free(llm)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=4, seed=1)) == expected
