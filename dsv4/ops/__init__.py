"""Every operation of the model, a folder for each family: contract and oracle, launcher, tiles, kernels.

The model never calls an op by name; it is handed an `OpSet`. `TORCH` is the set of oracles: plain torch, any device,
any float dtype, bitwise independent of how requests are batched or chunked. The set of kernels is
`dsv4.ops.triton_set.TRITON`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from dsv4.formats.row_store import RowStore
from dsv4.formats.tensors import QuantActivation
from dsv4.ops.attention import attention_inputs_ref, sparse_attention_ref
from dsv4.ops.compress import compress_pair_ref, compress_ref
from dsv4.ops.hyper import (
    HyperInput,
    hc_boundary_ref,
    hc_enter_ref,
    hc_head_norm_ref,
    hc_head_ref,
    hc_post_ref,
    hc_pre_ref,
)
from dsv4.ops.indexer import index_queries_ref, index_topk_ref
from dsv4.ops.linear import grouped_linear_ref, linear_ref, linears_ref
from dsv4.ops.moe import moe_ref
from dsv4.ops.norm import rms_norm_quant_ref, rms_norm_ref
from dsv4.ops.router import route_ref
from dsv4.ops.rows import append_swa_ref, head_norm_rope_ref, rope_ref, window_rows_ref
from dsv4.ops.sampling import resolve_tokens_ref, sample_ref, sampled_logprobs_ref


@dataclass(frozen=True)
class OpSet:
    """One implementation of every op; the contract of each field is the docstring of its `_ref`."""

    rms_norm: Callable[..., Tensor]
    rms_norm_quant: Callable[..., tuple[Tensor | None, QuantActivation]]
    head_norm_rope: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    hc_pre: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hc_post: Callable[..., Tensor]
    hc_head: Callable[..., Tensor]
    hc_enter: Callable[..., HyperInput]
    hc_boundary: Callable[..., HyperInput]
    hc_head_norm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linears: Callable[..., tuple[Tensor, ...]]
    grouped_linear: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    moe: Callable[..., Tensor]
    attention_inputs: Callable[..., tuple[Tensor, RowStore, Tensor | None]]
    window_rows: Callable[..., RowStore]
    append_swa: Callable[..., None]
    compress: Callable[..., None]
    compress_pair: Callable[..., None]
    index_queries: Callable[..., Tensor]
    index_topk: Callable[..., Tensor]
    sparse_attention: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    sampled_logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    resolve_tokens: Callable[..., Tensor]


TORCH = OpSet(
    rms_norm=rms_norm_ref,
    rms_norm_quant=rms_norm_quant_ref,
    head_norm_rope=head_norm_rope_ref,
    rope=rope_ref,
    hc_pre=hc_pre_ref,
    hc_post=hc_post_ref,
    hc_head=hc_head_ref,
    hc_enter=hc_enter_ref,
    hc_boundary=hc_boundary_ref,
    hc_head_norm=hc_head_norm_ref,
    linear=linear_ref,
    linears=linears_ref,
    grouped_linear=grouped_linear_ref,
    route=route_ref,
    moe=moe_ref,
    attention_inputs=attention_inputs_ref,
    window_rows=window_rows_ref,
    append_swa=append_swa_ref,
    compress=compress_ref,
    compress_pair=compress_pair_ref,
    index_queries=index_queries_ref,
    index_topk=index_topk_ref,
    sparse_attention=sparse_attention_ref,
    sample=sample_ref,
    sampled_logprobs=sampled_logprobs_ref,
    resolve_tokens=resolve_tokens_ref,
)
