"""Placing requests on ranks, under random loads; a step and its tokens on the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_cases import SMALL

from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule
from dsv4.dist.messages import pack, unpack
from dsv4.dist.shares import expert_range, rank_limits
from dsv4.engine.draft.counts import Offer
from dsv4.engine.ranks.books import Admitted, Launched, RankBooks, Released, Rewound, StopAt
from dsv4.engine.ranks.scheduler import RankScheduler, StepSize
from dsv4.engine.ranks.wire import (
    DrawnToken,
    Opening,
    RankAnswer,
    RankPiece,
    RankShare,
    RanksStep,
    decode_answer,
    decode_masks,
    decode_plan,
    drawing_params,
    encode_answer,
    encode_masks,
    encode_plan,
)
from dsv4.engine.request import Request
from dsv4.request import SamplingParams, TokenLogprobs


def sequence_of(prompt, max_tokens, **params):
    """`prompt`: token ids, or how many of them."""
    token_ids = [1] * prompt if isinstance(prompt, int) else prompt
    asked = SamplingParams(max_tokens=max_tokens, **params)
    return Request.start(token_ids, asked, max_context_tokens=4096, eos_token_id=0)


def feed(books, pieces):
    books.prepare_forward(*([piece[place] for piece in pieces] for place in (1, 2, 3)))


def run_step(scheduler, now=0.0):
    """Every request that may draws token 3."""
    scheduler.check_integrity()
    plan = scheduler.schedule(now)
    for books, share in zip(scheduler.books, plan.shares, strict=True):
        assert share.num_tokens <= scheduler.max_batched_tokens
        for piece in share.pieces:
            assert piece.start == books.position(piece.slot)
        feed(books, share.pieces)
        books.check_integrity()
        assert books.num_free_blocks >= 0
    scheduler.commit(plan)
    for piece in plan.pieces:
        if piece.draws:
            piece.request.num_unread -= 1
            piece.request.append(3, None)
        scheduler.settle(piece.request)
    scheduler.check_integrity()
    return plan


def ranks_of(num_ranks, num_slots=2, num_blocks=4, **limits):
    books = [books_of(num_slots, num_blocks) for _ in range(num_ranks)]
    return RankScheduler(books, **{"max_batched_tokens": 64, **limits})


def books_of(num_slots, num_blocks, prefix_cache_bytes=0, tiers=None, **more):
    limits = EngineConfig(
        max_context_tokens=1024, max_concurrent_requests=num_slots, num_blocks=num_blocks,
        prefix_cache_bytes=prefix_cache_bytes, **more,
    )  # fmt: skip
    schedule = build_schedule(SMALL, with_mtp=False)
    return RankBooks(build_cache_schema(SMALL, schedule, limits, plain_itemsize=None), limits, tiers)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12), st.one_of(st.integers(1, 12), st.integers(110, 140)), st.integers(1, 30),
        st.integers(-1, 1), st.one_of(st.none(), st.integers(5, 60)), st.one_of(st.none(), st.integers(0, 20)),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), st.sampled_from([1, 5, 64, 1000]), ARRIVALS)
def test_everyone_ends_and_every_book_balances(num_ranks, num_slots, num_blocks, budget, arrivals):
    scheduler = ranks_of(num_ranks, num_slots, num_blocks, max_batched_tokens=budget, aging_steps=5)
    requests = [
        sequence_of(prompt_len, max_tokens, priority=priority, deadline=deadline)
        for _, prompt_len, max_tokens, priority, deadline, _ in arrivals
    ]
    total = sum(len(one.token_ids) + one.params.max_tokens for one in requests)
    for step in range(20 + 3 * total):
        for request, (arrival, *_, abort) in zip(requests, arrivals, strict=True):
            if arrival == step:
                scheduler.add(request, float(step))
            if abort == step:
                scheduler.abort(request)
        run_step(scheduler, float(step))
        if step > 20 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    arrived = [s for s, (arrival, *_, abort) in zip(requests, arrivals, strict=True)]
    assert all(request.is_done for request in arrived)
    for books in scheduler.books:
        assert (books.num_free_slots, books.num_free_blocks) == (num_slots, num_blocks)
    ended = scheduler.num_finished + scheduler.num_aborted + scheduler.num_failed
    assert ended == len(requests)


def test_the_rank_with_most_room_and_nobody_past_the_first():
    scheduler = ranks_of(3, num_slots=2, num_blocks=3)
    for length in (130, 5, 5, 5, 5):
        scheduler.add(sequence_of(length, 4))
    run_step(scheduler)
    assert [share.num_running for share in scheduler.shares] == [1, 2, 2], "rank 0's has taken most blocks already"
    scarce = ranks_of(2, num_blocks=2, max_batched_tokens=1000)
    running, large, small = [sequence_of(5, 3), sequence_of(5, 3)], sequence_of(200, 4), sequence_of(3, 4)
    for request in (*running, large, small):
        scarce.add(request)
    run_step(scarce)
    assert [request.slot for request in (*running, large, small)] == [0, 0, None, None]
    while not running[0].is_done:
        assert small.slot is None, "it would fit, but the one before it does not"
        run_step(scarce)
    run_step(scarce)
    assert (large.slot, small.slot) == (0, 0)
    crowded = ranks_of(2, num_slots=1)
    for _ in range(4):
        crowded.add(sequence_of(3, 2))
    assert [len(share.pieces) for share in run_step(crowded).shares] == [1, 1]
    assert (crowded.num_running, crowded.num_waiting) == (2, 2)


def test_a_higher_priority_takes_the_slot_of_the_latest():
    scheduler = ranks_of(2, num_slots=1)
    first, second = sequence_of(3, 20), sequence_of(3, 20)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    urgent = sequence_of(3, 2, priority=1)
    scheduler.add(urgent)
    plan = run_step(scheduler)
    assert plan.preempted == (second,)
    assert urgent.slot is not None
    assert first.slot is not None
    run_step(scheduler)
    assert urgent.is_done
    run_step(scheduler)
    assert second.slot is not None, "back on its rank, with all it knows"
    with pytest.raises(ValueError, match="queued before"):
        scheduler.add(second)


def test_experts_and_limits_are_divided():
    for num_experts in (1, 6, 7, 256):
        for num_ranks in range(1, min(num_experts, 9) + 1):
            ranges = [expert_range(num_experts, num_ranks, rank) for rank in range(num_ranks)]
            assert [expert for own in ranges for expert in own] == list(range(num_experts))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    limits = rank_limits(EngineConfig(max_concurrent_requests=9, num_blocks=5), 4)
    assert (limits.max_concurrent_requests, limits.num_blocks) == (3, 5)


NUMBERS = st.integers(0, 2**40)
IDS = st.lists(NUMBERS, max_size=5).map(tuple)
SALTS = st.text(st.characters())  # lone surrogates too
PARAMS = st.builds(
    SamplingParams, temperature=st.floats(0, 100), top_p=st.floats(0.01, 1), min_p=st.floats(0, 1),
    top_k=st.integers(0, 2**31 - 1), seed=st.integers(0, 2**63 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 100)), repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100), frequency_penalty=st.floats(-100, 100),
    prompt_logprobs=st.one_of(st.none(), st.integers(0, 100)),
    logit_bias=st.one_of(st.none(), st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3)),
    allowed_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 2**31), min_size=1, max_size=3).map(tuple)),
    bad_words_ids=st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    ignore_eos=st.booleans(), min_tokens=st.integers(0, 3),
)  # fmt: skip
OPENINGS = st.builds(
    Opening, NUMBERS, NUMBERS, NUMBERS, NUMBERS, PARAMS.map(lambda params: drawing_params(params, 1)),
    st.lists(NUMBERS).map(tuple),
)  # fmt: skip
CHANGES = st.one_of(
    st.builds(Admitted, *[NUMBERS] * 4, st.lists(NUMBERS).map(tuple), st.one_of(st.none(), SALTS)),
    st.builds(Released, NUMBERS, st.booleans(), NUMBERS), st.builds(StopAt, NUMBERS, NUMBERS),
    st.builds(Launched, NUMBERS, NUMBERS), st.builds(Rewound, NUMBERS, NUMBERS),
)  # fmt: skip
SHARES = st.builds(
    RankShare,
    st.lists(CHANGES).map(tuple),
    st.lists(OPENINGS, max_size=3).map(tuple),
    st.lists(st.builds(RankPiece, NUMBERS, NUMBERS, NUMBERS, st.booleans(), IDS)).map(tuple),
)
MASKS = st.lists(st.tuples(NUMBERS, st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple)), max_size=3).map(tuple)
LOGPROBS = st.builds(
    TokenLogprobs,
    st.just(7),
    st.floats(allow_nan=False),
    st.lists(st.tuples(NUMBERS, st.floats(allow_nan=False))).map(tuple),
)
OFFERS = st.builds(Offer, IDS, st.one_of(st.none(), st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple)))
DRAWN = st.one_of(
    st.builds(DrawnToken, st.just(7), st.one_of(st.none(), LOGPROBS)),
    st.builds(DrawnToken, st.just(0), st.none(), st.text(min_size=1)),
)


@settings(max_examples=50)
@given(
    NUMBERS,
    st.builds(StepSize, NUMBERS, NUMBERS, NUMBERS),
    st.booleans(),
    st.lists(st.tuples(SHARES, MASKS), min_size=1, max_size=4),
)
def test_a_plan_and_its_masks_survive_the_wire(step, size, at_once, ranks):
    shares, masks = zip(*ranks, strict=True)
    numbers = unpack(pack(encode_plan(step, size, at_once, shares)))
    allowed = unpack(pack(encode_masks(masks)))
    for rank, (share, mask) in enumerate(ranks, start=1):
        assert decode_plan(numbers, rank) == RanksStep(step, size, at_once, share)
        assert decode_masks(allowed, rank) == mask


@settings(max_examples=50)
@given(
    NUMBERS,
    NUMBERS,
    st.builds(
        RankAnswer,
        st.lists(DRAWN, max_size=4).map(tuple),
        st.lists(OFFERS, max_size=3).map(tuple),
        st.lists(st.tuples(NUMBERS, st.lists(LOGPROBS, max_size=3).map(tuple)), max_size=3).map(tuple),
    ),
)
def test_an_answer_survives_the_wire(step, checksum, answer):
    assert decode_answer(unpack(pack(encode_answer(step, checksum, answer)))) == (step, checksum, answer)
