"""Launchers of the linear layers.

Kernels (kernel_linear.py, kernel_grouped.py) take FP8 weights in blocks of 128 x 128 and bf16 weights, and bf16 inputs
or FP8 codes; other combinations go to the oracle. An output row is the same bits at every number of rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.layouts import TILE_COLS, TILE_ROWS, LayoutError, ShuffledTensor, shuffle
from dsv4.formats.tensors import (
    ACTIVATION_GROUP,
    AnyWeight,
    QuantActivation,
    QuantTensor,
    Weight,
    as_loaded,
    dequantize,
)
from dsv4.ops.lib.arch import code_tensor, num_multiprocessors
from dsv4.ops.lib.arrivals import NUM_COUNTERS, arrival_counters
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.linear.bundle import LinearBundle, Segment, is_kernel_weight, takes_codes
from dsv4.ops.linear.kernel_grouped import (
    GROUPED_STEP,
    GroupedCodes,
    grouped_plain_kernel,
    grouped_shuffled_kernel,
    widen_kernel,
)
from dsv4.ops.linear.kernel_linear import (
    FP8_STEP,
    PLAIN_STEP,
    LinearResult,
    LinearSizes,
    linear_kernel,
    quantize_kernel,
)
from dsv4.ops.linear.launch_wide import can_be_copied, launch_wide, takes_wide
from dsv4.ops.linear.op import grouped_linear_ref, linear_ref
from dsv4.ops.linear.outputs import Outputs
from dsv4.ops.linear.plan import (
    CODED_ROWS,
    GROUPED_MANY_ROWS,
    GROUPED_TILES,
    LINEAR_TILES,
    MANY_ROWS,
    QUANTISE_GROUPS,
    SHUFFLED_ROWS,
    SHUFFLED_TILES,
    WIDE,
    LinearTile,
    num_splits,
    pick_shuffled_tile,
    pick_tile,
)


def linear(x: Tensor | QuantActivation, weight: AnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `linear_ref`. Kernels for bf16 inputs or codes with FP8 or bf16 weights and bf16 or fp32 results."""
    weight, plain_dtype = as_loaded(weight), torch.bfloat16 if isinstance(x, QuantActivation) else x.dtype
    if not _has_kernel(x, weight, (out_dtype or plain_dtype,)):
        return linear_ref(x, weight, out_dtype)  # NVFP4, MXFP4, other dtypes
    if isinstance(weight, QuantTensor):
        bundle = LinearBundle(weight, None, (Segment(True, 0, weight.shape[0], 0),))
    else:
        bundle = LinearBundle(None, weight, (Segment(False, 0, weight.shape[0], 0),))
    return launch_linears(x, bundle, (out_dtype or plain_dtype,))[0]


def linears(
    x: Tensor | QuantActivation, weights: Sequence[AnyWeight] | LinearBundle,
    out_dtypes: Sequence[torch.dtype | None], codes: QuantActivation | None = None,
) -> tuple[Tensor, ...]:
    """See `linears_ref`. One launch for a bundle (two where a long input is quantised first); else one each."""
    plain_dtype = torch.bfloat16 if isinstance(x, QuantActivation) else x.dtype
    dtypes = tuple(dtype or plain_dtype for dtype in out_dtypes)
    views = weights.weights if isinstance(weights, LinearBundle) else tuple(map(as_loaded, weights))
    if len(views) != len(dtypes):
        raise KernelInputError(f"expected {len(views)} output dtypes, found {len(dtypes)}")
    if isinstance(weights, LinearBundle) and all(_has_kernel(x, weight, dtypes) for weight in views):
        return launch_linears(x, weights, dtypes, codes)
    return tuple(
        linear(x if codes is None or not takes_codes(weight) else codes, weight, dtype)
        for weight, dtype in zip(views, dtypes, strict=True)
    )


def grouped_linear(x: Tensor, weight: AnyWeight | ShuffledTensor) -> Tensor:
    """See `grouped_linear_ref`. Kernels for bf16 inputs with FP8 or bf16 weights.

    Made for a shuffled weight (`prepare_grouped`). An FP8 weight as it was loaded becomes bf16 by torch at each call.
    """
    weight = weight if isinstance(weight, ShuffledTensor) else as_loaded(weight)
    if x.dtype != torch.bfloat16:
        return grouped_linear_ref(x, weight)
    if isinstance(weight, ShuffledTensor):
        if x.shape[0] <= SHUFFLED_ROWS:
            return launch_shuffled(x, weight)
        return launch_grouped(x, widened(weight))
    return launch_grouped(x, dequantize(weight, x.dtype)) if is_kernel_weight(weight) else grouped_linear_ref(x, weight)


