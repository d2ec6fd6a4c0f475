"""`TRITON`: the op set of kernels, what a GPU runs. An op without a kernel is its oracle.

Imports without Triton; only a launch needs it.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4.ops import TORCH
from dsv4.ops.attention import attention_inputs, sparse_attention
from dsv4.ops.compress import compress, compress_pair
from dsv4.ops.hyper import hc_boundary, hc_enter, hc_head, hc_head_norm, hc_post, hc_pre
from dsv4.ops.indexer import index_queries, index_topk
from dsv4.ops.linear import grouped_linear, linear, linears
from dsv4.ops.moe import moe
from dsv4.ops.norm import rms_norm, rms_norm_quant
from dsv4.ops.router import route
from dsv4.ops.rows import append_swa, head_norm_rope, rope, window_rows
from dsv4.ops.sampling import resolve_tokens, sample, sampled_logprobs

TRITON = replace(
    TORCH,
    rms_norm=rms_norm,
    rms_norm_quant=rms_norm_quant,
    head_norm_rope=head_norm_rope,
    rope=rope,
    linear=linear,
    linears=linears,
    grouped_linear=grouped_linear,
    attention_inputs=attention_inputs,
    window_rows=window_rows,
    append_swa=append_swa,
    compress=compress,
    compress_pair=compress_pair,
    index_queries=index_queries,
    index_topk=index_topk,
    sparse_attention=sparse_attention,
    route=route,
    moe=moe,
    sample=sample,
    sampled_logprobs=sampled_logprobs,
    resolve_tokens=resolve_tokens,
    hc_pre=hc_pre,
    hc_post=hc_post,
    hc_head=hc_head,
    hc_enter=hc_enter,
    hc_boundary=hc_boundary,
    hc_head_norm=hc_head_norm,
)
