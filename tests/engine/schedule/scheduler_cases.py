"""A cache without its tensors, and requests that answer by themselves."""

import numpy as np

from dsv4.cache.ledger import CacheLedger
from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.request import Request
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.request import SamplingParams

EOS = 0
CONFIG = ModelConfig.tiny()


class Books(CacheLedger):
    """The ledger of a small model's cache."""

    def __init__(self, num_slots=4, num_blocks=16):
        self.num_blocks, self.num_slots = num_blocks, num_slots
        limits = EngineConfig(
            max_context_tokens=4096, max_concurrent_requests=num_slots, num_blocks=num_blocks, max_draft_tokens=8,
            prefix_cache_bytes=0,
        )  # fmt: skip
        schema = build_cache_schema(CONFIG, build_schedule(CONFIG), limits, plain_itemsize=None)
        super().__init__(schema, limits, copies=None)

    def advance(self, slot, num_tokens):
        """`OutOfBlocks` if there are not enough."""
        self.prepare_forward([slot], [self.position(slot)], [num_tokens])

    def apply(self, plan):
        for piece in plan.pieces:
            assert piece.slot == piece.request.slot
            self.prepare_forward([piece.slot], [piece.start], [piece.length])
        self.check_integrity()


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
