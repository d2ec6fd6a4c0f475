"""Weights of linear layers as the kernels take them: which they take, and several on one input for one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.formats.tensors import AnyWeight, QuantFormat, QuantTensor, Weight, as_loaded
from dsv4.ops.linear.kernel_linear import FP8_STEP


def takes_codes(weight: AnyWeight) -> bool:
    """Whether the layer quantises its input."""
    weight = as_loaded(weight)
    return isinstance(weight, QuantTensor) and weight.format is not QuantFormat.NVFP4


def is_kernel_weight(weight: Weight) -> bool:
    """Whether the kernels take this weight: bf16, or FP8 in blocks of 128 x 128."""
    if not isinstance(weight, QuantTensor):
        return weight.dtype == torch.bfloat16
    return (
        weight.format is QuantFormat.FP8_BLOCK
        and weight.block == (FP8_STEP, FP8_STEP)
        and weight.data.dim() == 2
        and weight.scale.dtype in (torch.uint8, torch.float32)
    )


@dataclass(frozen=True)
class Segment:
    """One weight of a bundle: its rows of the FP8 or of the bf16 matrix, and where its scales begin."""

    is_fp8: bool
    first_row: int
    num_rows: int
    scale_row: int


@dataclass(frozen=True)
class LinearBundle:
    """Weights [N_i, K] on one input, made ready for one launch: the FP8 ones end to end, and the bf16 ones.

    Built once at load. `weights` are views of it in the given order; a loader keeps those and lets the originals go.
    """

    fp8: QuantTensor | None
    plain: Tensor | None
    segments: tuple[Segment, ...]

    @classmethod
    def build(cls, weights: Sequence[Weight]) -> LinearBundle:
        """FP8 weights of one scale dtype and bf16 weights, in any order; ValueError for others."""
        quantised = [weight for weight in weights if isinstance(weight, QuantTensor)]
        plain = [weight for weight in weights if not isinstance(weight, QuantTensor)]
        if not all(is_kernel_weight(weight) for weight in weights) or len({w.scale.dtype for w in quantised}) > 1:
            raise ValueError("expected FP8 weights of one scale dtype in blocks of 128 x 128, and bf16 weights")
        if len({weight.shape[1] for weight in weights}) != 1:
            raise ValueError(f"expected weights of one width, found {[tuple(weight.shape) for weight in weights]}")
        segments, rows, scale_row = [], {True: 0, False: 0}, 0
        for weight in weights:
            is_fp8 = isinstance(weight, QuantTensor)
            segments.append(Segment(is_fp8, rows[is_fp8], weight.shape[0], scale_row if is_fp8 else 0))
            rows[is_fp8] += weight.shape[0]
            scale_row += weight.scale.shape[0] if isinstance(weight, QuantTensor) else 0
        fp8 = None
        if quantised:
            codes = _joined([weight.data.view(torch.uint8) for weight in quantised]).view(torch.float8_e4m3fn)
            fp8 = replace(quantised[0], data=codes, scale=_joined([weight.scale for weight in quantised]))
        return cls(fp8, _joined(plain) if plain else None, tuple(segments))

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(self._view(segment) for segment in self.segments)

    def _view(self, segment: Segment) -> Weight:
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        if not segment.is_fp8:
            assert self.plain is not None
            return self.plain[rows]
        assert self.fp8 is not None
        scales = slice(segment.scale_row, segment.scale_row - (-segment.num_rows // FP8_STEP))
        return replace(self.fp8, data=self.fp8.data[rows], scale=self.fp8.scale[scales])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts. `torch.cat` on "meta" imports torch's compiler, which takes a second of a start."""
    lengths = [part.shape[0] for part in parts]
    whole = parts[0].new_empty((sum(lengths), *parts[0].shape[1:]))
    for place, part in zip(whole.split(lengths), parts, strict=True):
        place.copy_(part)
    return whole
