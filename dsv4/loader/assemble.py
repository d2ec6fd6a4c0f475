"""`ParameterStore`: collects weights by name, experts straight into their stacks, and builds `ModelParams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule
from dsv4.formats.tensors import Weight
from dsv4.formats.trees import map_tensors, tensors_of
from dsv4.loader.names import LogicalTensor
from dsv4.loader.resolve import StoredFormat
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
        self._formats: dict[str, StoredFormat] = {}
        self._home = home
        self._own = range(config.n_routed_experts) if experts is None else experts
        self._unfinished: dict[tuple[int, int], dict[str, Weight]] = {}  # layer and expert: its matrices so far

    def put(self, tensor: LogicalTensor, weight: Weight) -> None:
        """Copy `weight` to the device, into its stack if it is an expert's. Experts of one stack share a format."""
        if tuple(weight.shape) != tensor.shape:
            raise ValueError(f"{tensor.name} must be {tensor.shape}, found {tuple(weight.shape)}")
        name = tensor.parameter
        self._formats[name] = StoredFormat.of(weight)
        if tensor.expert_idx is None:
            self._weights[name] = _copy_weight(weight, self.device)
            return
        if self._home is not None:
            self._send_home(self._home, tensor, weight)
            return
        if name not in self._weights:
            self._weights[name] = _empty_stack(weight, len(self._own), self.device)
        if self.device.type != "meta":  # nothing to copy, 33,000 times in Flash
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
            **self._of("", embed="embed.weight", lm_head="head.weight"),
            layers=[self.block(layer) for layer in schedule[:num_layers]],
            head=self._head(""),
            mtp=[] if is_dspark else [self.mtp(i, layer) for i, layer in enumerate(drafts)],
            dspark=self.dspark(drafts) if is_dspark and drafts else None,
            formats=self._formats,
        )

    def block(self, layer: LayerSpec) -> BlockParams:
        """One main layer alone; its names must have been put."""
        return self._block(f"layers.{layer.layer_idx}.", layer)

    def ends(self) -> ModelParams:
        """Embedding and head without any layer."""
        ends = self._of("", embed="embed.weight", lm_head="head.weight")
        return ModelParams(**ends, layers=[], head=self._head(""), mtp=[])

    def _of(self, prefix: str, *names: str, **others: str) -> dict[str, Any]:
        """Weights by their fields: those stored as `FIELD.weight`, and others under their own names."""
        stored = {name: f"{name}.weight" for name in names} | others
        return {name: self._weights[prefix + own] for name, own in stored.items()}

    def _hyper(self, prefix: str) -> HyperParams:
        return HyperParams(**self._of(f"{prefix}_", fn="fn", base="base", scale="scale"))

    def _head(self, prefix: str) -> HeadParams:
        return HeadParams(hc=self._hyper(f"{prefix}hc_head"), **self._of(prefix, "norm"))

    def _compressor(self, prefix: str) -> CompressorParams:
        return CompressorParams(**self._of(prefix, "wkv", "wgate", "norm", ape="ape"))

    def _attention(self, prefix: str, layer: LayerSpec) -> AttentionParams:
        indexer = None
        if layer.has_indexer:
            keys = self._compressor(f"{prefix}indexer.compressor.")
            indexer = IndexerParams(**self._of(f"{prefix}indexer.", "wq_b", "weights_proj"), compressor=keys)
        is_window = layer.attention is AttentionKind.SWA
        return AttentionParams(
            **self._of(prefix, "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", sink="attn_sink"),
            compressor=None if is_window else self._compressor(f"{prefix}compressor."),
            indexer=indexer,
        )

    def _experts(self, prefix: str) -> ExpertParams:
        return ExpertParams(**self._of(prefix, "w1", "w2", "w3"))

    def _block(self, prefix: str, layer: LayerSpec) -> BlockParams:
        is_hash = layer.router is RouterKind.HASH
        own = self._of(f"{prefix}ffn.gate.", **({"tid2eid": "tid2eid"} if is_hash else {"bias": "bias"}))
        home = self._home
        return BlockParams(
            **self._of(prefix, "attn_norm", "ffn_norm"),
            hc_attn=self._hyper(f"{prefix}hc_attn"),
            hc_ffn=self._hyper(f"{prefix}hc_ffn"),
            attn=self._attention(f"{prefix}attn.", layer),
            ffn=MoeParams(
                **self._of(f"{prefix}ffn.", "gate"),
                **{"bias": None, "tid2eid": None, **own},
                experts=self._experts(f"{prefix}ffn.experts.") if home is None else home.experts(layer.layer_idx),
                shared=self._experts(f"{prefix}ffn.shared_experts."),
            ),
        )

    def mtp(self, mtp_idx: int, layer: LayerSpec) -> MtpParams:
        """One MTP block alone."""
        prefix = f"mtp.{mtp_idx}."
        return MtpParams(
            **self._of(prefix, "e_proj", "h_proj", "enorm", "hnorm"),
            block=self._block(prefix, layer),
            head=self._head(prefix),
        )

    def dspark(self, layers: Sequence[LayerSpec]) -> DSparkParams:
        """A DSpark head alone."""
        last = f"mtp.{len(layers) - 1}."
        return DSparkParams(
            **self._of("mtp.0.", "main_proj", "main_norm"),
            blocks=[self._block(f"mtp.{i}.", layer) for i, layer in enumerate(layers)],
            head=self._head(last),
            **self._of(f"{last}markov_head.", "markov_w1", "markov_w2"),
            **self._of(last, confidence="confidence_head.proj.weight"),
        )


def _copy_weight(weight: Weight, device: torch.device) -> Weight:
    def copied(part: Tensor) -> Tensor:
        return torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part, non_blocking=True)

    copy: Weight = map_tensors(weight, copied)
    return copy


def _empty_stack(weight: Weight, num_experts: int, device: torch.device) -> Weight:
    stack: Weight = map_tensors(weight, lambda part: part.new_empty((num_experts, *part.shape), device=device))
    return stack


def _fill(stack: Weight, expert_idx: int, weight: Weight) -> None:
    formats = [getattr(one, "format", None) for one in (stack, weight)]
    assert formats[0] is formats[1], f"experts of one stack must share a format, found {formats}"
    for part, one in zip(tensors_of(stack), tensors_of(weight), strict=True):
        assert part.dtype == one.dtype, (part.dtype, one.dtype)
        part[expert_idx].copy_(one, non_blocking=True)
