"""How an answer ends and what is reported of it: stop strings, stop ids, end of sequence, limits, log-probabilities."""

import math

import pytest
from engine_cases import FILLER, SMALL, encode, let_it_say

from dsv4.request import FinishReason, RequestError, SamplingParams

RUNS_BOTH_WAYS = True

EOS = SMALL.eos_token_id


@pytest.fixture
def say(make_llm):
    """`say(answer, **params)`: the completion of a model that answers so."""

    def ask(answer, prompt="?", **params):
        return let_it_say(make_llm(), answer).generate(prompt, SamplingParams(**params))[0]

    return ask


D, F = (2 + ord(letter) for letter in "df")
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.mark.parametrize(
    ("answer", "params", "text", "reason", "num_tokens"),
    [
        ("abcdef", {"max_tokens": 3}, "abc", LENGTH, 3),
        ([*encode("ab"), EOS, *encode("cd")], {"max_tokens": 10}, "ab", STOP, 3),  # a token, but not text
        ([*encode("ab"), EOS], {"max_tokens": 3}, "ab", STOP, 3),  # as the last allowed token
        ("abcdef", {"max_tokens": 10, "stop_token_ids": [D, F]}, "abc", STOP, 4),
        ("abcdef", {"max_tokens": 4, "stop_token_ids": [D], "ignore_eos": True}, "abc", STOP, 4),
        ("one END two", {"stop": "END"}, "one ", STOP, 7),  # three tokens long
        ("one EN, END", {"stop": "END"}, "one EN, ", STOP, 11),  # a false start is given back
        ("aaab", {"stop": "aab"}, "a", STOP, 4),
        ("END", {"stop": "END"}, "", STOP, 3),
        ("naïve", {"stop": "ï"}, "na", STOP, 4),  # a stop of two bytes
        ("a\n\nb", {"stop": ["\n\n", "b"]}, "a", STOP, 3),
        ("one EN", {"max_tokens": 6, "stop": "END"}, "one EN", LENGTH, 6),  # held for a stop string, given at the end
        ([*encode("one EN"), EOS], {"stop": "END"}, "one EN", STOP, 7),
        ("abEND", {"max_tokens": 5, "stop": "END"}, "ab", STOP, 5),  # completed by the last token
        (encode("né")[:2], {"max_tokens": 2}, "n\ufffd", LENGTH, 2),  # an unfinished character
    ],
)
def test_how_an_answer_ends(say, answer, params, text, reason, num_tokens):
    done = say(answer, **{"max_tokens": 40, **params})
    assert (done.text, done.finish_reason) == (text, reason)
    assert done.token_ids == tuple(encode(answer) if isinstance(answer, str) else answer)[:num_tokens]
    assert (len(done.token_ids), done.prompt_token_ids) == (num_tokens, tuple(encode("?")))


def test_context_full(make_llm):
    llm = let_it_say(make_llm(max_context_tokens=10), "abcdefgh")
    done = llm.generate("1234567", SamplingParams(max_tokens=100))[0]
    assert (done.text, done.finish_reason) == ("abc", FinishReason.LENGTH)
    done = llm.generate("123456789", SamplingParams(max_tokens=100))[0]
    assert (done.text, done.finish_reason) == ("a", FinishReason.LENGTH)


def test_ignore_eos(say):
    done = say([*encode("ab"), EOS, *encode("cd")], max_tokens=5, ignore_eos=True)
    assert done.finish_reason is FinishReason.LENGTH
    assert done.text.startswith("ab")
    assert done.text.endswith("cd")
    assert len(done.token_ids) == 5


def test_stop_ids_outside_the_vocabulary(make_llm):
    with pytest.raises(RequestError, match="stop_token_ids holds 300; ids are integers from 0 to 299"):
        make_llm().generate("a", SamplingParams(stop_token_ids=[3, 300]))


# ---- streaming ----

PIECES = "a é 漢字 🙂🙃 END? EN then END after"


