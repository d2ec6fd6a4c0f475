"""What a checkpoint weighs, by part of the model and by number format. Headers only: instant for any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv4.formats.tensors import QuantFormat
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import TensorInfo
from dsv4.loader.names import Naming, detect_naming
from dsv4.loader.resolve import NVFP4_SUFFIXES, SCALE_SUFFIXES, weight_format

_SUFFIXES = (*SCALE_SUFFIXES, *NVFP4_SUFFIXES)
# first match wins
_PARTS = (
    (".experts.", "routed experts"), (".shared_experts.", "shared experts"), (".ffn.gate.", "router"),
    (".mlp.gate.", "router"), (".indexer.", "indexer"), (".compressor.", "compressor"), (".attn.", "attention"),
    (".self_attn.", "attention"), (".markov_head.", "draft projections"), (".confidence_head.", "draft projections"),
    ("embed", "embedding"), ("lm_head.", "head"), ("hc_", "hyper-connections"),
    ("_hc.", "hyper-connections"), ("norm", "norms"), ("head.", "head"),
    ("_proj.", "draft projections"),
)  # fmt: skip


@dataclass(frozen=True)
class SummaryRow:
    """One part of the model in one format. Scales count as bytes, not as parameters."""

    part: str
    format: str
    is_draft: bool
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class CheckpointSummary:
    """Rows in the order parts first appear; `main` and `draft` (MTP or DSpark) blocks are counted apart."""

    naming: Naming
    rows: tuple[SummaryRow, ...]

    @property
    def num_tensors(self) -> int:
        return sum(row.num_tensors for row in self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def num_parameters(self) -> int:
        """Of the main model, without the draft blocks."""
        return sum(row.num_parameters for row in self.rows if not row.is_draft)

    @property
    def num_draft_parameters(self) -> int:
        return sum(row.num_parameters for row in self.rows if row.is_draft)

    def bytes_by(self, key: Callable[[SummaryRow], str]) -> dict[str, int]:
        """Bytes grouped by `key`, e.g. `lambda row: row.format`."""
        totals: dict[str, int] = {}
        for row in self.rows:
            totals[key(row)] = totals.get(key(row), 0) + row.num_bytes
        return totals


def checkpoint_summary(checkpoint: Checkpoint) -> CheckpointSummary:
    """Count tensors, parameters and bytes of whatever the checkpoint holds; needs no config and checks nothing."""
    counts: dict[tuple[str, str, bool], list[int]] = {}
    for info in checkpoint.tensors.values():
        owner = _owner(checkpoint, info)
        quant = weight_format(checkpoint.tensors, owner.name.removesuffix(".weight"), owner.dtype)
        key = (_part(info.name), str(quant or owner.dtype.lower()), info.name.startswith("mtp."))
        count = counts.setdefault(key, [0, 0, 0])
        count[0] += 1
        if owner is info:
            count[1] += info.numel * (2 if quant in (QuantFormat.MXFP4, QuantFormat.NVFP4) else 1)
        count[2] += info.nbytes
    rows = tuple(SummaryRow(*key, *count) for key, count in counts.items())
    return CheckpointSummary(detect_naming(checkpoint.tensors), rows)


def _owner(checkpoint: Checkpoint, info: TensorInfo) -> TensorInfo:
    """The weight a scale belongs to; any other tensor is its own owner."""
    for suffix in _SUFFIXES:
        if info.name.endswith(suffix):
            return checkpoint.tensors.get(info.name.removesuffix(suffix) + ".weight", info)
    return info


def _part(name: str) -> str:
    return next((part for marker, part in _PARTS if marker in name), "other")
