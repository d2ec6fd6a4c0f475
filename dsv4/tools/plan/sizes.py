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

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dsv4.config import ConfigError, ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule

ExpertFormat = Literal["mxfp4", "nvfp4", "fp8", "bf16"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)

# the groups of formats/fp4.py, which cannot be imported here because it needs torch
MXFP4_GROUP = 32
NVFP4_GROUP = 16

_ITEM_BYTES = {"BF16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class TensorSize:
    """`count` tensors of the same name pattern, `num_values` stored elements each.

    `num_parameters` counts weights: two per packed byte, none for scales and hash tables.
    """

    name: str
    part: str
    dtype: str
    num_values: int
    num_parameters: int
    count: int = 1
    is_draft: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_values * _ITEM_BYTES[self.dtype] * self.count


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
        totals: Counter[str] = Counter()
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.is_draft):
            totals["draft blocks" if tensor.is_draft else tensor.part] += tensor.num_bytes
        return dict(totals)

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
    tensors = list(_global_tensors(config))
    for layer in build_schedule(config):
        tensors += _block_tensors(config, layer, experts)
    if with_draft:
        tensors += (replace(tensor, is_draft=True) for tensor in _draft_tensors(config, experts))
    return WeightSizes(tuple(tensors))


def active_parameters(config: ModelConfig) -> int:
    """Parameters one token uses in the main model: all but the routed experts that are not chosen."""
    sizes = count_weights(config, "bf16", with_draft=False)
    routed = sum(t.num_parameters * t.count for t in sizes.tensors if t.part == "routed experts")
    return sizes.num_parameters - routed + routed * config.num_experts_per_tok // config.n_routed_experts


def _plain(name: str, part: str, dtype: str, *shape: int) -> TensorSize:
    num_values = 1
    for size in shape:
        num_values *= size
    return TensorSize(name, part, dtype, num_values, 0 if dtype == "I64" else num_values)


