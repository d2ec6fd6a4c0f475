"""Kernels of ops/sampling, apart from their contracts because the two together would be too long for one file.

A row of logits is cut in chunks, one program each. Four launches, whatever the settings:

1. `_scan_kernel`: largest logit of every chunk, after penalties, and which; clears what the others count in.
2. `_count_kernel`, rows with top-k or top-p: how many tokens in each of NUM_BUCKETS buckets of the distance to the
   largest, and the probability of all.
3. `_gather_kernel`, those rows: the counts say in which bucket the filters end at the latest. All tokens up to there
   are listed, and the row's last program to finish searches the list for the last token kept, by bisection over the
   orderable bits of the logit, then over the index. Beyond MAX_LISTED tokens it reads the whole row at every step:
   slow, the same result.
4. `_draw_kernel`: value + noise of every token kept, the best of a chunk; the last program takes the best of the row. A
   token far below the largest cannot win, and a tile of such tokens makes no noise.

Values are fp32 and relative to the row's largest, z = (logit - largest) / temperature, so that nothing overflows and
the likeliest tokens are the most precise. Order cannot matter: probabilities are integers, in units of 2^-40 of the
largest, and everything else is a maximum or a count.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32, exp_negative, log_fp32, log_of_odd, log_positive, ordered_bits

NUM_BUCKETS = 256
MAX_LISTED = 16384
NOISE_BLOCK = 512  # see `gumbel_noise` in ops/sampling

_NUM_BUCKETS, _MAX_LISTED = tl.constexpr(NUM_BUCKETS), tl.constexpr(MAX_LISTED)
_NOISE_BLOCK = tl.constexpr(NOISE_BLOCK)
_BUCKETS_PER_UNIT = tl.constexpr(8.0)
_REACH = tl.constexpr(32.0)  # of the buckets: all that lies further below the largest has no probability left
_MASS_UNIT = tl.constexpr(2.0**40)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SMALLEST_KEY = tl.constexpr(-(1 << 31))
_MAX_INDEX = tl.constexpr((1 << 31) - 1)
_NOISE_SPAN = tl.constexpr(24.0)  # a token further below the largest cannot win: noise lies between -2.86 and 17.33


# ---- values ----


@jit
def _numbers(x):
    """NaN as -inf, +inf as the largest number."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x > _LARGEST, _LARGEST, x)


@jit
def _open_row(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
    stride_lr, stride_lv, vocab_size,
):  # fmt: skip
    """What `_load_logits` and `_relative` need of a row: pointers, sizes and settings."""
    temperature = tl.load(temperature_ptr + row)
    # 1 if greedy; a reciprocal that is not finite orders tokens like the largest one
    inverse = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))
    inverse = tl.where(inverse > _LARGEST, _LARGEST, inverse)
    return (
        logits_ptr + row * stride_lr, prompt_ptr + row * vocab_size, output_ptr + row * vocab_size,
        stride_lv, vocab_size, inverse, tl.load(repetition_ptr + row), tl.load(presence_ptr + row),
        tl.load(frequency_ptr + row),
    )  # fmt: skip


@jit
def _load_logits(opened, columns, HAS_PENALTIES: tl.constexpr):
    """fp32 logits of a row after penalties. -inf beyond the vocabulary."""
    logits_ptr, prompt_ptr, output_ptr, stride_lv, vocab_size, _inverse, repetition, presence, frequency = opened
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float32)
    if HAS_PENALTIES:
        counts = tl.load(output_ptr + columns, mask=is_token, other=0).to(tl.float32)
        in_prompt = tl.load(prompt_ptr + columns, mask=is_token, other=0).to(tl.int32) != 0
        # torch.where(seen, where(logits > 0, logits / factor, logits * factor), logits) - frequency * counts -
        # presence * (counts > 0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
        x = tl.where(in_prompt | (counts > 0.0), repeated, x)
        x = x - frequency * counts
        x = x - presence * (counts > 0.0).to(tl.float32)
    return _numbers(x)


@jit
def _relative(opened, x, largest):
    """z = (x - largest) / temperature, at most 0."""
    return tl.where(x == largest, 0.0, (x - largest) * opened[5])


@jit
def _bucket(z):
    """Bucket of 1/8 each, NUM_BUCKETS and more where a token is beyond all of them."""
    return (tl.where(z > -_REACH, z, -_REACH) * -_BUCKETS_PER_UNIT).to(tl.int32)