def grouped_codes(x: Tensor, weight: AnyWeight | ShuffledTensor) -> QuantActivation:
    """See `grouped_codes_ref`. Up to CODED_ROWS rows of a shuffled weight in the launch that makes them."""
    if isinstance(weight, ShuffledTensor) and x.dtype == torch.bfloat16 and x.shape[0] <= CODED_ROWS:
        num_rows = weight.shape[0] // x.shape[1]
        if num_rows % ACTIVATION_GROUP == 0:
            return launch_codes(x, weight)
    out = grouped_linear(x, weight).flatten(1)
    return _quantize(out) if out.dtype == torch.bfloat16 and out.numel() else QuantActivation.of(out)


def prepare_grouped(weight: Weight, num_groups: int) -> Weight | ShuffledTensor:
    """wo_a as the kernels like it best, once at load; as it is where that is not possible: another format, scales that
    are no powers of two, groups that end inside a tile.
    """
    if not isinstance(weight, QuantTensor) or not is_kernel_weight(weight):
        return weight
    if weight.shape[0] % (num_groups * TILE_ROWS) or weight.shape[1] % TILE_COLS:
        return weight
    try:
        return shuffle(weight)
    except LayoutError:
        return weight


def _has_kernel(x: Tensor | QuantActivation, weight: Weight, out_dtypes: Sequence[torch.dtype]) -> bool:
    if isinstance(x, QuantActivation) and not takes_codes(weight):
        return False  # the oracle says what is wrong
    has_input = isinstance(x, QuantActivation) or x.dtype == torch.bfloat16
    return has_input and is_kernel_weight(weight) and set(out_dtypes) <= {torch.bfloat16, torch.float32}


