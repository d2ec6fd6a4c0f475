"""What goes wrong on one rank is told by name, within seconds, and leaves nobody behind."""

import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from torch.distributed import HashStore

from dsv4.dist import control
from dsv4.dist.errors import ExchangeDamaged, RankFailed, RanksDiverged
from dsv4.dist.follower import Follower
from dsv4.dist.mesh import meet
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
    """A group that changes one bit of the first message of a kind that it passes on."""

    def __init__(self, inner, kind):
        self.inner = inner
        self.kind = kind
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def all_gather(self, mine):
        return self.damage("input", self.inner.all_gather(mine))

    def all_to_all(self, mine, num_sent, num_received):
        return self.damage("part", self.inner.all_to_all(mine, num_sent, num_received))

    def damage(self, kind, received):
        if kind == self.kind and received.numel() > 64:
            received.view(-1)[3] ^= 16
            self.kind = None
        return received


@pytest.mark.parametrize("kind", ["input", "part"])
def test_a_flipped_bit_is_seen(make_ranks, kind):
    """On its way to rank 1."""

    def wrap(rank, group):
        return Damaging(group, kind) if rank == 1 else group

    ranks = make_ranks(2, is_checked=True, wrap=wrap)
    with within(10), pytest.raises(RankFailed, match="rank 1: .*what rank [01] sent arrived damaged at rank 1"):
        ranks.run([(PROMPT, PARAMS), (PROMPT, PARAMS)])
    assert isinstance(ranks.errors[1].__cause__, ExchangeDamaged)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_message_is_seen(make_ranks, lost):
    """Rank 1 never hears that a step begins: the others wait for it, and one of those that stand still is named."""
    ranks = make_ranks(2, stalled_seconds=2.0)
    agreement = ranks.own.agreement
    agreement._sockets[1] = Forgetful(agreement._sockets[1], lost)
    with within(10), pytest.raises(RankFailed, match="rank 1 has made no progress for 2 s while the others wait"):
        ranks.run([(PROMPT, PARAMS)])
    with within(1), pytest.raises(RankFailed, match="rank 1 has made no progress"):
        ranks.run([(PROMPT, PARAMS)])


class Forgetful:
    """A connection that loses one message."""

    def __init__(self, inner, lost):
        self.inner, self.left = inner, lost

    def sendall(self, data):
        self.left -= 1
        if self.left != -1:
            self.inner.sendall(data)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_ranks_that_are_in_different_steps_say_so(make_ranks):
    ranks = make_ranks(2)
    ranks.run([(PROMPT, PARAMS)])
    ranks.own.agreement.num_rounds += 1
    with (
        within(10),
        pytest.raises((RanksDiverged, RankFailed), match=r"rank [01] is in step \d+, this one in step \d+"),
    ):
        ranks.run([(PROMPT, PARAMS)])


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_in_a_rank_is_the_end_of_all(make_ranks, overlap):
    def change(rank, made):
        if rank == 1:
            made.model.forward = _raise

    ranks = make_ranks(2, change=change, overlap=overlap)
    told = []
    ranks.engine.sizes.when_failed(told.append)
    with within(10), pytest.raises(RankFailed, match="rank 1: RuntimeError: out of everything"):
        ranks.run([(PROMPT, PARAMS)])
    with pytest.raises(RankFailed, match="out of everything"):
        ranks.run([(PROMPT, PARAMS)])
    ranks.engine.take_results()
    assert not ranks.engine.has_work
    with within(2):
        while not told:
            time.sleep(0.05)
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
    ours, theirs = socket.socketpair()
    follower = Follower(theirs, 1, control.Progress(), on_lost=lost.append)
    with within(5):
        while not lost:
            time.sleep(0.05)
    assert lost == ["rank 0 has not been heard of for 0.5 s"]
    assert follower.is_stopped
    follower.close()
    ours.close()


def test_a_silent_rank(monkeypatch):
    monkeypatch.setattr(control, "SILENT_SECONDS", 0.6)
    ours, theirs = socket.socketpair()
    leader = control.Leader({1: ours}, control.Progress())
    with within(5), pytest.raises(RankFailed, match="rank 1 has not been heard of for 0.6 s"):
        leader.wait_until_ready()
    theirs.close()
    leader.stop()


class Stuck:
    """In place of a method: the thread that calls it stays there until the test ends."""

    def __init__(self):
        self.is_over = threading.Event()

    def __call__(self, *given, **options):
        self.is_over.wait(60)