@jit
def _mass(z):
    """Probability relative to the largest as an integer; sums of it are exact, in any order."""
    return (exp_fp32(z) * _MASS_UNIT).to(tl.int64)


@jit
def _row_best(values_ptr, indices_ptr, row, num_chunks, C_BLOCK: tl.constexpr):
    """The largest of a row's chunks, and the lowest index that has it."""
    chunks = tl.arange(0, C_BLOCK)
    places, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    values = tl.load(values_ptr + places, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
    indices = tl.load(indices_ptr + places, mask=is_chunk, other=_MAX_INDEX, cache_modifier=".cg")
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, indices, _MAX_INDEX), 0)


@jit
def _filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size):
    """Whether the row has a filter that needs the search; its top-k (0: off) and top-p (1 or more: off)."""
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    return (tl.load(temperature_ptr + row) != 0.0) & ((top_k > 0) | (top_p < 1.0)), top_k, top_p


# ---- 1 and 2: largest, buckets ----


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _scan_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, total_ptr, arrivals_ptr,
    stride_lr, stride_lv, vocab_size, chunk_len, num_chunks, TILE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    opened = _open_row(
        logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
        stride_lr, stride_lv, vocab_size,
    )  # fmt: skip
    start = chunk * chunk_len
    best, best_index = tl.full([], float("-inf"), tl.float32), start
    for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
        columns = tile + tl.arange(0, TILE)
        values = _load_logits(opened, columns, HAS_PENALTIES)
        largest = tl.max(values, 0)
        index = tl.min(tl.where(values == largest, columns, _MAX_INDEX), 0)
        best_index = tl.where(largest > best, index, best_index)
        best = tl.where(largest > best, largest, best)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, best)
    tl.store(chunk_argmax_ptr + row * num_chunks + chunk, best_index)
    if chunk == 0:  # what later launches count in
        zeros = tl.zeros([_NUM_BUCKETS], dtype=tl.int32)
        tl.store(counts_ptr + row * _NUM_BUCKETS + tl.arange(0, _NUM_BUCKETS), zeros)
        tl.store(total_ptr + row, tl.full([], 0, tl.int64))
        tl.store(arrivals_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], dtype=tl.int32))


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _count_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, total_ptr, stride_lr, stride_lv, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_filtered, _top_k, _top_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if is_filtered:
        opened = _open_row(
            logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
            stride_lr, stride_lv, vocab_size,
        )  # fmt: skip
        largest, _largest_index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        start = chunk * chunk_len
        counts = tl.zeros([_NUM_BUCKETS], dtype=tl.int32)
        total = tl.full([], 0, tl.int64)
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            x = _load_logits(opened, columns, HAS_PENALTIES)
            z = _relative(opened, x, largest)
            bucket = _bucket(z)
            is_counted = (x > float("-inf")) & (bucket < _NUM_BUCKETS)
            counts += tl.histogram(tl.minimum(bucket, _NUM_BUCKETS - 1), _NUM_BUCKETS, mask=is_counted)
            total += tl.sum(tl.where(is_counted, _mass(z), 0), 0)
        places = counts_ptr + row * _NUM_BUCKETS + tl.arange(0, _NUM_BUCKETS)
        tl.atomic_add(places, counts, mask=counts > 0, sem="relaxed")
        tl.atomic_add(total_ptr + row, total, sem="relaxed")


# ---- 3: the last token kept ----


@jit
def _mass_target(top_p, total):
    """Tokens are kept while the mass before them is below this: one token at least."""
    return tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@jit
def _last_bucket(counts, total, top_k, top_p):
    """The bucket in which the filters end at the latest. counts [NUM_BUCKETS]; total is the mass of all that is
    counted.
    """
    buckets = tl.arange(0, _NUM_BUCKETS)
    k_bucket = tl.sum((tl.cumsum(counts, 0) < tl.where(top_k > 0, top_k, _MAX_INDEX)).to(tl.int32), 0)
    # behind a bucket lies at most what its followers' counts allow; top-p ends where that is what it may leave out
    most = counts.to(tl.int64) * _mass(buckets.to(tl.float32) * (-1.0 / _BUCKETS_PER_UNIT))
    behind = (tl.sum(most, 0) - tl.cumsum(most, 0)).to(tl.float64)
    spared = (1.0 - top_p.to(tl.float64)) * total.to(tl.float64) * 0.999
    p_bucket = tl.sum((behind > spared).to(tl.int32), 0)
    last = tl.where((top_k > 0) & (k_bucket < _NUM_BUCKETS), k_bucket, _NUM_BUCKETS - 1)
    return tl.where((top_k == 0) & (top_p < 1.0), tl.minimum(p_bucket, last), last)


