"""The books of a cache without its tensors, and requests that answer by themselves."""

import numpy as np

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.prefix.cache import NO_STOP, Match
from dsv4.cache.schema import blocks_at_position
from dsv4.engine.request import Request
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.request import SamplingParams

EOS = 0


class Books:
    """`KVCacheManager` as far as the scheduler sees it, and `apply` in place of `prepare_forward`."""

    def __init__(self, num_slots=4, num_blocks=16):
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self._allocator = BlockAllocator(num_blocks)
        self._free_slots = list(range(num_slots))
        self._positions = {}
        self._blocks = {}

    @property
    def num_free_blocks(self):
        return self._allocator.num_free

    @property
    def num_free_slots(self):
        return len(self._free_slots)

    def chain(self, token_ids, salt):
        return None

    def match(self, chain):
        return Match()

    def next_stop(self, slot):
        return NO_STOP

    def launched(self, slot):
        pass

    def blocks_freed_by(self, slots):
        return sum(len(self._blocks[slot]) for slot in slots)

    def admit(self, max_tokens, chain=None, match=None):
        if not self._free_slots:
            raise NoFreeSlot("none")
        slot = self._free_slots.pop(0)
        self._positions[slot], self._blocks[slot] = 0, []
        return slot

    def release(self, slot, *, keep=True):
        self._allocator.release(self._blocks.pop(slot))
        del self._positions[slot]
        self._free_slots.append(slot)

    def rewind(self, slot, position):
        keep = blocks_at_position(position)
        self._allocator.release(self._blocks[slot][keep:])
        del self._blocks[slot][keep:]
        self._positions[slot] = position

    def position(self, slot):
        return self._positions[slot]

    def advance(self, slot, num_tokens):
        """`OutOfBlocks` if there are not enough."""
        self._positions[slot] += num_tokens
        needed = blocks_at_position(self._positions[slot]) - len(self._blocks[slot])
        self._blocks[slot] += self._allocator.acquire(needed)

    def apply(self, plan):
        for piece in plan.pieces:
            assert (piece.slot, piece.start) == (piece.request.slot, self._positions[piece.slot])
            self.advance(piece.slot, piece.length)


def scheduler_of(books=None, **limits):
    """With rows for every slot; `num_rows=0`: without."""
    books = books or Books()
    given = {"max_batched_tokens": 64, "num_rows": books.num_slots, **limits}
    return Scheduler(books, num_blocks=books.num_blocks, **given)


def make_sequence(prompt_len, max_tokens, **params):
    return Request.start(
        [1] * prompt_len, SamplingParams(max_tokens=max_tokens, **params), max_context_tokens=4096,
        eos_token_id=EOS,
    )  # fmt: skip


def run_step(scheduler, now=0.0):
    """One step in which every request that may draws token 3: [(request, start, length)]."""
    scheduler.check_integrity()
    plan = scheduler.schedule(now)
    scheduler._cache.apply(plan)
    scheduler.commit(plan)
    collect(scheduler, plan)
    scheduler.check_integrity()
    return [(piece.request, piece.start, piece.length) for piece in plan.pieces]


def collect(scheduler, plan):
    """Every request of the plan that draws gets token 3."""
    taken = scheduler.rows.take(plan.rows, np.full(len(plan.rows), 3))
    assert not taken.invalid
    for request in (*taken.ended, *(plan.rows.requests[place] for place in taken.left)):
        if request not in taken.ended:
            request.num_unread -= 1
            if not request.is_done:
                request.append(3, None)
        scheduler.settle(request)
    for piece in plan.others:
        if piece.draws and piece.request.num_unread:
            piece.request.num_unread -= 1
            if not piece.request.is_done:
                piece.request.append(3, None)
        scheduler.settle(piece.request)


def pieces_of(step):
    return {request for request, _, _ in step}
