"""The fold of what `_attend_kernel` stored: tiles within a run, then runs, for some heads and columns."""

from __future__ import annotations

from dsv4.ops.attention.kernel_attend import _BY_RUN, _GROUP, _NONE, _finish, _fold, _one_over_total
from dsv4.ops.attention.kernel_rows import (
    count_tiles,
)
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_wait


@jit
def _fold_state(state, other, is_first):
    """The left fold of two states (highest, total, out); the first of all is taken as it is."""
    highest, total, out = state
    other_highest, other_total, part = other
    new_highest = tl.maximum(highest, other_highest)
    shrink = tl.exp2(highest - new_highest)
    share = tl.exp2(other_highest - new_highest)
    return (
        tl.where(is_first, other_highest, new_highest),
        tl.where(is_first, other_total, total * shrink + other_total * share),
        tl.where(is_first, part, _fold(out, shrink, part, share)),
    )


@jit
def _where(exists, state, otherwise):
    """What comes after the last part changes nothing: not even the sign of a zero."""
    return (
        tl.where(exists, state[0], otherwise[0]),
        tl.where(exists, state[1], otherwise[1]),
        tl.where(exists[:, None], state[2], otherwise[2]),
    )


@jit
def _no_part(ROWS: tl.constexpr, COLS: tl.constexpr):
    return tl.full([ROWS], _NONE, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)


@jit
def _load_parts(states, first_part, rows, cols, start, num_parts, DIM: tl.constexpr, HEADS: tl.constexpr,
                AT_ONCE: tl.constexpr):
    """Some heads and columns of the stored states start .. start + AT_ONCE - 1, and which of them there are."""
    parts = ()
    for step in tl.static_range(AT_ONCE):
        row = (first_part + start + step) * HEADS + rows
        exists = (row * 0 + start + step) < num_parts
        parts += (
            (
                exists,
                (
                    tl.load(states.highest + row, mask=exists, other=_NONE),
                    tl.load(states.total + row, mask=exists, other=0.0),
                    tl.load(states.part + row[:, None] * DIM + cols[None, :], mask=exists[:, None], other=0.0),
                ),
            ),
        )  # type: ignore[assignment]
    return parts


@jit
def _fold_runs(states, first_part, rows, cols, num_runs, DIM: tl.constexpr, HEADS: tl.constexpr,
               AT_ONCE: tl.constexpr):
    """The left fold of stored runs, for some heads and columns."""
    state = _no_part(rows.shape[0], cols.shape[0])
    for start in range(0, num_runs, AT_ONCE):
        parts = _load_parts(
            states, first_part, rows, cols, start, num_runs, DIM, HEADS, AT_ONCE
        )
        for step in tl.static_range(AT_ONCE):
            exists, part = parts[step]  # type: ignore[var-annotated]
            state = _where(exists, _fold_state(state, part, start + step == 0), state)
    return state


@jit(do_not_specialize=("num_heads", "num_slices"))
def _combine_kernel(
    states, num_slices, out_ptr, num_heads, tables, positions_ptr, slots_ptr,
    NUM_GROUPS: tl.constexpr, HAS_ENTRIES: tl.constexpr, NUM_PICKS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, INVERSE_ROPE: tl.constexpr,
    RUN: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):
    """Folds what `_attend_kernel` stored, for ROWS heads and one part of the columns: tiles within a run of RUN, which
    is AT_ONCE then, and runs. A query of one run that was not cut into tiles is done already.
    """
    block = tl.program_id(0).to(tl.int64)
    token = block // HEAD_BLOCKS
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    heads = block % HEAD_BLOCKS * HEADS + rows
    head_mask = heads < num_heads
    position = tl.load(positions_ptr + token)
    num_parts = count_tiles(position, tl.load(slots_ptr + token), HAS_ENTRIES, NUM_PICKS, RATIO, WINDOW)
    pdl_wait()
    if CUT == _BY_RUN:
        num_parts = (num_parts + RUN - 1) // RUN
        if num_parts <= 1:
            return
    num_parts = tl.minimum(num_parts, num_slices)  # it is; a number the compiler knows would undo the batch of loads
    DIM: tl.constexpr = (NUM_GROUPS + 1) * _GROUP
    cols = tl.program_id(2) * _GROUP + tl.arange(0, _GROUP)
    if CUT == _BY_RUN:
        state = _fold_runs(states, block * num_slices, rows, cols, num_parts, DIM, HEADS, AT_ONCE)
    else:
        state = _no_part(ROWS, _GROUP)
        for start in range(0, num_parts, AT_ONCE):
            parts = _load_parts(
                states, block * num_slices, rows, cols, start, num_parts, DIM, HEADS, AT_ONCE
            )
            run = _no_part(ROWS, _GROUP)
            for step in tl.static_range(AT_ONCE):
                exists, part = parts[step]  # type: ignore[var-annotated]
                run = _where(exists, _fold_state(run, part, False), run)
            state = _fold_state(state, run, start == 0)
    highest, total, out = state
    inverse = _one_over_total(highest, total, heads, head_mask, tables.sink)
    column_ptr = out_ptr + (token * num_heads + block % HEAD_BLOCKS * HEADS + tl.program_id(1) * ROWS) * DIM
    if tl.program_id(2) == NUM_GROUPS:
        _finish(
            out, column_ptr + NUM_GROUPS * _GROUP, DIM, inverse, head_mask, position, tables.freqs, INVERSE_ROPE,
        )
    else:
        _finish(out, column_ptr + tl.program_id(2) * _GROUP, DIM, inverse, head_mask, position, tables.freqs, False)