@jit
def _load_listed(
    opened, list_values_ptr, list_indices_ptr, num_listed, largest, tile, TILE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Keys, columns and masses of some tokens that a filter may keep, and which places hold one."""
    places = tile + tl.arange(0, TILE)
    if num_listed <= _MAX_LISTED:
        is_listed = places < num_listed
        x = tl.load(list_values_ptr + places, mask=is_listed, other=float("-inf"))
        columns = tl.load(list_indices_ptr + places, mask=is_listed, other=_MAX_INDEX)
    else:
        columns = places
        x = _load_logits(opened, columns, HAS_PENALTIES)
    z = _relative(opened, x, largest)
    is_inside = (x > float("-inf")) & (_bucket(z) < _NUM_BUCKETS)
    return ordered_bits(x).to(tl.int64), columns, tl.where(is_inside, _mass(z), 0), is_inside


@jit
def _totals(
    opened, list_values_ptr, list_indices_ptr, num_listed, largest, key, last_index, TILE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Number and mass of the tokens above `key`; number and mass of those with this key, and how many of them have an
    index up to `last_index`; the lowest key.
    """
    size = tl.where(num_listed <= _MAX_LISTED, num_listed, opened[4])
    above, equal, early = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass, equal_mass, lowest = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], _MAX_INDEX, tl.int64)
    for tile in range(0, size, TILE):
        keys, columns, masses, is_inside = _load_listed(
            opened, list_values_ptr, list_indices_ptr, num_listed, largest, tile, TILE, HAS_PENALTIES
        )
        is_above, is_equal = is_inside & (keys > key), is_inside & (keys == key)
        above += tl.sum(is_above.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_above, masses, 0), 0)
        equal += tl.sum(is_equal.to(tl.int32), 0)
        equal_mass += tl.sum(tl.where(is_equal, masses, 0), 0)
        early += tl.sum((is_equal & (columns <= last_index)).to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_inside, keys, _MAX_INDEX), 0))
    return above, mass, equal, equal_mass, early, lowest


