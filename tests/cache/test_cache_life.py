"""Random lives of several requests over one manager, with a stand-in for the ops that labels every row it writes.

After each step, everything that a continuation of any request would read must be there and must be that request's own,
whatever was interleaved, taken back, released or refused in between.
"""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_cases import CONFIG, check_rows, write_rows

from dsv4.cache.errors import NoFreeSlot, OutOfBlocks, RewindTooFar
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule

MAX_CONTEXT, NUM_SLOTS, NUM_BLOCKS = 400, 3, 5


def make_manager(slack):
    engine = EngineConfig(
        max_context_tokens=MAX_CONTEXT,
        max_concurrent_requests=NUM_SLOTS,
        max_draft_tokens=slack,
        num_blocks=NUM_BLOCKS,
    )
    return KVCacheManager(CONFIG, build_schedule(CONFIG), engine, device="cpu", plain_dtype=torch.float64)


class CacheLife(RuleBasedStateMachine):
    @initialize(slack=st.integers(0, 5))
    def start(self, slack):
        self.slack = slack
        self.manager = make_manager(slack)
        self.labels = {}  # slot -> the label each processed token was written with
        self.highest = {}
        self.next_label = 1

    @rule(max_tokens=st.sampled_from([5, 130, MAX_CONTEXT]))
    def admit(self, max_tokens):
        if len(self.labels) == NUM_SLOTS:
            with pytest.raises(NoFreeSlot):
                self.manager.admit(max_tokens)
            return
        slot = self.manager.admit(max_tokens)
        assert slot == min(set(range(NUM_SLOTS)) - set(self.labels))
        self.labels[slot], self.highest[slot] = [], 0

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def forward(self, data):
        slots = data.draw(st.permutations(sorted(self.labels)))[: data.draw(st.integers(1, len(self.labels)))]
        chunks = {}
        for slot in slots:
            room = self.manager._max_tokens[slot] - len(self.labels[slot])
            if room:
                chunks[slot] = min(room, data.draw(st.sampled_from([1, 2, 3, 4, 5, 7, 31, 127, 128, 129, 260])))
        needed = sum(num_blocks(len(self.labels[s]) + n) - num_blocks(len(self.labels[s])) for s, n in chunks.items())
        used = sum(num_blocks(len(labels)) for labels in self.labels.values())
        token_ids = [[1] * length for length in chunks.values()]
        if needed > NUM_BLOCKS - used:
            with pytest.raises(OutOfBlocks, match=f"{needed} blocks needed, {NUM_BLOCKS - used} free of {NUM_BLOCKS}"):
                self.manager.make_batch(list(chunks), token_ids)
            return
        batch = self.manager.make_batch(list(chunks), token_ids)
        assert batch.num_tokens == sum(chunks.values())
        for slot, length in chunks.items():
            self.labels[slot] += range(self.next_label, self.next_label + length)
            self.next_label += length
            self.highest[slot] = max(self.highest[slot], len(self.labels[slot]))
            write_rows(self.manager, slot, self.labels[slot], length)

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def rewind(self, data):
        slot = data.draw(st.sampled_from(sorted(self.labels)))
        position = max(0, len(self.labels[slot]) - data.draw(st.integers(0, self.slack + 1)))
        if position < len(self.labels[slot]) and self.highest[slot] - position > self.slack:
            with pytest.raises(RewindTooFar):
                self.manager.rewind(slot, position)
            return
        self.manager.rewind(slot, position)
        del self.labels[slot][position:]

    @precondition(lambda self: self.labels)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.labels)))
        self.manager.release(slot)
        del self.labels[slot], self.highest[slot]

    @invariant()
    def everything_is_there(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.num_free_slots == NUM_SLOTS - len(self.labels)
        for slot, labels in self.labels.items():
            assert self.manager.position(slot) == len(labels)
            check_rows(self.manager, slot, labels)


TestCacheLife = CacheLife.TestCase
TestCacheLife.pytestmark = [pytest.mark.thorough]
TestCacheLife.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("slack", [1, 2, 3, 4, 5, 9])
def test_rewind_by_the_whole_slack_loses_nothing(slack):
    """At every phase of the blocks, the first ones included; then the continuation is as good as a first run."""
    manager = make_manager(slack)
    for position in (*range(18), *range(120, 136), *range(250, 264)):
        slot = manager.admit(MAX_CONTEXT)
        labels = list(range(1, position + 1))
        if position:
            manager.prepare_forward([slot], [0], [position])
            write_rows(manager, slot, labels, position)
        manager.prepare_forward([slot], [position], [slack])
        write_rows(manager, slot, labels + [-1] * slack, slack)
        manager.rewind(slot, position)
        manager.check_integrity()
        check_rows(manager, slot, labels)
        labels += range(1001, 1001 + 2 * slack)
        manager.prepare_forward([slot], [position], [2 * slack])
        write_rows(manager, slot, labels, 2 * slack)
        check_rows(manager, slot, labels)
        manager.release(slot)


def num_blocks(position):
    """Counted one by one: the blocks that the closed CSA entries lie in."""
    return len({entry // 32 for entry in range(position // 4)})
