"""How a weight lies in a file: the tensor itself, then its scales. From shapes alone: no torch, no data.

| format | tensors |
|---|---|
| plain | the tensor |
| fp8 | F8_E4M3, and a scale for each block: F8_E8M0, or F32 in the Base release |
| mxfp4 | I8 (two values a byte), `.scale` F8_E8M0 per 32 |
| nvfp4 | U8 (two values a byte), `.weight_scale` F8_E4M3 per 16, `.weight_scale_2` and `.input_scale` F32 |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.loader.header import ITEM_BYTES
from dsv4.loader.names import LogicalTensor, Role


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def weight_tensors(
    tensor: LogicalTensor, quant: str | None, block: tuple[int, int], *, dtype: str | None = None,
    scale_dtype: str = "F8_E8M0",
) -> tuple[StoredTensor, ...]:  # fmt: skip
    """The weight, then its scales. `quant`: a format of the table, or None for plain, then in `dtype` (by default what
    its role has); `block` and `scale_dtype` are those of fp8."""
    name, base = tensor.name, tensor.base
    if quant is None:
        usual = {Role.TABLE: "I64", Role.CONTROL: "F32"}.get(tensor.role, "BF16")
        return (StoredTensor(name, dtype or usual, tensor.shape),)
    rows, cols = tensor.shape
    if quant == "fp8":
        scale_shape = (-(-rows // block[0]), -(-cols // block[1]))
        return StoredTensor(name, "F8_E4M3", tensor.shape), StoredTensor(f"{base}.scale", scale_dtype, scale_shape)
    if quant == "mxfp4":
        scale = StoredTensor(f"{base}.scale", "F8_E8M0", (rows, cols // MXFP4_GROUP))
        return StoredTensor(name, "I8", (rows, cols // 2)), scale
    assert quant == "nvfp4", quant
    return (
        StoredTensor(name, "U8", (rows, cols // 2)),
        StoredTensor(f"{base}.weight_scale", "F8_E4M3", (rows, cols // NVFP4_GROUP)),
        StoredTensor(f"{base}.weight_scale_2", "F32", ()),
        StoredTensor(f"{base}.input_scale", "F32", ()),
    )
