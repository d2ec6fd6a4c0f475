"""Selection: the k largest of many scores, ties to the lower index. Used by the router, the indexer and the sampler.

Kernels: a radix select on the composite (orderable bits of the score, reversed index), a total order: the result does
not depend on how the work is divided. 8 bits at a time, a histogram finds the digit of the k-th composite from above.

* One program per row (short rows, or many rows): as many passes over the row as it takes until the digits found so far
  separate exactly k elements, then one pass that writes.
* Many programs per row (8,192 columns and more, few rows): three launches. Two histogram 8 bits each, every program of
  the next launch summing the chunks' histograms itself. The third knows from them, without an atomic, where each
  chunk's winners and candidates go, and writes both lists in ascending order; the last program of a row to finish
  selects among the candidates, commonly a few dozen, and merges. Many equal scores are slow but right: beyond
  MAX_CANDIDATES that program reads the row again instead of the list.

Best first is one more launch, which ranks the k chosen by counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.tl_math import ordered_bits
from dsv4.ops.tl_utils import KernelInputError, check_launch, jit, next_power_of_2, tl

MAX_K = 1024
MAX_COLUMNS = 1 << 24  # an index takes 24 bits of the composite
MAX_CANDIDATES = 2048
_MAX_CANDIDATES = tl.constexpr(MAX_CANDIDATES)
_BITS_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)  # as `ordered_bits` gives them


@dataclass(frozen=True)
class TopkConfig:
    """How the work is divided; results do not depend on it. Rows of `long_row` columns and more are cut in chunks."""

    tile: int = 2048
    num_warps: int = 8
    max_chunks: int = 64
    long_row: int = 8192

    def num_chunks(self, num_rows: int, num_columns: int) -> int:
        """A power of two: enough programs to fill a GPU, of at least two tiles each."""
        if num_columns < self.long_row:
            return 1
        wanted = min(256 // num_rows, num_columns // (2 * self.tile), self.max_chunks)
        return 1 << max(wanted.bit_length() - 1, 0)

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


TOPK_CONFIG = TopkConfig()


def topk_select_ref(scores: Tensor, k: int, *, lengths: Tensor | None = None, ascending: bool = False) -> Tensor:
    """Indices int64 of the k largest of scores [T, N]; ties go to the lower index, NaN counts as -inf.

    Best first: [T, min(k, N)]. `ascending`: [T, k] in ascending order, without -inf and NaN, -1 where there are fewer
    than k. `lengths` [T]: only the first lengths[t] scores of a row are read, the others count as -inf.
    """
    ordered = scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    if lengths is not None:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        ordered = ordered.masked_fill(columns >= lengths.unsqueeze(-1), float("-inf"))
    values, indices = ordered.sort(dim=-1, descending=True, stable=True)
    if not ascending:
        return indices[:, :k]
    beyond = scores.shape[-1]
    chosen = indices.masked_fill(values == float("-inf"), beyond)[:, :k].sort(-1).values
    picks = torch.full((scores.shape[0], k), -1, dtype=torch.int64, device=scores.device)
    picks[:, : chosen.shape[-1]] = chosen.masked_fill(chosen == beyond, -1)
    return picks


# ---- pieces ----


@jit
def _load_bits(row_ptr, columns, stride_n, length, num_columns, ASCENDING: tl.constexpr):
    """Orderable bits of a row's scores at `columns`, and which of them take part. Nothing beyond `length` is read."""
    score = tl.load(row_ptr + columns.to(tl.int64) * stride_n, mask=columns < length, other=float("-inf"))
    bits = ordered_bits(score.to(tl.float32))
    if ASCENDING:
        return bits, (columns < length) & (bits != _BITS_OF_MINUS_INFINITY)
    return bits, columns < num_columns


@jit
def _composite(bits, columns):
    """int64 >= 0: 32 bits of score, 24 of reversed index."""
    return ((bits.to(tl.int64) + 0x80000000) << 24) | (0xFFFFFF - columns).to(tl.int64)


@jit
def _find_digit(histogram, wanted):
    """The digit of the wanted-th largest, how many have a larger digit, and how many have this one. wanted <= the
    total.
    """
    digits = tl.arange(0, 256)
    at_least = tl.cumsum(histogram, 0, reverse=True)
    digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(digits > digit, histogram, 0), 0)
    return digit, above, tl.sum(tl.where(digits == digit, histogram, 0), 0)


