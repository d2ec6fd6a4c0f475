"""What the launches of `sample` share, and the first of them.

A row of logits is cut in chunks, one program each; the program that arrives last in a row finishes what the chunks
found. The launches are the same whatever the settings, and a row that has nothing to do in one leaves it at once:

1. `_scan_kernel`: bias, penalties and mask, once; what comes out is kept for the later launches (not of greedy rows).
   Largest and smallest of the row, NaN. Greedy rows have their token here.
2. `_narrow_kernel` (kernel_search.py), NUM_PASSES times, rows with top-k or top-p: one byte of the last value kept.
   Values are compared as 32 bits whose order is theirs. A pass adds weights (1 for top-k, the probability for top-p) by
   the next byte of all values that share the bytes found so far. The byte in which the sum from above reaches what is
   wanted is the next. Four bytes for top-k, then four for top-p among what it kept. Bytes that all values of a row
   share are not searched.
3. `_tie_kernel` (kernel_search.py), rows where only some of the values equal to the last may stay: how many each chunk
   has. The lower indices stay.
4. `_draw_kernel` (kernel_draw.py): value + noise of every token kept, the best of a chunk, then of the row. A chunk far
   below the largest cannot win and makes no noise.

The number of passes and the work in each are bounded for any values. Equal values would queue at one address: of every
tile the weights of its highest and of its lowest byte are summed first, and added once.

Values are fp32 and relative to the row's largest, z = (value - largest) / temperature, so that nothing overflows and
the likeliest tokens are the most precise. Order cannot matter: probabilities are integers, in units of 2^-40 of the
largest, and everything else is a maximum or a count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32, ordered_bits

NUM_DIGITS = 256
NOISE_BLOCK = 512  # see `gumbel_noise` in op.py
TILE = 4 * NOISE_BLOCK
ROW_FIELDS = 16  # int64 of a row that one launch leaves to the next

_NUM_DIGITS, _ROW_FIELDS = tl.constexpr(NUM_DIGITS), tl.constexpr(ROW_FIELDS)
_NOISE_BLOCK, _TILE = tl.constexpr(NOISE_BLOCK), tl.constexpr(TILE)
_HAS_PENALTIES, _HAS_BIAS = tl.constexpr(1), tl.constexpr(2)
_COUNT_BITS = tl.constexpr((1 << 30) - 1)  # of a token's count; the bit above says that it stands in the prompt
_POISONED, _NOTHING_ALLOWED = tl.constexpr(-1), tl.constexpr(-2)
_MASS_UNIT = tl.constexpr(2.0**40)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_MAX_INDEX = tl.constexpr((1 << 31) - 1)
_FORBIDDEN = tl.constexpr(0x007FFFFF)  # `_sortable` of -inf

# what is left to do in a row
_KNOWN, _TOP_K, _TOP_P, _DRAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# fields of a row
_STAGE = tl.constexpr(0)
_TOKEN = tl.constexpr(1)  # the answer of a row whose stage is _KNOWN
_TOP = tl.constexpr(2)  # the largest value, as sortable bits
_START_SHIFT, _START_PREFIX = tl.constexpr(3), tl.constexpr(4)  # the first byte that differs, and what stands above it
_SHIFT, _PREFIX = tl.constexpr(5), tl.constexpr(6)  # the same of the pass to come
_REST = tl.constexpr(7)  # weight still wanted of the values that share the prefix; -1: not known yet
_LAST = tl.constexpr(8)  # values above it are kept
_KEPT = tl.constexpr(9)  # how many of those equal to it are kept too
_IS_LIMITED = tl.constexpr(10)  # whether that is not all of them


class SlotArguments(NamedTuple):
    """`SamplingState`."""

    temperature: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    top_k: Any
    seeds: Any
    prompt_lens: Any
    flags: Any
    last_tokens: Any
    token_counts: Any
    bias: Any


class Scratch(NamedTuple):
    """allowed fp32 [R, pitch], -inf beyond the vocabulary; row_fields int64 [R, ROW_FIELDS]; histogram int64
    [R, NUM_DIGITS], 0 between passes; the others [R, num_chunks]. arrivals int64 [R], 0 between launches."""

    allowed: Any
    pitch: int
    row_fields: Any
    histogram: Any
    chunk_max: Any
    chunk_argmax: Any
    chunk_min: Any
    chunk_ties: Any
    best: Any
    best_index: Any
    arrivals: Any


# ---- values ----


@jit
def _sortable(x):
    """fp32 without NaN -> uint32 of the same order; both zeros are equal."""
    return ordered_bits(x).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def _from_sortable(bits):
    """A scalar of `_sortable`, in int64 -> fp32."""
    key = (bits - 0x80000000).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _numbers(x):
    """NaN as -inf, +inf as the largest number."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x > _LARGEST, _LARGEST, x)


