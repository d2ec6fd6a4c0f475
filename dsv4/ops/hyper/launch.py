"""Launchers of the hyper-connections.

Kernels are in kernel_few.py, which says how they work, and kernel_many.py. They take four streams of bf16 and fp32
mixing weights; non-contiguous tensors are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import ACTIVATION_GROUP, AnyWeight, QuantActivation, as_loaded
from dsv4.ops.hyper.kernel_few import FEW_ROWS, hyper_kernel
from dsv4.ops.hyper.kernel_many import hyper_many_kernel
from dsv4.ops.hyper.kernel_streams import (
    FROM_EMBEDDING,
    FROM_STREAMS,
    FROM_SUBLAYER,
    MIX_COLS,
    NUM_STREAMS,
    HyperResult,
    hc_post_kernel,
)
from dsv4.ops.hyper.kernel_weights import AS_CODES, AS_VALUES, NO_CODES
from dsv4.ops.hyper.op import HyperInput, HyperSettings
from dsv4.ops.hyper.plan import (
    HC_POST_COLS,
    HC_POST_CONFIG,
    MANY_REGISTERS,
    MAX_ROWS,
    NUM_WORKERS,
    SPLIT_COLS,
    HyperTiles,
    padded_splits,
    pick_tiles,
)
from dsv4.ops.lib.arch import blackwell_registers, code_tensor
from dsv4.ops.lib.arrivals import arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import LaunchConfig, pick_config
from dsv4.ops.norm import ROW_CONFIGS


@dataclass(frozen=True)
class HyperCall:
    """Arguments of `launch_hyper`. x: streams [T, 4, D] or an embedding [T, D]; out, post and comb come with a sublayer
    to finish first; norm_weight None leaves out the norm; a head has no post and comb to make."""

    x: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    settings: HyperSettings
    norm_weight: Tensor | None = None
    has_codes: bool = False
    out: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None
    is_head: bool = False
    has_rounded: bool = False

    @property
    def source(self) -> int:
        if self.out is not None:
            return FROM_SUBLAYER
        return FROM_EMBEDDING if self.x.dim() == 2 else FROM_STREAMS

    @property
    def num_mixes(self) -> int:
        return NUM_STREAMS if self.is_head else NUM_STREAMS * (NUM_STREAMS + 2)

    def rows(self, start: int, stop: int) -> HyperCall:
        out, post, comb = (None if x is None else x[start:stop] for x in (self.out, self.post, self.comb))
        return replace(self, x=self.x[start:stop], out=out, post=post, comb=comb)


def _tensor(fn: AnyWeight) -> Tensor:
    loaded = as_loaded(fn)
    assert isinstance(loaded, Tensor), "fn is never quantised"
    return loaded


def hc_enter(
    source: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, settings: HyperSettings,
    has_codes: bool,
) -> HyperInput:
    """See `hc_enter_ref`. One launch for up to MAX_ROWS rows."""
    return launch_hyper(HyperCall(source, _tensor(fn), base, scale, settings, norm_weight, has_codes))


def hc_boundary(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor,
    norm_weight: Tensor, settings: HyperSettings, has_codes: bool, has_rounded: bool = False,
) -> HyperInput:
    """See `hc_boundary_ref`. One launch for up to MAX_ROWS rows."""
    mixing = streams, _tensor(fn), base, scale, settings, norm_weight
    return launch_hyper(HyperCall(*mixing, has_codes, out, post, comb, has_rounded=has_rounded))


def hc_pre(
    streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, *, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hc_pre_ref`."""
    result = launch_hyper(HyperCall(streams, _tensor(fn), base, scale, HyperSettings(num_iters, hc_eps, norm_eps)))
    return result.hidden, result.post, result.comb


def hc_head(streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float) -> Tensor:
    """See `hc_head_ref`."""
    settings = HyperSettings(0, hc_eps, norm_eps)
    return launch_hyper(HyperCall(streams, _tensor(fn), base, scale, settings, is_head=True)).hidden


