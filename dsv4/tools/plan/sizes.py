"""How many parameters and bytes a checkpoint has, tensor by tensor, from the config alone. No torch, no files.

The official list reproduces the published index exactly: bytes are those of the tensors, without safetensors headers.

| experts | routed experts | other matrices | their scales | found in |
|---|---|---|---|---|
| mxfp4 | E2M1, one E8M0 per 32 | E4M3 | E8M0 per block | DeepSeek's release |
| nvfp4 | E2M1, one E4M3 per 16, two FP32 a matrix; draft experts stay MXFP4 | E4M3 | E8M0 per block | ModelOpt |
| fp8 | E4M3, one FP32 per block | E4M3 | FP32 per block | the Base release |
| bf16 | BF16 | BF16 | none | dequantised checkpoints |

Compressors, `weights_proj`, gates, norms and the vocabulary matrices are BF16 in all of them; hyper-connections, sinks,
ape and gate biases FP32; hash tables I64.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import get_args

from dsv4.config import ConfigError, ModelConfig
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.loader.layout import weight_tensors
from dsv4.loader.names import LogicalTensor, Role, expected_tensors
from dsv4.loader.write.config_file import ExpertFormat

EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)

# of the main model, as they are listed
PARTS = (
    "embedding", "output head", "norms", "hyper-connections", "attention", "routers", "shared experts",
    "routed experts", "compressors", "indexers",
)  # fmt: skip
_MARKERS = (  # the first that occurs in a name decides
    (".experts.", "routed experts"), (".shared_experts.", "shared experts"), (".indexer.", "indexers"),
    (".compressor.", "compressors"), (".gate.", "routers"), ("hc_", "hyper-connections"), ("embed", "embedding"),
    ("norm", "norms"), (".attn.", "attention"), ("markov_head", "draft projections"),
    ("confidence_head", "draft projections"), ("head.", "output head"),
)  # fmt: skip


@dataclass(frozen=True)
class TensorSize:
    """`count` tensors like this one, of `each_bytes` each.

    `num_parameters` counts weights: two per packed byte, none for scales and hash tables.
    """

    name: str
    part: str
    dtype: str
    each_bytes: int
    num_parameters: int
    count: int = 1
    is_draft: bool = False

    @property
    def num_bytes(self) -> int:
        return self.each_bytes * self.count


@dataclass(frozen=True)
class WeightSizes:
    """A checkpoint's tensors and their sums. `is_draft` marks the `mtp.*` blocks (MTP, or a DSpark head)."""

    tensors: tuple[TensorSize, ...]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_tensors(self) -> int:
        return sum(tensor.count for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        """Of the main model; the draft blocks are counted by `num_draft_parameters`."""
        return sum(tensor.num_parameters * tensor.count for tensor in self.tensors if not tensor.is_draft)

    @property
    def num_draft_parameters(self) -> int:
        return sum(tensor.num_parameters * tensor.count for tensor in self.tensors if tensor.is_draft)

    @property
    def routed_expert_bytes(self) -> int:
        """Of all blocks, draft blocks included: what expert parallelism divides and offloading moves."""
        return sum(tensor.num_bytes for tensor in self.tensors if tensor.part == "routed experts")

    def by_part(self) -> dict[str, int]:
        """Bytes of each part of the main model, then of the draft blocks as a whole."""
        totals = dict.fromkeys((*PARTS, "draft blocks"), 0)
        for tensor in self.tensors:
            totals["draft blocks" if tensor.is_draft else tensor.part] += tensor.num_bytes
        return {part: num_bytes for part, num_bytes in totals.items() if num_bytes}

    def by_format(self) -> dict[str, int]:
        """Bytes of each stored dtype, in the checkpoint's spelling."""
        totals: Counter[str] = Counter()
        for tensor in self.tensors:
            totals[tensor.dtype] += tensor.num_bytes
        return dict(totals.most_common())


def count_weights(config: ModelConfig, experts: ExpertFormat = "mxfp4", *, with_draft: bool = True) -> WeightSizes:
    """Every tensor of a checkpoint of `config` with experts of that format; `with_draft` adds the `mtp.*` blocks."""
    if experts not in EXPERT_FORMATS:
        raise ConfigError(f"experts must be one of {', '.join(EXPERT_FORMATS)}, found {experts!r}")
    sizes = []
    for tensor in expected_tensors(config, with_draft, num_experts=1):
        is_draft, is_routed = tensor.name.startswith("mtp."), tensor.role is Role.EXPERT
        quant, num_parameters = _format_of(tensor, experts, is_draft), prod(tensor.shape)
        group = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}.get(quant or "")
        if group and tensor.shape[-1] % group:
            found = tensor.shape[-1]
            raise ConfigError(f"{experts} experts need input widths that are multiples of {group}, found {found}")
        scale_dtype = "F32" if experts == "fp8" else "F8_E8M0"
        for place, part in enumerate(weight_tensors(tensor, quant, config.weight_block_size, scale_dtype=scale_dtype)):
            counted = 0 if place or tensor.role is Role.TABLE else num_parameters
            count = config.n_routed_experts if is_routed else 1
            sizes.append(
                TensorSize(part.name, _part_of(tensor.name), part.dtype, part.nbytes, counted, count, is_draft)
            )
    return WeightSizes(tuple(sizes))


def _format_of(tensor: LogicalTensor, experts: ExpertFormat, is_draft: bool) -> str | None:
    """ModelOpt leaves the experts of draft blocks in MXFP4."""
    if tensor.role not in (Role.LINEAR, Role.EXPERT) or experts == "bf16":
        return None
    if tensor.role is Role.LINEAR or experts == "fp8":
        return "fp8"
    return "mxfp4" if is_draft else experts


def _part_of(name: str) -> str:
    return next((part for marker, part in _MARKERS if marker in name), "draft projections")
