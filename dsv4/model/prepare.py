"""Weights laid out as a backend wants them: done once, after loading, in place.

The kernels take experts shuffled for their MMA (formats/layouts.py) and weights that share an input end to end
(`LinearBundle`). The oracles take weights as they were loaded; nothing is prepared for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.model.parameters import AttentionParams, BlockParams, ExpertParams, ModelParams, OnInput, OnLatent
from dsv4.ops.backend import Backend, WeightLayout
from dsv4.ops.linear import LinearBundle, is_kernel_weight


def prepare_params(params: ModelParams, backend: Backend) -> ModelParams:
    """Layer by layer, since there may be no room for a second copy; what is prepared already stays as it is."""
    for place, block in enumerate(params.layers):
        params.layers[place] = _prepare_block(block, backend.layout)
    for place, draft in enumerate(params.mtp):
        params.mtp[place] = replace(draft, block=_prepare_block(draft.block, backend.layout))
    if params.dspark is not None:
        blocks = params.dspark.blocks
        for place, block in enumerate(blocks):
            blocks[place] = _prepare_block(block, backend.layout)
    return params


def _prepare_block(block: BlockParams, layout: WeightLayout) -> BlockParams:
    attn, ffn = block.attn, block.ffn
    if layout.bundle is not None:
        attn = _bundle(attn, layout.bundle)
    if layout.grouped is not None and not isinstance(attn.wo_a, ShuffledTensor):
        attn = replace(attn, wo_a=layout.grouped(attn.wo_a, attn.wq_b.shape[0] // attn.wo_a.shape[1]))
    if layout.experts is not None:
        ffn = replace(
            ffn,
            experts=_prepare_experts(ffn.experts, layout.experts),
            shared=_prepare_experts(ffn.shared, layout.experts),
        )
    return replace(block, attn=attn, ffn=ffn)


def _bundle(attn: AttentionParams, build: Callable[[Sequence[Weight]], LinearBundle]) -> AttentionParams:
    """With bundles, their views in place of the weights they were made of, so that nothing is held twice."""
    if attn.input_bundle is not None or not all(map(is_kernel_weight, (*attn.on_input, *attn.on_latent))):
        return attn
    on_input, on_latent = build(attn.on_input), build(attn.on_latent)
    views, latent_views = OnInput(*on_input.weights), OnLatent(*on_latent.weights)
    compressor, indexer = attn.compressor, attn.indexer
    if compressor is not None:
        assert views.compressor_kv is not None and views.compressor_gate is not None
        compressor = replace(compressor, wkv=views.compressor_kv, wgate=views.compressor_gate)
    if indexer is not None:
        assert views.index_kv is not None and views.index_gate is not None and views.index_weights is not None
        assert latent_views.index_q is not None
        keys = replace(indexer.compressor, wkv=views.index_kv, wgate=views.index_gate)
        indexer = replace(indexer, wq_b=latent_views.index_q, weights_proj=views.index_weights, compressor=keys)
    return replace(
        attn, wq_a=views.latent, wkv=views.kv, wq_b=latent_views.q, compressor=compressor, indexer=indexer,
        input_bundle=on_input, latent_bundle=on_latent,
    )  # fmt: skip


def _prepare_experts(experts: ExpertParams, prepare: Callable[..., tuple[ShuffledTensor, ...]]) -> ExpertParams:
    matrices = experts.matrices
    if not isinstance(matrices, tuple) or not all(isinstance(weight, QuantTensor) for weight in matrices):
        return experts  # prepared, offloaded, or plain
    return ExpertParams(*cast(tuple[Weight, Weight, Weight], prepare(matrices)))