def _block_scale_values(config: ModelConfig, rows: int, cols: int) -> int:
    block_rows, block_cols = config.weight_block_size
    return -(-rows // block_rows) * -(-cols // block_cols)


def _matrix(
    config: ModelConfig, name: str, part: str, rows: int, cols: int, experts: ExpertFormat, count: int = 1
) -> Iterator[TensorSize]:
    """A matrix that the official checkpoint keeps in FP8 with block scales."""
    num_values = rows * cols
    dtype = "BF16" if experts == "bf16" else "F8_E4M3"
    yield TensorSize(f"{name}.weight", part, dtype, num_values, num_values, count)
    if experts != "bf16":
        scale_dtype = "F32" if experts == "fp8" else "F8_E8M0"
        yield TensorSize(f"{name}.scale", part, scale_dtype, _block_scale_values(config, rows, cols), 0, count)


def _expert_matrix(
    config: ModelConfig, name: str, rows: int, cols: int, experts: ExpertFormat, is_draft: bool
) -> Iterator[TensorSize]:
    """One of the three matrices of every routed expert of a block."""
    part, count = "routed experts", config.n_routed_experts
    if experts in ("fp8", "bf16"):
        yield from _matrix(config, name, part, rows, cols, experts, count)
        return
    group = MXFP4_GROUP if experts == "mxfp4" or is_draft else NVFP4_GROUP
    if cols % group:
        raise ConfigError(f"{experts} experts need input widths that are multiples of {group}, found {cols}")
    num_parameters = rows * cols
    if group == MXFP4_GROUP:
        yield TensorSize(f"{name}.weight", part, "I8", num_parameters // 2, num_parameters, count)
        yield TensorSize(f"{name}.scale", part, "F8_E8M0", num_parameters // group, 0, count)
        return
    yield TensorSize(f"{name}.weight", part, "U8", num_parameters // 2, num_parameters, count)
    yield TensorSize(f"{name}.weight_scale", part, "F8_E4M3", num_parameters // group, 0, count)
    for scalar in ("weight_scale_2", "input_scale"):
        yield TensorSize(f"{name}.{scalar}", part, "F32", 1, 0, count)


def _global_tensors(config: ModelConfig) -> Iterator[TensorSize]:
    yield _plain("embed.weight", "embedding", "BF16", config.vocab_size, config.hidden_size)
    yield _plain("head.weight", "output head", "BF16", config.vocab_size, config.hidden_size)
    yield _plain("norm.weight", "norms", "BF16", config.hidden_size)
    yield from _head_hyper_tensors(config, "")


def _head_hyper_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSize]:
    streams, part = config.hc_mult, "hyper-connections"
    yield _plain(f"{prefix}hc_head_fn", part, "F32", streams, streams * config.hidden_size)
    yield _plain(f"{prefix}hc_head_base", part, "F32", streams)
    yield _plain(f"{prefix}hc_head_scale", part, "F32", 1)


def _block_tensors(
    config: ModelConfig, layer: LayerSpec, experts: ExpertFormat, prefix: str = "layers.L."
) -> Iterator[TensorSize]:
    streams, hidden = config.hc_mult, config.hidden_size
    num_mixes = 2 * streams + streams * streams
    for sublayer in ("attn", "ffn"):
        yield _plain(f"{prefix}{sublayer}_norm.weight", "norms", "BF16", hidden)
        yield _plain(f"{prefix}hc_{sublayer}_fn", "hyper-connections", "F32", num_mixes, streams * hidden)
        yield _plain(f"{prefix}hc_{sublayer}_base", "hyper-connections", "F32", num_mixes)
        yield _plain(f"{prefix}hc_{sublayer}_scale", "hyper-connections", "F32", 3)
    yield from _attention_tensors(config, experts, f"{prefix}attn.")
    if layer.attention is not AttentionKind.SWA:
        overlap = 2 if layer.attention is AttentionKind.CSA else 1
        yield from _compressor_tensors(config, f"{prefix}attn.compressor.", layer.ratio, overlap, config.head_dim)
    if layer.has_indexer:
        yield from _indexer_tensors(config, layer, experts, f"{prefix}attn.indexer.")
    yield from _moe_tensors(config, layer, experts, f"{prefix}ffn.")


def _attention_tensors(config: ModelConfig, experts: ExpertFormat, prefix: str) -> Iterator[TensorSize]:
    hidden, part = config.hidden_size, "attention"
    heads_width = config.num_attention_heads * config.head_dim
    output_width = config.o_groups * config.o_lora_rank
    yield _plain(f"{prefix}attn_sink", part, "F32", config.num_attention_heads)
    yield _plain(f"{prefix}q_norm.weight", "norms", "BF16", config.q_lora_rank)
    yield _plain(f"{prefix}kv_norm.weight", "norms", "BF16", config.head_dim)
    for name, rows, cols in (
        ("wq_a", config.q_lora_rank, hidden),
        ("wq_b", heads_width, config.q_lora_rank),
        ("wkv", config.head_dim, hidden),
        ("wo_a", output_width, heads_width // config.o_groups),
        ("wo_b", hidden, output_width),
    ):
        yield from _matrix(config, f"{prefix}{name}", part, rows, cols, experts)


def _compressor_tensors(
    config: ModelConfig, prefix: str, ratio: int, overlap: int, dim: int, part: str = "compressors"
) -> Iterator[TensorSize]:
    width = overlap * dim
    yield _plain(f"{prefix}ape", part, "F32", ratio, width)
    for name in ("wkv", "wgate"):
        yield _plain(f"{prefix}{name}.weight", part, "BF16", width, config.hidden_size)
    yield _plain(f"{prefix}norm.weight", part, "BF16", dim)


def _indexer_tensors(config: ModelConfig, layer: LayerSpec, experts: ExpertFormat, prefix: str) -> Iterator[TensorSize]:
    part, width = "indexers", config.index_n_heads * config.index_head_dim
    yield from _matrix(config, f"{prefix}wq_b", part, width, config.q_lora_rank, experts)
    yield _plain(f"{prefix}weights_proj.weight", part, "BF16", config.index_n_heads, config.hidden_size)
    yield from _compressor_tensors(config, f"{prefix}compressor.", layer.ratio, 2, config.index_head_dim, part)


def _moe_tensors(config: ModelConfig, layer: LayerSpec, experts: ExpertFormat, prefix: str) -> Iterator[TensorSize]:
    hidden, inner, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _plain(f"{prefix}gate.weight", "routers", "BF16", num_experts, hidden)
    if layer.router is RouterKind.HASH:
        yield _plain(f"{prefix}gate.tid2eid", "routers", "I64", config.vocab_size, config.num_experts_per_tok)
    else:
        yield _plain(f"{prefix}gate.bias", "routers", "F32", num_experts)
    for name, rows, cols in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        yield from _matrix(config, f"{prefix}shared_experts.{name}", "shared experts", rows, cols, experts)
        yield from _expert_matrix(config, f"{prefix}experts.E.{name}", rows, cols, experts, layer.is_mtp)


def _draft_tensors(config: ModelConfig, experts: ExpertFormat) -> Iterator[TensorSize]:
    """MTP blocks, or the layers of a DSpark head under the same names."""
    hidden, part = config.hidden_size, "draft projections"
    num_blocks = config.num_draft_layers
    for block_idx in range(num_blocks):
        prefix = f"mtp.{block_idx}."
        layer = LayerSpec(config.num_hidden_layers + block_idx, AttentionKind.SWA, RouterKind.DENSE, is_mtp=True)
        yield from _block_tensors(config, layer, experts, prefix)
        if config.dspark is None:
            for name in ("e_proj", "h_proj"):
                yield from _matrix(config, f"{prefix}{name}", part, hidden, hidden, experts)
            for name in ("enorm", "hnorm"):
                yield _plain(f"{prefix}{name}.weight", "norms", "BF16", hidden)
        if config.dspark is None or block_idx == num_blocks - 1:
            yield _plain(f"{prefix}norm.weight", "norms", "BF16", hidden)
            yield from _head_hyper_tensors(config, prefix)
    if config.dspark is not None:
        yield from _dspark_tensors(config, experts)


def _dspark_tensors(config: ModelConfig, experts: ExpertFormat) -> Iterator[TensorSize]:
    assert config.dspark is not None
    hidden, rank, part = config.hidden_size, config.dspark.markov_rank, "draft projections"
    num_targets, last = len(config.dspark.target_layer_ids), f"mtp.{config.num_draft_layers - 1}"
    yield from _matrix(config, "mtp.0.main_proj", part, hidden, num_targets * hidden, experts)
    yield _plain("mtp.0.main_norm.weight", "norms", "BF16", hidden)
    for name in ("markov_w1", "markov_w2"):
        yield _plain(f"{last}.markov_head.{name}.weight", part, "BF16", config.vocab_size, rank)
    yield _plain(f"{last}.confidence_head.proj.weight", part, "BF16", hidden + rank)
