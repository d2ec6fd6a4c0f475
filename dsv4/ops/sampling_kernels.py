"""Kernels of ops/sampling.py, apart from their contracts because the two together would be too long for one file.

A row of logits is cut in chunks, one program each. Four launches, whatever the settings:

1. `_scan_kernel`: largest logit / temperature of every chunk, and which; clears what the others count in.
2. `_mass_kernel`, rows with top-k or top-p: how many tokens, and how much probability, in each of NUM_BUCKETS buckets
   of the distance to the largest.
3. `_gather_kernel`, those rows: lists the tokens of the buckets where a filter can end; the row's last program to
   finish searches there for the last token kept, by bisection over the orderable bits of the value, then over the
   index: commonly about ten steps over a few hundred tokens. Beyond MAX_LISTED tokens (nearly equal logits) it reads
   the whole row at every step: slow, the same result.
4. `_draw_kernel`: value + noise of every token kept, the best of a chunk; the last program takes the best of the row. A
   token far below the largest cannot win, and a tile of such tokens makes no noise.

Order cannot matter: probabilities are integers, in units of 2^-45 of the largest, and everything else is a maximum. All
values are fp64, computed as the oracle computes them.
"""

from __future__ import annotations

from dsv4.ops.tl_math import exp_negative, log_positive, ordered_bits64
from dsv4.ops.tl_utils import jit, tl

NUM_BUCKETS = 2048
MAX_LISTED = 4096

_NUM_BUCKETS = tl.constexpr(NUM_BUCKETS)
_LAST_BUCKET = tl.constexpr(NUM_BUCKETS - 1)  # of everything 32 and more below the largest: no probability left
_MAX_LISTED = tl.constexpr(MAX_LISTED)
_BUCKETS_PER_UNIT = tl.constexpr(64.0)
_MASS_UNIT = tl.constexpr(2.0**45)
_LARGEST = tl.constexpr(1.7976931348623157e308)
_SMALLEST_KEY = tl.constexpr(-(1 << 63))
_LARGEST_KEY = tl.constexpr((1 << 63) - 1)
_MAX_INDEX = tl.constexpr((1 << 31) - 1)
# A token further below the largest cannot win: noise lies between -2.86 and 17.33. The margin keeps that exact where
# logits are so large that their sums with noise are rounded.
_NOISE_SPAN = tl.constexpr(64.0)


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
    """What `_load_scaled` needs of a row: pointers, sizes and settings."""
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    return (
        logits_ptr + row * stride_lr, prompt_ptr + row * vocab_size, output_ptr + row * vocab_size,
        stride_lv, vocab_size,
        tl.where(temperature == 0.0, temperature + 1.0, temperature), tl.load(repetition_ptr + row).to(tl.float64),
        tl.load(presence_ptr + row).to(tl.float64), tl.load(frequency_ptr + row).to(tl.float64),
    )  # fmt: skip


@jit
def _load_scaled(opened, columns, HAS_PENALTIES: tl.constexpr):
    """fp64 values of a row: logits after penalties, over the temperature (1 if greedy). -inf beyond the vocabulary."""
    logits_ptr, prompt_ptr, output_ptr, stride_lv, vocab_size, temperature, repetition, presence, frequency = opened
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float64)
    if HAS_PENALTIES:
        counts = tl.load(output_ptr + columns, mask=is_token, other=0).to(tl.float64)
        in_prompt = tl.load(prompt_ptr + columns, mask=is_token, other=0).to(tl.int32) != 0
        # torch.where(seen, where(logits > 0, logits / factor, logits * factor), logits) - frequency * counts -
        # presence * (counts > 0)
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where(in_prompt | (counts > 0.0), repeated, x)
        x = x - frequency * counts
        x = x - presence * (counts > 0.0).to(tl.float64)
    return _numbers(_numbers(x) / temperature)


@jit
def _distance(values, largest):
    """largest - values, also where both are infinite."""
    return tl.where(values == largest, 0.0, largest - values)


@jit
def _bucket(distance):
    """Bucket of 1/64 each; the last takes everything 32 and more below the largest."""
    bucket = (tl.where(distance < 32.0, distance, 32.0) * _BUCKETS_PER_UNIT).to(tl.int32)
    return tl.minimum(bucket, _LAST_BUCKET)


@jit
def _mass(distance):
    """Probability relative to the largest as an integer; sums of it are exact, in any order."""
    return (exp_negative(distance * -1.0) * _MASS_UNIT + 0.5).to(tl.int64)


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
    top_p = tl.load(top_p_ptr + row).to(tl.float64)
    return (tl.load(temperature_ptr + row) != 0.0) & ((top_k > 0) | (top_p < 1.0)), top_k, top_p


