"""`RowStore`: a tensor of cached rows in a `RowFormat`, and the exact codec between rows and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats.e8m0 import E4M3_MAX, FP8_AMAX_FLOOR, ceil_e8m0, e8m0_to_float
from dsv4.formats.fp4 import mxfp4_dequantize, mxfp4_quantize
from dsv4.formats.fp8 import fp8_dequantize, fp8_quantize
from dsv4.formats.rows import ENTRY_GROUP, RowFormat, RowKind


@dataclass(frozen=True)
class RowStore:
    """Rows addressed by leading indices: [slot, ring row], [block, entry], or just [token] for rows not yet stored.

    data: uint8 [..., data_bytes], or the plain dtype [..., dim]. scales: uint8 [..., scale_bytes], None where the
    format has none.
    """

    data: Tensor
    scales: Tensor | None
    format: RowFormat

    @classmethod
    def allocate(cls, leading: tuple[int, ...], fmt: RowFormat, dtype: torch.dtype, device: torch.device) -> RowStore:
        """Zeroed rows. `dtype` is the values' dtype for plain rows and unused otherwise."""
        if fmt.kind is RowKind.PLAIN:
            return cls(torch.zeros((*leading, fmt.dim), dtype=dtype, device=device), None, fmt)
        data = torch.zeros((*leading, fmt.data_bytes), dtype=torch.uint8, device=device)
        scales = torch.zeros((*leading, fmt.scale_bytes), dtype=torch.uint8, device=device)
        return cls(data, scales, fmt)

    @property
    def nbytes(self) -> int:
        scale_bytes = 0 if self.scales is None else self.scales.numel()
        return self.data.numel() * self.data.element_size() + scale_bytes

    def __getitem__(self, index: tuple[Tensor | int | slice, ...]) -> RowStore:
        """The rows at `index` (one index for each leading dimension)."""
        return RowStore(self.data[index], None if self.scales is None else self.scales[index], self.format)

    def __setitem__(self, index: tuple[Tensor, ...], rows: RowStore) -> None:
        """Copy encoded rows into place; the formats must be the same."""
        assert rows.format == self.format, (rows.format, self.format)
        self.data[index] = rows.data
        if self.scales is not None:
            assert rows.scales is not None
            self.scales[index] = rows.scales


def encode_rows(values: Tensor, fmt: RowFormat) -> RowStore:
    """values [..., dim] -> encoded rows [...], by the model's own quantisation rule of each kind."""
    if fmt.kind is RowKind.PLAIN:
        return RowStore(values.contiguous(), None, fmt)
    if fmt.kind is RowKind.INDEX_FP4:
        packed, scale = mxfp4_quantize(values)
        return RowStore(packed, scale, fmt)
    if fmt.kind is RowKind.INDEX_FP8:
        codes, factor = _fp8_row_quantize(values)
        return RowStore(codes.view(torch.uint8), factor.view(torch.uint8), fmt)
    nope = fmt.dim - fmt.rope_dim
    codes, scale = fp8_quantize(values[..., :nope], ENTRY_GROUP)
    rope = values[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data = torch.cat((codes.view(torch.uint8), rope), -1)
    return RowStore(data, torch.constant_pad_nd(scale, (0, fmt.scale_bytes - scale.shape[-1])), fmt)


def decode_rows(rows: RowStore) -> Tensor:
    """Encoded rows [...] -> values [..., dim]: bf16 for the quantised kinds (exact), the plain dtype otherwise."""
    fmt = rows.format
    if fmt.kind is RowKind.PLAIN:
        return rows.data
    assert rows.scales is not None
    if fmt.kind is RowKind.INDEX_FP4:
        return mxfp4_dequantize(rows.data, rows.scales).to(torch.bfloat16)
    if fmt.kind is RowKind.INDEX_FP8:
        factor = rows.scales.contiguous().view(torch.float32)  # [..., 1]
        return (rows.data.view(torch.float8_e4m3fn).float() * factor).to(torch.bfloat16)
    nope = fmt.dim - fmt.rope_dim
    codes = rows.data[..., :nope].contiguous().view(torch.float8_e4m3fn)
    values = fp8_dequantize(codes, rows.scales[..., : nope // ENTRY_GROUP], ENTRY_GROUP).to(torch.bfloat16)
    rope = rows.data[..., nope:].contiguous().view(torch.bfloat16)
    return torch.cat((values, rope), -1)


def decode_joined(parts: Sequence[RowStore]) -> Tensor:
    """Values [N, dim] of rows [N_i], end to end."""
    if len({part.format for part in parts}) > 1:
        return torch.cat([decode_rows(part) for part in parts])
    scales = None if parts[0].scales is None else torch.cat([part.scales for part in parts if part.scales is not None])
    return decode_rows(RowStore(torch.cat([part.data for part in parts]), scales, parts[0].format))


def _fp8_row_quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """One power-of-two FP32 scale for the whole row: codes [..., dim], factor fp32 [..., 1]."""
    amax = values.float().abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR)
    factor = e8m0_to_float(ceil_e8m0(amax, E4M3_MAX))
    codes = (values.float() / factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, factor