@jit
def _still_a_number(was_number, x):
    """What arithmetic pushed below all numbers stays a number: only -inf is forbidden."""
    return tl.where(was_number & (x < -_LARGEST), -_LARGEST, x)


@jit
def _penalise(x, token_counts_ptr, drafts, columns, is_token, repetition, presence, frequency):
    words = tl.load(token_counts_ptr + columns, mask=is_token, other=0)
    drafts_ptr, num_drafts = drafts
    for i in range(num_drafts):
        words += (columns == tl.load(drafts_ptr + i)).to(tl.int32)
    counts = (words & _COUNT_BITS).to(tl.float32)
    was_number = x > float("-inf")
    # torch.where(seen, where(logits > 0, logits / factor, logits * factor), logits) - frequency * counts -
    # presence * (counts > 0)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where(words != 0, repeated, x)
    x = x - frequency * counts
    x = x - presence * (counts > 0.0).to(tl.float32)
    return _still_a_number(was_number, x)


@jit
def _inverse_temperature(temperature):
    """1 if greedy; a reciprocal that is not finite orders tokens like the largest one."""
    inverse = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))
    return tl.where(inverse > _LARGEST, _LARGEST, inverse)


@jit
def _relative(x, largest, inverse):
    """z = (x - largest) / temperature, at most 0."""
    return tl.where(x == largest, 0.0, (x - largest) * inverse)


@jit
def _mass(z):
    """Probability relative to the largest as an integer; sums of it are exact, in any order."""
    return (exp_fp32(z) * _MASS_UNIT).to(tl.int64)


@jit
def _is_last(arrivals_ptr, row, num_chunks):
    """Whether all other programs of the row have stored what they found. The counter is 0 again for the next launch."""
    tl.debug_barrier()  # every thread's stores before the arrival
    is_last = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == num_chunks - 1
    if is_last:
        tl.store(arrivals_ptr + row, tl.full([], 0, tl.int64))
    return is_last


@jit
def _load_chunks(ptr, row, num_chunks, other, C_BLOCK: tl.constexpr):
    """What every chunk of a row has stored, `other` behind them."""
    chunks = tl.arange(0, C_BLOCK)
    return tl.load(ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=other, cache_modifier=".cg")


@jit
def _row_best(values_ptr, indices_ptr, row, num_chunks, C_BLOCK: tl.constexpr):
    """The largest of a row's chunks, and the lowest index that has it."""
    values = _load_chunks(values_ptr, row, num_chunks, float("-inf"), C_BLOCK)
    indices = _load_chunks(indices_ptr, row, num_chunks, _MAX_INDEX, C_BLOCK)
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, indices, _MAX_INDEX), 0)


# ---- 1: what may be drawn ----