# ---- 1 and 2: largest, buckets ----


@jit(do_not_specialize=("chunk_len", "num_chunks", "slice_len"))
def _scan_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr, arrivals_ptr,
    stride_lr, stride_lv, vocab_size, chunk_len, num_chunks, slice_len,
    TILE: tl.constexpr, SLICE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    opened = _open_row(
        logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
        stride_lr, stride_lv, vocab_size,
    )  # fmt: skip
    start = chunk * chunk_len
    best, best_index = tl.full([], float("-inf"), tl.float64), start
    for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
        columns = tile + tl.arange(0, TILE)
        values = _load_scaled(opened, columns, HAS_PENALTIES)
        largest = tl.max(values, 0)
        index = tl.min(tl.where(values == largest, columns, _MAX_INDEX), 0)
        best_index = tl.where(largest > best, index, best_index)
        best = tl.where(largest > best, largest, best)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, best)
    tl.store(chunk_argmax_ptr + row * num_chunks + chunk, best_index)
    # what later launches count in
    buckets = chunk * slice_len + tl.arange(0, SLICE)
    is_own = (tl.arange(0, SLICE) < slice_len) & (buckets < _NUM_BUCKETS)
    tl.store(counts_ptr + row * _NUM_BUCKETS + buckets, tl.zeros([SLICE], dtype=tl.int32), mask=is_own)
    tl.store(masses_ptr + row * _NUM_BUCKETS + buckets, tl.zeros([SLICE], dtype=tl.int64), mask=is_own)
    if chunk == 0:
        tl.store(arrivals_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], dtype=tl.int32))


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _mass_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr, stride_lr, stride_lv, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_filtered, _top_k, top_p = _filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    if is_filtered:
        opened = _open_row(
            logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
            stride_lr, stride_lv, vocab_size,
        )  # fmt: skip
        largest, _largest_index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        start = chunk * chunk_len
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            distance = _distance(_load_scaled(opened, columns, HAS_PENALTIES), largest)
            bucket = _bucket(distance)
            is_counted = (columns < vocab_size) & (bucket < _LAST_BUCKET)
            places = row * _NUM_BUCKETS + bucket
            tl.atomic_add(counts_ptr + places, tl.full([TILE], 1, tl.int32), mask=is_counted, sem="relaxed")
            if top_p < 1.0:
                tl.atomic_add(masses_ptr + places, _mass(distance), mask=is_counted, sem="relaxed")


# ---- 3: the last token kept ----


@jit
def _first_reaching(through, target):
    """The first bucket through which `target` is reached, and what lies before it; `through` are running sums."""
    is_before = through < target
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, through, 0), 0)


@jit
def _mass_target(top_p, total):
    """Tokens are kept while the mass before them is below this: one token at least."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@jit
def _totals(
    opened, list_values_ptr, list_indices_ptr, num_listed, largest, bucket, key, last_index,
    TILE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Of a bucket's tokens, in order (larger value first, then lower index), up to (key, last_index): number and mass.

    And the bucket's nearest keys at or below, and above, `key`; of those with this key, the nearest indices at or
    below, and above, `last_index`.
    """
    vocab_size = opened[4]
    from_list = num_listed <= _MAX_LISTED
    count, mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    key_below, key_above = tl.full([], _SMALLEST_KEY, tl.int64), tl.full([], _LARGEST_KEY, tl.int64)
    index_below, index_above = tl.full([], -1, tl.int32), tl.full([], _MAX_INDEX, tl.int32)
    for tile in range(0, tl.where(from_list, num_listed, vocab_size), TILE):
        places = tile + tl.arange(0, TILE)
        if from_list:
            is_listed = places < num_listed
            values = tl.load(list_values_ptr + places, mask=is_listed, other=float("-inf"), cache_modifier=".cg")
            columns = tl.load(list_indices_ptr + places, mask=is_listed, other=vocab_size, cache_modifier=".cg")
        else:
            columns = places
            values = _load_scaled(opened, columns, HAS_PENALTIES)
        distance = _distance(values, largest)
        is_inside = (columns < vocab_size) & (_bucket(distance) == bucket)
        keys = ordered_bits64(values)
        is_equal = is_inside & (keys == key)
        is_counted = (is_inside & (keys > key)) | (is_equal & (columns <= last_index))
        count += tl.sum(is_counted.to(tl.int64), 0)
        mass += tl.sum(tl.where(is_counted, _mass(distance), 0), 0)
        key_below = tl.maximum(key_below, tl.max(tl.where(is_inside & (keys <= key), keys, _SMALLEST_KEY), 0))
        key_above = tl.minimum(key_above, tl.min(tl.where(is_inside & (keys > key), keys, _LARGEST_KEY), 0))
        is_low = is_equal & (columns <= last_index)
        index_below = tl.maximum(index_below, tl.max(tl.where(is_low, columns, -1), 0))
        is_high = is_equal & (columns > last_index)
        index_above = tl.minimum(index_above, tl.min(tl.where(is_high, columns, _MAX_INDEX), 0))
    return count, mass, key_below, key_above, index_below, index_above


