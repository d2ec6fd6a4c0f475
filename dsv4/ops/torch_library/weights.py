"""How weights are spelled out for the ops that multiply with them, and read back.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4.formats.layouts import TILE_COLS, TILE_ROWS, ShuffledTensor
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight
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
        tensors += weight.parts
    return tensors


def bundle_tensors(bundle: LinearBundle) -> tuple[list[Tensor], list[int]]:
    """`weights` and `segments` of `linears`; of a segment is_fp8, first_row, num_rows, scale_row."""
    matrices = [matrix for matrix in (bundle.fp8, bundle.plain) if matrix is not None]
    numbers = [(int(s.is_fp8), s.first_row, s.num_rows, s.scale_row) for s in bundle.segments]
    return weight_tensors(*matrices), [number for segment in numbers for number in segment]


def shuffled_tensors(*weights: ShuffledTensor) -> list[Tensor]:
    """What `moe` and `fp4_linear` take."""
    return [tensor for weight in weights for tensor in (weight.data, weight.scale, weight.out_scale)]


def weights_of(tensors: Sequence[Tensor]) -> list[Weight]:
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


def weight_of(tensors: Sequence[Tensor]) -> Weight:
    """The one weight of a list."""
    weights = weights_of(tensors)
    if len(weights) != 1:
        raise KernelInputError(f"expected the tensors of one weight, found {len(weights)} weights")
    return weights[0]


def bundle_of(tensors: Sequence[Tensor], numbers: Sequence[int]) -> LinearBundle:
    """The inverse of `bundle_tensors`."""
    matrices = weights_of(tensors)
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


def shuffled_of(tensors: Sequence[Tensor], number_format: QuantFormat, shape: Sequence[int]) -> ShuffledTensor:
    """A weight of a logical shape as the launchers read it: what only `unshuffle` needs is not there."""
    if len(tensors) != 3:
        raise KernelInputError(f"expected three tensors, found {len(tensors)}")
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


def experts_of(
    tensors: Sequence[Tensor], number_format: QuantFormat, stack: Sequence[int], width: int, dim: int
) -> tuple[ShuffledTensor, ShuffledTensor, ShuffledTensor]:
    """w1 [.., I, D], w2 [.., D, I] and w3, three tensors each."""
    if len(tensors) != 9:
        raise KernelInputError(f"expected nine tensors twice, found {len(tensors)}")
    shapes = (width, dim), (dim, width), (width, dim)
    w1, w2, w3 = (
        shuffled_of(tensors[3 * i : 3 * i + 3], number_format, (*stack, *shape)) for i, shape in enumerate(shapes)
    )
    return w1, w2, w3
