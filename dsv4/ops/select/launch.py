"""Launchers of the selection.

One launch. Long rows are spread over programs that wait for each other (kernel_long.py); short ones, and those of up to
`short_row` columns where there are as many rows as programs, are selected by one program each, in registers
(kernel_short.py). Best first is one more launch, which ranks the k chosen by counting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.lib.arch import num_multiprocessors
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.ops.lib.guard import IS_INTERPRETED, KernelInputError, check_launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.ops.select.kernel_list import LIST
from dsv4.ops.select.kernel_long import LINE, NUM_PHASES, scratch_len, topk_long_kernel
from dsv4.ops.select.kernel_short import topk_rank_kernel, topk_short_kernel
from dsv4.ops.select.plan import COUNTERS_OF_SPREAD, MAX_COLUMNS, MAX_K, OPTIONS, TOPK_CONFIG, Spread, TopkConfig


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
    )
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
    is_few = num_rows <= num_multiprocessors(scores.device)
    tile = config.few_tile if is_few else config.short_tile
    # by itself the compiler spills to fit two programs of 16 warps
    options = OPTIONS | {"maxnreg": 128} if is_few else OPTIONS
    topk_short_kernel[(num_rows,)](
        scores, lengths, picks, num_columns, *scores.stride(), K=k, K_BLOCK=max(next_power_of_2(k), 32), BLOCK=block,
        TILE=min(block, tile), num_warps=config.short_warps(block), **flags, **options,
    )


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
        )


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
