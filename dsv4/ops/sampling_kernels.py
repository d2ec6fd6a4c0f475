"""Kernels of ops/sampling.py, apart from their contracts because the two together would be too long for one file.

A row of logits is cut in chunks, one program each. Four launches, whatever the settings:

1. `_scan_kernel`: largest logit / temperature of every chunk, and which; clears what the others count in.
2. `_mass_kernel`, rows with top-k or top-p: how many tokens, and how much probability, in each of NUM_BUCKETS buckets of the
   distance to the largest.
3. `_gather_kernel`, those rows: lists the tokens of the buckets where a filter can end; the row's last program to finish
   searches there for the last token kept. The search is a bisection over the orderable bits of the value, then over the
   index; commonly about ten steps over a few hundred tokens. Beyond MAX_LISTED tokens in a bucket (nearly equal logits)
   it reads the whole row at every step: slow, the same result.
4. `_draw_kernel`: value + noise of every token kept, the best of a chunk; the last program takes the best of the row. A
   token more than NOISE_SPAN below the largest cannot win, and a tile of such tokens makes no noise.

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
_MAX_INDEX = tl.constexpr((1 << 31) - 1)
# noise lies between -2.86 and 17.33; the margin keeps the rule exact where logits are so large that sums are rounded
_NOISE_SPAN = tl.constexpr(64.0)


# ---- values ----


@jit
def _numbers(x):
    """NaN as -inf, +inf as the largest number."""
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x > _LARGEST, _LARGEST, x)


@jit
def _load_scaled(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, row, columns, stride_lr, stride_lv, num_rows, vocab_size,
    HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """fp64 values of a row: logits after penalties, over the temperature (1 if greedy). -inf beyond the vocabulary.

    settings fp32 [6, R]: temperature, top_p, min_p, repetition, presence, frequency.
    """
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + row * stride_lr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float64)
    if HAS_PENALTIES:
        repetition = tl.load(settings_ptr + 3 * num_rows + row).to(tl.float64)
        presence = tl.load(settings_ptr + 4 * num_rows + row).to(tl.float64)
        frequency = tl.load(settings_ptr + 5 * num_rows + row).to(tl.float64)
        counts = tl.load(output_ptr + row * vocab_size + columns, mask=is_token, other=0).to(tl.float64)
        in_prompt = tl.load(prompt_ptr + row * vocab_size + columns, mask=is_token, other=0).to(tl.int32) != 0
        repeated = tl.where(x > 0.0, x / repetition, x * repetition)
        x = tl.where(in_prompt | (counts > 0.0), repeated, x)
        x = x - frequency * counts
        x = x - presence * (counts > 0.0).to(tl.float64)
    temperature = tl.load(settings_ptr + row).to(tl.float64)
    temperature = tl.where(temperature == 0.0, temperature + 1.0, temperature)
    return _numbers(_numbers(x) / temperature)


@jit
def _distance(values, largest):
    """largest - values, also where both are infinite."""
    return tl.where(values == largest, 0.0, largest - values)


@jit
def _bucket(distance):
    return (tl.where(distance < 32.0, distance, 32.0) * _BUCKETS_PER_UNIT).to(tl.int32).to(tl.int64)


@jit
def _clamp_bucket(distance):
    bucket = _bucket(distance)
    return tl.where(bucket > _LAST_BUCKET, _LAST_BUCKET, bucket)


@jit
def _mass(distance):
    """Probability relative to the largest as an integer; sums of it are exact, in any order."""
    return (exp_negative(distance * -1.0) * _MASS_UNIT + 0.5).to(tl.int64)


@jit
def _row_best(values_ptr, indices_ptr, row, num_chunks, C_BLOCK: tl.constexpr):
    """The largest of a row's chunks, and the lowest index that has it."""
    chunks = tl.arange(0, C_BLOCK)
    values = tl.load(
        values_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"), cache_modifier=".cg"
    )
    indices = tl.load(
        indices_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=_MAX_INDEX, cache_modifier=".cg"
    )
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, indices, _MAX_INDEX), 0)


