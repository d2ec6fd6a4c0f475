"""What a compressor keeps of tokens whose entry has not closed: written back to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import jit, tl


class TailArguments(NamedTuple):
    """One ring of raw rows: [slots, len, DIM] each, with the same strides."""

    kv: Any
    score: Any
    slot_stride: int
    row_stride: int


@jit
def _write_tail(
    job, tail, token, slot, start, end, first_col, HALF: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr,
    LEN: tl.constexpr, TAIL_ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """The last LEN rows of the chunk whose first token is `token` into one ring: kv and score = gate + ape."""
    cols = first_col + tl.arange(0, COLS)[None, :]
    for first in range(tl.maximum(start, end - LEN), end, TAIL_ROWS):
        positions = (first + tl.arange(0, TAIL_ROWS))[:, None]
        mask = (positions < end) & (cols >= 0)
        rows = token + positions - start
        kv = tl.load(job.kv + rows * job.kv_stride + HALF + cols, mask=mask)
        gate = tl.load(job.gate + rows * job.gate_stride + HALF + cols, mask=mask)
        ape = tl.load(job.ape + (positions % RATIO) * WIDTH + HALF + cols, mask=mask)
        place = slot * tail.slot_stride + (positions % LEN) * tail.row_stride + cols
        tl.store(tail.kv + place, kv, mask=mask)
        tl.store(tail.score + place, gate + ape, mask=mask)


@jit
def _write_tails(
    job, batch, token, first_col, RATIO: tl.constexpr, DIM: tl.constexpr, OWN_LEN: tl.constexpr,
    FOLLOWING_LEN: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_COLS: tl.constexpr,
):
    slot = tl.load(batch.slots + token)
    start = tl.load(batch.chunk_starts + token).to(tl.int32)
    end = tl.load(batch.chunk_ends + token).to(tl.int32)
    token = token.to(tl.int64)
    if FOLLOWING_LEN > 0:
        _write_tail(
            job,
            job.following,
            token,
            slot,
            start,
            end,
            first_col,
            0,
            2 * DIM,
            RATIO,
            FOLLOWING_LEN,
            TAIL_ROWS,
            TAIL_COLS,
        )
        _write_tail(
            job, job.own, token, slot, start, end, first_col, DIM, 2 * DIM, RATIO, OWN_LEN, TAIL_ROWS, TAIL_COLS
        )
    else:
        _write_tail(job, job.own, token, slot, start, end, first_col, 0, DIM, RATIO, OWN_LEN, TAIL_ROWS, TAIL_COLS)
