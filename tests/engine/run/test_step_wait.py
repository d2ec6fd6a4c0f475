"""Waiting for a step: asleep nearly all the time, and the end is seen when it comes. A clock that only the test moves
stands for the device's and the host's."""

import random
from dataclasses import dataclass, field

import pytest

from dsv4.engine.run.step_wait import NAP_SECONDS, StepWait

WAKES_LATE = 0.00006  # a sleeper, by Linux's timer


@dataclass
class Device:
    """Runs steps one after the other; each is launched `ahead` of the end of the one before, or at once."""

    now: float = 100.0
    free_at: float = 0.0
    over_at: float = 0.0
    asleep: float = 0.0
    asking: float = 0.0
    late: list[float] = field(default_factory=list)

    @property
    def is_there(self):
        return self.now >= self.over_at

    def wait(self):
        self.asking += max(0.0, self.over_at - self.now)
        self.now = max(self.now, self.over_at)
        self.late.append(self.now - self.over_at)
        return ()

    def sleep(self, seconds):
        assert 0 < seconds <= NAP_SECONDS
        self.now += seconds + WAKES_LATE
        self.asleep += seconds + WAKES_LATE

    def step(self, waits, seconds, num_rows=256, host=0.0005):
        launched = self.now
        self.over_at = self.free_at = max(self.free_at, launched) + seconds
        self.now += host
        waits.until_over(self, num_rows, launched)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def waits(device):
    return StepWait(lambda: device.now, device.sleep)


def test_steps_alike_are_slept_through_and_none_is_seen_late(device, waits):
    device.step(waits, 0.0065)
    assert device.asleep == 0, "nothing is known of the first"
    device.asking = 0.0
    for _ in range(100):
        device.step(waits, 0.0065)
    assert max(device.late) < 1e-9
    assert device.asking < 0.1 * 100 * 0.0065
    assert device.asleep > 0.8 * 100 * 0.0065


def test_steps_that_differ_are_seen_in_time(device, waits):
    chance = random.Random(1)
    for _ in range(500):
        device.step(waits, 0.0065 * chance.uniform(0.96, 1.04), num_rows=chance.choice([254, 255, 253]))
    assert sum(device.late) / 500 < 5e-6
    assert device.asking < 0.15 * 500 * 0.0065


def test_a_step_much_shorter_than_expected_is_late_by_a_nap_at_most_and_only_for_a_moment(device, waits):
    for _ in range(20):
        device.step(waits, 0.026, num_rows=4096)
    del device.late[:]
    for _ in range(20):
        device.step(waits, 0.003, num_rows=4096)
    assert device.late[0] <= NAP_SECONDS + WAKES_LATE
    assert sum(device.late[1:]) <= 2 * NAP_SECONDS


def test_a_longer_step_does_not_make_the_next_one_late(device, waits):
    """One that takes twice as long is an exception, whatever it was; many are the rule."""
    for _ in range(10):
        device.step(waits, 0.006)
    device.step(waits, 0.012)
    del device.late[:]
    device.step(waits, 0.006)
    assert device.late == [pytest.approx(0, abs=NAP_SECONDS)]
    for _ in range(60):
        device.step(waits, 0.012)
    device.asking = 0.0
    device.step(waits, 0.012)
    assert device.asking < 0.002


def test_sizes_have_expectations_of_their_own(device, waits):
    for _ in range(5):
        device.step(waits, 0.03, num_rows=4096)
        device.step(waits, 0.002, num_rows=64)
    assert max(device.late) < 1e-9


def test_a_host_that_comes_late_learns_nothing_wrong(device, waits):
    """What it finds done already may have been so for long: to expect that would be to see later steps late."""
    for _ in range(3):
        device.step(waits, 0.002)
    for _ in range(10):
        device.step(waits, 0.002, host=0.01)
    del device.late[:]
    for _ in range(3):
        device.step(waits, 0.002)
    assert max(device.late) < 1e-9
