"""A text through the model, one layer in memory at a time: what the numerics do to each layer, and the noise floor.

Three chains run side by side: `exact` (weights dequantised, fp32), `official` (as published), and exact arithmetic
with bf16 activations, whose distance from `exact` is what harmless rounding does: the floor to read the others by.
Each layer also runs in official numerics on the exact chain's input: its own error, without what came before. On a GPU
it runs once more there, with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule
from dsv4.formats.row_store import decode_rows, encode_rows
from dsv4.formats.tensors import dequantize
from dsv4.loader.assemble import ParameterStore
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.names import Role
from dsv4.loader.resolve import LoadPlan
from dsv4.loader.weights import read_weight
from dsv4.model.block import BlockOutput, block, enter
from dsv4.model.context import ModelContext
from dsv4.model.parameters import BlockParams
from dsv4.model.prepare import prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, Backend, backend_for
from dsv4.tools.audit.files import REST, group_sources
from dsv4.tools.audit.report import Finding, LayerRun, TextRun, fault
from dsv4.tools.evaluate import index_recall, negative_log_likelihood, shared_share

MOST_ERROR = 0.5  # of one layer by itself: beyond it, official numerics compute something else
MOST_KERNEL_ERROR = 0.05


@dataclass
class Chain:
    """One way to run the model on one text. `weight_dtype` None keeps weights and cached rows as published. `streams`
    are what its last layer gave [T, n, D], at first the embedding [T, D]."""

    context: ModelContext
    cache: KVCacheManager
    batch: TokenBatch
    weight_dtype: torch.dtype | None
    streams: Tensor

    @classmethod
    def start(
        cls, config: ModelConfig, token_ids: Sequence[int], embedding: Tensor, exact: torch.dtype | None,
        backend: Backend = TORCH,
    ) -> Chain:  # fmt: skip
        num_tokens, device = len(token_ids), embedding.device
        limits = EngineConfig(max_context_tokens=num_tokens, max_concurrent_requests=1, max_chunk_tokens=num_tokens)
        cache = KVCacheManager(config, build_schedule(config), limits, device=device, plain_dtype=exact)
        batch = cache.make_batch([cache.admit(num_tokens)], [list(token_ids)])
        return cls(ModelContext.build(config, backend, exact or torch.bfloat16, device), cache, batch, exact, embedding)

    def run(self, params: BlockParams, layer: LayerSpec, given: Tensor | None = None) -> BlockOutput:
        """One layer as a prefill from position 0, on its own streams or on given ones."""
        start = enter((self.streams if given is None else given).to(self.context.dtype), params, self.context)
        output = block(start, params, layer, self.handle(layer), self.batch, self.context, None)[0]
        self.streams = output.streams
        return output

    def handle(self, layer: LayerSpec) -> LayerCacheHandle:
        return self.cache.handle(layer.layer_idx)


class TextAudit:
    """The chains of one checkpoint and one text."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, plan: LoadPlan, token_ids: Sequence[int], device: str
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.units = group_sources(plan.sources)
        self.token_ids = list(token_ids)
        self.device = torch.device(device)
        kernels = backend_for(self.device, "official")
        ids = torch.tensor(self.token_ids, device=self.device)
        chain = partial(Chain.start, config, self.token_ids, self._load(REST, None).ends().embed[ids])
        self.exact, self.rounded, self.official = chain(torch.float32), chain(torch.bfloat16), chain(None)
        self.alone = chain(None)  # official numerics on the exact chain's input
        self.kernels = chain(None, kernels) if kernels.has_kernels else None

    @property
    def nbytes(self) -> int:
        """Stored bytes of the layers."""
        names = (f"layers.{layer_idx}" for layer_idx in range(self.config.num_hidden_layers))
        return sum(source.nbytes for name in names for source in self.units[name])

    def run(self, advance: Callable[[int], None]) -> tuple[TextRun, list[Finding]]:
        """Layer by layer; `advance` gets the bytes of each layer that is done."""
        layers: list[LayerRun] = []
        findings: list[Finding] = []
        for layer in build_schedule(self.config):
            name = f"layers.{layer.layer_idx}"
            layers.append(self._layer(name, layer))
            findings += _judge(name, layers[-1])
            advance(sum(source.nbytes for source in self.units[name]))
            if not math.isfinite(layers[-1].stream_error):
                break
        exact, official = self._perplexity(self.exact), self._perplexity(self.official)
        if not exact < self.config.vocab_size:
            text = f"perplexity {exact:.3g} of the text is no better than chance ({self.config.vocab_size} tokens)"
            findings.append(fault("no language", "the whole model", text))
        return TextRun(len(self.token_ids), exact, official, tuple(layers)), findings

    def _load(self, unit: str, dtype: torch.dtype | None) -> ParameterStore:
        store = ParameterStore(self.config, self.device)
        for source in self.units[unit]:
            weight = read_weight(self.checkpoint, source, self.config)
            if dtype is not None and source.tensor.role is not Role.TABLE:
                weight = dequantize(weight, dtype)
            store.put(source.tensor, weight)
        return store

    def _layer(self, name: str, layer: LayerSpec) -> LayerRun:
        given = self.exact.streams
        exact = self.exact.run(self._load(name, torch.float32).block(layer), layer)
        self.rounded.run(self._load(name, torch.bfloat16).block(layer), layer)
        params = self._load(name, None).block(layer)
        official = self.official.run(params, layer)
        alone = self.alone.run(params, layer, given)
        kernel_error = None if self.kernels is None else self._kernel_error(params, layer, given, alone)
        largest = float(exact.streams.abs().max())
        recall = index_recall(exact.entries, official.entries, layer, self.config.index_topk)
        return LayerRun(
            layer_idx=layer.layer_idx,
            attention=layer.attention.value,
            attn_error=_error(alone.attn_out, exact.attn_out),
            ffn_error=_error(alone.ffn_out, exact.ffn_out),
            stream_error=_error(official.streams, exact.streams),
            noise=_error(self.rounded.streams, exact.streams),
            largest=largest,
            crest=largest / max(float(exact.streams.float().square().mean().sqrt()), 1e-30),
            router=float(shared_share(exact.experts, official.experts).mean()),
            index_recall=float(recall.mean()) if len(recall) else None,
            kv_error=_kv_error(self.exact.handle(layer), self.official.handle(layer)),
            kernel_error=kernel_error,
        )

    def _kernel_error(self, params: BlockParams, layer: LayerSpec, given: Tensor, oracle: BlockOutput) -> float:
        """Kernels against oracles on the same input: the larger error of the two sublayers."""
        assert self.kernels is not None
        ends = self._load(REST, None).ends()
        prepared = prepare_params(replace(ends, layers=[params]), self.kernels.context.backend).layers[0]
        found = self.kernels.run(prepared, layer, given)
        return max(_error(found.attn_out, oracle.attn_out), _error(found.ffn_out, oracle.ffn_out))

    def _perplexity(self, chain: Chain) -> float:
        ends = self._load(REST, chain.weight_dtype).ends()
        logits = Transformer(self.config, ends, chain.context.dtype).logits(chain.streams.to(chain.context.dtype))
        mean = negative_log_likelihood(logits, self.token_ids) / (len(self.token_ids) - 1)
        return math.exp(min(mean, 700.0)) if math.isfinite(mean) else math.nan


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative, Frobenius; NaN and infinity come out as infinity."""
    wide = exact.double()
    error = float((found.double() - wide).norm() / wide.norm().clamp_min(1e-300))
    return error if math.isfinite(error) else math.inf


def _kv_error(exact: LayerCacheHandle, official: LayerCacheHandle) -> float:
    """What storing the exact chain's rows (window, entries, index keys) in the official format does to them: the
    largest relative error of the three."""
    errors = []
    for name in ("window", "entries", "index_keys"):
        plain, packed = getattr(exact, name), getattr(official, name)
        if plain is not None:
            values = plain.rows.data
            errors.append(_error(decode_rows(encode_rows(values.to(torch.bfloat16), packed.rows.format)), values))
    return max(errors)


def _judge(name: str, layer: LayerRun) -> list[Finding]:
    findings = []
    if not math.isfinite(layer.stream_error) or not math.isfinite(layer.largest):
        findings.append(fault("not a number", name, "the layer's output is not finite"))
    elif max(layer.attn_error, layer.ffn_error) > MOST_ERROR:
        part, error = max(("attention", layer.attn_error), ("experts", layer.ffn_error), key=lambda item: item[1])
        text = f"official numerics differ from exact by {error:.2f} in the {part} of this layer alone"
        findings.append(fault("numerics", name, text))
    if layer.kernel_error is not None and not layer.kernel_error <= MOST_KERNEL_ERROR:
        findings.append(fault("kernels", name, f"kernels differ from their oracles by {layer.kernel_error:.3f}"))
    return findings
