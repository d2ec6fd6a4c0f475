"""A ring of stages in shared memory between producer and consumer warps, for kernels in Gluon on Hopper.

Each stage has two barriers. One round of the ring, for a stage:

    producer warps                               consumer warps
    producer_acquire: wait until it is free      consumer_wait: wait until it is full
    write the stage                              read the stage
    producer_commit: arrive at `full`            consumer_release: arrive at `free`
    next_stage                                   next_stage

A barrier completes a phase when as many arrivals have come as it was made for; one bit distinguishes phases. Both
sides walk the ring with a stage and a phase of their own, and start at stage 0: a consumer with phase 0, a producer
with phase 1. A wait for the phase before the first returns at once, so every stage is free at first.

                 stage:  0  1  2 | 0  1  2 | 0
    consumer's phase:    0  0  0 | 1  1  1 | 0
    producer's phase:    1  1  1 | 0  0  0 | 1

The functions here wait and arrive for all warps of a partition at once: its threads first wait for one another. Warps
that are to go on one by one use the addresses of the same barriers (`warp_wait`, `warp_arrive` in warp_groups.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import gl, gluon_jit, hopper

BARRIER_BYTES = 8
if hopper is not None:
    _barrier, _async = hopper.mbarrier, hopper.async_copy


class Ring(NamedTuple):
    """Barriers of S stages: `full` from number `first_full` on, `free` from number `first_free` on."""

    full: Any
    free: Any
    first_full: Any
    first_free: Any


@gluon_jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """[COUNT, 1], each completed by ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], _barrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        _barrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon_jit
def new_ring(STAGES: gl.constexpr, FULL_ARRIVALS: gl.constexpr, FREE_ARRIVALS: gl.constexpr):
    return Ring(new_barriers(STAGES, FULL_ARRIVALS), new_barriers(STAGES, FREE_ARRIVALS), 0, 0)


@gluon_jit
def ring_at(barriers, FIRST: gl.constexpr, STAGES: gl.constexpr):
    """A ring of barriers FIRST .. FIRST + 2 * STAGES - 1 of others: all of `full`, then all of `free`. Made where it is
    used, since every partition of warps is given a copy of what it captures, in shared memory.
    """
    return Ring(barriers, barriers, FIRST, FIRST + STAGES)


@gluon_jit
def init_ring_at(
    barriers, FIRST: gl.constexpr, STAGES: gl.constexpr, FULL_ARRIVALS: gl.constexpr, FREE_ARRIVALS: gl.constexpr
):
    for i in gl.static_range(STAGES):
        _barrier.init(barriers.index(FIRST + i), count=FULL_ARRIVALS)
        _barrier.init(barriers.index(FIRST + STAGES + i), count=FREE_ARRIVALS)


@gluon_jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and its phase."""
    following = stage + 1
    is_end = following == STAGES
    return gl.where(is_end, 0, following), gl.where(is_end, phase ^ 1, phase)


@gluon_jit
def later_stage(stage, phase, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """The stage STEPS after this one, and its phase."""
    steps = stage + STEPS
    return steps % STAGES, phase ^ steps // STAGES % 2


@gluon_jit
def producer_acquire(ring, stage, phase):
    """Until the stage may be written."""
    _barrier.wait(ring.free.index(ring.first_free + stage), phase)


@gluon_jit
def producer_commit(ring, stage):
    """The stage is written."""
    _barrier.arrive(ring.full.index(ring.first_full + stage))


@gluon_jit
def producer_commit_copies(ring, stage):
    """Every thread arrives when the asynchronous copies that it has issued have ended."""
    _async.mbarrier_arrive(ring.full.index(ring.first_full + stage), increment_count=False)


@gluon_jit
def consumer_wait(ring, stage, phase):
    """Until the stage is written."""
    _barrier.wait(ring.full.index(ring.first_full + stage), phase)


@gluon_jit
def consumer_release(ring, stage, pred=True):
    """The stage is read."""
    _barrier.arrive(ring.free.index(ring.first_free + stage), pred=pred)
