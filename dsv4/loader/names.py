"""Which tensors a DeepSeek-V4 checkpoint holds, and how the three spellings in use name them.

`expected_tensors` lists the matrices, vectors and tables by their official names. A quantised matrix is stored with
siblings (scales); those are not listed, because only the stored dtype says which siblings there must be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dsv4.config import DSparkConfig, ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule


class Role(StrEnum):
    """What a tensor is for; it decides which dtypes are acceptable."""

    LINEAR = "linear"  # a projection: plain or quantised
    EXPERT = "expert"  # the same, one of a stack
    PLAIN = "plain"  # norms, gate, compressor, embedding, head: plain, kept as stored
    CONTROL = "control"  # hyper-connections, ape, sink, router bias: fp32 in the model
    TABLE = "table"  # int64 token -> experts


class Naming(StrEnum):
    OFFICIAL = "official"
    HF = "hugging face"  # names of transformers' modules
    HF_SAVED = "hugging face, as written by save_pretrained"  # official names under `model.`, with exceptions


@dataclass(frozen=True)
class LogicalTensor:
    """One tensor of the model: official name, logical shape (in weights), role, and which of a stack it is."""

    name: str
    shape: tuple[int, ...]
    role: Role
    expert_idx: int | None = None

    @property
    def base(self) -> str:
        """The name without `.weight`: siblings are `<base>.scale` and so on."""
        return self.name.removesuffix(".weight")

    @property
    def parameter(self) -> str:
        """Name of the model's parameter; the experts of a layer share one."""
        return self.name if self.expert_idx is None else re.sub(r"\.experts\.\d+\.", ".experts.", self.name)


def expected_tensors(config: ModelConfig, with_mtp: bool, num_experts: int | None = None) -> list[LogicalTensor]:
    """Every tensor of the model in checkpoint order; `with_mtp` adds the draft blocks the config announces.
    `num_experts`: as many routed experts of each layer, by default all."""
    num_experts = config.n_routed_experts if num_experts is None else num_experts
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors = [LogicalTensor("embed.weight", (vocab, hidden), Role.PLAIN)]
    for layer in build_schedule(config, with_mtp):
        mtp_idx = layer.layer_idx - config.num_hidden_layers
        prefix = f"mtp.{mtp_idx}." if layer.is_mtp else f"layers.{layer.layer_idx}."
        tensors += (_prefixed(prefix, tensor) for tensor in _block_tensors(config, layer, num_experts))
        if layer.is_mtp:
            tensors += (_prefixed(prefix, tensor) for tensor in _draft_tensors(config, mtp_idx))
    tensors += _head_tensors(config)
    tensors.append(LogicalTensor("head.weight", (vocab, hidden), Role.PLAIN))
    return tensors


def _prefixed(prefix: str, tensor: LogicalTensor) -> LogicalTensor:
    return LogicalTensor(prefix + tensor.name, tensor.shape, tensor.role, tensor.expert_idx)


def _hyper_tensors(config: ModelConfig, name: str, rows: int, scales: int) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}_fn", (rows, config.hc_mult * config.hidden_size), Role.CONTROL)
    yield LogicalTensor(f"{name}_base", (rows,), Role.CONTROL)
    yield LogicalTensor(f"{name}_scale", (scales,), Role.CONTROL)


def _head_tensors(config: ModelConfig) -> Iterator[LogicalTensor]:
    yield LogicalTensor("norm.weight", (config.hidden_size,), Role.PLAIN)
    yield from _hyper_tensors(config, "hc_head", config.hc_mult, 1)


def _draft_tensors(config: ModelConfig, mtp_idx: int) -> Iterator[LogicalTensor]:
    """What a draft block has beyond an ordinary one."""
    if config.dspark is not None:
        yield from _dspark_tensors(config, config.dspark, mtp_idx)
        return
    hidden = config.hidden_size
    for name in ("e_proj", "h_proj"):
        yield LogicalTensor(f"{name}.weight", (hidden, hidden), Role.LINEAR)
    for name in ("enorm", "hnorm"):
        yield LogicalTensor(f"{name}.weight", (hidden,), Role.PLAIN)
    yield from _head_tensors(config)