@jit
def _last_kept(
    opened, list_values_ptr, list_indices_ptr, num_listed, largest, bucket, target, by_mass,
    TILE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """The bucket's first token, in order, through which the count or mass reaches `target`: its key, its index, the
    mass through it. Bisection; the ends of the interval move to tokens that exist.
    """
    # A bucket is 1/64 wide; with one more on either side no rounding can matter, and keys are less than 2^63 apart.
    lower = largest - (bucket + 2).to(tl.float64) / _BUCKETS_PER_UNIT
    upper = largest - tl.maximum(bucket - 1, 0).to(tl.float64) / _BUCKETS_PER_UNIT
    low, high = (
        ordered_bits64(lower) - 1,
        ordered_bits64(upper),
    )  # reached by the keys above low, not by those above high
    low_index = tl.full([], -1, tl.int32)
    high_index = low_index + opened[4]  # the last token
    kept = tl.full([], 0, tl.int64)
    is_done = tl.full([], 0, tl.int32)
    while is_done == 0:
        in_keys = high - low > 1
        in_indices = (in_keys == 0) & (high_index - low_index > 1)
        key = tl.where(in_keys, low + (high - low) // 2, high)
        index = tl.where(in_indices, low_index + (high_index - low_index) // 2, high_index)
        index = tl.where(in_keys, -1, index)
        count, kept, key_below, key_above, index_below, index_above = _totals(
            opened, list_values_ptr, list_indices_ptr, num_listed, largest, bucket, key, index, TILE, HAS_PENALTIES
        )
        is_reached = tl.where(by_mass, kept, count) >= target
        low = tl.where(in_keys & is_reached, key_above - 1, low)
        high = tl.where(in_keys & (is_reached == 0), key_below, high)
        high_index = tl.where(in_indices & is_reached, index_below, high_index)
        low_index = tl.where(in_indices & (is_reached == 0), index_above - 1, low_index)
        is_done = ((in_keys | in_indices) == 0).to(tl.int32)
    return high, high_index, kept


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _gather_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr, arrivals_ptr, list_values_ptr, list_indices_ptr,
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
        buckets = tl.arange(0, _NUM_BUCKETS)
        count_through = tl.cumsum(tl.load(counts_ptr + row * _NUM_BUCKETS + buckets), 0)
        mass_through = tl.cumsum(tl.load(masses_ptr + row * _NUM_BUCKETS + buckets), 0)
        # The bucket where top-k ends: none if all but hopeless tokens are kept. The mass of what it keeps, which top-p
        # is a part of, is known but for that bucket; top-p then ends in one of a few buckets.
        k_bucket, count_before = _first_reaching(count_through, tl.where(top_k > 0, top_k, _MAX_INDEX))
        has_k, has_p = k_bucket < _LAST_BUCKET, top_p < 1.0
        least = tl.max(tl.where(buckets < k_bucket, mass_through, 0), 0)
        most = tl.max(tl.where(buckets <= k_bucket, mass_through, 0), 0)
        first_p, _before = _first_reaching(mass_through, _mass_target(top_p, least))
        last_p, _before = _first_reaching(mass_through, _mass_target(top_p, most))
        last_p = tl.where(has_p, last_p, -1)

        start = chunk * chunk_len
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            values = _load_scaled(opened, columns, HAS_PENALTIES)
            bucket = _bucket(_distance(values, largest))
            is_wanted = (has_k & (bucket == k_bucket)) | ((bucket >= first_p) & (bucket <= last_p))
            is_listed = (is_wanted & (columns < vocab_size) & (bucket < _LAST_BUCKET)).to(tl.int32)
            place = tl.atomic_add(arrivals_ptr + row * 4 + 2, tl.sum(is_listed, 0), sem="relaxed")
            places = place + tl.cumsum(is_listed, 0) - 1
            is_stored = (is_listed == 1) & (places < _MAX_LISTED)
            tl.store(list_values_ptr + places, values, mask=is_stored)
            tl.store(list_indices_ptr + places, columns, mask=is_stored)
        tl.debug_barrier()  # every thread's entries before the arrival
        if tl.atomic_add(arrivals_ptr + row * 4, 1, sem="acq_rel") == num_chunks - 1:
            num_listed = tl.load(arrivals_ptr + row * 4 + 2, cache_modifier=".cg")
            key, last_index, total = tl.full([], _SMALLEST_KEY, tl.int64), tl.full([], _MAX_INDEX, tl.int32), most
            for stage in range(2):  # top-k, then top-p of what it kept
                if ((stage == 0) & has_k) | ((stage == 1) & has_p):
                    by_mass = stage == 1
                    goal = _mass_target(top_p, total)
                    # summed again: kept from above, the sums would take the search's registers
                    masses = tl.load(masses_ptr + row * _NUM_BUCKETS + buckets, cache_modifier=".cg")
                    p_bucket, mass_before = _first_reaching(tl.cumsum(masses, 0), goal)
                    goal = tl.where(by_mass, goal - mass_before, (top_k - count_before).to(tl.int64))
                    ending = tl.where(by_mass, p_bucket, k_bucket)
                    key, last_index, kept = _last_kept(
                        opened, list_values_ptr, list_indices_ptr, num_listed, largest, ending, goal, by_mass,
                        TILE // 2, HAS_PENALTIES,
                    )  # fmt: skip
                    total = least + kept
            tl.store(last_key_ptr + row, key)
            tl.store(last_index_ptr + row, last_index)


# ---- 4: the draw ----


@jit
def gumbel(seed, step, columns):
    """-log(-log u), rounded to fp32, in fp64; u from Philox 4x32-10 at counter (column, step, 0, 0) and key seed."""
    zeros = tl.zeros_like(columns)
    low_step = (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    bits, _b1, _b2, _b3 = tl.philox(seed, columns, zeros + low_step, zeros, zeros)
    uniform = ((bits.to(tl.uint32, bitcast=True) >> 8).to(tl.float64) + 0.5) * (1.0 / 16777216.0)
    return (log_positive(log_positive(uniform) * -1.0) * -1.0).to(tl.float32).to(tl.float64)


@jit(do_not_specialize=("chunk_len", "num_chunks"))
def _draw_kernel(
    logits_ptr, prompt_ptr, output_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    top_k_ptr, top_p_ptr,
    min_p_ptr, seeds_ptr, steps_ptr, chunk_max_ptr, chunk_argmax_ptr, last_key_ptr, last_index_ptr, arrivals_ptr,
    best_ptr, best_index_ptr, token_ids_ptr, stride_lr, stride_lv, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
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
        last_key = tl.load(last_key_ptr + row, mask=is_filtered, other=_SMALLEST_KEY)
        last_index = tl.load(last_index_ptr + row, mask=is_filtered, other=_MAX_INDEX)
        min_p = tl.load(min_p_ptr + row).to(tl.float64)
        seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
        largest, _largest_index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        best, best_index = tl.full([], float("-inf"), tl.float64), start
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            values = _load_scaled(opened, columns, HAS_PENALTIES)
            distance = _distance(values, largest)
            keys = ordered_bits64(values)
            is_kept = (keys > last_key) | ((keys == last_key) & (columns <= last_index))
            is_kept = is_kept & (distance <= _NOISE_SPAN) & (columns < vocab_size)
            if min_p > 0.0:
                is_kept = is_kept & (exp_negative(distance * -1.0) >= min_p)
            if tl.max(is_kept.to(tl.int32), 0) == 1:
                drawn = tl.where(is_kept, values + gumbel(seed, step, columns), float("-inf"))
                tile_best = tl.max(drawn, 0)
                tile_index = tl.min(tl.where(is_kept & (drawn == tile_best), columns, _MAX_INDEX), 0)
                best_index = tl.where(tile_best > best, tile_index, best_index)
                best = tl.where(tile_best > best, tile_best, best)
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
    """Largest logit of a chunk of TILE, and the sum of exp(logit - largest)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = chunk * TILE + tl.arange(0, TILE)
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + row * stride_lr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float64)
    largest = tl.max(x, 0)
    # a chunk of -inf adds nothing to the others
    base = tl.where(largest == float("-inf"), 0.0, largest)
    terms = tl.where(is_token, exp_negative(x - base), 0.0)
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
    chunk_max = tl.load(chunk_max_ptr + places, mask=is_chunk, other=float("-inf"))
    largest = tl.max(chunk_max, 0)
    sums = tl.load(chunk_sum_ptr + places, mask=is_chunk, other=0.0)
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