@jit
def _filters(settings_ptr, top_k_ptr, row, num_rows, vocab_size):
    """Whether the row draws at all, its top-k (0: off) and top-p (1 or more: off)."""
    is_drawn = tl.load(settings_ptr + row) != 0.0
    top_k = tl.load(top_k_ptr + row)
    return is_drawn, tl.where(top_k < vocab_size, top_k, 0), tl.load(settings_ptr + num_rows + row).to(tl.float64)


# ---- 1 and 2: largest, buckets ----


@jit(do_not_specialize=("num_rows", "chunk_len"))
def _scan_kernel(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr,
    arrivals_ptr, stride_lr, stride_lv, num_rows, vocab_size, chunk_len, num_chunks, slice_len,
    TILE: tl.constexpr, SLICE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = chunk * chunk_len
    best, best_index = tl.full([], float("-inf"), tl.float64), start
    for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
        columns = tile + tl.arange(0, TILE)
        values = _load_scaled(
            logits_ptr, prompt_ptr, output_ptr, settings_ptr, row, columns, stride_lr, stride_lv, num_rows, vocab_size,
            HAS_PENALTIES,
        )  # fmt: skip
        largest = tl.max(values, 0)
        index = tl.min(tl.where(values == largest, columns, _MAX_INDEX), 0)
        best_index = tl.where(largest > best, index, best_index)
        best = tl.where(largest > best, largest, best)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, best)
    tl.store(chunk_argmax_ptr + row * num_chunks + chunk, best_index)
    buckets = chunk * slice_len + tl.arange(0, SLICE)
    is_own = (tl.arange(0, SLICE) < slice_len) & (buckets < _NUM_BUCKETS)
    tl.store(counts_ptr + row * _NUM_BUCKETS + buckets, tl.zeros([SLICE], dtype=tl.int32), mask=is_own)
    tl.store(masses_ptr + row * _NUM_BUCKETS + buckets, tl.zeros([SLICE], dtype=tl.int64), mask=is_own)
    if chunk == 0:
        tl.store(arrivals_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], dtype=tl.int32))


