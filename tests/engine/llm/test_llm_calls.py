"""What users of `LLM` expect of it: several answers, seeds that are named, conversations, streams of tokens, progress,
threads."""

import asyncio
import threading

import pytest
from engine_cases import assert_all_free, encode, let_it_say

from dsv4 import LLM
from dsv4.async_llm import AsyncLLM
from dsv4.request import RequestError, SamplingParams
from dsv4.text.chat import ChatError, ChatOptions
from dsv4.text.tokenizer import encode_chat

HELLO = [{"role": "user", "content": "Hello"}]


# ---- seeds ----


@pytest.mark.usefixtures("real_seeds")
def test_without_a_seed_answers_differ_and_can_be_repeated(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    done = llm.generate(["And then"] * 3, params)
    assert len({one.token_ids for one in done}) == 3
    assert all(0 <= one.seed < 2**53 for one in done), "a number of JavaScript"
    for one in done:
        again = llm.generate("And then", SamplingParams(max_tokens=12, ignore_eos=True, seed=one.seed))[0]
        assert (again, again.seed) == (one, one.seed)
    assert llm.generate(["And then"] * 3, params) != done

    async def ask():
        async with AsyncLLM.over(make_llm()) as engine:
            return await engine.generate(["And then"] * 3, params)

    found = asyncio.run(ask())
    assert len({one.token_ids for one in found}) == 3
    assert llm.generate("And then", SamplingParams(max_tokens=12, ignore_eos=True, seed=found[1].seed)) == [found[1]]


def test_several_answers_stand_side_by_side(make_llm):
    llm = make_llm()
    params = SamplingParams(n=3, seed=2**63 - 2, max_tokens=5, ignore_eos=True)
    done = llm.generate(["a", "b"], params)
    assert [one.prompt_token_ids for one in done] == [tuple(encode(text)) for text in "aaabbb"]
    assert [one.seed for one in done] == [2**63 - 2, 2**63 - 1, -(2**63)] * 2
    alone = [llm.generate("a", SamplingParams(seed=one.seed, max_tokens=5, ignore_eos=True))[0] for one in done[:3]]
    assert alone == done[:3]

    async def ask():
        async with AsyncLLM.over(make_llm()) as engine:
            with pytest.raises(RequestError, match="n must be 1 in a stream, found 3"):
                await anext(engine.stream("a", params))
            return await engine.generate(["a", "b"], params), await engine.generate([])

    assert asyncio.run(ask()) == (done, [])


def test_no_prompts_are_no_answers(make_llm):
    assert make_llm().generate([]) == []
    assert make_llm().score([]) == []


# ---- conversations ----


def test_chat_is_generate_over_the_conversation(make_llm, tokenizer):
    llm = let_it_say(make_llm(), "hm</think>Yes.")
    params = SamplingParams(seed=0, max_tokens=16)
    prompt = tuple(encode_chat(tokenizer, HELLO, ChatOptions(thinking=True)))
    one = llm.chat(HELLO, params, thinking=True)
    assert [(done.prompt_token_ids, done.text[:3]) for done in one] == [(prompt, "hm<")]
    several = llm.chat([HELLO, [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]], params)
    assert len(several) == 2
    assert several[0].prompt_token_ids == tuple(encode_chat(tokenizer, HELLO))


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ChatError, "expected at least one message"),
        ("Hello", ChatError, "expected a list, found str"),
        (["Hello"], ChatError, "message 0: expected an object"),
        ([*HELLO, {"role": "assistant", "content": "Hi."}], RequestError, "the last one must be a user or tool"),
    ],
)
def test_conversations_refused(make_llm, messages, error, message):
    with pytest.raises(error, match=message):
        make_llm().chat(messages)


def test_chat_needs_a_tokenizer(make_llm):
    with pytest.raises(RequestError, match="no tokenizer.json, and chat"):
        make_llm(with_tokenizer=False).chat(HELLO)


# ---- streams ----


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, seed=1, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=300, seed=3, stop=("a", "e", "o", "1"), ignore_eos=True),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
    ],
)
def test_a_stream_of_tokens_is_the_answer(make_llm, params):
    llm = make_llm()
    (whole,) = llm.generate("Once", params)
    tokens = list(llm.stream_tokens("Once", params))
    assert tuple(token.token_id for token in tokens if token.token_id is not None) == whole.token_ids
    assert "".join(token.text for token in tokens) == whole.text
    assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + [whole.finish_reason]
    if whole.logprobs is not None:
        assert tuple(token.logprobs for token in tokens) == whole.logprobs
    assert_all_free(llm)


def test_a_stream_has_one_answer_and_needs_no_tokenizer(make_llm):
    llm = make_llm(with_tokenizer=False)
    with pytest.raises(RequestError, match="n must be 1 for one answer, found 2"):
        llm.stream_tokens([5], SamplingParams(n=2))
    tokens = list(llm.stream_tokens([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [token.text for token in tokens] == [""] * 3


# ---- progress, the end ----


def test_progress_is_told(make_llm):
    told = []
    make_llm().generate(
        ["a"] * 3, SamplingParams(max_tokens=4), progress=lambda done, total: told.append((done, total))
    )
    assert told == sorted(told)
    assert told[-1] == (3, 3)


def test_a_bar_shows_progress(make_llm, capsys):
    make_llm().generate(["a"] * 3, SamplingParams(max_tokens=4), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "tokens/s" in shown.err


def test_a_model_is_closed_at_the_end_of_its_block(make_llm, monkeypatch):
    closed = []
    monkeypatch.setattr(LLM, "close", lambda llm: closed.append(llm))
    with make_llm() as llm:
        llm.generate("a", SamplingParams(max_tokens=1))
        assert closed == []
    assert closed == [llm]


# ---- threads ----


def test_threads_share_the_engine(make_llm):
    """Requests of several threads run in the same steps, each with the answer it has alone."""
    llm = make_llm()
    asked = [(f"thread {n}", SamplingParams(max_tokens=24, seed=n, logprobs=1, ignore_eos=True)) for n in range(6)]
    expected = [make_llm().generate(*one)[0] for one in asked]
    found, start, sizes = [None] * len(asked), threading.Barrier(len(asked)), []
    step = llm.engine.step
    llm.engine.step = lambda: (sizes.append(llm.engine.stats().num_running), step())[1]

    def work(place):
        start.wait()
        if place % 2:
            found[place] = llm.generate(*asked[place])[0]
        else:
            found[place] = "".join(llm.stream(*asked[place]))

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "stuck"
    assert found == [one if place % 2 else one.text for place, one in enumerate(expected)]
    assert max(sizes) > 1, "nobody waited for another's answer"
    assert_all_free(llm)
