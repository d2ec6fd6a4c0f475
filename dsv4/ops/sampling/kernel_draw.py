"""Noise, and the draw. See kernel_row.py."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32, log_fp32, log_of_odd
from dsv4.ops.sampling.kernel_row import (
    _HAS_PENALTIES,
    _IS_LIMITED,
    _KEPT,
    _KNOWN,
    _LARGEST,
    _LAST,
    _MAX_INDEX,
    _NOISE_BLOCK,
    _ROW_FIELDS,
    _STAGE,
    _TILE,
    _TOKEN,
    _TOP,
    _from_sortable,
    _inverse_temperature,
    _is_last,
    _load_chunks,
    _relative,
    _row_best,
    _sortable,
)

_NOISE_SPAN = tl.constexpr(24.0)  # a token further below the largest cannot win: noise lies between -2.86 and 17.33


@jit
def _gumbel(bits):
    """-log(-log u) in fp32 of u = (the upper 24 bits + 1/2) / 2^24."""
    odd = ((bits.to(tl.uint32, bitcast=True) >> 8).to(tl.int32) << 1) | 1  # u * 2^25
    return log_fp32(log_of_odd(odd) * -1.0) * -1.0


@jit
def gumbel(seed, step, block):
    """Noise of four times NOISE_BLOCK neighbouring tokens, from number 4 * NOISE_BLOCK * block on; Philox 4x32-10."""
    counters = block * _NOISE_BLOCK + tl.arange(0, _NOISE_BLOCK)
    zeros = tl.zeros_like(counters)
    low_step = (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    b0, b1, b2, b3 = tl.philox(seed, counters, zeros + low_step, zeros, zeros)
    return _gumbel(b0), _gumbel(b1), _gumbel(b2), _gumbel(b3)


@jit
def _draw_block(values_ptr, limits, noise, columns, best, best_index, num_ties):
    """The better of (best, best_index) and a block of tokens, place by place; ties of the last value met so far."""
    largest, inverse, min_p, last, kept, is_limited = limits
    x = tl.load(values_ptr + columns)
    z = _relative(x, largest, inverse)
    bits = _sortable(x)
    is_kept = (bits >= last) & (x > float("-inf"))
    if is_limited:
        is_tie = (bits == last).to(tl.int32)
        rank = num_ties + tl.cumsum(is_tie, 0) - 1
        is_kept = is_kept & ((is_tie == 0) | (rank < kept))
        num_ties += tl.sum(is_tie, 0)
    if min_p > 0.0:
        is_kept = is_kept & (exp_fp32(z) >= min_p)
    # noise cannot tell infinities apart
    drawn = tl.where(is_kept, tl.where(largest == _LARGEST, z, z + noise), float("-inf"))
    return tl.where(drawn > best, drawn, best), tl.where(drawn > best, columns, best_index), num_ties


@jit
def _draw_chunk(values_ptr, limits, seed, step, num_ties, start, end):
    """The best sum of value and noise from `start` to `end`, and its lowest index."""
    bests = tl.full([_NOISE_BLOCK], float("-inf"), tl.float32)
    indices = tl.full([_NOISE_BLOCK], 0, tl.int32) + start
    for tile in range(start, end, _TILE):
        noise0, noise1, noise2, noise3 = gumbel(seed, step, tile // _TILE)
        columns = tile + tl.arange(0, _NOISE_BLOCK)
        bests, indices, num_ties = _draw_block(values_ptr, limits, noise0, columns, bests, indices, num_ties)
        columns += _NOISE_BLOCK
        bests, indices, num_ties = _draw_block(values_ptr, limits, noise1, columns, bests, indices, num_ties)
        columns += _NOISE_BLOCK
        bests, indices, num_ties = _draw_block(values_ptr, limits, noise2, columns, bests, indices, num_ties)
        columns += _NOISE_BLOCK
        bests, indices, num_ties = _draw_block(values_ptr, limits, noise3, columns, bests, indices, num_ties)
    best = tl.max(bests, 0)
    return best, tl.min(tl.where(bests == best, indices, _MAX_INDEX), 0)


@jit
def _finish(token_ids_ptr, state, row, slot, remembers, token, vocab_size):
    """The row's answer, and what its slot remembers of it."""
    tl.store(token_ids_ptr + row, token)
    if (slot >= 0) & (remembers != 0):
        tl.store(state.last_tokens + slot, tl.maximum(token, 0))
        if (token >= 0) & ((tl.load(state.flags + slot) & _HAS_PENALTIES) != 0):
            tl.atomic_add(state.token_counts + slot * vocab_size + token, 1, sem="relaxed")


@jit(do_not_specialize=("slots_ptr", "positions_ptr", "remembers", "token_ids_ptr", "chunk_len", "num_chunks"))
def _draw_kernel(
    slots_ptr, positions_ptr, remembers, state, scratch, token_ids_ptr, vocab_size, chunk_len, num_chunks,
    C_BLOCK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    fields_ptr = scratch.row_fields + row * _ROW_FIELDS
    if tl.load(fields_ptr + _STAGE) == _KNOWN:
        if chunk == 0:
            _finish(token_ids_ptr, state, row, slot, remembers, tl.load(fields_ptr + _TOKEN), vocab_size)
    else:
        place = row * num_chunks + chunk
        inverse = _inverse_temperature(tl.load(state.temperature + slot))
        largest, is_limited = _from_sortable(tl.load(fields_ptr + _TOP)), tl.load(fields_ptr + _IS_LIMITED) != 0
        num_ties = tl.full([], 0, tl.int32)
        if is_limited:
            ties = _load_chunks(scratch.chunk_ties, row, num_chunks, 0, C_BLOCK)
            num_ties = tl.sum(tl.where(tl.arange(0, C_BLOCK) < chunk, ties, 0), 0)
        limits = (
            largest, inverse, tl.minimum(tl.load(state.min_p + slot), 1.0),
            tl.load(fields_ptr + _LAST).to(tl.uint32), tl.load(fields_ptr + _KEPT).to(tl.int32), is_limited,
        )
        step = tl.load(positions_ptr + row) + 1 - tl.load(state.prompt_lens + slot)
        start = chunk * chunk_len
        # a chunk without a token that could win makes no noise
        can_win = _relative(tl.load(scratch.chunk_max + place), largest, inverse) >= -_NOISE_SPAN
        end = tl.where(can_win, tl.minimum(start + chunk_len, scratch.pitch), start)
        best, best_index = _draw_chunk(
            scratch.allowed + row * scratch.pitch, limits, tl.load(state.seeds + slot), step, num_ties, start, end
        )
        tl.store(scratch.best + place, best)
        tl.store(scratch.best_index + place, best_index)
        if _is_last(scratch.arrivals, row, num_chunks):
            _best, token = _row_best(scratch.best, scratch.best_index, row, num_chunks, C_BLOCK)
            _finish(token_ids_ptr, state, row, slot, remembers, token.to(tl.int64), vocab_size)
