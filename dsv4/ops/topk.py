"""Selection: the k largest of many scores, ties to the lower index. Used by the router, the indexer and the sampler.

One launch. Long rows are spread over programs that wait for each other (topk_long_kernels.py); short ones, and those of
up to `short_row` columns where there are as many rows as programs, are selected by one program each, in registers
(topk_short_kernels.py). Best first is one more launch, which ranks the k chosen by counting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.ops.arrivals import arrival_counters
from dsv4.ops.tl_utils import IS_INTERPRETED, KernelInputError, check_launch, next_power_of_2
from dsv4.ops.topk_long_kernels import COUNTERS, LINE, LIST, NUM_PHASES, scratch_len, topk_long_kernel
from dsv4.ops.topk_short_kernels import topk_rank_kernel, topk_short_kernel

MAX_K = 1024
MAX_COLUMNS = 1 << 24  # an index takes 24 bits of the order in which the best come first
COUNTERS_OF_SPREAD = 4096  # arrival counters for each number of programs


class Spread(NamedTuple):
    """How a long row is divided."""

    programs: int  # a power of two
    resident: int  # programs of a multiprocessor, of this row or others

    @property
    def is_few(self) -> bool:
        return self.resident == 1


@dataclass(frozen=True)
class TopkConfig:
    """How the work is divided; results do not depend on it."""

    short_row: int = 16384  # rows up to here fit the registers of one program
    short_keys: int = 32  # a thread's share of a short row
    short_tile: int = 2048  # of its columns, written at once
    few_rows: int = 132  # up to here one program a multiprocessor, with twice the registers
    few_tile: int = 4096
    long_row: int = 4096  # rows up to here are never spread
    long_keys: int = 1024  # a program of a spread row has at least so many
    long_tile: int = 2048  # read at once
    long_programs: int = 128  # of a row, at most
    long_warps: int = 8
    resident: int = 4  # programs of a multiprocessor: registers are limited so that they fit for certain
    lone_rows: int = 2  # up to here each program has a multiprocessor, and its keys in registers
    lone_keys: int = 512  # at least, and at most
    max_lone_keys: int = 4096

    def spread(self, num_rows: int, num_columns: int, device: torch.device) -> Spread | None:
        """How rows are spread over programs that wait for each other; None where rows are short.

        All programs must run at once, unless each has a row of its own and waits for none.
        """
        if num_columns <= self.long_row:
            return None
        limit = _num_multiprocessors(device)
        if num_rows <= min(self.lone_rows, limit):
            programs = self._power(limit // num_rows, num_columns // self.lone_keys)
            if num_columns <= programs * self.max_lone_keys:
                return Spread(programs, 1)
        at_once = self.resident * limit if COUNTERS * num_rows <= COUNTERS_OF_SPREAD else 0
        programs = self._power(at_once // num_rows, num_columns // self.long_keys)
        return None if programs == 1 and num_columns <= self.short_row else Spread(programs, self.resident)

    def _power(self, *limits: int) -> int:
        return 1 << max(min(*limits, self.long_programs).bit_length() - 1, 0)

    def short_warps(self, block: int) -> int:
        return min(max(block // (32 * self.short_keys), 4), 16)


TOPK_CONFIG = TopkConfig()
OPTIONS: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": False}


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """Of the GPU at hand; of an H200 where there is none."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return 132
    gpu = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.cuda.get_device_properties(gpu).multi_processor_count


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
    select(scores, given, picks, config, flags)
    if ascending:
        return picks
    out = torch.empty_like(picks)
    block = min(next_power_of_2(k), 64)
    topk_rank_kernel[(num_rows, -(-k // block))](
        scores, given, picks, out, num_columns, *scores.stride(), K=k, BLOCK=block, OTHERS=64,
        HAS_LENGTHS=lengths is not None, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out


def select(scores: Tensor, lengths: Tensor, picks: Tensor, config: TopkConfig, flags: dict[str, bool]) -> None:
    """picks [T, k] of scores [T, N], ascending, then -1."""
    spread = config.spread(scores.shape[0], scores.shape[1], scores.device)
    if spread is None:
        _select_short(scores, lengths, picks, config, flags)
    else:
        _select_long(scores, lengths, picks, spread, config, flags)


def _select_short(scores: Tensor, lengths: Tensor, picks: Tensor, config: TopkConfig, flags: dict[str, bool]) -> None:
    """picks [T, k] of scores [T, N], N up to `short_row`."""
    (num_rows, num_columns), k = scores.shape, picks.shape[1]
    block = max(next_power_of_2(num_columns), 128)
    tile = config.few_tile if num_rows <= config.few_rows else config.short_tile
    # by itself the compiler spills to fit two programs of 16 warps
    options = OPTIONS | {"maxnreg": 128} if num_rows <= config.few_rows else OPTIONS
    topk_short_kernel[(num_rows,)](
        scores, lengths, picks, num_columns, *scores.stride(), K=k, K_BLOCK=max(next_power_of_2(k), 32), BLOCK=block,
        TILE=min(block, tile), num_warps=config.short_warps(block), **flags, **options,
    )  # fmt: skip


def _select_long(
    scores: Tensor, lengths: Tensor, picks: Tensor, spread: Spread, config: TopkConfig, flags: dict[str, bool]
) -> None:
    """picks [T, k] of scores [T, N], each row by several programs."""
    (num_rows, num_columns), k, programs = scores.shape, picks.shape[1], spread.programs
    chunk = max(next_power_of_2(-(-num_columns // programs)), LINE)
    tile = chunk if spread.is_few else min(chunk, config.long_tile)
    k_block = max(next_power_of_2(k), 32)
    # twice as many maxima as are wanted, and at least one a program
    num_maxima = min(max(2 * next_power_of_2(k), 512, programs), programs * tile)
    length = scratch_len(programs, num_maxima, 0 if spread.is_few else k_block)
    scratch = torch.empty(num_rows, length, dtype=torch.int32, device=scores.device)
    lists = torch.empty(num_rows, LIST, dtype=torch.int64, device=scores.device)
    counters = arrival_counters("topk_select", scores.device)[programs.bit_length() * COUNTERS_OF_SPREAD :]
    phases = NUM_PHASES if num_columns > LIST else 3  # of the interpreter: a short list cannot overflow
    for phase in range(phases) if IS_INTERPRETED else (-1,):
        topk_long_kernel[(programs, num_rows)](
            scores, lengths, counters, scratch, lists, picks, num_columns, *scores.stride(),
            K=k, K_BLOCK=k_block, PROGRAMS=programs, CHUNK=chunk, TILE=tile, THREADS=min(32 * config.long_warps, tile),
            MAXIMA=num_maxima // programs, SMALL=max(1024, num_maxima),
            RANKED=min(max(2 * k_block // programs, 16), 128), SCRATCH=length, FEW=spread.is_few, PHASE=phase,
            num_warps=config.long_warps, maxnreg=min(65536 // (32 * config.long_warps * spread.resident), 255),
            **flags, **OPTIONS,
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
