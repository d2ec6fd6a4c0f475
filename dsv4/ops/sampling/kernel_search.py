"""The last value that top-k and top-p keep, byte by byte, and where its equals are. See kernel_row.py."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.sampling.kernel_row import (
    _DRAW,
    _IS_LIMITED,
    _KEPT,
    _LAST,
    _NUM_DIGITS,
    _PREFIX,
    _REST,
    _ROW_FIELDS,
    _SHIFT,
    _STAGE,
    _START_PREFIX,
    _START_SHIFT,
    _TILE,
    _TOP,
    _TOP_K,
    _TOP_P,
    _from_sortable,
    _inverse_temperature,
    _is_last,
    _mass,
    _relative,
    _sortable,
)

NUM_PASSES = 8  # four bytes for top-k, four for top-p


@jit
def _add_by_digit(histogram_ptr, digits, weights, is_in, high):
    """Add the weights of a tile by digit. `high` is the highest of its digits."""
    tl.atomic_add(histogram_ptr + high, tl.sum(tl.where(is_in & (digits == high), weights, 0), 0), sem="relaxed")
    low = tl.min(tl.where(is_in, digits, _NUM_DIGITS), 0)
    if low < high:
        tl.atomic_add(histogram_ptr + low, tl.sum(tl.where(is_in & (digits == low), weights, 0), 0), sem="relaxed")
        is_between = is_in & (digits > low) & (digits < high) & (weights > 0)
        tl.atomic_add(histogram_ptr + digits, weights, mask=is_between, sem="relaxed")


@jit
def _mass_target(top_p, total):
    """Tokens are kept while the mass before them is below this: one token at least."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@jit
def _next_byte(fields_ptr, histogram_ptr, by_mass, shift, prefix, last, largest, inverse, top_p):
    """The byte in which the sum from above reaches what is wanted; behind the lowest byte, the end of a search."""
    kept, was_limited = tl.load(fields_ptr + _KEPT), tl.load(fields_ptr + _IS_LIMITED)
    digits = tl.arange(0, _NUM_DIGITS)  # [256]
    sums = tl.load(histogram_ptr + digits, cache_modifier=".cg")  # [256]
    tl.debug_barrier()  # every thread has read before one clears
    tl.store(histogram_ptr + digits, tl.zeros([_NUM_DIGITS], tl.int64))
    # top-k may have kept some of its last value's equals: they were not added one by one
    is_shared = by_mass & (((last >> shift) >> 8) == prefix)
    extra = tl.where(is_shared, kept * _mass(_relative(_from_sortable(last), largest, inverse)), 0)
    sums += tl.where(digits == (last >> shift) & 255, extra, 0)
    total = tl.sum(sums, 0)
    rest = tl.load(fields_ptr + _REST)
    rest = tl.where(rest < 0, _mass_target(top_p, total), rest)
    through = total - tl.cumsum(sums, 0) + sums  # [256], the sum from a digit on
    digit = tl.sum((through >= rest).to(tl.int32), 0) - 1
    rest -= tl.sum(tl.where(digits > digit, sums, 0), 0)
    own = tl.sum(tl.where(digits == digit, sums, 0), 0)
    found = prefix * 256 + digit
    if (digit >= 0) & (shift > 0):
        tl.store(fields_ptr + _SHIFT, shift - 8)
        tl.store(fields_ptr + _PREFIX, found)
        tl.store(fields_ptr + _REST, rest)
    else:
        if digit >= 0:  # else top-k asks for more tokens than there are
            each = tl.where(by_mass, tl.maximum(_mass(_relative(_from_sortable(found), largest, inverse)), 1), 1)
            num_kept, num_equal = (rest + each - 1) // each, own // each
            is_limited = (num_kept < num_equal) | ((found == last) & (was_limited != 0))
            tl.store(fields_ptr + _LAST, found)
            tl.store(fields_ptr + _KEPT, num_kept)
            tl.store(fields_ptr + _IS_LIMITED, is_limited.to(tl.int64))
        # top-p among what top-k kept
        tl.store(fields_ptr + _STAGE, tl.where(by_mass | (top_p >= 1.0), _DRAW, _TOP_P).to(tl.int64))
        tl.store(fields_ptr + _SHIFT, tl.load(fields_ptr + _START_SHIFT))
        tl.store(fields_ptr + _PREFIX, tl.load(fields_ptr + _START_PREFIX))
        tl.store(fields_ptr + _REST, tl.full([], -1, tl.int64))


@jit(do_not_specialize=("slots_ptr", "chunk_len", "num_chunks"))
def _narrow_kernel(slots_ptr, state, scratch, chunk_len, num_chunks):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    fields_ptr = scratch.row_fields + row * _ROW_FIELDS
    stage = tl.load(fields_ptr + _STAGE)
    if (stage == _TOP_K) | (stage == _TOP_P):
        by_mass = stage == _TOP_P
        slot = tl.load(slots_ptr + row)
        inverse = _inverse_temperature(tl.load(state.temperature + slot))
        largest = _from_sortable(tl.load(fields_ptr + _TOP))
        shift, prefix = tl.load(fields_ptr + _SHIFT), tl.load(fields_ptr + _PREFIX)
        last = tl.load(fields_ptr + _LAST)
        low_shift, low_prefix, low_last = shift.to(tl.uint32), prefix.to(tl.uint32), last.to(tl.uint32)
        histogram_ptr = scratch.histogram + row * _NUM_DIGITS
        start = chunk * chunk_len
        for tile in range(start, tl.minimum(start + chunk_len, scratch.pitch), _TILE):
            x = tl.load(scratch.allowed + row * scratch.pitch + tile + tl.arange(0, _TILE))  # [TILE]
            bits = _sortable(x)  # [TILE]
            is_in = (bits > low_last) & (((bits >> low_shift) >> 8) == low_prefix)
            digits = ((bits >> low_shift) & 255).to(tl.int32)
            high = tl.max(tl.where(is_in, digits, -1), 0)
            if high >= 0:
                weights = tl.full([_TILE], 1, tl.int64)
                if by_mass:
                    weights = _mass(_relative(x, largest, inverse))
                _add_by_digit(histogram_ptr, digits, weights, is_in, high)
        if _is_last(scratch.arrivals, row, num_chunks):
            top_p = tl.load(state.top_p + slot)
            _next_byte(fields_ptr, histogram_ptr, by_mass, shift, prefix, last, largest, inverse, top_p)


# ---- equals of the last value ----


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _tie_kernel(scratch, chunk_len, num_chunks):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    fields_ptr = scratch.row_fields + row * _ROW_FIELDS
    # of a row whose token is known the other field was not written
    if (tl.load(fields_ptr + _STAGE) == _DRAW) & (tl.load(fields_ptr + _IS_LIMITED) != 0):
        last = tl.load(fields_ptr + _LAST).to(tl.uint32)
        start, num_ties = chunk * chunk_len, tl.full([], 0, tl.int32)
        for tile in range(start, tl.minimum(start + chunk_len, scratch.pitch), _TILE):
            x = tl.load(scratch.allowed + row * scratch.pitch + tile + tl.arange(0, _TILE))
            num_ties += tl.sum((_sortable(x) == last).to(tl.int32), 0)
        tl.store(scratch.chunk_ties + row * num_chunks + chunk, num_ties)
