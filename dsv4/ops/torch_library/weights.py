"""The ops that multiply with weights, and how a weight is spelled out.

| weight | tensors |
|---|---|
| plain | the tensor |
| FP8 in blocks of 128 x 128 | codes, scale |
| MXFP4 | data, scale |
| NVFP4 | data, scale, global scale |
| shuffled (formats/layouts.py) | data, scale, out_scale; format and logical shape are arguments |

Dtypes tell the first four apart, so that several weights are one list, tensor after tensor. A bundle is the list of its
FP8 and its bf16 matrix, and four numbers a segment. `weight_tensors`, `bundle_tensors` and `shuffled_tensors` make
these lists; once, at load.

x is rows, or the codes of rows where `x_scale` is given. Schemas know no lists of dtypes: `in_fp32` says of every
result whether it is fp32, else it has x's dtype (bf16 for codes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4.formats.layouts import TILE_COLS, TILE_ROWS, ShuffledTensor
from dsv4.formats.tensors import QuantActivation, QuantFormat, QuantTensor, Weight
from dsv4.ops import linear as linear_ops
from dsv4.ops import moe as moe_ops
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.linear import LinearBundle, Segment

FP8 = torch.float8_e4m3fn
BLOCK = (128, 128)

# ---- weights as lists of tensors, and back ----


def weight_tensors(*weights: Weight) -> list[Tensor]:
    """What `linear`, `linears` and `grouped_linear` take."""
    tensors: list[Tensor] = []
    for weight in weights:
        if not isinstance(weight, QuantTensor):
            tensors.append(weight)
            continue
        if weight.format is QuantFormat.FP8_BLOCK and weight.block != BLOCK:
            raise ValueError(f"expected FP8 weights in blocks of {BLOCK}, found {weight.block}")
        tensors += [weight.data, weight.scale]
        tensors += [] if weight.global_scale is None else [weight.global_scale]
    return tensors


def bundle_tensors(bundle: LinearBundle) -> tuple[list[Tensor], list[int]]:
    """`weights` and `segments` of `linears`; of a segment is_fp8, first_row, num_rows, scale_row."""
    matrices = [matrix for matrix in (bundle.fp8, bundle.plain) if matrix is not None]
    numbers = [(int(s.is_fp8), s.first_row, s.num_rows, s.scale_row) for s in bundle.segments]
    return weight_tensors(*matrices), [number for segment in numbers for number in segment]


def shuffled_tensors(*weights: ShuffledTensor) -> list[Tensor]:
    """What `moe` and `fp4_linear` take."""
    return [tensor for weight in weights for tensor in (weight.data, weight.scale, weight.out_scale)]


def _weights(tensors: Sequence[Tensor]) -> list[Weight]:
    """The inverse of `weight_tensors`."""
    rest: Iterator[Tensor] = iter(tensors)
    weights: list[Weight] = []
    try:
        for data in rest:
            if data.dtype == FP8:
                weights.append(QuantTensor(data, next(rest), QuantFormat.FP8_BLOCK))
            elif data.dtype != torch.uint8:
                weights.append(data)
            elif (scale := next(rest)).dtype == FP8:
                weights.append(QuantTensor(data, scale, QuantFormat.NVFP4, next(rest)))
            else:
                weights.append(QuantTensor(data, scale, QuantFormat.MXFP4))
    except StopIteration:
        found = [tensor.dtype for tensor in tensors]
        raise KernelInputError(f"expected every weight's tensors one after another, found {found}") from None
    return weights


def _weight(tensors: Sequence[Tensor]) -> Weight:
    weights = _weights(tensors)
    if len(weights) != 1:
        raise KernelInputError(f"expected the tensors of one weight, found {len(weights)} weights")
    return weights[0]


def _bundle(tensors: Sequence[Tensor], numbers: Sequence[int]) -> LinearBundle:
    """The inverse of `bundle_tensors`."""
    matrices = _weights(tensors)
    fp8 = [matrix for matrix in matrices if isinstance(matrix, QuantTensor)]
    plain = [matrix for matrix in matrices if not isinstance(matrix, QuantTensor)]
    if len(fp8) > 1 or len(plain) > 1 or len(numbers) % 4:
        raise KernelInputError(
            f"expected at most one FP8 and one bf16 matrix and four numbers a segment, found {len(fp8)}, {len(plain)} "
            f"and {len(numbers)} numbers"
        )
    segments = tuple(
        Segment(bool(is_fp8), first_row, num_rows, scale_row)
        for is_fp8, first_row, num_rows, scale_row in zip(*(numbers[i::4] for i in range(4)), strict=True)
    )
    rows = {True: fp8[0].shape[0] if fp8 else 0, False: plain[0].shape[0] if plain else 0}
    for segment in segments:
        if segment.first_row + segment.num_rows > rows[segment.is_fp8]:
            raise KernelInputError(f"expected segments within {rows[True]} and {rows[False]} rows, found {segment}")
    return LinearBundle(fp8[0] if fp8 else None, plain[0] if plain else None, segments)


# of a tile: words of the data, words of the scales
_TILES = {
    QuantFormat.NVFP4: ((TILE_ROWS, 16), (TILE_ROWS, 2)),
    QuantFormat.MXFP4: ((TILE_ROWS, 16), (TILE_ROWS, 1)),
    QuantFormat.FP8_BLOCK: ((TILE_ROWS, 32), ()),
}


def _shuffled(tensors: Sequence[Tensor], number_format: QuantFormat, shape: Sequence[int]) -> ShuffledTensor:
    """A weight of a logical shape as the launchers read it: what only `unshuffle` needs is not there."""
    data, scale, out_scale = tensors
    *stack, num_rows, num_cols = shape
    tiles = (*stack, -(-num_rows // TILE_ROWS), -(-num_cols // TILE_COLS))
    data_tile, scale_tile = _TILES[number_format]
    if data.shape != (*tiles, *data_tile) or scale.shape != (*tiles, *scale_tile) or out_scale.shape != tuple(stack):
        raise KernelInputError(
            f"expected a shuffled {number_format} weight {tuple(shape)}, found data {tuple(data.shape)}, "
            f"scale {tuple(scale.shape)} and out_scale {tuple(out_scale.shape)}"
        )
    dtype = torch.uint8
    return ShuffledTensor(data, scale, out_scale, out_scale, number_format, torch.Size(shape), BLOCK, dtype)


def _activation(x: Tensor, x_scale: Tensor | None) -> Tensor | QuantActivation:
    return x if x_scale is None else QuantActivation(x, x_scale)


def _alone(results: Sequence[Tensor]) -> list[Tensor]:
    """Results that share memory, apart: those of an op may not."""
    seen: set[int] = set()
    apart = []
    for result in results:
        owner = result.untyped_storage().data_ptr()
        apart.append(result.clone() if owner in seen and result.numel() else result)
        seen.add(owner)
    return apart


# ---- linear layers ----


@torch.library.custom_op("dsv4::linear", mutates_args=())
def linear(x: Tensor, x_scale: Tensor | None, weight: Sequence[Tensor], out_dtype: torch.dtype | None = None) -> Tensor:
    return linear_ops.linear(_activation(x, x_scale), _weight(weight), out_dtype)


@linear.register_fake
def _(x: Tensor, x_scale: Tensor | None, weight: Sequence[Tensor], out_dtype: torch.dtype | None = None) -> Tensor:
    plain_dtype = x.dtype if x_scale is None else torch.bfloat16
    return x.new_empty(x.shape[0], weight[0].shape[0], dtype=out_dtype or plain_dtype)


@torch.library.custom_op("dsv4::linears", mutates_args=())
def linears(
    x: Tensor, x_scale: Tensor | None, weights: Sequence[Tensor], in_fp32: Sequence[bool],
    codes: Tensor | None = None, codes_scale: Tensor | None = None, segments: Sequence[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    if (codes is None) != (codes_scale is None):
        raise KernelInputError("expected codes and their scale, or neither, found one of them")
    quant = None if codes is None or codes_scale is None else QuantActivation(codes, codes_scale)
    given = _weights(weights) if segments is None else _bundle(weights, segments)
    out_dtypes = [torch.float32 if is_wide else None for is_wide in in_fp32]
    return _alone(linear_ops.linears(_activation(x, x_scale), given, out_dtypes, quant))


@linears.register_fake
def _(
    x: Tensor, x_scale: Tensor | None, weights: Sequence[Tensor], in_fp32: Sequence[bool],
    codes: Tensor | None = None, codes_scale: Tensor | None = None, segments: Sequence[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    plain_dtype = x.dtype if x_scale is None else torch.bfloat16
    sizes = [weight.shape[0] for weight in _weights(weights)] if segments is None else segments[2::4]
    return [
        x.new_empty(x.shape[0], size, dtype=torch.float32 if is_wide else plain_dtype)
        for size, is_wide in zip(sizes, in_fp32, strict=True)
    ]


@torch.library.custom_op("dsv4::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return linear_ops.grouped_linear(x, _weight(weight))


@grouped_linear.register_fake
def _(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    num_tokens, num_groups, _ = x.shape
    return x.new_empty(num_tokens, num_groups, weight[0].shape[0] // num_groups)


# ---- experts ----


@torch.library.custom_op("dsv4::moe", mutates_args=())
def moe(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Sequence[Tensor], shared: Sequence[Tensor], limit: float,
    format: str, width: int,
) -> Tensor:  # fmt: skip
    """`routed` and `shared`: three tensors each of w1 [.., I, D], w2 [.., D, I] and w3. `format` of the routed ones,
    `width` I.
    """
    if len(routed) != 9 or len(shared) != 9:
        raise KernelInputError(f"expected nine tensors twice, found {len(routed)} and {len(shared)}")
    num_experts, dim = routed[0].shape[0], x.shape[-1]
    shapes = (width, dim), (dim, width), (width, dim)
    w1, w2, w3 = (
        _shuffled(routed[3 * i : 3 * i + 3], QuantFormat(format), (num_experts, *shape))
        for i, shape in enumerate(shapes)
    )
    s1, s2, s3 = (_shuffled(shared[3 * i : 3 * i + 3], QuantFormat.FP8_BLOCK, shape) for i, shape in enumerate(shapes))
    return moe_ops.moe(x, experts, weights, (w1, w2, w3), (s1, s2, s3), limit=limit)


@moe.register_fake
def _(
    x: Tensor, experts: Tensor, weights: Tensor, routed: Sequence[Tensor], shared: Sequence[Tensor], limit: float,
    format: str, width: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::fp4_linear", mutates_args=())
def fp4_linear(
    x: Tensor, weight: Sequence[Tensor], format: str, shape: Sequence[int], out_dtype: torch.dtype | None = None
) -> Tensor:
    """`shape`: the logical one, [N, K]."""
    if len(weight) != 3:
        raise KernelInputError(f"expected three tensors, found {len(weight)}")
    return moe_ops.fp4_linear(x, _shuffled(weight, QuantFormat(format), shape), out_dtype)


@fp4_linear.register_fake
def _(
    x: Tensor, weight: Sequence[Tensor], format: str, shape: Sequence[int], out_dtype: torch.dtype | None = None
) -> Tensor:
    return x.new_empty(x.shape[0], shape[0], dtype=out_dtype or x.dtype)


OPS = (linear, linears, grouped_linear, moe, fp4_linear)
