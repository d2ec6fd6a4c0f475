"""The allocator against a naive model, and every wrong use leaving it as it was."""

import copy
import pickle
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.errors import BlockError, DoubleRelease, ForeignBlock, IntegrityError, OutOfBlocks, UnallocatedBlock


class AllocatorMachine(RuleBasedStateMachine):
    """`owners` is the whole truth; the real one must agree after every step."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.num_blocks = num_blocks
        self.allocator = BlockAllocator(num_blocks)
        self.twin = BlockAllocator(num_blocks)  # same calls, same answers
        self.owners = Counter()

    @rule(count=st.integers(0, 14))
    def acquire(self, count):
        num_free = self.num_blocks - len(self.owners)
        if count > num_free:
            before = copy.deepcopy(vars(self.allocator))
            with pytest.raises(OutOfBlocks) as caught:
                self.allocator.acquire(count)
            assert (caught.value.needed, caught.value.free, caught.value.total) == (count, num_free, self.num_blocks)
            assert vars(self.allocator) == before
            return
        blocks = self.allocator.acquire(count)
        assert blocks == self.twin.acquire(count)
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & set(self.owners)
        assert all(0 <= block < self.num_blocks for block in blocks)
        self.owners.update(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def retain(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owners)), max_size=4))
        self.allocator.retain(blocks)
        self.twin.retain(blocks)
        self.owners.update(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.owners.elements())), max_size=6))
        if any(count > self.owners[block] for block, count in Counter(blocks).items()):
            before = copy.deepcopy(vars(self.allocator))
            with pytest.raises(DoubleRelease):
                self.allocator.release(blocks)
            assert vars(self.allocator) == before
            return
        self.allocator.release(blocks)
        self.twin.release(blocks)
        self.owners -= Counter(blocks)

    @rule(block=st.integers(-3, 15))
    def wrong_ids(self, block):
        before = copy.deepcopy(vars(self.allocator))
        valid = list(self.owners)[:2]
        if not 0 <= block < self.num_blocks:
            for call in (self.allocator.release, self.allocator.retain):
                with pytest.raises(ForeignBlock):
                    call([*valid, block])
        elif block not in self.owners:
            with pytest.raises(DoubleRelease):
                self.allocator.release([*valid, block])
            with pytest.raises(UnallocatedBlock):
                self.allocator.retain([*valid, block])
        assert vars(self.allocator) == before

    @invariant()
    def agrees(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        assert self.allocator.num_free == self.num_blocks - len(self.owners)
        for block in range(self.num_blocks):
            assert self.allocator.num_owners(block) == self.owners[block]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_lowest_blocks_first_and_last_released_first():
    allocator = BlockAllocator(6)
    assert allocator.acquire(3) == [0, 1, 2]
    assert allocator.acquire(0) == []
    allocator.release([1, 0])
    assert allocator.acquire(3) == [1, 0, 3]


def test_out_of_blocks_says_needed_free_and_total():
    allocator = BlockAllocator(4)
    allocator.acquire(3)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free of 4") as caught:
        allocator.acquire(2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.0])
def test_impossible_sizes(num_blocks):
    with pytest.raises(BlockError, match="positive integer"):
        BlockAllocator(num_blocks)


def test_negative_acquisition():
    with pytest.raises(BlockError, match="cannot acquire -1"):
        BlockAllocator(2).acquire(-1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._free.append(a._free[0]),
        lambda a: a._free.pop(),
        lambda a: a._num_owners.__setitem__(3, 1),
        lambda a: a._num_owners.__setitem__(0, 0),
        lambda a: a._num_owners.__setitem__(0, -1),
        lambda a: a._num_owners.append(0),
    ],
)
def test_check_integrity_sees_damage(damage):
    allocator = BlockAllocator(4)
    allocator.acquire(2)
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