@jit
def _row_length(lengths_ptr, row, num_columns, HAS_LENGTHS: tl.constexpr):
    if HAS_LENGTHS:
        return tl.minimum(tl.load(lengths_ptr + row), num_columns).to(tl.int32)
    return num_columns


@jit
def _load_composites(
    row_ptr, list_ptr, start, stride_n, length, size, list_len,
    TILE: tl.constexpr, ASCENDING: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """TILE composites of the row from column `start` on, or of the list if there is one that holds everything; else
    -1.
    """
    places = start + tl.arange(0, TILE)
    columns = places
    if HAS_LIST:
        from_list = list_len <= _MAX_CANDIDATES
        is_listed = from_list & (places < list_len)
        listed = tl.load(list_ptr + places, mask=is_listed, other=-1, cache_modifier=".cg")
        columns = tl.where(from_list, size, places)
    bits, is_valid = _load_bits(row_ptr, columns, stride_n, length, size, ASCENDING)
    composite = tl.where(is_valid, _composite(bits, columns), -1)
    if HAS_LIST:
        composite = tl.where(from_list, listed, composite)
    return composite


@jit
def _threshold(
    row_ptr, list_ptr, stride_n, length, size, list_len, prefix, wanted,
    SHIFT: tl.constexpr, TILE: tl.constexpr, ASCENDING: tl.constexpr, HAS_LIST: tl.constexpr,
):  # fmt: skip
    """The composite at or above which `wanted` elements lie (all, if there are fewer) of those that start with
    `prefix`.

    `prefix` is what is known of the composite >> SHIFT. Stops as soon as all elements with the digits so far are
    wanted.
    """
    num_places = size
    if HAS_LIST:
        num_places = tl.where(list_len <= _MAX_CANDIDATES, list_len, size)
    shift = tl.full([], SHIFT, tl.int32)
    is_done = wanted == 0
    while (shift > 0) & (is_done == 0):
        histogram = tl.zeros([256], dtype=tl.int32)
        for start in range(0, num_places, TILE):
            composite = _load_composites(
                row_ptr, list_ptr, start, stride_n, length, size, list_len, TILE, ASCENDING, HAS_LIST
            )
            digit = (composite >> (shift - 8)).to(tl.int32) & 255
            histogram += tl.histogram(digit, 256, mask=(composite >> shift) == prefix)
        wanted = tl.minimum(wanted, tl.sum(histogram, 0))
        found, above, inside = _find_digit(histogram, wanted)
        wanted -= above
        prefix = (prefix << 8) | found.to(tl.int64)
        shift -= 8
        is_done = inside == wanted
    return tl.where(wanted == 0, prefix + 1, prefix) << shift


# ---- one program per row ----


@jit(do_not_specialize=("num_columns",))
def _topk_row_kernel(
    scores_ptr, lengths_ptr, picks_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, TILE: tl.constexpr, ASCENDING: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_st
    length = _row_length(lengths_ptr, row, num_columns, HAS_LENGTHS)
    # beyond the row's length there is nothing to choose, unless k indices must be returned in any case
    size = length if ASCENDING else num_columns
    nothing, wanted = tl.full([], 0, tl.int64), tl.full([], K, tl.int32)
    threshold = _threshold(
        row_ptr, picks_ptr, stride_sn, length, size, 0, nothing, wanted, 56, TILE, ASCENDING, HAS_LIST=False
    )
    num_chosen = tl.full([], 0, tl.int32)
    for start in range(0, size, TILE):
        composite = _load_composites(
            row_ptr, picks_ptr, start, stride_sn, length, size, 0, TILE, ASCENDING, HAS_LIST=False
        )
        is_chosen = (composite >= threshold).to(tl.int32)
        places = num_chosen + tl.cumsum(is_chosen, 0) - 1
        columns = (start + tl.arange(0, TILE)).to(tl.int64)
        tl.store(picks_ptr + row * K + places, columns, mask=is_chosen == 1)
        num_chosen += tl.sum(is_chosen, 0)
    for start in range(num_chosen, K, TILE):
        places = start + tl.arange(0, TILE)
        tl.store(picks_ptr + row * K + places, tl.full([TILE], -1, tl.int64), mask=places < K)


# ---- many programs per row ----


@jit
def _sum_chunks(histogram_ptr, row, chunk, CHUNKS: tl.constexpr):
    """Histogram [256] of a whole row, and of its chunks before `chunk`."""
    BLOCK: tl.constexpr = 16 if CHUNKS > 16 else CHUNKS
    totals, before = tl.zeros([256], dtype=tl.int32), tl.zeros([256], dtype=tl.int32)
    for start in tl.static_range(0, CHUNKS, BLOCK):
        chunks = start + tl.arange(0, BLOCK)[:, None]
        tile = tl.load(histogram_ptr + (row * CHUNKS + chunks) * 256 + tl.arange(0, 256)[None, :])
        totals += tl.sum(tile, 0)
        before += tl.sum(tl.where(chunks < chunk, tile, 0), 0)
    return totals, before


@jit(do_not_specialize=("num_columns", "chunk_len"))
def _topk_histogram_kernel(
    scores_ptr, lengths_ptr, first_ptr, second_ptr, arrivals_ptr, num_columns, chunk_len, stride_st, stride_sn, k,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, ASCENDING: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    IS_SECOND: tl.constexpr,
):  # fmt: skip
    """Histogram of a chunk: of the highest 8 bits, or (`IS_SECOND`) of the next 8 where the highest are the k-th's."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = _row_length(lengths_ptr, row, num_columns, HAS_LENGTHS)
    start = chunk * chunk_len
    end = tl.minimum(start + chunk_len, length if ASCENDING else num_columns)
    if IS_SECOND:
        totals, _before = _sum_chunks(first_ptr, row, chunk, CHUNKS)
        high, _above, _inside = _find_digit(totals, tl.minimum(k, tl.sum(totals, 0)))
    histogram = tl.zeros([256], dtype=tl.int32)
    for tile in range(start, end, TILE):
        columns = tile + tl.arange(0, TILE)
        bits, is_valid = _load_bits(scores_ptr + row * stride_st, columns, stride_sn, length, end, ASCENDING)
        is_valid = is_valid & (columns < end)
        if IS_SECOND:
            histogram += tl.histogram((bits >> 16) & 255, 256, mask=is_valid & ((bits >> 24) + 128 == high))
        else:
            histogram += tl.histogram((bits >> 24) + 128, 256, mask=is_valid)
    own = (row * CHUNKS + chunk) * 256 + tl.arange(0, 256)
    if IS_SECOND:
        tl.store(second_ptr + own, histogram)
    else:
        tl.store(first_ptr + own, histogram)
        if chunk == 0:
            tl.store(arrivals_ptr + row, 0)  # for the last launch; an arrival is counted there


@jit(do_not_specialize=("num_columns", "chunk_len"))
def _topk_merge_kernel(
    scores_ptr, lengths_ptr, first_ptr, second_ptr, arrivals_ptr, sure_ptr, list_ptr, picks_ptr,
    num_columns, chunk_len, stride_st, stride_sn,
    K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    ASCENDING: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_ptr = scores_ptr + row * stride_st
    length = _row_length(lengths_ptr, row, num_columns, HAS_LENGTHS)
    size = length if ASCENDING else num_columns
    sure_ptr += row * K
    list_ptr += row * _MAX_CANDIDATES
    # what the first 16 bits decide
    digits = tl.arange(0, 256)
    totals, before = _sum_chunks(first_ptr, row, chunk, CHUNKS)
    wanted = tl.minimum(K, tl.sum(totals, 0))
    high, above_high, _inside = _find_digit(totals, wanted)
    sure_place = tl.sum(tl.where(digits > high, before, 0), 0)
    totals, before = _sum_chunks(second_ptr, row, chunk, CHUNKS)
    low, above_low, num_candidates = _find_digit(totals, wanted - above_high)
    num_sure = above_high + above_low
    sure_place += tl.sum(tl.where(digits > low, before, 0), 0)
    candidate_place = tl.sum(tl.where(digits == low, before, 0), 0)
    prefix = (high << 8) | low

    start = chunk * chunk_len
    for tile in range(start, tl.minimum(start + chunk_len, size), TILE):
        columns = tile + tl.arange(0, TILE)
        bits, is_valid = _load_bits(row_ptr, columns, stride_sn, length, size, ASCENDING)
        is_valid = is_valid & (columns < start + chunk_len)
        upper = (bits >> 16) + 32768
        is_sure = (is_valid & (upper > prefix)).to(tl.int32)
        places = sure_place + tl.cumsum(is_sure, 0) - 1
        tl.store(sure_ptr + places, columns, mask=is_sure == 1)
        sure_place += tl.sum(is_sure, 0)
        is_candidate = (is_valid & (upper == prefix)).to(tl.int32)
        places = candidate_place + tl.cumsum(is_candidate, 0) - 1
        is_listed = (is_candidate == 1) & (places < _MAX_CANDIDATES)
        tl.store(list_ptr + places, _composite(bits, columns), mask=is_listed)
        candidate_place += tl.sum(is_candidate, 0)

    tl.debug_barrier()  # every thread's list entries before the arrival
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == CHUNKS - 1:
        _merge(
            row_ptr, sure_ptr, list_ptr, picks_ptr + row * K, stride_sn, length, size, prefix.to(tl.int64), num_sure,
            num_candidates, wanted - num_sure, K, K_BLOCK, TILE, ASCENDING,
        )  # fmt: skip


@jit
def _merge(
    row_ptr, sure_ptr, list_ptr, picks_ptr, stride_n, length, size, prefix, num_sure, num_candidates, wanted,
    K: tl.constexpr, K_BLOCK: tl.constexpr, TILE: tl.constexpr, ASCENDING: tl.constexpr,
):  # fmt: skip
    """Choose `wanted` of the candidates and merge them with the sure ones, both ascending."""
    threshold = _threshold(
        row_ptr, list_ptr, stride_n, length, size, num_candidates, prefix, wanted, 40, TILE, ASCENDING, HAS_LIST=True
    )
    # the chosen candidates, ascending, behind the sure ones
    place = num_sure
    for start in range(0, tl.where(num_candidates <= _MAX_CANDIDATES, num_candidates, size), TILE):
        composite = _load_composites(
            row_ptr, list_ptr, start, stride_n, length, size, num_candidates, TILE, ASCENDING, HAS_LIST=True
        )
        is_chosen = ((composite >= threshold) & ((composite >> 40) == prefix)).to(tl.int32)
        column = 0xFFFFFF - (composite & 0xFFFFFF).to(tl.int32)
        tl.store(sure_ptr + place + tl.cumsum(is_chosen, 0) - 1, column, mask=is_chosen == 1)
        place += tl.sum(is_chosen, 0)
    tl.debug_barrier()
    lanes = tl.arange(0, K_BLOCK)
    sure = tl.load(sure_ptr + lanes, mask=lanes < num_sure, other=-1, cache_modifier=".cg")
    shifts = tl.zeros([K_BLOCK], dtype=tl.int32)
    for start in range(num_sure, num_sure + wanted, 16):
        others = start + tl.arange(0, 16)
        is_other = others < num_sure + wanted
        column = tl.load(sure_ptr + others, mask=is_other, other=size, cache_modifier=".cg")
        is_before = (column[None, :] < sure[:, None]).to(tl.int32)  # never true where either is padding
        shifts += tl.sum(is_before, 1)
        tl.store(picks_ptr + others - tl.sum(is_before, 0), column.to(tl.int64), mask=is_other)
    tl.store(picks_ptr + lanes + shifts, sure.to(tl.int64), mask=lanes < num_sure)
    is_padding = (lanes >= num_sure + wanted) & (lanes < K)
    tl.store(picks_ptr + lanes, tl.full([K_BLOCK], -1, tl.int64), mask=is_padding)


# ---- best first ----


@jit(do_not_specialize=("num_columns",))
def _topk_rank_kernel(
    scores_ptr, lengths_ptr, picks_ptr, out_ptr, num_columns, stride_st, stride_sn,
    K: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    """Place each of the K chosen by the number of chosen that come before it."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = scores_ptr + row * stride_st
    length = _row_length(lengths_ptr, row, num_columns, HAS_LENGTHS)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.load(picks_ptr + row * K + lanes, mask=lanes < K, other=num_columns).to(tl.int32)
    bits, _is_valid = _load_bits(row_ptr, columns, stride_sn, length, num_columns, False)
    own = _composite(bits, columns)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, K, OTHERS):
        others = start + tl.arange(0, OTHERS)
        other_columns = tl.load(picks_ptr + row * K + others, mask=others < K, other=num_columns).to(tl.int32)
        other_bits, is_other = _load_bits(row_ptr, other_columns, stride_sn, length, num_columns, False)
        composite = tl.where(is_other, _composite(other_bits, other_columns), -1)
        rank += tl.sum((composite[None, :] > own[:, None]).to(tl.int32), 1)
    tl.store(out_ptr + row * K + rank, columns.to(tl.int64), mask=lanes < K)


# ---- launcher ----


def topk_select(scores: Tensor, k: int, *, lengths: Tensor | None = None, ascending: bool = False) -> Tensor:
    """See `topk_select_ref`. fp32, bf16 or fp16 scores of any strides; k up to 1024, N below 2^24."""
    return launch_topk(scores, k, lengths, ascending, TOPK_CONFIG)


def launch_topk(scores: Tensor, k: int, lengths: Tensor | None, ascending: bool, config: TopkConfig) -> Tensor:
    """`topk_select` with the work divided as `config` says."""
    _check(scores, k, lengths)
    num_rows, num_columns = scores.shape
    if not ascending:
        k = min(k, num_columns)
    picks = torch.empty(num_rows, k, dtype=torch.int64, device=scores.device)
    if picks.numel() == 0:
        return picks
    if num_columns == 0:
        return picks.fill_(-1)
    num_chunks = config.num_chunks(num_rows, num_columns)
    given = scores if lengths is None else lengths.contiguous()
    flags = {"ASCENDING": ascending, "HAS_LENGTHS": lengths is not None, **config.options}
    if num_chunks == 1:
        tile = min(max(next_power_of_2(num_columns), 128), config.tile)
        _topk_row_kernel[(num_rows,)](scores, given, picks, num_columns, *scores.stride(), K=k, TILE=tile, **flags)
    else:
        _select_in_chunks(scores, given, picks, num_chunks, config.tile, flags)
    if ascending:
        return picks
    out = torch.empty_like(picks)
    block = min(next_power_of_2(k), 64)
    _topk_rank_kernel[(num_rows, -(-k // block))](
        scores, given, picks, out, num_columns, *scores.stride(), K=k, BLOCK=block, OTHERS=64,
        HAS_LENGTHS=lengths is not None, **{**config.options, "num_warps": 4},
    )  # fmt: skip
    return out


def _select_in_chunks(
    scores: Tensor, lengths: Tensor, picks: Tensor, num_chunks: int, tile: int, flags: dict[str, Any]
) -> None:
    (num_rows, num_columns), k = scores.shape, picks.shape[1]
    grid = (num_chunks, num_rows)
    chunk_len = -(-num_columns // (num_chunks * tile)) * tile

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=scores.device)

    first, second, arrivals = scratch(num_chunks, 256), scratch(num_chunks, 256), scratch()
    sure, candidates = scratch(k), scratch(MAX_CANDIDATES, dtype=torch.int64)
    sizes = num_columns, chunk_len, *scores.stride()
    for is_second in (False, True):
        _topk_histogram_kernel[grid](
            scores, lengths, first, second, arrivals, *sizes, k,
            CHUNKS=num_chunks, TILE=tile, IS_SECOND=is_second, **flags,
        )  # fmt: skip
    _topk_merge_kernel[grid](
        scores, lengths, first, second, arrivals, sure, candidates, picks, *sizes,
        K=k, K_BLOCK=max(next_power_of_2(k), 32), CHUNKS=num_chunks, TILE=tile, **flags,
    )  # fmt: skip


def _check(scores: Tensor, k: int, lengths: Tensor | None) -> None:
    check_launch(scores, lengths)
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelInputError(f"expected fp32, bf16 or fp16 scores [T, N], found {scores.dtype} {tuple(scores.shape)}")
    if not 0 <= k <= MAX_K or scores.shape[1] >= MAX_COLUMNS:
        raise KernelInputError(f"expected k up to {MAX_K} of fewer than {MAX_COLUMNS}, found {k} of {scores.shape[1]}")
    if lengths is not None and (lengths.shape != (scores.shape[0],) or lengths.dtype.is_floating_point):
        raise KernelInputError(
            f"expected integer lengths ({scores.shape[0]},), found {lengths.dtype} {tuple(lengths.shape)}"
        )