@jit
def _last_kept(
    opened, list_values_ptr, list_indices_ptr, num_listed, largest, target, by_mass, TILE: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """The first token, in order (larger logit first, then lower index), through which the count or mass reaches
    `target`: its key, its index, the mass through it.
    """
    high = tl.max(ordered_bits(largest + tl.zeros([1], tl.float32)), 0).to(tl.int64)  # nothing is above it
    _a, _m, _e, _em, _f, lowest = _totals(
        opened, list_values_ptr, list_indices_ptr, num_listed, largest, high, -1, TILE, HAS_PENALTIES
    )
    low = lowest - 1  # everything is above it, which is enough
    while high - low > 1:
        key = low + (high - low) // 2
        above, mass, _e, _em, _f, _l = _totals(
            opened, list_values_ptr, list_indices_ptr, num_listed, largest, key, -1, TILE, HAS_PENALTIES
        )
        is_reached = tl.where(by_mass, mass, above.to(tl.int64)) >= target
        low = tl.where(is_reached, key, low)
        high = tl.where(is_reached, high, key)
    above, mass, equal, equal_mass, _f, _l = _totals(
        opened, list_values_ptr, list_indices_ptr, num_listed, largest, high, -1, TILE, HAS_PENALTIES
    )
    # equal tokens have equal masses: as many of them as are still missing
    each = tl.maximum(equal_mass // tl.maximum(equal, 1), 1)
    missing = tl.where(by_mass, (target - mass + each - 1) // each, target - above.to(tl.int64))
    missing = tl.minimum(tl.maximum(missing, 1), equal.to(tl.int64)).to(tl.int32)
    low_index, high_index = tl.full([], -1, tl.int32), tl.full([], _MAX_INDEX, tl.int32)
    if missing < equal:
        high_index = tl.full([], 0, tl.int32) + opened[4] - 1
        while high_index - low_index > 1:
            index = low_index + (high_index - low_index) // 2
            _a, _m, _e, _em, early, _l = _totals(
                opened, list_values_ptr, list_indices_ptr, num_listed, largest, high, index, TILE, HAS_PENALTIES
            )
            low_index = tl.where(early < missing, index, low_index)
            high_index = tl.where(early < missing, high_index, index)
    return high, high_index, mass + missing * each


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _gather_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, total_ptr, arrivals_ptr, list_values_ptr, list_indices_ptr,
    last_key_ptr, last_index_ptr, stride_lr, stride_lv, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_filtered, top_k, top_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if is_filtered:
        opened = _open_row(
            logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
            stride_lr, stride_lv, vocab_size,
        )  # fmt: skip
        largest, _largest_index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        list_values_ptr += row * _MAX_LISTED
        list_indices_ptr += row * _MAX_LISTED
        counts = tl.load(counts_ptr + row * _NUM_BUCKETS + tl.arange(0, _NUM_BUCKETS))
        total = tl.load(total_ptr + row)
        num_counted = tl.sum(counts, 0)
        last = _last_bucket(counts, total, top_k, top_p)
        num_listed = tl.sum(tl.where(tl.arange(0, _NUM_BUCKETS) <= last, counts, 0), 0)
        start = chunk * chunk_len
        if num_listed <= _MAX_LISTED:
            for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
                columns = tile + tl.arange(0, TILE)
                x = _load_logits(opened, columns, HAS_PENALTIES)
                is_listed = (x > float("-inf")) & (_bucket(_relative(opened, x, largest)) <= last)
                number = tl.sum(is_listed.to(tl.int32), 0)
                if number > 0:
                    place = tl.atomic_add(arrivals_ptr + row * 4 + 2, number, sem="relaxed")
                    places = place + tl.cumsum(is_listed.to(tl.int32), 0) - 1
                    tl.store(list_values_ptr + places, x, mask=is_listed)
                    tl.store(list_indices_ptr + places, columns, mask=is_listed)
        tl.debug_barrier()  # every thread's entries before the arrival
        if tl.atomic_add(arrivals_ptr + row * 4, 1, sem="acq_rel") == num_chunks - 1:
            key, last_index = tl.full([], _SMALLEST_KEY, tl.int64), tl.full([], _MAX_INDEX, tl.int32)
            for stage in range(2):  # top-k, then top-p of what it kept
                has_k = (stage == 0) & (top_k > 0) & (top_k < num_counted)
                if has_k | ((stage == 1) & (top_p < 1.0) & (num_counted > 0)):
                    by_mass = stage == 1
                    goal = tl.where(by_mass, _mass_target(top_p, total), top_k.to(tl.int64))
                    key, last_index, total = _last_kept(
                        opened, list_values_ptr, list_indices_ptr, num_listed, largest, goal, by_mass, TILE // 2,
                        HAS_PENALTIES,
                    )  # fmt: skip
            tl.store(last_key_ptr + row, key)
            tl.store(last_index_ptr + row, last_index)


# ---- 4: the draw ----


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
def _draw_block(opened, row_state, noise, columns, best, best_index, HAS_PENALTIES: tl.constexpr):
    """The better of (best, best_index) and a block of tokens, place by place."""
    largest, last_key, last_index, min_p = row_state
    x = _load_logits(opened, columns, HAS_PENALTIES)
    z = _relative(opened, x, largest)
    keys = ordered_bits(x)
    is_kept = (keys > last_key) | ((keys == last_key) & (columns <= last_index))
    is_kept = is_kept & (x > float("-inf"))
    if min_p > 0.0:
        is_kept = is_kept & (exp_fp32(z) >= min_p)
    # noise cannot tell infinities apart
    drawn = tl.where(is_kept, tl.where(largest == _LARGEST, z, z + noise), float("-inf"))
    return tl.where(drawn > best, drawn, best), tl.where(drawn > best, columns, best_index)


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _draw_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    min_p_ptr, seeds_ptr, steps_ptr, chunk_max_ptr, chunk_argmax_ptr, last_key_ptr, last_index_ptr, arrivals_ptr,
    best_ptr, best_index_ptr, token_ids_ptr, stride_lr, stride_lv, vocab_size, chunk_len, num_chunks,
    C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = chunk * chunk_len
    # a greedy row: the scan has the answer
    best = tl.load(chunk_max_ptr + row * num_chunks + chunk)
    best_index = tl.load(chunk_argmax_ptr + row * num_chunks + chunk)
    if tl.load(temperature_ptr + row) != 0.0:
        opened = _open_row(
            logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
            stride_lr, stride_lv, vocab_size,
        )  # fmt: skip
        is_filtered, _top_k, _top_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
        last_key = tl.load(last_key_ptr + row, mask=is_filtered, other=_SMALLEST_KEY).to(tl.int32)
        last_index = tl.load(last_index_ptr + row, mask=is_filtered, other=_MAX_INDEX)
        seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        largest, _largest_index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        row_state = largest, last_key, last_index, tl.load(min_p_ptr + row)
        chunk_z = _relative(opened, best, largest)
        bests = tl.full([_NOISE_BLOCK], float("-inf"), tl.float32)
        indices = tl.full([_NOISE_BLOCK], 0, tl.int32) + start
        end = tl.minimum(start + chunk_len, vocab_size)
        # a chunk without a token that could win, or be kept, makes no noise
        for tile in range(start, tl.where(chunk_z >= -_NOISE_SPAN, end, start), 4 * _NOISE_BLOCK):
            noise0, noise1, noise2, noise3 = gumbel(seed, step, tile // (4 * _NOISE_BLOCK))
            columns = tile + tl.arange(0, _NOISE_BLOCK)
            bests, indices = _draw_block(opened, row_state, noise0, columns, bests, indices, HAS_PENALTIES)
            columns += _NOISE_BLOCK
            bests, indices = _draw_block(opened, row_state, noise1, columns, bests, indices, HAS_PENALTIES)
            columns += _NOISE_BLOCK
            bests, indices = _draw_block(opened, row_state, noise2, columns, bests, indices, HAS_PENALTIES)
            columns += _NOISE_BLOCK
            bests, indices = _draw_block(opened, row_state, noise3, columns, bests, indices, HAS_PENALTIES)
        best = tl.max(bests, 0)
        best_index = tl.min(tl.where(bests == best, indices, _MAX_INDEX), 0)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(best_index_ptr + row * num_chunks + chunk, best_index)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + row * 4 + 1, 1, sem="acq_rel") == num_chunks - 1:
        best, best_index = _row_best(best_ptr, best_index_ptr, row, num_chunks, C_BLOCK)
        tl.store(token_ids_ptr + row, best_index.to(tl.int64))


# ---- log-probabilities ----


@jit(do_not_specialize=("num_chunks",))
def _exp_sum_kernel(
    logits_ptr, chunk_max_ptr, chunk_sum_ptr, stride_lr, stride_lv, vocab_size, num_chunks, TILE: tl.constexpr
):
    """Largest logit of a chunk of TILE, and the sum of exp(logit - largest), both fp32."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = chunk * TILE + tl.arange(0, TILE)
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + row * stride_lr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    # a chunk of -inf adds nothing to the others
    base = tl.where(largest == float("-inf"), 0.0, largest)
    terms = tl.where(is_token, exp_fp32(x - base), 0.0)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, largest)
    tl.store(chunk_sum_ptr + row * num_chunks + chunk, tl.sum(terms, 0))


@jit(do_not_specialize=("num_chunks",))
def _logprob_kernel(
    logits_ptr, chunk_max_ptr, chunk_sum_ptr, token_ids_ptr, top_ids_ptr, chosen_ptr, top_ptr, stride_lr, stride_lv,
    num_chunks, NUM_TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, C_BLOCK)
    places, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    # a few chunks a row: fp64 from here on costs nothing
    chunk_max = tl.load(chunk_max_ptr + places, mask=is_chunk, other=float("-inf")).to(tl.float64)
    largest = tl.max(chunk_max, 0)
    sums = tl.load(chunk_sum_ptr + places, mask=is_chunk, other=0.0).to(tl.float64)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * exp_negative(chunk_max - largest)), 0)
    # log_softmax: logits - largest - log(sum(exp(logits - largest)))
    log_total = tl.where(total > 0.0, log_positive(total), float("nan"))
    row_ptr = logits_ptr + row * stride_lr
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row) * stride_lv).to(tl.float64)
    tl.store(chosen_ptr + row, (chosen - largest - log_total).to(tl.float32))
    if NUM_TOP > 0:
        lanes = tl.arange(0, TOP_BLOCK)
        is_lane = lanes < NUM_TOP
        ids = tl.load(top_ids_ptr + row * NUM_TOP + lanes, mask=is_lane, other=0)
        top = tl.load(row_ptr + ids * stride_lv, mask=is_lane, other=0.0).to(tl.float64)
        tl.store(top_ptr + row * NUM_TOP + lanes, (top - largest - log_total).to(tl.float32), mask=is_lane)
