"""Manifold-constrained hyper-connections (mHC): n residual streams mixed around every sublayer.

X [T, n, D] streams; u = X flattened; m = (fn u) * rsqrt(mean(u^2) + eps).
  pre  = sigmoid(m[0:n] * scale[0] + base[0:n]) + hc_eps      sublayer input y = sum_j pre[j] X[j]
  post = 2 sigmoid(m[n:2n] * scale[1] + base[n:2n])
  comb = sinkhorn(m[2n:] * scale[2] + base[2n:])              after it X'[k] = post[k] o + sum_j comb[j, k] X[j]
comb moves stream j into stream k: the first index is the source, so the mixing matrix is comb transposed.

Ops: `hc_post` and `hc_pre` (and `hc_head`, a pre without post and comb) are the steps; `hc_boundary` is everything
between one sublayer and the next in one launch, `hc_enter` the same at the first sublayer, `hc_head_norm` at the end. A
fused op gives the bits of the chain of unfused ones. Rows are independent: a padded row costs time, changes nothing.

Kernels are in hyper_kernels.py, which says how they work, and hyper_many_kernels.py. They take four streams of bf16 and
fp32 mixing weights; non-contiguous tensors are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation
from dsv4.ops.arrivals import arrival_counters
from dsv4.ops.hyper_kernels import FEW_ROWS, hyper_kernel
from dsv4.ops.hyper_many_kernels import hyper_many_kernel
from dsv4.ops.hyper_streams import (
    FROM_EMBEDDING,
    FROM_STREAMS,
    FROM_SUBLAYER,
    MIX_COLS,
    NUM_STREAMS,
    hc_post_kernel,
)
from dsv4.ops.invariant import accumulator, exp, ordered_sum, rows_matmul, sigmoid
from dsv4.ops.norm import ROW_CONFIGS, rms_norm_ref
from dsv4.ops.tl_utils import (
    KernelInputError,
    LaunchConfig,
    blackwell_registers,
    check_launch,
    next_power_of_2,
    pick_config,
)


@dataclass(frozen=True)
class HyperSettings:
    """Constants of a model's hyper-connections; norm_eps is also that of the RMSNorm behind them."""

    num_iters: int
    hc_eps: float
    norm_eps: float


@dataclass(frozen=True)
class HyperInput:
    """What a sublayer starts from: the streams [T, n, D] it will be mixed into, its normed input [T, D] (and that
    input's FP8 codes, if asked for), and the weights post [T, n] and comb [T, n, n] for mixing, in at least fp32."""

    streams: Tensor
    hidden: Tensor
    quant: QuantActivation | None
    post: Tensor
    comb: Tensor


def hc_expand_ref(hidden: Tensor, num_streams: int) -> Tensor:
    """hidden [T, D] -> streams [T, n, D]: every stream starts as the embedding."""
    return hidden.unsqueeze(1).repeat(1, num_streams, 1)


