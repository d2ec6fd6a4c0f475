"""Weights laid out as a backend wants them: done once, after loading, in place.

The kernels take experts shuffled for their MMA (formats/layouts.py) and weights that share an input end to end
(`LinearBundle`). The oracles take weights in any layout; on a CPU small models keep the fp64 operands of their products
(`WideWeight`), eight bytes a weight, from the first product on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import AnyWeight, QuantTensor, Weight, WideWeight
from dsv4.model.parameters import AttentionParams, BlockParams, ExpertParams, ModelParams, OnInput, OnLatent
from dsv4.ops.backend import Backend, PrepareExperts, WeightLayout
from dsv4.ops.lib.waiting import waits_for_device
from dsv4.ops.linear import LinearBundle, is_kernel_weight
from dsv4.ops.moe import are_prepared

KEPT_BYTES = 512 << 20  # of all operands of a model: 64 million weights
_PRODUCTS = frozenset(
    {
        "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wgate", "weights_proj", "gate", "w1", "w2", "w3", "fn", "e_proj",
        "h_proj", "main_proj", "markov_w2", "lm_head",
    }
)  # fmt: skip


def prepare_params(params: ModelParams, backend: Backend) -> ModelParams:
    """Layer by layer, since there may be no room for a second copy; what is prepared already stays as it is."""
    keep_operands(params, backend.layout.keeps_operands and params.embed.device.type == "cpu")
    for place, block in enumerate(params.layers):
        params.layers[place] = prepare_block(block, backend.layout)
    for place, draft in enumerate(params.mtp):
        params.mtp[place] = replace(draft, block=prepare_block(draft.block, backend.layout))
    if params.dspark is not None:
        blocks = params.dspark.blocks
        for place, block in enumerate(blocks):
            blocks[place] = prepare_block(block, backend.layout)
    return params


def keep_operands(params: ModelParams, is_wanted: bool) -> None:
    """Weights that meet an input keep their operands from now on, or no longer; a model above KEPT_BYTES never does."""
    products = [weight for _, _, weight in _products(params)]
    num_bytes = sum(weight.shape.numel() for weight in products) * torch.float64.itemsize
    is_kept = is_wanted and num_bytes <= KEPT_BYTES
    for holder, name, weight in list(_products(params)):
        if isinstance(weight, WideWeight) != is_kept:
            dtype = torch.bfloat16 if name == "wo_a" else torch.float32  # the published model rounds this one
            setattr(holder, name, weight.source if isinstance(weight, WideWeight) else WideWeight(weight, dtype))


def _products(holder: Any) -> Iterator[tuple[Any, str, AnyWeight]]:
    """Every weight that meets an input: the dataclass that holds it, the field, the weight."""
    for field in fields(holder):
        value = getattr(holder, field.name)
        if field.name in _PRODUCTS and isinstance(value, (Tensor, QuantTensor, WideWeight)):
            yield holder, field.name, value
        for part in value if isinstance(value, list) else [value]:
            if is_dataclass(part) and not isinstance(part, (QuantTensor, ShuffledTensor, LinearBundle)):
                yield from _products(part)


def prepare_block(block: BlockParams, layout: WeightLayout) -> BlockParams:
    """One block as the backend wants it."""
    attn, ffn = block.attn, block.ffn
    if layout.bundle is not None:
        attn = _bundle(attn, layout.bundle)
    if layout.grouped is not None and not isinstance(attn.wo_a, ShuffledTensor):
        attn = replace(attn, wo_a=layout.grouped(attn.wo_a, attn.wq_b.shape[0] // attn.wo_a.shape[1]))
    ffn = replace(
        ffn, experts=prepare_experts(ffn.experts, layout.routed), shared=prepare_experts(ffn.shared, layout.shared)
    )
    return replace(block, attn=attn, ffn=ffn)


def backend_for_weights(backend: Backend, params: ModelParams, *, has_drafts: bool) -> Backend:
    """The backend as prepared weights allow it. Where the kernels do not take a block's experts (bf16, FP8), oracles
    run inside their ops: these ops wait for the device then, so that no call is captured.
    """
    blocks = [*params.layers, *(params.draft_blocks if has_drafts else ())]
    if not backend.has_kernels or all(map(_has_kernel_experts, blocks)):
        return backend
    # a partial of each, since the mark belongs to these weights alone
    return backend.with_ops(
        moe=waits_for_device(partial(backend.ops.moe)), moe_parts=waits_for_device(partial(backend.ops.moe_parts))
    )


def _has_kernel_experts(block: BlockParams) -> bool:
    routed = block.ffn.experts.matrices
    return are_prepared(getattr(routed, "stack", routed), block.ffn.shared.matrices)  # offloaded, or whole


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


def prepare_experts(experts: ExpertParams, prepare: PrepareExperts | None) -> ExpertParams:
    """One expert, or stacks of them."""
    matrices = experts.matrices
    if (
        prepare is None
        or not isinstance(matrices, tuple)
        or not all(isinstance(weight, QuantTensor) for weight in matrices)
    ):
        return experts  # prepared, offloaded, or plain
    return ExpertParams(*cast(tuple[Weight, Weight, Weight], prepare(matrices)))
