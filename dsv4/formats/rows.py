"""Byte layout of one cached row: an attention entry (key = value) or an indexer key. Arithmetic only, no torch.

| kind | data bytes | scale bytes | for Flash |
|---|---|---|---|
| entry_fp8 | nope E4M3, then rope BF16 | E8M0 per 64 nope dims, padded to 8 | 576 + 8 = 584 |
| index_fp4 | dim / 2 packed E2M1 | E8M0 per 32 dims | 64 + 4 = 68 |
| index_fp8 | dim E4M3 | one FP32 (a power of two) | 128 + 4 = 132 |
| plain | dim x itemsize | none | unquantised rows of the `exact` numerics |
"""

from dataclasses import dataclass
from enum import StrEnum

from dsv4.errors import Dsv4Error

ENTRY_GROUP = 64
MXFP4_GROUP, NVFP4_GROUP = 32, 16  # values with one scale
INDEX_FP4_GROUP = MXFP4_GROUP


class RowError(Dsv4Error, ValueError):
    """A model's rows have no such format."""


class RowKind(StrEnum):
    ENTRY_FP8 = "entry_fp8"
    INDEX_FP4 = "index_fp4"
    INDEX_FP8 = "index_fp8"
    PLAIN = "plain"


@dataclass(frozen=True)
class RowFormat:
    """`dim` values a row, the last `rope_dim` of them kept in BF16 by ENTRY_FP8; `itemsize` counts for PLAIN only."""

    kind: RowKind
    dim: int
    rope_dim: int = 0
    itemsize: int = 0

    def __post_init__(self) -> None:
        if self.kind is RowKind.ENTRY_FP8 and (self.dim - self.rope_dim) % ENTRY_GROUP:
            raise RowError(
                f"FP8 cache entries need head_dim - qk_rope_head_dim to be a multiple of {ENTRY_GROUP}, "
                f"found {self.dim} - {self.rope_dim}; use numerics='exact'"
            )
        if self.kind is RowKind.INDEX_FP4 and self.dim % INDEX_FP4_GROUP:
            raise RowError(f"FP4 index keys need index_head_dim to be a multiple of {INDEX_FP4_GROUP}: {self.dim}")
        if (self.kind is RowKind.PLAIN) != (self.itemsize > 0):
            raise RowError("itemsize is given for plain rows, and for them only")

    @property
    def data_bytes(self) -> int:
        if self.kind is RowKind.ENTRY_FP8:
            return self.dim - self.rope_dim + 2 * self.rope_dim
        if self.kind is RowKind.INDEX_FP4:
            return self.dim // 2
        return self.dim if self.kind is RowKind.INDEX_FP8 else self.dim * self.itemsize

    @property
    def scale_bytes(self) -> int:
        if self.kind is RowKind.ENTRY_FP8:
            num_groups = (self.dim - self.rope_dim) // ENTRY_GROUP
            return -(-num_groups // 8) * 8
        if self.kind is RowKind.INDEX_FP4:
            return self.dim // INDEX_FP4_GROUP
        return 4 if self.kind is RowKind.INDEX_FP8 else 0

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes
