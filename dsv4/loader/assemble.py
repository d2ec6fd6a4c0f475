"""`ParameterStore`: collects weights by name, experts straight into their stacks, and builds `ModelParams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule
from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.loader.names import LogicalTensor
from dsv4.model.parameters import (
    AttentionParams,
    BlockParams,
    CompressorParams,
    DSparkParams,
    ExpertParams,
    HeadParams,
    HyperParams,
    IndexerParams,
    ModelParams,
    MoeParams,
    MtpParams,
)


class ExpertHome(Protocol):
    """Takes routed experts one by one, instead of stacks on the device (engine/offload/). Must copy what it keeps.

    Draft blocks count on from the model's last layer.
    """

    def put(self, layer_idx: int, expert_idx: int, weights: ExpertParams) -> None:
        """One whole expert; its weights may be views of a mapped file."""

    def experts(self, layer_idx: int) -> ExpertParams:
        """What stands for a layer's experts in the model, once all of them were put."""


class ParameterStore:
    """Every `put` copies, so a weight may be a view of a mapped file; from pinned memory to a GPU it does not wait. A
    stack is allocated with its first expert.

    `home`, where given, takes the routed experts; an expert goes there with its last matrix. `experts`: those that are
    put, all by default; in stacks and at home the first of them is number 0.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device | str, home: ExpertHome | None = None,
        experts: range | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.device = torch.device(device)
        self._weights: dict[str, Weight] = {}
        self._home = home
        self._own = range(config.n_routed_experts) if experts is None else experts
        self._unfinished: dict[tuple[int, int], dict[str, Weight]] = {}  # layer and expert: its matrices so far

    def put(self, tensor: LogicalTensor, weight: Weight) -> None:
        """Copy `weight` to the device, into its stack if it is an expert's. Experts of one stack share a format."""
        if tuple(weight.shape) != tensor.shape:
            raise ValueError(f"{tensor.name} must be {tensor.shape}, found {tuple(weight.shape)}")
        name = tensor.parameter
        if tensor.expert_idx is None:
            self._weights[name] = _copy_weight(weight, self.device)
            return
        if self._home is not None:
            self._send_home(self._home, tensor, weight)
            return
        if name not in self._weights:
            self._weights[name] = _empty_stack(weight, len(self._own), self.device)
        _fill(self._weights[name], tensor.expert_idx - self._own.start, weight)

    def _send_home(self, home: ExpertHome, tensor: LogicalTensor, weight: Weight) -> None:
        assert tensor.expert_idx is not None
        block, number, *_, part, _ = tensor.name.split(".")
        expert_idx = tensor.expert_idx - self._own.start
        key = (int(number) + (self.config.num_hidden_layers if block == "mtp" else 0), expert_idx)
        matrices = self._unfinished.setdefault(key, {})
        matrices[part] = weight
        if len(matrices) == 3:
            home.put(*key, ExpertParams(**self._unfinished.pop(key)))

    def build(self, num_mtp: int) -> ModelParams:
        """The model's parameters; every name must have been put. The store must not be used afterwards."""
        schedule = build_schedule(self.config, with_mtp=num_mtp > 0)
        num_layers = self.config.num_hidden_layers
        drafts = schedule[num_layers:]
        is_dspark = self.config.dspark is not None
        return ModelParams(
            embed=self._plain("embed.weight"),
            lm_head=self._plain("head.weight"),
            layers=[self.block(layer) for layer in schedule[:num_layers]],
            head=self._head(""),
            mtp=[] if is_dspark else [self.mtp(i, layer) for i, layer in enumerate(drafts)],
            dspark=self.dspark(drafts) if is_dspark and drafts else None,
        )

    def block(self, layer: LayerSpec) -> BlockParams:
        """One main layer alone; its names must have been put."""
        return self._block(f"layers.{layer.layer_idx}.", layer)

    def ends(self) -> ModelParams:
        """Embedding and head without any layer."""
        return ModelParams(self._plain("embed.weight"), self._plain("head.weight"), [], self._head(""), [])

    def _plain(self, name: str) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor), name
        return weight

    def _hyper(self, prefix: str) -> HyperParams:
        return HyperParams(*(self._plain(f"{prefix}_{part}") for part in ("fn", "base", "scale")))

    def _head(self, prefix: str) -> HeadParams:
        return HeadParams(hc=self._hyper(f"{prefix}hc_head"), norm=self._plain(f"{prefix}norm.weight"))

    def _compressor(self, prefix: str) -> CompressorParams:
        return CompressorParams(
            wkv=self._weights[f"{prefix}wkv.weight"],
            wgate=self._weights[f"{prefix}wgate.weight"],
            ape=self._plain(f"{prefix}ape"),
            norm=self._plain(f"{prefix}norm.weight"),
        )

    def _attention(self, prefix: str, layer: LayerSpec) -> AttentionParams:
        has_compressor = layer.attention is not AttentionKind.SWA
        indexer = None
        if layer.has_indexer:
            indexer = IndexerParams(
                wq_b=self._weights[f"{prefix}indexer.wq_b.weight"],
                weights_proj=self._weights[f"{prefix}indexer.weights_proj.weight"],
                compressor=self._compressor(f"{prefix}indexer.compressor."),
            )
        return AttentionParams(
            wq_a=self._weights[f"{prefix}wq_a.weight"],
            q_norm=self._plain(f"{prefix}q_norm.weight"),
            wq_b=self._weights[f"{prefix}wq_b.weight"],
            wkv=self._weights[f"{prefix}wkv.weight"],
            kv_norm=self._plain(f"{prefix}kv_norm.weight"),
            wo_a=self._weights[f"{prefix}wo_a.weight"],
            wo_b=self._weights[f"{prefix}wo_b.weight"],
            sink=self._plain(f"{prefix}attn_sink"),
            compressor=self._compressor(f"{prefix}compressor.") if has_compressor else None,
            indexer=indexer,
        )

    def _routed(self, prefix: str, layer: LayerSpec) -> ExpertParams:
        return self._experts(prefix) if self._home is None else self._home.experts(layer.layer_idx)

    def _experts(self, prefix: str) -> ExpertParams:
        return ExpertParams(*(self._weights[f"{prefix}{part}.weight"] for part in ("w1", "w2", "w3")))

    def _block(self, prefix: str, layer: LayerSpec) -> BlockParams:
        is_hash = layer.router is RouterKind.HASH
        moe = MoeParams(
            gate=self._weights[f"{prefix}ffn.gate.weight"],
            bias=None if is_hash else self._plain(f"{prefix}ffn.gate.bias"),
            tid2eid=self._plain(f"{prefix}ffn.gate.tid2eid") if is_hash else None,
            experts=self._routed(f"{prefix}ffn.experts.", layer),
            shared=self._experts(f"{prefix}ffn.shared_experts."),
        )
        return BlockParams(
            attn_norm=self._plain(f"{prefix}attn_norm.weight"),
            ffn_norm=self._plain(f"{prefix}ffn_norm.weight"),
            hc_attn=self._hyper(f"{prefix}hc_attn"),
            hc_ffn=self._hyper(f"{prefix}hc_ffn"),
            attn=self._attention(f"{prefix}attn.", layer),
            ffn=moe,
        )

    def mtp(self, mtp_idx: int, layer: LayerSpec) -> MtpParams:
        """One MTP block alone."""
        prefix = f"mtp.{mtp_idx}."
        return MtpParams(
            e_proj=self._weights[f"{prefix}e_proj.weight"],
            h_proj=self._weights[f"{prefix}h_proj.weight"],
            enorm=self._plain(f"{prefix}enorm.weight"),
            hnorm=self._plain(f"{prefix}hnorm.weight"),
            block=self._block(prefix, layer),
            head=self._head(prefix),
        )

    def dspark(self, layers: Sequence[LayerSpec]) -> DSparkParams:
        """A DSpark head alone."""
        last = f"mtp.{len(layers) - 1}."
        return DSparkParams(
            main_proj=self._weights["mtp.0.main_proj.weight"],
            main_norm=self._plain("mtp.0.main_norm.weight"),
            blocks=[self._block(f"mtp.{i}.", layer) for i, layer in enumerate(layers)],
            head=self._head(last),
            markov_w1=self._plain(f"{last}markov_head.markov_w1.weight"),
            markov_w2=self._plain(f"{last}markov_head.markov_w2.weight"),
            confidence=self._plain(f"{last}confidence_head.proj.weight"),
        )


def _copy_weight(weight: Weight, device: torch.device) -> Weight:
    def copied(part: Tensor) -> Tensor:
        return torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part, non_blocking=True)

    return copied(weight) if isinstance(weight, Tensor) else weight.map(copied)


def _empty_stack(weight: Weight, num_experts: int, device: torch.device) -> Weight:
    def empty(part: Tensor) -> Tensor:
        return torch.empty((num_experts, *part.shape), dtype=part.dtype, device=device)

    return empty(weight) if isinstance(weight, Tensor) else weight.map(empty)


def _fill(stack: Weight, expert_idx: int, weight: Weight) -> None:
    if isinstance(stack, QuantTensor) and isinstance(weight, QuantTensor):
        assert stack.format is weight.format, (stack.format, weight.format)
        parts, given = stack.parts, weight.parts
    else:
        assert isinstance(stack, Tensor) and isinstance(weight, Tensor), "experts of one stack must share a format"
        parts, given = (stack,), (weight,)
    for part, one in zip(parts, given, strict=True):
        assert part.dtype == one.dtype, (part.dtype, one.dtype)
        part[expert_idx].copy_(one, non_blocking=True)