def launch_linears(
    x: Tensor | QuantActivation, bundle: LinearBundle, out_dtypes: Sequence[torch.dtype],
    codes: QuantActivation | None = None, tile: LinearTile | None = None,
) -> tuple[Tensor, ...]:
    """`linear_kernel` for a bundle. The tile follows from the number of rows unless a benchmark chooses it.

    Launches on one device share counters, so they must not overlap in time: one stream, or ordered ones.
    """
    fp8, plain = bundle.fp8, bundle.plain
    first = fp8 if fp8 is not None else plain
    assert first is not None, "a bundle without weights"
    width = first.shape[1]
    codes = x if isinstance(x, QuantActivation) else codes
    rows = code_tensor(x.codes) if isinstance(x, QuantActivation) else x
    check_launch(rows, None if codes is None else codes.scale, None if fp8 is None else fp8.scale, plain)
    num_tokens = rows.shape[0]
    if rows.shape != (num_tokens, width) or (codes is not None and codes.codes.shape != rows.shape):
        raise KernelInputError(f"expected an input [T, {width}], found {tuple(rows.shape)}")
    if fp8 is not None and width % FP8_STEP:
        raise KernelInputError(f"expected a multiple of {FP8_STEP} columns for an FP8 weight, found {width}")
    outputs = Outputs(bundle.segments, out_dtypes, num_tokens, rows.device)
    if num_tokens == 0 or width == 0:
        return outputs.zeroed()
    is_wide = tile is None and num_tokens >= WIDE.min_rows
    tile = tile or pick_tile(LINEAR_TILES, MANY_ROWS, num_tokens)
    rows = _dense_columns(rows)
    quantize = fp8 is not None and codes is None and num_tokens <= tile.quantize_rows
    if fp8 is not None and codes is None and not quantize:
        codes = _quantize(rows)
    x8 = rows if codes is None else _dense_columns(code_tensor(codes.codes))
    scale = rows if codes is None else _dense_columns(codes.scale)
    splits8 = 1 if fp8 is None else _common_splits(bundle, True, width, "fp8")
    splits16 = 1 if plain is None else _common_splits(bundle, False, width, "plain")
    if is_wide and takes_wide(fp8, plain, x8, rows):
        launch_wide(fp8, plain, QuantActivation(x8, scale), rows, outputs, splits8, splits16)
        return outputs.tensors()
    segments8, tiles8 = outputs.table(True, tile.outputs)
    segments16, tiles16 = outputs.table(False, tile.outputs)
    num_token_tiles = -(-num_tokens // tile.tokens)
    items = tiles8 * splits8 + tiles16 * splits16 if tile.is_split else tiles8 + tiles16
    partial, counters = _workspace(
        rows.device, tile, num_token_tiles * items, num_token_tiles * (tiles8 + tiles16), max(splits8, splits16)
    )
    w8 = None if fp8 is None else _source(_dense(code_tensor(fp8.data)), (tile.outputs, FP8_STEP))
    w16 = None if plain is None else _source(_dense(plain), (tile.outputs, PLAIN_STEP))
    x8_source = _source(x8, (tile.tokens, FP8_STEP)) if fp8 is not None else (rows, False)
    x16_source = _source(rows, (tile.tokens, PLAIN_STEP)) if plain is not None else (rows, False)
    has_w_desc = (w8 is None or w8[1]) and (w16 is None or w16[1])
    if not has_w_desc:
        w8 = None if fp8 is None else (_dense(code_tensor(fp8.data)), False)
        w16 = None if plain is None else (_dense(plain), False)
    # an unused pointer still needs a tensor
    linear_kernel[(num_token_tiles * items,)](
        rows if w8 is None else w8[0], rows if fp8 is None else _dense(fp8.scale),
        rows if w16 is None else w16[0], x8_source[0], scale, x16_source[0],
        LinearResult(outputs.narrow, outputs.wide, partial, counters), num_tokens,
        LinearSizes(
            0 if fp8 is None else fp8.shape[0], 0 if plain is None else plain.shape[0],
            x8.stride(0), scale.stride(0), rows.stride(0),
        ),
        K=width, SEGMENTS8=segments8, SEGMENTS16=segments16, TILES8=tiles8, TILES16=tiles16,
        SPLITS8=splits8, SPLITS16=splits16, BM=tile.outputs, BT=tile.tokens, BAND=tile.band,
        TOKENS_FIRST=tile.tokens_first, IS_SPLIT=tile.is_split, QUANTISE=quantize,
        W_DESC=has_w_desc, X8_DESC=x8_source[1], X16_DESC=x16_source[1],
        STAGES8=tile.stages, STAGES16=tile.plain_stages, **tile.options,
    )
    return outputs.tensors()


def launch_shuffled(x: Tensor, weight: ShuffledTensor, tile: LinearTile | None = None) -> Tensor:
    """`grouped_shuffled_kernel`; the tile follows from the number of rows unless a benchmark chooses it."""
    rows, rank = _grouped_operands(x, weight.shape)
    out = torch.empty(*x.shape[:2], rank, dtype=x.dtype, device=x.device)
    tile = tile or pick_shuffled_tile(x.shape[0], num_multiprocessors(x.device))
    _launch_shuffled(x, rows, weight, tile, out, None)
    return out


def launch_codes(x: Tensor, weight: ShuffledTensor) -> QuantActivation:
    """The same for up to CODED_ROWS rows, and the codes of the result instead of itself."""
    rows, rank = _grouped_operands(x, weight.shape)
    num_tokens, num_groups, _ = x.shape
    codes = torch.empty(num_tokens, num_groups * rank, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_tokens, num_groups * rank // ACTIVATION_GROUP, dtype=torch.uint8, device=x.device)
    _launch_shuffled(x, rows, weight, SHUFFLED_TILES[CODED_ROWS], codes, scale)
    return QuantActivation(codes, scale)


def _launch_shuffled(
    x: Tensor, rows: Tensor, weight: ShuffledTensor, tile: LinearTile, out: Tensor, scale: Tensor | None
) -> None:
    """Into `out`; with `scale`, codes and their scales."""
    check_launch(x, weight.data)
    num_tokens, num_groups, width = x.shape
    rank = weight.shape[0] // num_groups
    if rank % TILE_ROWS or width % TILE_COLS:
        raise KernelInputError(f"expected groups of whole tiles ({TILE_ROWS} x {TILE_COLS}), found {rank} x {width}")
    if out.numel() == 0:
        return
    splits = num_splits(weight.shape[0], width, "grouped")
    if rank % tile.outputs:
        tile = replace(tile, outputs=TILE_ROWS, num_warps=4)
    tiles, num_token_tiles = weight.shape[0] // tile.outputs, -(-num_tokens // tile.tokens)
    num_shares = splits if scale is None else 2 * splits  # of what one program adds up: two tiles for codes
    partial, counters = _workspace(
        x.device, tile, num_token_tiles * tiles * splits, num_token_tiles * tiles, num_shares
    )
    x_source = _source(rows, (tile.tokens, TILE_COLS))
    grouped_shuffled_kernel[(num_token_tiles * tiles * splits,)](
        weight.data, weight.scale, weight.out_scale, x_source[0],
        out if scale is None else GroupedCodes(code_tensor(out), scale), partial, counters, num_tokens, rows.stride(0),
        K=width, RANK=rank, GROUPS=num_groups, SPLITS=splits, BM=tile.outputs, BT=tile.tokens, BAND=tile.band,
        X_DESC=x_source[1], STAGES=tile.stages, CODES=scale is not None, **tile.options,
    )


def widened(weight: ShuffledTensor) -> Tensor:
    """A shuffled FP8 weight as bf16 [N, K], one launch. N and K are multiples of its tile."""
    num_rows, width = weight.shape
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=weight.device)
    widen_kernel[(num_rows // TILE_ROWS * (width // TILE_COLS),)](
        weight.data, weight.scale, weight.out_scale, out, K=width, num_warps=4, enable_fp_fusion=False
    )
    return out


def launch_grouped(x: Tensor, weight: Tensor, tile: LinearTile | None = None) -> Tensor:
    """`grouped_plain_kernel` for a bf16 weight; the tile as in `launch_shuffled`."""
    check_launch(x, weight)
    rows, rank = _grouped_operands(x, weight.shape)
    num_tokens, num_groups, width = x.shape
    out = torch.empty(num_tokens, num_groups, rank, dtype=x.dtype, device=x.device)
    if out.numel() == 0 or width == 0:
        return out.zero_()
    tile = tile or pick_tile(GROUPED_TILES, GROUPED_MANY_ROWS, num_tokens)
    splits = num_splits(weight.shape[0], width, "grouped")
    num_token_tiles = -(-num_tokens // tile.tokens)
    tiles = num_groups * -(-rank // tile.outputs)
    items = tiles * splits if tile.is_split else tiles
    partial, counters = _workspace(x.device, tile, num_token_tiles * items, num_token_tiles * tiles, splits)
    is_even = width % GROUPED_STEP == 0  # else a tile would end in the next group's columns
    w_source = _source(_dense(weight), (tile.outputs, GROUPED_STEP), is_even)
    x_source = _source(rows, (tile.tokens, GROUPED_STEP), is_even)
    grouped_plain_kernel[(num_token_tiles * items,)](
        w_source[0], x_source[0], out, partial, counters, num_tokens, rows.stride(0),
        K=width, RANK=rank, GROUPS=num_groups, SPLITS=splits, BM=tile.outputs, BT=tile.tokens, BAND=tile.band,
        TOKENS_FIRST=tile.tokens_first, IS_SPLIT=tile.is_split, W_DESC=w_source[1], X_DESC=x_source[1],
        STAGES=tile.stages, **tile.options,
    )
    return out


def _grouped_operands(x: Tensor, weight_shape: Sequence[int]) -> tuple[Tensor, int]:
    """The input as [T, G K] with contiguous columns, and R: the result is [T, G, R]."""
    _, num_groups, width = x.shape
    if weight_shape[1] != width or weight_shape[0] % num_groups:
        raise KernelInputError(f"expected a weight [{num_groups} * R, {width}], found {tuple(weight_shape)}")
    rank = weight_shape[0] // num_groups
    rows = x if x.stride(2) == 1 and x.stride(1) == width else x.contiguous()
    return rows.flatten(1), rank


def _common_splits(bundle: LinearBundle, is_fp8: bool, width: int, kind: str) -> int:
    """The splits of the segments of one format. A bundle has one number, that of its largest weight."""
    return min(
        num_splits(segment.num_rows, width, kind) for segment in bundle.segments if segment.is_fp8 == is_fp8
    )


def _quantize(x: Tensor) -> QuantActivation:
    """`fp8_quantize` of x [T, K] with contiguous columns, in a launch of its own."""
    num_tokens, width = x.shape
    row_groups = width // ACTIVATION_GROUP
    codes = torch.empty(num_tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_tokens, row_groups, dtype=torch.uint8, device=x.device)
    num_groups = num_tokens * row_groups
    quantize_kernel[(-(-num_groups // QUANTISE_GROUPS),)](
        x, code_tensor(codes), scale, num_groups, x.stride(0),
        ROW_GROUPS=row_groups, GROUP=ACTIVATION_GROUP, TILE=QUANTISE_GROUPS, num_warps=4, enable_fp_fusion=False,
    )
    return QuantActivation(codes, scale)


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _source(matrix: Tensor, block: tuple[int, int], is_allowed: bool = True) -> tuple[Any, bool]:
    """A matrix with contiguous columns as the kernel reads it: a tensor descriptor where the copy engine can take
    it, else itself. Second: whether it is a descriptor.
    """
    if not (is_allowed and can_be_copied(matrix)):
        return matrix, False
    descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return descriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block)), True


def _workspace(
    device: torch.device, tile: LinearTile, num_partials: int, num_counters: int, splits: int
) -> tuple[Tensor, Tensor]:
    """Partial tiles and counters of a launch whose splits are programs; any tensors otherwise."""
    if not tile.is_split or splits == 1:
        num_partials = num_counters = 0
    if num_counters > NUM_COUNTERS:
        raise KernelInputError(f"expected at most {NUM_COUNTERS} tiles with splits, found {num_counters}")
    partial = torch.empty(num_partials * tile.outputs * tile.tokens, dtype=torch.float32, device=device)
    return partial, arrival_counters("linear", device)
