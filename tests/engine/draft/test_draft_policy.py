"""How many drafts: against a search of every choice, and over made-up lives of requests."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.engine.draft.policy import LEAST_TRIES, AcceptanceMeter, DraftPolicy, LearnedTimes


class StepTimes:
    """A step takes as long as at the next larger measured number of rows; beyond the largest, in proportion."""

    def __init__(self, measured):
        self.measured = dict(sorted(measured.items()))

    def seconds(self, rows):
        most = max(self.measured)
        return next((one for at, one in self.measured.items() if at >= rows), self.measured[most] * rows / most)


FLAT = StepTimes({1: 1.0, 1024: 1.0})  # more rows cost nothing
LINEAR = StepTimes({1: 1.0})  # a row costs what a row costs


def test_free_rows_are_all_used_and_dear_ones_never():
    survivals = [[0.9, 0.5, 0.1], [0.3], []]
    assert DraftPolicy(FLAT).choose(survivals) == [3, 1, 0]
    assert DraftPolicy(LINEAR).choose(survivals) == [0, 0, 0]
    assert DraftPolicy(FLAT).choose([]) == []


def test_the_rows_of_a_captured_step_are_filled():
    """Five requests take a step of 8 rows anyway: three drafts are free, and a fourth would double the time."""
    times = StepTimes({1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2, 16: 2.4})
    assert sum(DraftPolicy(times).choose([[0.6, 0.3]] * 5)) == 3
    assert DraftPolicy(times).choose([[0.6, 0.3]] * 5, other_rows=3) == [0] * 5


chances = st.lists(st.floats(0, 1), max_size=3).map(lambda values: sorted(values, reverse=True))
tables = st.dictionaries(st.integers(1, 16), st.floats(0.1, 10), min_size=1)


@given(st.lists(chances, min_size=1, max_size=3), tables, st.integers(0, 5))
def test_no_other_choice_gives_more_tokens_a_second(survivals, table, other_rows):
    verify = StepTimes(table)

    def rate(counts):
        tokens = sum(1 + sum(chances[:count]) for chances, count in zip(survivals, counts, strict=True))
        return tokens / verify.seconds(other_rows + len(survivals) + sum(counts))

    counts = DraftPolicy(verify).choose(survivals, other_rows)
    best = max(rate(other) for other in itertools.product(*(range(len(chances) + 1) for chances in survivals)))
    assert rate(counts) >= best * (1 - 1e-9)


def test_a_draft_is_probed_now_and_then():
    policy = DraftPolicy(LINEAR, probe_steps=4)
    asked = [policy.ask([0.1, 0.1], 2) for _ in range(9)]
    assert asked == [(0, False)] * 3 + [(1, True)] + [(0, False)] * 3 + [(1, True)] + [(0, False)]
    assert DraftPolicy(LINEAR, probe_steps=1).ask([], 2) == (0, True)


@given(chances, tables, st.integers(1, 6))
def test_asking_for_another_number_gives_no_more(chances, table, num_requests):
    verify = StepTimes(table)

    def rate(count):
        return (1 + sum(chances[:count])) / verify.seconds(num_requests * (1 + count))

    count, is_probe = DraftPolicy(verify).ask(chances, num_requests)
    assert not is_probe
    assert rate(count) >= max(map(rate, range(len(chances) + 1))) * (1 - 1e-9)


def test_times_are_learned():
    times = LearnedTimes(memory=10, weight=0.5)
    assert times.seconds(1) == times.seconds(0) == 0
    times.record(1, 1.0)
    assert (times.seconds(1), times.seconds(6)) == (1.0, 1.0), "a size that was not seen is worth a try"
    times.record(2, 3.0)
    times.record(4, 2.0)
    assert [times.seconds(rows) for rows in (1, 2, 3, 4, 100)] == [1, 3, 3, 3, 3], "never faster than a smaller one"
    times.record(2, 1.0)
    assert times.seconds(2) == 2.0
    for _ in range(11):
        times.record(1, 1.5)
    assert times.seconds(4) == times.seconds(1), "what was seen long ago is forgotten"
    times.record(60, 9.0)
    assert times.seconds(33) == 9.0, "large steps are grouped"


def test_meter_finds_the_rates_and_follows_a_change():
    meter, source = AcceptanceMeter(3), random.Random(0)

    def live(rates, steps):
        for _ in range(steps):
            accepted = 0
            while accepted < 3 and source.random() < rates[accepted]:
                accepted += 1
            meter.record(3, accepted)

    live((0.8, 0.6, 0.3), 3000)
    assert meter.survivals() == pytest.approx([0.8, 0.48, 0.144], abs=0.06)
    assert not meter.looks_broken
    live((0.2, 0.2, 0.2), 1500)
    assert meter.rate(0) == pytest.approx(0.2, abs=0.08)
    assert meter.num_tried[0] == 4500
    assert meter.num_accepted[0] > meter.num_tried[1] - 1  # the second is tried when the first was accepted


def test_what_was_not_tried_counts_neither_way():
    meter = AcceptanceMeter(4, expected=0.5)
    before = meter.rate(3)
    meter.record(4, 1)
    assert (meter.num_tried, meter.num_accepted) == ([1, 1, 0, 0], [1, 0, 0, 0])
    assert meter.rate(3) == before == 0.5
    meter.record(2, 2)
    meter.record(0, 0)
    assert (meter.num_tried, meter.num_accepted) == ([2, 2, 0, 0], [2, 1, 0, 0])


def test_a_broken_drafter_is_noticed():
    meter = AcceptanceMeter(2)
    for _ in range(LEAST_TRIES - 1):
        meter.record(2, 0)
    assert not meter.looks_broken
    meter.record(2, 0)
    assert meter.looks_broken
    assert not AcceptanceMeter(0).looks_broken
