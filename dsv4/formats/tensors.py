"""`QuantTensor`: a quantised weight that says what it is. `QuantActivation`: the input an FP8 product takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.exact_sums import RUN, weight_operand
from dsv4.formats.fp4 import mxfp4_dequantize, nvfp4_dequantize
from dsv4.formats.fp8 import fp8_block_dequantize, fp8_dequantize, fp8_groups


class QuantFormat(StrEnum):
    FP8_BLOCK = "fp8"  # E4M3 codes, one E8M0 or FP32 scale per block
    MXFP4 = "mxfp4"  # E2M1 nibbles, E8M0 scale per 32
    NVFP4 = "nvfp4"  # E2M1 nibbles, E4M3 scale per 16, one FP32 scale per matrix


@dataclass(frozen=True)
class QuantTensor:
    """A weight [..., N, K] in a named format. A leading dimension stacks experts.

    | format | data | scale | global_scale |
    |---|---|---|---|
    | fp8 | float8_e4m3fn [..., N, K] | uint8 (E8M0 codes) or fp32 [..., ceil(N/bn), ceil(K/bk)] | - |
    | mxfp4 | uint8 [..., N, K/2] | uint8 (E8M0 codes) [..., N, K/32] | - |
    | nvfp4 | uint8 [..., N, K/2] | float8_e4m3fn [..., N, K/16] | fp32 [...] |
    """

    data: Tensor
    scale: Tensor
    format: QuantFormat
    global_scale: Tensor | None = None
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> torch.Size:
        """Logical shape, in weights."""
        per_item = 1 if self.format is QuantFormat.FP8_BLOCK else 2
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] * per_item))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Its tensors, as files have them one after another."""
        return (self.data, self.scale) if self.global_scale is None else (self.data, self.scale, self.global_scale)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantTensor:
        """The same weight with every tensor changed."""
        data, scale, *whole = map(change, self.parts)
        return QuantTensor(data, scale, self.format, whole[0] if whole else None, self.block)

    def __getitem__(self, index: int) -> QuantTensor:
        """One matrix of a stack."""
        return self.map(lambda part: part[index])

    def to(self, device: torch.device | str) -> QuantTensor:
        return self.map(lambda part: part.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight's exact values; rounded once if `dtype` is narrower than fp32."""
        if self.format is QuantFormat.FP8_BLOCK:
            return fp8_block_dequantize(self.data, self.scale, self.block).to(dtype)
        if self.format is QuantFormat.MXFP4:
            return mxfp4_dequantize(self.data, self.scale).to(dtype)
        assert self.global_scale is not None
        return nvfp4_dequantize(self.data, self.scale, self.global_scale[..., None, None]).to(dtype)


ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class QuantActivation:
    """An activation in E4M3, one E8M0 scale per row and 128 channels: codes [..., K], scale uint8 [..., K / 128]."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> QuantActivation:
        """x [..., K] quantised."""
        codes, scale, factor = fp8_groups(x, ACTIVATION_GROUP)
        made = cls(codes.flatten(-2), scale.view(torch.uint8).squeeze(-1))
        made.__dict__["runs"] = codes.double() * factor
        return made

    def dequantize(self) -> Tensor:
        """fp32 [..., K], exact."""
        return fp8_dequantize(self.codes, self.scale, ACTIVATION_GROUP)

    @cached_property
    def runs(self) -> Tensor:
        """fp64 [..., C, 128], on the grid of exact sums: the codes of one scale span 18 bits."""
        assert RUN == ACTIVATION_GROUP
        return self.codes.double().unflatten(-1, (-1, RUN)) * e8m0_to_float(self.scale).unsqueeze(-1)


def quantised_runs(x: Tensor) -> Tensor:
    """`QuantActivation.of(x).runs`, without what only kernels read."""
    codes, _, factor = fp8_groups(x, ACTIVATION_GROUP)
    return codes.double() * factor


Weight = Tensor | QuantTensor


class WideWeight:
    """A weight of the oracles that keeps its fp64 operand (formats/exact_sums.py) from its first product on.

    source  the weight as loaded; after a change of its values, call `forget_operands`
    dtype   what its values are rounded to first
    """

    def __init__(self, source: Weight, dtype: torch.dtype = torch.float32) -> None:
        self.source = source
        self.dtype = dtype
        self._matrices: dict[int, WideWeight] = {}
        self._joined: dict[tuple[int, ...], tuple[Tensor, tuple[WideWeight, ...]]] = {}

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def nbytes(self) -> int:
        """Of the operand, made or not."""
        return self.shape.numel() * torch.float64.itemsize

    @cached_property
    def operand(self) -> Tensor:
        """fp64 [C, R, N]."""
        return weight_operand(dequantize(self.source, self.dtype))

    def forget_operands(self) -> None:
        """The source has new values; operands are made of them again when they are needed."""
        self.__dict__.pop("operand", None)
        self._matrices.clear()
        self._joined.clear()

    def joined_operand(self, others: tuple[WideWeight, ...]) -> Tensor:
        """The operand of this weight's rows and then those of others that always meet the same input: one product.

        Kept here; the operands of the single weights are not.
        """
        if not others:
            return self.operand
        key = tuple(map(id, others))  # whose owners are kept as long
        if key not in self._joined:
            parts = [dequantize(weight.source, weight.dtype) for weight in (self, *others)]
            self._joined[key] = weight_operand(torch.cat(parts)), others
        return self._joined[key][0]

    def __getitem__(self, index: int) -> WideWeight:
        """One matrix of a stack: the same object each time."""
        if index not in self._matrices:
            self._matrices[index] = WideWeight(self.source[index], self.dtype)
        return self._matrices[index]


AnyWeight = Weight | WideWeight


def as_loaded(weight: AnyWeight) -> Weight:
    """Without what was kept."""
    return weight.source if isinstance(weight, WideWeight) else weight


def operand_of(weight: AnyWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The fp64 operand [C, R, N] of a weight's values, rounded to `dtype`."""
    if not isinstance(weight, WideWeight):
        return weight_operand(dequantize(weight, dtype))
    assert weight.dtype == dtype, (weight.dtype, dtype)
    return weight.operand


def dequantize(weight: AnyWeight, dtype: torch.dtype) -> Tensor:
    """Any weight as a plain tensor of `dtype`."""
    weight = as_loaded(weight)
    return weight.dequantize(dtype) if isinstance(weight, QuantTensor) else weight.to(dtype)