@jit(do_not_specialize=("num_rows", "chunk_len"))
def _mass_kernel(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, top_k_ptr, chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr,
    stride_lr, stride_lv, num_rows, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_drawn, top_k, top_p = _filters(settings_ptr, top_k_ptr, row, num_rows, vocab_size)
    if is_drawn & ((top_k > 0) | (top_p < 1.0)):
        largest, index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        start = chunk * chunk_len
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            values = _load_scaled(
                logits_ptr, prompt_ptr, output_ptr, settings_ptr, row, columns, stride_lr, stride_lv, num_rows,
                vocab_size, HAS_PENALTIES,
            )  # fmt: skip
            distance = _distance(values, largest)
            bucket = _clamp_bucket(distance)
            is_counted = (columns < vocab_size) & (bucket < _LAST_BUCKET)
            places = row * _NUM_BUCKETS + bucket
            tl.atomic_add(counts_ptr + places, tl.full([TILE], 1, tl.int32), mask=is_counted, sem="relaxed")
            if top_p < 1.0:
                tl.atomic_add(masses_ptr + places, _mass(distance), mask=is_counted, sem="relaxed")


# ---- 3: the last token kept ----


@jit
def _first_reaching(through, target):
    """The first bucket through which `target` is reached, and what lies before it; `through` are running sums."""
    bucket = tl.sum((through < target).to(tl.int32), 0)
    before = tl.max(tl.where(through < target, through, 0), 0)
    return bucket, before


@jit
def _mass_target(top_p, total):
    """Tokens are kept while the mass before them is below this: a token at least."""
    target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.where(target < 1, 1, target)


@jit(do_not_specialize=("num_rows", "chunk_len"))
def _gather_kernel(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, top_k_ptr, chunk_max_ptr, chunk_argmax_ptr, counts_ptr, masses_ptr,
    arrivals_ptr, list_values_ptr, list_indices_ptr, last_key_ptr, last_index_ptr,
    stride_lr, stride_lv, num_rows, vocab_size, chunk_len, num_chunks,
    TILE: tl.constexpr, C_BLOCK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    is_drawn, top_k, top_p = _filters(settings_ptr, top_k_ptr, row, num_rows, vocab_size)
    if is_drawn & ((top_k > 0) | (top_p < 1.0)):
        largest, index = _row_best(chunk_max_ptr, chunk_argmax_ptr, row, num_chunks, C_BLOCK)
        list_values_ptr += row * _MAX_LISTED
        list_indices_ptr += row * _MAX_LISTED
        buckets = tl.arange(0, _NUM_BUCKETS)
        count_through = tl.cumsum(tl.load(counts_ptr + row * _NUM_BUCKETS + buckets), 0)
        mass_through = tl.cumsum(tl.load(masses_ptr + row * _NUM_BUCKETS + buckets), 0)
        # The bucket where top-k ends: none if all but hopeless tokens are kept. The mass of what it keeps, which top-p is
        # a part of, is known up to that bucket's mass; top-p ends in one of a few buckets.
        k_bucket, count_before = _first_reaching(count_through, tl.where(top_k > 0, top_k, _MAX_INDEX).to(tl.int32))
        has_k = k_bucket < _LAST_BUCKET
        least = tl.max(tl.where(buckets < k_bucket, mass_through, 0), 0)
        most = tl.max(tl.where(buckets <= k_bucket, mass_through, 0), 0)
        first_p, before = _first_reaching(mass_through, _mass_target(top_p, least))
        last_p, before = _first_reaching(mass_through, _mass_target(top_p, most))

        start = chunk * chunk_len
        for tile in range(start, tl.minimum(start + chunk_len, vocab_size), TILE):
            columns = tile + tl.arange(0, TILE)
            values = _load_scaled(
                logits_ptr, prompt_ptr, output_ptr, settings_ptr, row, columns, stride_lr, stride_lv, num_rows,
                vocab_size, HAS_PENALTIES,
            )  # fmt: skip
            bucket = _clamp_bucket(_distance(values, largest))
            is_listed = (has_k & (bucket == k_bucket)) | ((top_p < 1.0) & (bucket >= first_p) & (bucket <= last_p))
            is_listed = (is_listed & (columns < vocab_size) & (bucket < _LAST_BUCKET)).to(tl.int32)
            count = tl.sum(is_listed, 0)
            if count > 0:
                place = tl.atomic_add(arrivals_ptr + row * 4 + 2, count, sem="relaxed")
                places = place + tl.cumsum(is_listed, 0) - 1
                is_stored = (is_listed == 1) & (places < _MAX_LISTED)
                tl.store(list_values_ptr + places, values, mask=is_stored)
                tl.store(list_indices_ptr + places, columns, mask=is_stored)
        tl.debug_barrier()  # every thread's entries before the arrival
        if tl.atomic_add(arrivals_ptr + row * 4, 1, sem="acq_rel") == num_chunks - 1:
            num_listed = tl.load(arrivals_ptr + row * 4 + 2, cache_modifier=".cg")
            key, last_index, total = tl.full([], _SMALLEST_KEY, tl.int64), tl.full([], _MAX_INDEX, tl.int32), most
            if has_k:
                target = (top_k - count_before).to(tl.int64)
                key, last_index, kept = _last_kept(
                    logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
                    stride_lr, stride_lv, num_rows, vocab_size, largest, k_bucket, target, TILE, HAS_PENALTIES, False,
                )  # fmt: skip
                total = least + kept
            if top_p < 1.0:
                target = _mass_target(top_p, total)
                p_bucket, mass_before = _first_reaching(mass_through, target)
                key, last_index, kept = _last_kept(
                    logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
                    stride_lr, stride_lv, num_rows, vocab_size, largest, p_bucket, target - mass_before,
                    TILE, HAS_PENALTIES, True,
                )  # fmt: skip
            tl.store(last_key_ptr + row, key)
            tl.store(last_index_ptr + row, last_index)


@jit
def _totals(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
    stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, key, last_index,
    TILE: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Of a bucket's tokens in order up to (key, last_index): their number and mass. And the largest key at or below `key`."""
    from_list = num_listed <= _MAX_LISTED
    count, mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    next_key = tl.full([], _SMALLEST_KEY, tl.int64)
    for tile in range(0, tl.where(from_list, num_listed, vocab_size), TILE):
        places = tile + tl.arange(0, TILE)
        if from_list:
            is_listed = places < num_listed
            values = tl.load(list_values_ptr + places, mask=is_listed, other=float("-inf"), cache_modifier=".cg")
            columns = tl.load(list_indices_ptr + places, mask=is_listed, other=_MAX_INDEX, cache_modifier=".cg")
        else:
            columns = places
            values = _load_scaled(
                logits_ptr, prompt_ptr, output_ptr, settings_ptr, row, columns, stride_lr, stride_lv, num_rows,
                vocab_size, HAS_PENALTIES,
            )  # fmt: skip
        distance = _distance(values, largest)
        is_inside = (columns < vocab_size) & (_clamp_bucket(distance) == bucket)
        keys = ordered_bits64(values)
        is_before = is_inside & ((keys > key) | ((keys == key) & (columns <= last_index)))
        count += tl.sum(is_before.to(tl.int64), 0)
        mass += tl.sum(tl.where(is_before, _mass(distance), 0), 0)
        next_key = tl.maximum(next_key, tl.max(tl.where(is_inside & (keys <= key), keys, _SMALLEST_KEY), 0))
    return count, mass, next_key


@jit
def _last_kept(
    logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
    stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, target,
    TILE: tl.constexpr, HAS_PENALTIES: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The bucket's first token, in order, through which the count (or mass) reaches `target`: its key, its index, the mass
    through it.
    """
    # A bucket is 1/64 wide; with one more on either side no rounding can matter, and keys are less than 2^63 apart.
    lower = largest - (bucket + 2).to(tl.float64) / _BUCKETS_PER_UNIT
    upper = largest - tl.maximum(bucket - 1, 0).to(tl.float64) / _BUCKETS_PER_UNIT
    low, high = ordered_bits64(lower) - 1, ordered_bits64(upper)  # target reached at keys > low, not at keys > high
    num_low, num_high = tl.full([], 1 << 31, tl.int64), tl.full([], 0, tl.int64)
    while (high - low > 1) & (num_low - num_high > 1):
        middle = low + (high - low) // 2
        count, mass, next_key = _totals(
            logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
            stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, middle, -1, TILE, HAS_PENALTIES,
        )  # fmt: skip
        is_reached = (mass if BY_MASS else count) >= target
        low, num_low = tl.where(is_reached, middle, low), tl.where(is_reached, count, num_low)
        high, num_high = tl.where(is_reached, high, middle), tl.where(is_reached, num_high, count)
    count, mass, key = _totals(
        logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
        stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, high, -1, TILE, HAS_PENALTIES,
    )  # fmt: skip
    # equal values: the lowest index that is enough
    low_index, high_index = tl.full([], -1, tl.int32), vocab_size + low_index_zero(row)
    count, mass, next_key = _totals(
        logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
        stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, key, high_index, TILE, HAS_PENALTIES,
    )  # fmt: skip
    is_single = count - num_high <= 1
    while (high_index - low_index > 1) & (is_single == 0):
        middle_index = low_index + (high_index - low_index) // 2
        count, mass, next_key = _totals(
            logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
            stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, key, middle_index, TILE, HAS_PENALTIES,
        )  # fmt: skip
        is_reached = (mass if BY_MASS else count) >= target
        low_index = tl.where(is_reached, low_index, middle_index)
        high_index = tl.where(is_reached, middle_index, high_index)
    count, mass, next_key = _totals(
        logits_ptr, prompt_ptr, output_ptr, settings_ptr, list_values_ptr, list_indices_ptr, num_listed, row,
        stride_lr, stride_lv, num_rows, vocab_size, largest, bucket, key, high_index, TILE, HAS_PENALTIES,
    )  # fmt: skip
    return key, high_index, mass