def _dspark_tensors(config: ModelConfig, dspark: DSparkConfig, mtp_idx: int) -> Iterator[LogicalTensor]:
    """The first layer of a head has the projection of the taps, the last one everything behind the layers."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, dspark.markov_rank
    if mtp_idx == 0:
        yield LogicalTensor("main_proj.weight", (hidden, len(dspark.target_layer_ids) * hidden), Role.LINEAR)
        yield LogicalTensor("main_norm.weight", (hidden,), Role.PLAIN)
    if mtp_idx == config.num_draft_layers - 1:
        yield from _head_tensors(config)
        for name in ("markov_w1", "markov_w2"):
            yield LogicalTensor(f"markov_head.{name}.weight", (vocab, rank), Role.PLAIN)
        yield LogicalTensor("confidence_head.proj.weight", (1, hidden + rank), Role.PLAIN)


def _compressor_tensors(config: ModelConfig, name: str, ratio: int, dim: int, overlap: bool) -> Iterator[LogicalTensor]:
    width = 2 * dim if overlap else dim
    yield LogicalTensor(f"{name}.ape", (ratio, width), Role.CONTROL)
    for part in ("wkv", "wgate"):
        yield LogicalTensor(f"{name}.{part}.weight", (width, config.hidden_size), Role.PLAIN)
    yield LogicalTensor(f"{name}.norm.weight", (dim,), Role.PLAIN)


def _attention_tensors(config: ModelConfig, layer: LayerSpec) -> Iterator[LogicalTensor]:
    hidden, rank, head = config.hidden_size, config.q_lora_rank, config.head_dim
    heads, groups = config.num_attention_heads, config.o_groups
    yield LogicalTensor("attn.attn_sink", (heads,), Role.CONTROL)
    yield LogicalTensor("attn.wq_a.weight", (rank, hidden), Role.LINEAR)
    yield LogicalTensor("attn.q_norm.weight", (rank,), Role.PLAIN)
    yield LogicalTensor("attn.wq_b.weight", (heads * head, rank), Role.LINEAR)
    yield LogicalTensor("attn.wkv.weight", (head, hidden), Role.LINEAR)
    yield LogicalTensor("attn.kv_norm.weight", (head,), Role.PLAIN)
    yield LogicalTensor("attn.wo_a.weight", (groups * config.o_lora_rank, heads // groups * head), Role.LINEAR)
    yield LogicalTensor("attn.wo_b.weight", (hidden, groups * config.o_lora_rank), Role.LINEAR)
    overlap = layer.attention is AttentionKind.CSA
    if layer.attention is not AttentionKind.SWA:
        yield from _compressor_tensors(config, "attn.compressor", layer.ratio, head, overlap)
    if layer.has_indexer:
        yield LogicalTensor(
            "attn.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, rank), Role.LINEAR
        )
        yield LogicalTensor("attn.indexer.weights_proj.weight", (config.index_n_heads, hidden), Role.PLAIN)
        yield from _compressor_tensors(config, "attn.indexer.compressor", layer.ratio, config.index_head_dim, overlap)


def _block_tensors(config: ModelConfig, layer: LayerSpec, num_experts: int) -> Iterator[LogicalTensor]:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield LogicalTensor("attn_norm.weight", (hidden,), Role.PLAIN)
    yield LogicalTensor("ffn_norm.weight", (hidden,), Role.PLAIN)
    for name in ("hc_attn", "hc_ffn"):
        yield from _hyper_tensors(config, name, config.hc_mult * (config.hc_mult + 2), 3)
    yield from _attention_tensors(config, layer)
    yield LogicalTensor("ffn.gate.weight", (experts, hidden), Role.PLAIN)
    if layer.router is RouterKind.HASH:
        yield LogicalTensor("ffn.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), Role.TABLE)
    else:
        yield LogicalTensor("ffn.gate.bias", (experts,), Role.CONTROL)
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    for part, shape in shapes.items():
        yield LogicalTensor(f"ffn.shared_experts.{part}.weight", shape, Role.LINEAR)
    for expert_idx in range(num_experts):
        for part, shape in shapes.items():
            yield LogicalTensor(f"ffn.experts.{expert_idx}.{part}.weight", shape, Role.EXPERT, expert_idx)


# ---- spellings ----

# applied in order to an official name; the rotation of `indexer` under `compressor` comes before the leaf names
_HF_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed\.", "model.embed_tokens."), (r"^head\.", "lm_head."), (r"^norm\.", "model.norm."),
        (r"^hc_head_", "model.hc_head.hc_"), (r"^layers\.", "model.layers."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."), (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."), (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
        (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
        (r"(\.compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."), (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."), (r"\.q_norm\.", ".q_a_norm."),
        (r"\.wkv\.", ".kv_proj."), (r"\.wgate\.", ".gate_proj."), (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."), (r"\.attn_sink$", ".sinks"), (r"\.attn\.", ".self_attn."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"), (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."), (r"\.ffn\.", ".mlp."),
        (r"\.experts\.\d+\.(?:w1|w3)\.weight$", ".experts.gate_up_proj"),
        (r"\.experts\.\d+\.w2\.weight$", ".experts.down_proj"),
    )
]  # fmt: skip
_HF_SAVED_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^embed\.", "model.embed_tokens."), (r"^norm\.", "model.norm."), (r"^hc_head_", "model.hc_head.hc_"),
        (r"^layers\.", "model.layers."), (r"\.attn\.kv_norm\.", ".attn.norm."),
    )
]  # fmt: skip


def detect_naming(names: Iterable[str]) -> Naming:
    """Which spelling a checkpoint uses, from names that occur in one spelling only."""
    has_prefix = False
    for name in names:
        if ".self_attn." in name or ".mlp." in name:
            return Naming.HF
        has_prefix |= name.startswith("model.")
    return Naming.HF_SAVED if has_prefix else Naming.OFFICIAL


def stored_names(tensor: LogicalTensor, naming: Naming) -> tuple[str, ...]:
    """The names under which `tensor` may be stored, the usual one first.

    With `Naming.HF` all experts of a layer are in one tensor: w1 and w3 are the halves of `gate_up_proj` [E, 2 I, D].
    """
    if naming is Naming.OFFICIAL:
        return (tensor.name,)
    name = tensor.name
    for pattern, replacement in _HF_RULES if naming is Naming.HF else _HF_SAVED_RULES:
        name = pattern.sub(replacement, name)
    older = name.replace(".indexer.scorer.weights_proj.", ".indexer.weights_proj.")
    return (name,) if older == name else (name, older)