@jit
def _load_allowed(logits_ptr, mask_ptr, is_masked, state, slot, flags, settings, drafts, columns, vocab_size):
    """fp32 logits of a row after bias, penalties and mask, -inf beyond the vocabulary; whether one of them was NaN."""
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + columns, mask=is_token, other=float("-inf")).to(tl.float32)
    is_poisoned = tl.max((x != x).to(tl.int32), 0)
    if (flags & _HAS_BIAS) != 0:
        bias = tl.load(state.bias + slot * vocab_size + columns, mask=is_token, other=0.0)
        was_number = (x > float("-inf")) & (bias > float("-inf"))
        x = _still_a_number(was_number, x + bias)
    if (flags & _HAS_PENALTIES) != 0:
        repetition, presence, frequency = settings
        counts_ptr = state.token_counts + slot * vocab_size
        x = _penalise(x, counts_ptr, drafts, columns, is_token, repetition, presence, frequency)
    x = _numbers(x)
    if is_masked != 0:
        words = tl.load(mask_ptr + columns // 32, mask=is_token, other=0)
        x = tl.where(((words >> (columns % 32)) & 1) != 0, x, float("-inf"))
    return x, is_poisoned


@jit
def _open_row(fields_ptr, state, slot, temperature, is_poisoned, largest, index, smallest, vocab_size):
    """What the row still needs, for the launches to come."""
    has_none = largest == float("-inf")
    token = tl.where(is_poisoned, _POISONED, tl.where(has_none, _NOTHING_ALLOWED, index)).to(tl.int64)
    top_k, top_p = tl.load(state.top_k + slot), tl.load(state.top_p + slot)
    has_k = (top_k > 0) & (top_k < vocab_size)
    stage = tl.where(has_k, _TOP_K, tl.where(top_p < 1.0, _TOP_P, _DRAW))
    stage = tl.where(is_poisoned | has_none | (temperature == 0.0), _KNOWN, stage)
    top = _sortable(largest).to(tl.int64)
    differing = top ^ _sortable(smallest).to(tl.int64)
    shift = tl.where(differing >= 1 << 24, 24, tl.where(differing >= 1 << 16, 16, tl.where(differing >= 1 << 8, 8, 0)))
    tl.store(fields_ptr + _STAGE, stage.to(tl.int64))
    tl.store(fields_ptr + _TOKEN, token)
    tl.store(fields_ptr + _TOP, top)
    tl.store(fields_ptr + _START_SHIFT, shift.to(tl.int64))
    tl.store(fields_ptr + _START_PREFIX, (top >> shift) >> 8)
    tl.store(fields_ptr + _SHIFT, shift.to(tl.int64))
    tl.store(fields_ptr + _PREFIX, (top >> shift) >> 8)
    tl.store(fields_ptr + _REST, tl.where(has_k, top_k, -1))
    tl.store(fields_ptr + _LAST, tl.full([], _FORBIDDEN, tl.int64))
    tl.store(fields_ptr + _KEPT, tl.full([], 0, tl.int64))
    tl.store(fields_ptr + _IS_LIMITED, tl.full([], 0, tl.int64))


# what has one value a row may begin anywhere: it is not compiled for an alignment
@jit(
    do_not_specialize=(
        "slots_ptr", "has_mask", "mask_ptr", "is_masked_ptr", "drafts_ptr", "num_drafts", "chunk_len", "num_chunks"
    )
)
def _scan_kernel(
    logits_ptr, slots_ptr, has_mask, mask_ptr, is_masked_ptr, drafts_ptr, num_drafts, state, scratch, stride_lr,
    vocab_size, chunk_len, num_chunks, C_BLOCK: tl.constexpr,
):
    """Where has_mask is 0, mask_ptr [R, words] and is_masked_ptr [R] are not read; drafts_ptr is [R, num_drafts]."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    fields_ptr = scratch.row_fields + row * _ROW_FIELDS
    if slot < 0:
        if chunk == 0:
            tl.store(fields_ptr + _STAGE, tl.full([], _KNOWN, tl.int64))
            tl.store(fields_ptr + _TOKEN, tl.full([], _POISONED, tl.int64))
    else:
        flags, temperature = tl.load(state.flags + slot), tl.load(state.temperature + slot)
        settings = (
            tl.load(state.repetition_penalty + slot), tl.load(state.presence_penalty + slot),
            tl.load(state.frequency_penalty + slot),
        )
        is_masked = tl.full([], 0, tl.int32)
        if has_mask != 0:
            is_masked = tl.load(is_masked_ptr + row)
        mask_ptr += row * ((vocab_size + 31) // 32)
        drafts = (drafts_ptr + row * num_drafts, num_drafts)
        start = chunk * chunk_len
        best, best_index = tl.full([], float("-inf"), tl.float32), start
        smallest, is_poisoned = tl.full([], float("inf"), tl.float32), tl.full([], 0, tl.int32)
        for tile in range(start, tl.minimum(start + chunk_len, scratch.pitch), _TILE):
            columns = tile + tl.arange(0, _TILE)
            values, has_nan = _load_allowed(
                logits_ptr + row * stride_lr, mask_ptr, is_masked, state, slot, flags, settings, drafts, columns,
                vocab_size,
            )
            is_poisoned = is_poisoned | has_nan
            largest = tl.max(values, 0)
            index = tl.min(tl.where(values == largest, columns, _MAX_INDEX), 0)
            best_index = tl.where(largest > best, index, best_index)
            best = tl.where(largest > best, largest, best)
            smallest = tl.minimum(smallest, tl.min(tl.where(values > float("-inf"), values, float("inf")), 0))
            if temperature != 0.0:
                tl.store(scratch.allowed + row * scratch.pitch + columns, values)
        place = row * num_chunks + chunk
        tl.store(scratch.chunk_max + place, best)
        tl.store(scratch.chunk_argmax + place, tl.where(is_poisoned != 0, -1, best_index))
        tl.store(scratch.chunk_min + place, smallest)
        if _is_last(scratch.arrivals, row, num_chunks):
            largest, index = _row_best(scratch.chunk_max, scratch.chunk_argmax, row, num_chunks, C_BLOCK)
            all_indices = _load_chunks(scratch.chunk_argmax, row, num_chunks, 0, C_BLOCK)
            all_smallest = _load_chunks(scratch.chunk_min, row, num_chunks, float("inf"), C_BLOCK)
            _open_row(
                fields_ptr, state, slot, temperature, tl.min(all_indices, 0) < 0, largest, index,
                tl.min(all_smallest, 0), vocab_size,
            )
            tl.store(
                scratch.histogram + row * _NUM_DIGITS + tl.arange(0, _NUM_DIGITS), tl.zeros([_NUM_DIGITS], tl.int64)
            )
