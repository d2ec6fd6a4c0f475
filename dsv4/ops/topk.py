"""Selection: the k largest of many scores, ties to the lower index. Used by the router, the indexer and the sampler.

Kernels: few rows are spread over programs that wait for each other, in one launch (topk_grid_kernels.py). Of many,
those of up to `short_row` columns are selected by one program each, in registers; longer ones in two launches, maxima
of every 8 scores and then the selection itself, by up to `max_chunks` programs a row (topk_kernels.py). Best first is
one more launch, which ranks the k chosen by counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.ops.arrivals import arrival_counters
from dsv4.ops.tl_utils import IS_INTERPRETED, KernelInputError, check_launch, next_power_of_2
from dsv4.ops.topk_grid_kernels import GRID_LIST, LINE, NUM_PHASES, scratch_len, topk_grid_kernel
from dsv4.ops.topk_kernels import (
    FOLDED,
    GROUP,
    LIST,
    topk_long_kernel,
    topk_maxima_kernel,
    topk_rank_kernel,
    topk_short_kernel,
)

MAX_K = 1024
MAX_COLUMNS = 1 << 24  # an index takes 24 bits of the order in which the best come first


@dataclass(frozen=True)
class TopkConfig:
    """How the work is divided; results do not depend on it."""

    tile: int = 2048
    num_warps: int = 8
    max_chunks: int = 128
    short_row: int = 16384
    maxima_tile: int = 2048
    folds: int = 4  # of FOLDED maxima, read at once
    direct: int = 8192  # rows of a long table that are this short go to one program
    short_keys: int = 32  # a thread's share of a short row
    short_tile: int = 2048  # of its columns, written at once
    few_rows: int = 132  # up to here one program a multiprocessor, with twice the registers
    few_tile: int = 4096
    grid_row: int = 4096  # rows up to here are never spread
    grid_keys: int = 512  # a program of a spread row has at least so many, where rows are short
    max_grid_keys: int = 4096
    grid_programs: int = 128  # of a row, at most
    grid_warps: int = 8

    def spread(self, num_rows: int, num_columns: int, device: torch.device) -> int:
        """Programs of one row that wait for each other, a power of two; 0 where rows are short or too many.

        They must all run at once: there are no more of them than multiprocessors.
        """
        if num_columns <= self.grid_row or num_rows > _num_multiprocessors(device):
            return 0
        wanted = min(_num_multiprocessors(device) // num_rows, num_columns // self.grid_keys, self.grid_programs)
        programs = 1 << max(wanted.bit_length() - 1, 0)
        return programs if num_columns <= programs * self.max_grid_keys else 0

    def needs_maxima(self, num_rows: int, num_columns: int, device: torch.device) -> bool:
        """Whether `select` is to be given `LongRows` with the rows' maxima."""
        return num_columns > self.short_row and not self.spread(num_rows, num_columns, device)

    def num_chunks(self, num_rows: int, num_columns: int) -> int:
        """Programs of one long row, a power of two: enough to fill a GPU, of at least a tile each."""
        wanted = min(256 // num_rows, num_columns // self.tile, self.max_chunks)
        return 1 << max(wanted.bit_length() - 1, 0)

    def short_warps(self, block: int) -> int:
        return min(max(block // (32 * self.short_keys), 4), 16)

    def options(self, num_warps: int | None = None) -> dict[str, Any]:
        return {"num_warps": num_warps or self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


TOPK_CONFIG = TopkConfig()
COUNTERS_OF_SPREAD = 4096  # arrival counters for each number of programs: 16 a row


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """Of an H200 where kernels are interpreted or only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


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


@dataclass(frozen=True)
class LongRows:
    """What the two launches of long rows [T, N] share. `maxima` and `arrivals` are the first one's output."""

    maxima: Tensor  # int16 [T, ceil(N / GROUP)]
    arrivals: Tensor  # int32 [T], 0
    counts: Tensor  # int32 [T, chunks]
    keys: Tensor  # int32 [T, LIST]
    lists: Tensor  # int32 [T, list_len]

    @classmethod
    def allocate(cls, num_rows: int, num_columns: int, config: TopkConfig, device: torch.device) -> LongRows:
        num_chunks = config.num_chunks(num_rows, num_columns)
        # the chunks begin at multiples of 16; several are joined in a second half
        list_len = num_columns if num_chunks == 1 else 2 * (num_columns + 16 * num_chunks)

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        maxima = scratch(-(-num_columns // GROUP), dtype=torch.int16)
        return cls(maxima, scratch(), scratch(num_chunks), scratch(LIST), scratch(list_len))


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
    given = scores if lengths is None else lengths.contiguous()
    flags = {"ASCENDING": ascending, "DROP": ascending, "HAS_LENGTHS": lengths is not None}
    rows = None
    if config.needs_maxima(num_rows, num_columns, scores.device):
        rows = LongRows.allocate(num_rows, num_columns, config, scores.device)
        tile = config.maxima_tile
        topk_maxima_kernel[(-(-num_columns // tile), num_rows)](
            scores, given, rows.maxima, rows.arrivals, num_columns, rows.maxima.shape[1], *scores.stride(),
            BLOCK=tile, **flags, **config.options(),
        )  # fmt: skip
    select(scores, given, rows, picks, config, flags)
    if ascending:
        return picks
    out = torch.empty_like(picks)
    block = min(next_power_of_2(k), 64)
    topk_rank_kernel[(num_rows, -(-k // block))](
        scores, given, picks, out, num_columns, *scores.stride(), K=k, BLOCK=block, OTHERS=64,
        HAS_LENGTHS=lengths is not None, **config.options(4),
    )  # fmt: skip
    return out


def select(
    scores: Tensor, lengths: Tensor, rows: LongRows | None, picks: Tensor, config: TopkConfig, flags: dict[str, bool]
) -> None:
    """picks [T, k] of scores [T, N], ascending, then -1; `rows` where `needs_maxima` says so."""
    programs = config.spread(scores.shape[0], scores.shape[1], scores.device)
    if programs:
        _select_spread(scores, lengths, picks, programs, config, flags)
    elif rows is None:
        _select_short(scores, lengths, picks, config, flags)
    else:
        _select_long(scores, lengths, rows, picks, config, flags)


def _select_short(scores: Tensor, lengths: Tensor, picks: Tensor, config: TopkConfig, flags: dict[str, bool]) -> None:
    """picks [T, k] of scores [T, N], N up to `short_row`."""
    (num_rows, num_columns), k = scores.shape, picks.shape[1]
    block = max(next_power_of_2(num_columns), 128)
    tile = config.few_tile if num_rows <= config.few_rows else config.short_tile
    options = config.options(config.short_warps(block))
    if num_rows <= config.few_rows:
        options["maxnreg"] = 128  # else the compiler spills to fit two programs of 16 warps
    topk_short_kernel[(num_rows,)](
        scores, lengths, picks, num_columns, *scores.stride(), K=k, K_BLOCK=max(next_power_of_2(k), 32), BLOCK=block,
        TILE=min(block, tile), **flags, **options,
    )  # fmt: skip


def _select_spread(
    scores: Tensor, lengths: Tensor, picks: Tensor, programs: int, config: TopkConfig, flags: dict[str, bool]
) -> None:
    """picks [T, k] of scores [T, N], each row by `programs` programs, as `spread` says."""
    (num_rows, num_columns), k = scores.shape, picks.shape[1]
    chunk = max(next_power_of_2(-(-num_columns // programs)), LINE)
    # twice as many maxima as are wanted, and at least one a program
    num_maxima = min(max(2 * next_power_of_2(k), 512, programs), programs * chunk)
    scratch = torch.empty(num_rows, scratch_len(programs, num_maxima), dtype=torch.int32, device=scores.device)
    counters = arrival_counters("topk_select", scores.device)[programs.bit_length() * COUNTERS_OF_SPREAD :]
    phases = NUM_PHASES if num_columns > GRID_LIST else 3  # of the interpreter: a short list cannot overflow
    for phase in range(phases) if IS_INTERPRETED else (-1,):
        topk_grid_kernel[(programs, num_rows)](
            scores, lengths, counters, scratch, picks, num_columns, *scores.stride(),
            K=k, K_BLOCK=max(next_power_of_2(k), 32), PROGRAMS=programs, CHUNK=chunk, MAXIMA=num_maxima // programs,
            THREADS=min(32 * config.grid_warps, chunk), SMALL=max(1024, num_maxima), SCRATCH=scratch.shape[1],
            PHASE=phase, **flags, **config.options(config.grid_warps),
        )  # fmt: skip


def _select_long(
    scores: Tensor, lengths: Tensor, rows: LongRows, picks: Tensor, config: TopkConfig, flags: dict[str, bool]
) -> None:
    """picks [T, k] of scores [T, N], given the rows' maxima."""
    (num_rows, num_columns), k = scores.shape, picks.shape[1]
    num_chunks = rows.counts.shape[1]
    topk_long_kernel[(num_chunks, num_rows)](
        scores, lengths, rows.maxima, rows.arrivals, rows.counts, rows.keys, rows.lists, picks,
        num_columns, rows.maxima.shape[1], rows.lists.shape[1], *scores.stride(),
        K=k, K_BLOCK=max(next_power_of_2(k), 32), CHUNKS=num_chunks, TILE=config.tile, DIRECT=config.direct,
        FOLDS=min(config.folds, next_power_of_2(-(-rows.maxima.shape[1] // FOLDED))), **flags, **config.options(),
        maxnreg=255,  # by itself ptxas stops at 128 and spills
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