@pytest.mark.parametrize("stop", [(), ("END after",), ("🙃",)])
def test_a_stream_joins_to_the_text_and_holds_whole_characters(make_llm, stop):
    llm = let_it_say(make_llm(), PIECES)
    params = SamplingParams(max_tokens=len(PIECES.encode()), stop=stop)
    text = llm.generate("?", params)[0].text
    pieces = list(llm.stream("?", params))
    assert "".join(pieces) == text == (PIECES[: PIECES.index(stop[0])] if stop else PIECES)
    assert all(pieces), "no empty piece"
    assert "\ufffd" not in text
    assert pieces[:8] == ["a", " ", "é", " ", "漢", "字", " ", "🙂"], "as soon as a character is whole"


def test_invalid_bytes_become_replacement_characters_in_both(make_llm):
    broken = [2 + byte for byte in b"a\xff\xe6\xbcb\xf0\x9f"]
    llm = let_it_say(make_llm(), broken)
    params = SamplingParams(max_tokens=len(broken))
    expected = b"a\xff\xe6\xbcb\xf0\x9f".decode("utf-8", errors="replace")
    assert llm.generate("?", params)[0].text == expected == "".join(llm.stream("?", params))


def test_streams_side_by_side(make_llm):
    llm = let_it_say(make_llm(), "first é", "second 漢")
    streams = [llm.stream("?", SamplingParams(max_tokens=10, seed=seed)) for seed in (0, 1)]
    texts = ["", ""]
    for _ in range(4):
        for idx, stream in enumerate(streams):
            texts[idx] += next(stream)
    texts = [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)]
    assert texts == ["first é..", "second 漢"]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_an_abandoned_stream_frees_its_slot_and_blocks(make_llm, how):
    llm = let_it_say(make_llm(), "abcdefgh")
    stream = llm.stream("x" * 130, SamplingParams(max_tokens=8))
    assert next(stream) == "a"
    assert llm.cache.num_free_slots == 3
    assert llm.cache.num_free_blocks == llm.cache.schema.num_blocks - 1
    if how == "close":
        stream.close()
    else:
        del stream
    assert llm.cache.num_free_slots == 4
    assert llm.cache.num_free_blocks == llm.cache.schema.num_blocks
    llm.cache.check_integrity()
    assert llm.generate("?", SamplingParams(max_tokens=2))[0].text == "ab"


# ---- log-probabilities ----


def test_logprobs(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True, repetition_penalty=1.0)
    done = llm.generate([5, 6, 7], params)[0]
    assert len(done.logprobs) == 4
    rows = llm.logits([5, 6, 7, *done.token_ids]).double().log_softmax(-1).float()
    for step, one in enumerate(done.logprobs):
        row = rows[2 + step]
        best = row.sort(descending=True, stable=True)
        assert one.token_id == done.token_ids[step] == best.indices[0].item()
        assert one.logprob == row[one.token_id].item()
        assert one.top == tuple(zip(best.indices[:3].tolist(), best.values[:3].tolist(), strict=True))


def test_logprobs_none_zero_and_of_a_token_outside_the_best(make_llm):
    llm = let_it_say(make_llm(), [9, 9, FILLER])
    assert llm.generate([5], SamplingParams(max_tokens=3))[0].logprobs is None
    done = llm.generate([5], SamplingParams(max_tokens=3, logprobs=0))[0]
    assert [(one.token_id, one.top) for one in done.logprobs] == [(9, ()), (9, ()), (FILLER, ())]
    assert all(one.logprob < 0 and math.isfinite(one.logprob) for one in done.logprobs)
    best = llm.generate([5], SamplingParams(max_tokens=1, logprobs=100))[0].logprobs[0]
    assert len(best.top) == 100
    assert [logprob for _, logprob in best.top] == sorted((logprob for _, logprob in best.top), reverse=True)


def test_logprobs_are_the_models_not_the_samplers(make_llm):
    """Penalties, temperature and filters change what is drawn, not what is reported."""
    llm = let_it_say(make_llm(), "abc")
    plain = llm.generate([5], SamplingParams(max_tokens=3, logprobs=2))[0]
    bent = llm.generate(
        [5], SamplingParams(max_tokens=3, logprobs=2, temperature=0.3, top_k=2, repetition_penalty=2.0, min_p=0.5)
    )[0]
    assert plain == bent
