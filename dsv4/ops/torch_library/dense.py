"""Norms, rope, hyper-connections, selection and sampling: the ops that touch neither cache nor large weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import ACTIVATION_GROUP
from dsv4.ops import hyper, moe, norm, router, sampling, select
from dsv4.ops import rows as row_ops
from dsv4.ops.hyper import HyperInput, HyperSettings

NAMESPACE = "dsv4"


def define(function: Callable[..., Any]) -> Any:
    """Register `function` under its name; what it returns has a `register_fake`."""
    return torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())


def _codes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Empty codes and scale of rows [..., K]."""
    scale_shape = (*rows.shape[:-1], rows.shape[-1] // ACTIVATION_GROUP)
    return rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn), rows.new_empty(scale_shape, dtype=torch.uint8)


# ---- norm, rope ----


@define
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@define
def rms_norm_quant(x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool) -> tuple[Tensor, Tensor, Tensor]:
    plain, quant = norm.rms_norm_quant(x, weight, eps, keep_plain)
    return x.new_empty(0) if plain is None else plain, quant.codes, quant.scale


@rms_norm_quant.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape if keep_plain else 0), *_codes(x)


@define
def rope(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    return row_ops.rope(x, positions, freqs, inverse)


@rope.register_fake
def _(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    return x.new_empty(x.shape)


@define
def head_norm_rope(q: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> Tensor:
    return row_ops.head_norm_rope(q, positions, freqs, eps)


@head_norm_rope.register_fake
def _(q: Tensor, positions: Tensor, freqs: Tensor, eps: float) -> Tensor:
    return q.new_empty(q.shape)


# ---- hyper-connections ----

HyperTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _hyper_tensors(result: HyperInput, keep_streams: bool) -> HyperTensors:
    """streams (none if they are an argument), hidden, codes and scale (none without), post, comb."""
    none = result.hidden.new_empty(0)
    streams = result.streams if keep_streams else none
    quant = result.quant
    codes = none.to(torch.float8_e4m3fn) if quant is None else quant.codes
    scale = none.to(torch.uint8) if quant is None else quant.scale
    return streams, result.hidden, codes, scale, result.post, result.comb


def _fake_hyper(streams: Tensor, keep_streams: bool, has_codes: bool) -> HyperTensors:
    num_tokens, num_streams, _ = streams.shape
    hidden = streams.new_empty(num_tokens, streams.shape[-1])
    codes, scale = _codes(hidden if has_codes else hidden.new_empty(0))
    post = hidden.new_empty(num_tokens, num_streams, dtype=torch.float32)
    comb = hidden.new_empty(num_tokens, num_streams, num_streams, dtype=torch.float32)
    return streams.new_empty(streams.shape if keep_streams else 0), hidden, codes, scale, post, comb


@define
def hc_enter(
    source: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, num_iters: int, hc_eps: float,
    norm_eps: float, has_codes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    settings = HyperSettings(num_iters, hc_eps, norm_eps)
    result = hyper.hc_enter(source, fn, base, scale, norm_weight, settings, has_codes)
    return _hyper_tensors(result, keep_streams=source.dim() == 2)


@hc_enter.register_fake
def _(
    source: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, num_iters: int, hc_eps: float,
    norm_eps: float, has_codes: bool,
) -> HyperTensors:  # fmt: skip
    is_embedding = source.dim() == 2
    streams = source.unsqueeze(1).expand(-1, fn.shape[1] // source.shape[-1], -1) if is_embedding else source
    return _fake_hyper(streams, is_embedding, has_codes)


@define
def hc_boundary(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
    norm_weight: Tensor, num_iters: int, hc_eps: float, norm_eps: float, has_codes: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    settings = HyperSettings(num_iters, hc_eps, norm_eps)
    result = hyper.hc_boundary(out, streams, post, comb, fn, base, scale, norm_weight, settings, has_codes)
    return _hyper_tensors(result, keep_streams=True)


@hc_boundary.register_fake
def _(
    out: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
    norm_weight: Tensor, num_iters: int, hc_eps: float, norm_eps: float, has_codes: bool,
) -> HyperTensors:  # fmt: skip
    return _fake_hyper(streams, True, has_codes)


@define
def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return hyper.hc_pre(streams, fn, base, scale, num_iters=num_iters, hc_eps=hc_eps, norm_eps=norm_eps)


@hc_pre.register_fake
def _(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _, hidden, _, _, post, comb = _fake_hyper(streams, False, False)
    return hidden, post, comb


@define
def hc_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return hyper.hc_post(out, streams, post, comb)


@hc_post.register_fake
def _(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return streams.new_empty(streams.shape)


@define
def hc_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    return hyper.hc_head(streams, fn, base, scale, hc_eps=hc_eps, norm_eps=norm_eps)


@hc_head.register_fake
def _(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


@define
def hc_head_norm(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    return hyper.hc_head_norm(streams, fn, base, scale, norm_weight, hc_eps=hc_eps, norm_eps=norm_eps)


@hc_head_norm.register_fake
def _(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    return streams.new_empty(streams.shape[0], streams.shape[2])


# ---- selection ----


@define
def topk_select(scores: Tensor, k: int, lengths: Tensor | None = None, ascending: bool = False) -> Tensor:
    return select.topk_select(scores, k, lengths=lengths, ascending=ascending)


@topk_select.register_fake
def _(scores: Tensor, k: int, lengths: Tensor | None = None, ascending: bool = False) -> Tensor:
    return scores.new_empty(scores.shape[0], k if ascending else min(k, scores.shape[1]), dtype=torch.int64)


def _fake_choice(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], top_k
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


@define
def activation_topk(logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    return router.activation_topk(logits, bias, top_k=top_k, scale=scale)


@activation_topk.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    return _fake_choice(logits, top_k)


@define
def route(
    x: Tensor, gate: Tensor, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    uniform_hash_weights: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return router.route(
        x, gate, bias, tid2eid, token_ids, top_k=top_k, scale=scale, uniform_hash_weights=uniform_hash_weights
    )


@route.register_fake
def _(
    x: Tensor, gate: Tensor, bias: Tensor | None, tid2eid: Tensor | None, token_ids: Tensor, top_k: int, scale: float,
    uniform_hash_weights: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake_choice(x, top_k)


@define
def expert_sort(
    experts: Tensor, num_experts: int, tile_rows: int, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    order = moe.expert_sort(experts, num_experts, tile_rows, slots)
    return order.counts, order.offsets, order.pairs, order.tile_experts, order.tile_starts


@expert_sort.register_fake
def _(
    experts: Tensor, num_experts: int, tile_rows: int, slots: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_pairs = experts.shape[0] * experts.shape[1]
    bound = moe.max_tiles(num_pairs, num_experts, tile_rows)

    def integers(size: int) -> Tensor:
        return experts.new_empty(size, dtype=torch.int32)

    return integers(num_experts), integers(num_experts + 1), integers(num_pairs), integers(bound), integers(bound)


# ---- sampling ----


@torch.library.custom_op("dsv4::sample", mutates_args=("last_tokens", "token_counts"))
def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, mask: Tensor | None, is_masked: Tensor | None,
    temperature: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor, presence_penalty: Tensor,
    frequency_penalty: Tensor, top_k: Tensor, seeds: Tensor, prompt_lens: Tensor, flags: Tensor, last_tokens: Tensor,
    token_counts: Tensor, bias: Tensor,
) -> Tensor:  # fmt: skip
    state = sampling.SamplingState(
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, top_k, seeds, prompt_lens,
        flags, last_tokens, token_counts, bias,
    )  # fmt: skip
    return sampling.sample(logits, sampling.SamplingRows(slots, positions, mask, is_masked), state)


@sample.register_fake
def _(logits: Tensor, *rows_and_state: Tensor | None) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@define
def resolve_tokens(token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    return sampling.resolve_tokens(token_ids, slots, last_tokens)


@resolve_tokens.register_fake
def _(token_ids: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    return torch.empty_like(token_ids)


@define
def sampled_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    return sampling.sampled_logprobs(logits, token_ids, num_top)


@sampled_logprobs.register_fake
def _(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = logits.shape
    shape = num_rows, min(num_top, vocab_size)
    values = logits.new_empty(shape, dtype=torch.float32)
    return logits.new_empty(num_rows, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64), values


OPS = (
    rms_norm, rms_norm_quant, rope, head_norm_rope, hc_enter, hc_boundary, hc_pre, hc_post, hc_head, hc_head_norm,
    topk_select, activation_topk, route, expert_sort, sample, sampled_logprobs, resolve_tokens,
)  # fmt: skip