def sinkhorn_ref(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """logits [T, n, n] -> nearly doubly stochastic comb. One softmax over rows, then columns and rows in turn.

    Ends on columns: num_iters column steps, num_iters - 1 row steps. eps stands in every denominator and once after the
    softmax.
    """
    comb = exp(logits - logits.amax(-1, keepdim=True))
    comb = comb / ordered_sum(comb, -1).unsqueeze(-1) + eps
    comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (ordered_sum(comb, -1).unsqueeze(-1) + eps)
        comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
    return comb


def hc_split_ref(
    mixes: Tensor, base: Tensor, scale: Tensor, num_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes [T, 2n + n*n] -> pre [T, n], post [T, n], comb [T, n, n]."""
    num_streams = round((mixes.shape[-1] + 1) ** 0.5) - 1  # 2n + n^2 = (n + 1)^2 - 1
    n = num_streams
    pre = sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn_ref(logits, num_iters, eps)


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """(fn u) * rsqrt(mean(u^2) + eps): the norm is over all streams together and comes after the product."""
    wide = streams.to(accumulator(streams))
    mean_square = ordered_sum(wide.square().sum(-1), -1) / (wide.shape[1] * wide.shape[2])
    return rows_matmul(wide.flatten(1), fn) * torch.rsqrt(mean_square + norm_eps).unsqueeze(-1)


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return ordered_sum(pre.unsqueeze(-1) * streams.to(pre.dtype), 1).to(streams.dtype)


def hc_pre_ref(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, n, D] -> sublayer input y [T, D], post [T, n], comb [T, n, n] (the last two in at least fp32)."""
    mixes = _mixes(streams, fn, norm_eps)
    pre, post, comb = hc_split_ref(mixes, base.to(mixes.dtype), scale.to(mixes.dtype), num_iters, hc_eps)
    return _collapse(streams, pre), post, comb


def hc_post_ref(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Sublayer output [T, D] and the streams it was read from -> the new streams [T, n, D], rounded once."""
    wide = streams.to(post.dtype)
    mixed = ordered_sum(comb.unsqueeze(-1) * wide.unsqueeze(2), 1)  # [T, source, destination, D] summed over the source
    return (post.unsqueeze(-1) * out.to(post.dtype).unsqueeze(1) + mixed).to(streams.dtype)


def hc_head_ref(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float) -> Tensor:
    """The final collapse [T, n, D] -> [T, D]: only the pre weights, fn [n, n*D], one scale."""
    mixes = _mixes(streams, fn, norm_eps)
    return _collapse(streams, sigmoid(mixes * scale.to(mixes.dtype) + base.to(mixes.dtype)) + hc_eps)


def hc_enter_ref(
    source: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, settings: HyperSettings,
    has_codes: bool,
) -> HyperInput:  # fmt: skip
    """Into the first sublayer: `hc_pre`, then RMSNorm, then FP8 codes of the rounded result if `has_codes`.

    source: streams [T, n, D], handed on as they are, or an embedding [T, D], which `hc_expand` makes into streams.
    """
    streams = hc_expand_ref(source, fn.shape[1] // source.shape[-1]) if source.dim() == 2 else source
    hidden, post, comb = hc_pre_ref(
        streams, fn, base, scale, num_iters=settings.num_iters, hc_eps=settings.hc_eps, norm_eps=settings.norm_eps
    )
    normed = rms_norm_ref(hidden, norm_weight, settings.norm_eps)
    quant = QuantActivation(*fp8_quantize(normed, ACTIVATION_GROUP)) if has_codes else None
    return HyperInput(streams, normed, quant, post, comb)


def hc_boundary_ref(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
    norm_weight: Tensor, settings: HyperSettings, has_codes: bool,
) -> HyperInput:  # fmt: skip
    """From one sublayer into the next: `hc_post` with the old weights, then `hc_enter` with the next fn, base, scale.

    The streams between the two are rounded to their dtype. New tensors throughout.
    """
    return hc_enter_ref(hc_post_ref(out, streams, post, comb), fn, base, scale, norm_weight, settings, has_codes)


def hc_head_norm_ref(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """`hc_head`, then the final RMSNorm: [T, n, D] -> [T, D]."""
    return rms_norm_ref(hc_head_ref(streams, fn, base, scale, hc_eps=hc_eps, norm_eps=norm_eps), norm_weight, norm_eps)


# ---- launchers ----

HC_POST_CONFIG = LaunchConfig(rows=4, num_warps=4, launch_pdl=True)
HC_POST_COLS = 256  # four rows of 256: a warp reads 512 bytes of a row
MAX_ROWS = 4096  # per launch: bounds the workspace, which is NUM_SPLITS * MIX_COLS fp32 a row
# columns of a stream per program, by hidden size: at most 128 programs read fn, and each has little enough of it to ask
# for all at once (ptxas delays loads when registers run short)
SPLIT_COLS = {4096: 32, 8192: 64, 16384: 128}


NUM_WORKERS = 32  # programs that share step 2 of few tokens once they have arrived
MANY_REGISTERS = 128  # per thread: four programs of four warps on a multiprocessor, two of eight


@dataclass(frozen=True)
class HyperTiles:
    """How a launch for many tokens is cut up. Results do not depend on it: the order of sums follows from SPLIT_COLS
    alone."""

    tile_rows: int  # tokens of a program in step 1, a multiple of SUB_ROWS: fn is read and taken apart once for them
    finish_rows: int  # tokens of a program in step 2
    lag: int  # tiles whose step 1 is started before the first one's step 2


# key: the largest number of tokens; up to FEW_ROWS there is nothing to choose
TILES = {
    512: HyperTiles(tile_rows=64, finish_rows=2, lag=8),
    MAX_ROWS: HyperTiles(tile_rows=128, finish_rows=4, lag=4),
}


def pick_tiles(num_tokens: int) -> HyperTiles | None:
    """None: the kernel for few tokens."""
    if num_tokens <= FEW_ROWS:
        return None
    return next(tiles for limit, tiles in TILES.items() if num_tokens <= limit)


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


def hc_enter(
    source: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, settings: HyperSettings,
    has_codes: bool,
) -> HyperInput:  # fmt: skip
    """See `hc_enter_ref`. One launch for up to MAX_ROWS rows."""
    return launch_hyper(HyperCall(source, fn, base, scale, settings, norm_weight, has_codes))


def hc_boundary(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
    norm_weight: Tensor, settings: HyperSettings, has_codes: bool,
) -> HyperInput:  # fmt: skip
    """See `hc_boundary_ref`. One launch for up to MAX_ROWS rows."""
    return launch_hyper(HyperCall(streams, fn, base, scale, settings, norm_weight, has_codes, out, post, comb))


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `hc_pre_ref`."""
    result = launch_hyper(HyperCall(streams, fn, base, scale, HyperSettings(num_iters, hc_eps, norm_eps)))
    return result.hidden, result.post, result.comb


def hc_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float) -> Tensor:
    """See `hc_head_ref`."""
    settings = HyperSettings(0, hc_eps, norm_eps)
    return launch_hyper(HyperCall(streams, fn, base, scale, settings, is_head=True)).hidden


def hc_head_norm(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """See `hc_head_norm_ref`. One launch for up to MAX_ROWS rows."""
    settings = HyperSettings(0, hc_eps, norm_eps)
    return launch_hyper(HyperCall(streams, fn, base, scale, settings, norm_weight, is_head=True)).hidden


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
        )  # fmt: skip
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
        part = HyperInput(result.streams[rows], result.hidden[rows], quant, result.post[rows], result.comb[rows])
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
    quant = result.quant
    tensors = (
        out, x, post, comb, _dense(call.fn), _dense(call.base), _dense(call.scale),
        x if call.norm_weight is None else _dense(call.norm_weight), result.streams, result.hidden,
        result.hidden if quant is None else quant.codes, result.hidden if quant is None else quant.scale,
        result.post, result.comb,
    )  # fmt: skip
    numbers = num_tokens, call.settings.norm_eps, call.settings.hc_eps
    constants: dict[str, Any] = {
        "D": hidden_size, "BLOCK": block, "GROUP": ACTIVATION_GROUP, "SPLIT": split_cols, "NUM_SPLITS": num_splits,
        "SPLIT_BLOCK": next_power_of_2(num_splits), "NUM_MIXES": call.num_mixes,
        "NUM_ITERS": call.settings.num_iters, "SOURCE": call.source, "HAS_NORM": call.norm_weight is not None,
        "HAS_CODES": quant is not None,
    }  # fmt: skip

    def empty_partial(num_rows: int) -> Tensor:
        return torch.empty(num_rows, num_splits, MIX_COLS, dtype=torch.float32, device=device)

    if tiles is None:
        hyper_kernel[(num_splits,)](
            *tensors, empty_partial(FEW_ROWS), arrival_counters(f"hyper, {num_splits} splits", device), *numbers,
            NUM_WORKERS=min(NUM_WORKERS, num_splits), **constants, **blackwell_registers(168),
            **LaunchConfig(FEW_ROWS, config.num_warps, launch_pdl=True).options,
        )  # fmt: skip
    else:
        num_tiles, num_finishers = -(-num_tokens // tiles.tile_rows), tiles.tile_rows // tiles.finish_rows
        hyper_many_kernel[(num_tiles * (num_splits + num_finishers),)](
            *tensors, empty_partial(num_tiles * tiles.tile_rows), arrival_counters("hyper, cleared", device), *numbers,
            tiles.lag, TILE=tiles.tile_rows, FINISH=tiles.finish_rows, **constants, maxnreg=MANY_REGISTERS,
            **LaunchConfig(tiles.tile_rows, config.num_warps, launch_pdl=True).options,
        )  # fmt: skip


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
    if call.has_codes and hidden_size % ACTIVATION_GROUP:
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