def hc_head_norm(
    streams: Tensor, fn: AnyWeight, base: Tensor, scale: Tensor, norm_weight: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """See `hc_head_norm_ref`. One launch for up to MAX_ROWS rows."""
    settings = HyperSettings(0, hc_eps, norm_eps)
    return launch_hyper(HyperCall(streams, _tensor(fn), base, scale, settings, norm_weight, is_head=True)).hidden


def hc_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See `hc_post_ref`."""
    check_launch(out, streams, post, comb)
    _check_streams(out, streams, post, comb)
    num_tokens, _, hidden_size = streams.shape
    new_streams = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if new_streams.numel():
        grid = (-(-num_tokens // HC_POST_CONFIG.rows), -(-hidden_size // HC_POST_COLS))
        hc_post_kernel[grid](
            _dense(out), _dense(streams), _dense(post), _dense(comb), new_streams, num_tokens,
            D=hidden_size, ROWS=HC_POST_CONFIG.rows, COLS=HC_POST_COLS, **HC_POST_CONFIG.options,
        )
    return new_streams


def launch_hyper(call: HyperCall, tiles: HyperTiles | None = None) -> HyperInput:
    """Check a call and launch its kernel. Which one, and how it is cut up, follows from the number of rows unless a
    test or a benchmark chooses `tiles`.

    Launches on one device share counters, so they must not overlap in time: one stream, or ordered ones.
    """
    _check_call(call)
    num_tokens, hidden_size = call.x.shape[0], call.x.shape[-1]
    result = _empty_result(call)
    for start in range(0, num_tokens, MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        quant = None if result.quant is None else QuantActivation(result.quant.codes[rows], result.quant.scale[rows])
        rounded = None if result.rounded is None else result.rounded[rows]
        part = HyperInput(
            result.streams[rows], result.hidden[rows], quant, result.post[rows], result.comb[rows], rounded
        )
        chosen = tiles or pick_tiles(min(num_tokens - start, MAX_ROWS))
        if hidden_size:
            _launch_rows(call.rows(start, start + MAX_ROWS), part, chosen)
    return result


def _launch_rows(call: HyperCall, result: HyperInput, tiles: HyperTiles | None) -> None:
    num_tokens, hidden_size = call.x.shape[0], call.x.shape[-1]
    # tile and warps of the RMSNorm kernel: the same sum in the same order
    block, config = pick_config(ROW_CONFIGS, hidden_size, "the hidden size")
    split_cols = next(cols for limit, cols in sorted(SPLIT_COLS.items()) if hidden_size <= limit)
    num_splits = -(-hidden_size // split_cols)
    x, device = _dense(call.x), call.x.device
    # an unused pointer still needs a tensor of the right kind
    out, post, comb = (x if tensor is None else _dense(tensor) for tensor in (call.out, call.post, call.comb))
    quant, codes = result.quant, result.hidden if result.rounded is None else result.rounded
    tensors = (
        out, x, post, comb, _dense(call.fn), _dense(call.base), _dense(call.scale),
        x if call.norm_weight is None else _dense(call.norm_weight),
        HyperResult(
            result.streams, result.hidden, codes if quant is None else code_tensor(quant.codes),
            result.hidden if quant is None else quant.scale, result.post, result.comb,
        ),
    )
    numbers = num_tokens, call.settings.norm_eps, call.settings.hc_eps
    constants: dict[str, Any] = {
        "D": hidden_size, "BLOCK": block, "GROUP": ACTIVATION_GROUP, "SPLIT": split_cols, "NUM_SPLITS": num_splits,
        "SPLIT_BLOCK": padded_splits(num_splits), "NUM_MIXES": call.num_mixes,
        "NUM_ITERS": call.settings.num_iters, "SOURCE": call.source, "HAS_NORM": call.norm_weight is not None,
        "CODES": AS_CODES if quant is not None else AS_VALUES if result.rounded is not None else NO_CODES,
    }

    def empty_partial(num_rows: int) -> Tensor:
        return torch.empty(num_rows, num_splits, MIX_COLS, dtype=torch.float32, device=device)

    if tiles is None:
        hyper_kernel[(num_splits,)](
            *tensors, empty_partial(FEW_ROWS), arrival_counters(f"hyper, {num_splits} splits", device), *numbers,
            NUM_WORKERS=min(NUM_WORKERS, num_splits), **constants, **blackwell_registers(168),
            **LaunchConfig(FEW_ROWS, config.num_warps, launch_pdl=True).options,
        )
    else:
        num_tiles, num_finishers = -(-num_tokens // tiles.tile_rows), tiles.tile_rows // tiles.finish_rows
        hyper_many_kernel[(num_tiles * (num_splits + num_finishers),)](
            *tensors, empty_partial(num_tiles * tiles.tile_rows), arrival_counters("hyper, cleared", device), *numbers,
            tiles.lag, TILE=tiles.tile_rows, FINISH=tiles.finish_rows, **constants, maxnreg=MANY_REGISTERS,
            **LaunchConfig(tiles.tile_rows, config.num_warps, launch_pdl=True).options,
        )


def _empty_result(call: HyperCall) -> HyperInput:
    num_tokens, hidden_size, device = call.x.shape[0], call.x.shape[-1], call.x.device

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

    quant = None
    if call.has_codes:
        quant = QuantActivation(
            codes=empty(hidden_size, dtype=torch.float8_e4m3fn),
            scale=empty(hidden_size // ACTIVATION_GROUP, dtype=torch.uint8),
        )
    is_handed_on = call.source == FROM_STREAMS
    return HyperInput(
        streams=call.x if is_handed_on else empty(NUM_STREAMS, hidden_size, dtype=call.x.dtype),
        hidden=empty(hidden_size, dtype=call.x.dtype),
        quant=quant,
        post=empty(NUM_STREAMS, dtype=torch.float32),
        comb=empty(NUM_STREAMS, NUM_STREAMS, dtype=torch.float32),
        rounded=empty(hidden_size, dtype=call.x.dtype) if call.has_rounded else None,
    )


def _dense(x: Tensor) -> Tensor:
    """x contiguous and 16-byte aligned: a kernel compiled for less would sum in another order."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def _check_call(call: HyperCall) -> None:
    check_launch(call.x, call.fn, call.base, call.scale, call.norm_weight, call.out, call.post, call.comb)
    if call.out is None:
        _check_x(call.x)
    else:
        assert call.post is not None and call.comb is not None, "a sublayer's output comes with its weights"
        _check_streams(call.out, call.x, call.post, call.comb)
    hidden_size, num_mixes = call.x.shape[-1], call.num_mixes
    if call.settings.num_iters < 1 and not call.is_head:
        raise KernelInputError(f"expected at least one Sinkhorn iteration, found {call.settings.num_iters}")
    num_scales = 3 if num_mixes > NUM_STREAMS else 1
    shapes = {"fn": (num_mixes, NUM_STREAMS * hidden_size), "base": (num_mixes,), "scale": (num_scales,)}
    for name, expected in shapes.items():
        _check_tensor(name, getattr(call, name), expected, torch.float32)
    if call.norm_weight is not None and call.norm_weight.shape != (hidden_size,):
        raise KernelInputError(f"expected a norm of shape ({hidden_size},), found {tuple(call.norm_weight.shape)}")
    if call.has_codes and call.has_rounded:
        raise KernelInputError("expected FP8 codes or their values to be asked for, found both")
    if (call.has_codes or call.has_rounded) and hidden_size % ACTIVATION_GROUP:
        raise KernelInputError(f"FP8 codes need a multiple of {ACTIVATION_GROUP} columns, found {hidden_size}")


def _check_x(x: Tensor) -> None:
    if x.dtype != torch.bfloat16 or x.dim() not in (2, 3) or (x.dim() == 3 and x.shape[1] != NUM_STREAMS):
        raise KernelInputError(
            f"expected streams [T, {NUM_STREAMS}, D] or an embedding [T, D] of bf16, "
            f"found {tuple(x.shape)} of {x.dtype}"
        )


def _check_streams(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> None:
    _check_x(streams)
    num_tokens, hidden_size = streams.shape[0], streams.shape[-1]
    _check_tensor("streams", streams, (num_tokens, NUM_STREAMS, hidden_size), torch.bfloat16)
    _check_tensor("sublayer output", out, (num_tokens, hidden_size), torch.bfloat16)
    _check_tensor("post", post, (num_tokens, NUM_STREAMS), torch.float32)
    _check_tensor("comb", comb, (num_tokens, NUM_STREAMS, NUM_STREAMS), torch.float32)


def _check_tensor(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise KernelInputError(f"{what}: expected {shape} of {dtype}, found {tuple(tensor.shape)} of {tensor.dtype}")
