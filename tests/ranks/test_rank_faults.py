"""What goes wrong on one rank is told by name, within seconds, and leaves nobody behind."""

from __future__ import annotations

import time
from contextlib import contextmanager

import numpy as np
import pytest

from dsv4.cache.errors import RequestNeverFits
from dsv4.dist import control
from dsv4.dist.errors import ExchangeDamaged, RankFailed, RanksDiverged
from dsv4.dist.messages import Kind
from dsv4.engine.request import DeadlinePassed, RequestFailed
from dsv4.engine.step.constraint import ConstraintError, pack_tokens
from dsv4.request import RequestError, SamplingParams

PROMPT = [5, 6, 7, 8]
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@contextmanager
def within(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


class Damaging:
    """A group that changes one bit of one message it passes on."""

    def __init__(self, inner, call):
        self.inner = inner
        self.left = call
        self.rank, self.size = inner.rank, inner.size

    def all_gather(self, mine):
        return self.damage(self.inner.all_gather(mine))

    def all_to_all(self, mine, num_sent, num_received):
        return self.damage(self.inner.all_to_all(mine, num_sent, num_received))

    def damage(self, received):
        self.left -= 1
        if self.left == 0:
            received.view(-1)[3] ^= 16
        return received


@pytest.mark.parametrize("call", [1, 2])
def test_a_flipped_bit_is_seen(make_ranks, call):
    """In an input (the first message) or in a part (the second), on its way to rank 1."""

    def wrap(rank, group):
        return Damaging(group, call) if rank == 1 else group

    ranks = make_ranks(2, is_checked=True, wrap=wrap)
    with within(10), pytest.raises(RankFailed, match="rank 1: .*what rank [01] sent arrived damaged at rank 1"):
        ranks.run([(PROMPT, PARAMS), (PROMPT, PARAMS)])
    assert isinstance(ranks.errors[1], ExchangeDamaged)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_message_is_seen(make_ranks, monkeypatch, lost):
    """Rank 1 never hears of a step, or is never asked what it drew: the others wait for it, and it is named."""
    ranks = make_ranks(2, stalled_seconds=2.0)
    channel = ranks.link._peers[1].channel
    send, sent = channel.send, []

    def forgetful(kind, payload=b""):
        sent.append(kind)
        if not (kind is Kind.WORK and sent.count(Kind.WORK) == lost):
            send(kind, payload)

    monkeypatch.setattr(channel, "send", forgetful)
    with within(10), pytest.raises(RankFailed, match="rank 1 has made no progress for 2 s while the others wait"):
        ranks.run([(PROMPT, PARAMS)])
    with within(1), pytest.raises(RankFailed, match="rank 1 has made no progress"):
        ranks.run([(PROMPT, PARAMS)])


def test_a_plan_out_of_order_and_books_that_differ(make_ranks):
    ranks = make_ranks(2)
    ranks.run([(PROMPT, PARAMS)])
    ranks.engine._num_plans += 1
    with within(10), pytest.raises(RankFailed, match="rank 1: RanksDiverged: plan 6 arrived after plan 4"):
        ranks.run([(PROMPT, PARAMS)])
    assert isinstance(ranks.errors[1], RanksDiverged)


def test_tokens_that_differ_from_what_a_rank_drew(make_ranks, monkeypatch):
    """The rolling checksum: rank 0 takes another token than rank 1 drew."""
    ranks = make_ranks(2)
    check = ranks.engine._check

    def changed(rank, answer):
        return check(rank, answer[:-32] + bytes([answer[-32] ^ 1]) + answer[-31:])

    monkeypatch.setattr(ranks.engine, "_check", changed)
    with pytest.raises(RanksDiverged, match="rank 1: the checksum of its plans and tokens differs"):
        ranks.run([(PROMPT, PARAMS), (PROMPT, PARAMS)])


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_a_rank_is_the_end_of_all(make_ranks, overlap):
    def change(rank, made):
        if rank == 1:
            made.model.forward = _raise

    ranks = make_ranks(2, change=change, overlap=overlap)
    told = []
    ranks.engine.when_failed(told.append)
    with within(10), pytest.raises(RankFailed, match="rank 1: RuntimeError: out of everything"):
        ranks.run([(PROMPT, PARAMS)])
    with pytest.raises(RankFailed, match="out of everything"):
        ranks.run([(PROMPT, PARAMS)])
    ranks.engine.take_results()
    assert not ranks.engine.has_work
    assert [str(error) for error in told] == ["rank 1: RuntimeError: out of everything"]


def _raise(*arguments):
    raise RuntimeError("out of everything")


def test_rank_0s_own_error_is_raised_as_it_is(make_ranks, monkeypatch):
    ranks = make_ranks(2)
    monkeypatch.setattr(ranks.own.model, "logits", _raise)
    with pytest.raises(RuntimeError, match="^out of everything"):
        ranks.run([(PROMPT, PARAMS)])
    with pytest.raises(RankFailed, match="rank 0: RuntimeError: out of everything"):
        ranks.run([(PROMPT, PARAMS)])


def test_a_silent_leader_is_left(make_ranks, monkeypatch):
    """A follower that hears nothing ends: here by its connection, when the leader is stopped."""
    monkeypatch.setattr(control, "SILENT_SECONDS", 0.5)
    lost = []
    leader = control.Leader(2, "127.0.0.1", b"token", control.Progress())
    follower = control.Follower(leader.address, 1, b"token", control.Progress(), on_lost=lost.append)
    with within(5):
        while not lost:
            time.sleep(0.05)
    assert lost == ["rank 0 has not been heard of for 0.5 s"]
    assert follower.work() is None
    follower.close()
    leader.stop()


def test_a_silent_rank_and_a_stranger(monkeypatch):
    monkeypatch.setattr(control, "SILENT_SECONDS", 0.6)
    monkeypatch.setattr(control.Follower, "_beat", lambda self: None)
    leader = control.Leader(2, "127.0.0.1", b"token", control.Progress())
    stranger = control.Follower(leader.address, 1, b"other", control.Progress(), on_lost=lambda why: None)
    follower = control.Follower(leader.address, 1, b"token", control.Progress(), on_lost=lambda why: None)
    leader.connect()
    leader.tell(b"")
    with within(5), pytest.raises(RankFailed, match="rank 1 has not been heard of for 0.6 s"):
        leader.answers()
    assert stranger.work() is None, "not let in"
    for one in (stranger, follower):
        one.close()
    leader.stop()


# ---- what happens to one request stays with it, as on one rank ----


class Rule:
    """Allows token 40 + how many came, then raises."""

    def __init__(self, num_allowed):
        self.num_allowed, self.drawn = num_allowed, []

    def allowed(self):
        if len(self.drawn) == self.num_allowed:
            raise ConstraintError("nothing fits any more")
        mask = np.zeros(300, dtype=np.bool_)
        mask[40 + 17 * len(self.drawn)] = True
        return pack_tokens(mask)

    def accept(self, token_id):
        self.drawn.append(token_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_are_asked_on_rank_0_and_hold_everywhere(make_ranks, overlap):
    ranks = make_ranks(2, overlap=overlap)
    engine, rules = ranks.engine, [Rule(9), Rule(9), Rule(2)]
    requests = [engine.prepare(PROMPT, PARAMS, rule) for rule in rules]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [list(request.completion().token_ids) for request in requests[:2]] == [[40, 57, 74, 91]] * 2
    with pytest.raises(RequestFailed, match="nothing fits any more"):
        requests[2].completion()
    assert requests[2].output_ids == [40, 57]
    assert [len(rule.drawn) for rule in rules] == [3, 3, 2], "told of every token but the last"


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_logits_deadlines_and_requests_that_never_fit(make_ranks, overlap):
    now = [0.0]

    def change(rank, made):
        if rank == 1:
            logits = made.model.logits
            made.model.logits = lambda streams: logits(streams).fill_(float("nan"))

    limits = {"max_concurrent_requests": 2, "num_blocks": 2}
    ranks = make_ranks(2, limits=limits, change=change, clock=lambda: now[0], overlap=overlap)
    engine = ranks.engine
    with pytest.raises(RequestError, match="which need 4 cache blocks of 2"):
        engine.prepare([5] * 400, PARAMS)
    first, second, late = (engine.add(PROMPT, params) for params in (PARAMS, PARAMS, SamplingParams(deadline=5.0)))
    engine.step()
    now[0] = 6.0
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert len(first.completion().token_ids) == 4
    with pytest.raises(RequestFailed, match=r"no numbers \(NaN logits\) for the token at position 4"):
        second.completion()
    with pytest.raises(DeadlinePassed, match="the deadline of 5 s passed with 0 of at most"):
        late.completion()
    assert (engine.stats().num_failed, engine.stats().num_finished) == (2, 1)
    request = engine.prepare(PROMPT, PARAMS)
    request.max_len = 5000
    with pytest.raises(RequestNeverFits, match="the whole cache of a rank has 2"):
        engine.submit(request)