@pytest.mark.parametrize("method", ["submit", "check_integrity"])
def test_a_rank_that_hangs_outside_a_step_is_named(make_ranks, monkeypatch, method):
    """While it takes a request, or answers; rank 0 has nothing to run, and the others beat."""
    monkeypatch.setattr(control, "SILENT_SECONDS", 2.0)
    stuck = Stuck()

    def change(rank, made):
        if rank == 1:
            setattr(made.engine, method, stuck)

    ranks = make_ranks(3, change=change)
    try:
        with within(6), pytest.raises(RankFailed, match="rank 1 hangs, and in no step, for 2 s"):
            ranks.run([(PROMPT, PARAMS), (PROMPT, PARAMS)])
    finally:
        stuck.is_over.set()


def test_statistics_wait_for_nobody(make_ranks):
    """They are what ranks said last: here while one of them is busy with something else."""
    stuck = Stuck()

    def change(rank, made):
        if rank == 1:
            made.engine.check_integrity = stuck

    ranks = make_ranks(2, change=change)
    requests = [ranks.engine.add(PROMPT, PARAMS) for _ in range(2)]
    while not all(one.is_done for one in requests):
        ranks.engine.step()
    ranks.engine.remotes[0].control("check_integrity")
    with within(0.5):
        stats = ranks.engine.stats()
    stuck.is_over.set()
    assert (stats.num_finished, stats.num_output_tokens, stats.num_slots) == (2, 8, 8)


def test_a_rank_that_hangs_behind_a_step_is_named(make_ranks):
    """In a draw: the others have left the step, and have nothing to run."""
    stuck = Stuck()

    def change(rank, made):
        if rank == 1:
            made.runner.draw = stuck

    ranks = make_ranks(2, change=change, stalled_seconds=2.0)
    try:
        with within(6), pytest.raises(RankFailed, match="rank 1 has made no progress for 2 s"):
            ranks.run([(PROMPT, SamplingParams(max_tokens=1)), (PROMPT, PARAMS)])
    finally:
        stuck.is_over.set()


def test_idle_ranks_and_long_steps_are_left_alone(make_ranks, monkeypatch):
    """Nothing to do for long, then a layer that takes longer than silence may."""
    monkeypatch.setattr(control, "SILENT_SECONDS", 2.5)

    def change(rank, made):
        logits = made.model.logits

        def slowly(streams):
            time.sleep(4 if rank else 0)
            return logits(streams)

        made.model.logits = slowly

    ranks = make_ranks(2, change=change)
    time.sleep(4)
    params = SamplingParams(max_tokens=1, temperature=0)
    assert len(ranks.run([(PROMPT, params), (PROMPT, params)])) == 2
    assert ranks.link.failure is None


def test_strangers_are_not_let_into_the_mesh():
    """Whoever does not know the token, or says nothing, is shown out, and the ranks meet all the same."""
    store, made = HashStore(), {}

    def join(rank):
        made[rank] = meet(store, rank, 2, "127.0.0.1", b"token")

    first = threading.Thread(target=join, args=(0,))
    first.start()
    host, port = store.get("mesh/0").decode().rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]  # the last one stays, in silence
    strangers[0].sendall(b"nekot" + bytes(16))
    strangers[1].close()
    join(1)
    first.join(20)
    assert [sorted(made[rank].steps) for rank in (0, 1)] == [[1], [0]]
    made[1].requests[0].sendall(b"hello")
    time.sleep(0.1)
    assert made[0].requests[1].recv(5) == b"hello"
    strangers[0].settimeout(5)
    assert strangers[0].recv(1) == b""
    for one in (*made.values(), *strangers):
        one.close()


# ---- what happens to one request stays with it, as on one rank ----


class Rule:
    """Allows token 40 + how many came, then raises. Other ranks make it from its source."""

    def __init__(self, num_allowed):
        self.num_allowed, self.drawn = num_allowed, []
        self.source = str(num_allowed), []

    def allowed(self):
        if len(self.drawn) == self.num_allowed:
            raise ConstraintError("nothing fits any more")
        mask = np.zeros(300, dtype=np.bool_)
        mask[40 + 17 * len(self.drawn)] = True
        return pack_tokens(mask)

    def accept(self, token_id):
        self.drawn.append(token_id)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_hold_on_every_rank(make_ranks, overlap):
    made = []

    def constrain(text, opening):
        def make():
            made.append(Rule(int(text)))
            return made[-1]

        return make

    ranks = make_ranks(2, overlap=overlap, constrain=constrain)
    engine, rules = ranks.engine, [Rule(9), Rule(2), Rule(9)]
    requests = [engine.prepare(PROMPT, PARAMS, rule) for rule in rules]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert [list(requests[place].completion().token_ids) for place in (0, 2)] == [[40, 57, 74, 91]] * 2
    with pytest.raises(RequestFailed, match="nothing fits any more"):
        requests[1].completion()
    assert requests[1].output_ids == [40, 57]
    assert [rule.num_allowed for rule in made] == [2], "the second one lived on rank 1"
    assert [len(rule.drawn) for rule in (rules[0], *made, rules[2])] == [3, 2, 3], "told of every token but the last"


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
