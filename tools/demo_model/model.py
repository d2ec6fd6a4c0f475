"""DeepSeek-V4 as a differentiable graph over whole sequences. Parameter names are the checkpoint's own.

`DemoModel(config).forward(ids)` computes what `dsv4.LLM(numerics="exact")` computes token by token; with quantisation
switched on it rounds where the `official` numerics do. Experts are computed densely (every expert on every token, the
routing weight zero where it was not chosen): with 8 small experts that is the fastest form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from functions import (
    attend,
    hc_head,
    hc_post,
    hc_pre,
    index_loss,
    index_scores,
    pool,
    rms_norm,
    rope,
    top_entries,
    visible_entries,
    wide,
)
from quantise import entry_rows, fp4_rows, fp8_blocks, fp8_rows, straight_through
from torch import Tensor, nn

from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule
from dsv4.ops.rows import rope_frequencies, rope_tables


@dataclass
class Flags:
    """Switches as bool tensors: flipping one compiles nothing anew. quantise and select are 0-dim; `sees_entries` [B]
    says which sequences see this layer's compressed entries at all."""

    quantise: Tensor
    select: Tensor
    sees_entries: Tensor


class Weight(nn.Module):
    """Holds `weight`; `official` says which rounding it gets in the checkpoint."""

    def __init__(self, *shape: int, std: float | None = None, official: str = "plain") -> None:
        super().__init__()
        self.official = official
        std = shape[-1] ** -0.5 if std is None else std
        self.weight = nn.Parameter(torch.randn(shape) * std if len(shape) > 1 else torch.ones(shape))

    def rounded(self, flags: Flags, dtype: torch.dtype) -> Tensor:
        """The weight in the compute dtype, rounded to its stored format where quantisation is on."""
        if self.official == "plain":
            return self.weight.to(dtype)
        stored = fp8_blocks(self.weight) if self.official == "fp8" else fp4_rows(self.weight)
        return straight_through(self.weight, stored, flags.quantise).to(dtype)

    def linear(self, x: Tensor, flags: Flags) -> Tensor:
        """x W^T. A quantised weight meets an input rounded to FP8 in groups of 128; sums in fp32 by the GEMM."""
        if self.official != "plain":
            x = straight_through(x, fp8_rows(x, 128), flags.quantise)
        return F.linear(x, self.rounded(flags, x.dtype))

    def wide_linear(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x W^T in at least fp32, the weight having been rounded to `dtype` as it is stored."""
        return F.linear(wide(x), wide(self.weight.to(dtype)))


class Compressor(nn.Module):
    def __init__(self, config: ModelConfig, ratio: int, dim: int, overlap: bool) -> None:
        super().__init__()
        self.ratio, self.dim, self.eps = ratio, dim, config.rms_norm_eps
        width = 2 * dim if overlap else dim
        self.wkv = Weight(width, config.hidden_size)
        self.wgate = Weight(width, config.hidden_size, std=0.02)
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = Weight(dim)

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        """x [B, T, D] -> normed and roped entries [B, T // ratio, dim], not yet quantised."""
        kv, gate = self.wkv.wide_linear(x, x.dtype), self.wgate.wide_linear(x, x.dtype)
        places = torch.arange(x.shape[1], device=x.device) % self.ratio
        entries = pool(kv, gate + self.ape.to(gate.dtype)[places], self.ratio, self.dim).to(x.dtype)
        starts = tables[:, :: self.ratio][:, : entries.shape[1]]
        return rope(rms_norm(entries, self.norm.weight, self.eps), starts)


class Indexer(nn.Module):
    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Weight(self.heads * self.dim, config.q_lora_rank, official="fp8")
        self.weights_proj = Weight(self.heads, config.hidden_size)
        self.compressor = Compressor(config, ratio, self.dim, overlap=True)
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < self.dim:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        self.register_buffer("hadamard", matrix * self.dim**-0.5, persistent=False)

    def forward(self, x: Tensor, latent: Tensor, tables: Tensor, flags: Flags) -> Tensor:
        """Scores [B, T, n]. The inputs are detached: only the indexer's own loss moves it."""
        x, latent = x.detach(), latent.detach()
        q = rope(self.wq_b.linear(latent, flags).unflatten(-1, (self.heads, self.dim)), tables)
        q, keys = (self._rotated(part, flags) for part in (q, self.compressor(x, tables)))
        weights = wide(self.weights_proj.linear(x, flags)) * (self.dim**-0.5 * self.heads**-0.5)
        return index_scores(q, weights, keys)

    def _rotated(self, x: Tensor, flags: Flags) -> Tensor:
        rotated = (wide(x) @ self.hadamard.to(wide(x).dtype)).to(x.dtype)
        return straight_through(rotated, fp4_rows(rotated), flags.quantise)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: LayerSpec, out_std: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
        heads, groups, out_rank = config.num_attention_heads, config.o_groups, config.o_lora_rank
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wq_a = Weight(rank, hidden, official="fp8")
        self.q_norm = Weight(rank)
        self.wq_b = Weight(heads * dim, rank, official="fp8")
        self.wkv = Weight(dim, hidden, official="fp8")
        self.kv_norm = Weight(dim)
        self.wo_a = Weight(groups * out_rank, heads // groups * dim, official="fp8")
        self.wo_b = Weight(hidden, groups * out_rank, std=out_std, official="fp8")
        if layer.attention is not AttentionKind.SWA:
            self.compressor = Compressor(config, layer.ratio, dim, overlap=layer.attention is AttentionKind.CSA)
        if layer.has_indexer:
            self.indexer = Indexer(config, layer.ratio)

    def forward(self, x: Tensor, tables: Tensor, flags: Flags) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [B, T, D] -> out; on CSA layers also the indexer's loss and its recall of attention mass (last token)."""
        config = self.config
        latent, q = self.queries(x, tables, flags)
        kv = self.rows(x, tables, flags)
        entries = selected = seen = scores = None
        if self.layer.attention is not AttentionKind.SWA and x.shape[1] >= self.layer.ratio:
            entries = entry_rows(self.compressor(x, tables), config.qk_rope_head_dim, flags.quantise)
            seen = visible_entries(x.shape[1], self.layer.ratio, entries.shape[1], x.device)
            selected = seen.unsqueeze(0)
            if self.layer.has_indexer:
                scores = self.indexer(x, latent, tables, flags)
                picked = top_entries(scores, seen, config.index_topk)
                selected = picked | (selected & ~flags.select)
            selected = selected & flags.sees_entries.view(-1, 1, 1)
        out, mass = attend(q, kv, entries, selected, seen, self.attn_sink, config.sliding_window)
        loss = recall = None
        if scores is not None:
            loss = index_loss(scores, mass, seen)
            recall = ((mass * picked)[:, -1].sum(-1) / mass[:, -1].sum(-1).clamp_min(1e-20)).mean().detach()
        return self.output(out, tables, flags), loss, recall

    def queries(self, x: Tensor, tables: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> latent [B, T, rank] and roped queries [B, T, H, d]."""
        eps = self.config.rms_norm_eps
        latent = rms_norm(self.wq_a.linear(x, flags), self.q_norm.weight, eps)
        q = self.wq_b.linear(latent, flags).unflatten(-1, (self.config.num_attention_heads, -1))
        return latent, rope(rms_norm(q, None, eps), tables)

    def rows(self, x: Tensor, tables: Tensor, flags: Flags) -> Tensor:
        """x [B, T, D] -> window rows [B, T, d] as the cache keeps them."""
        kv = rms_norm(self.wkv.linear(x, flags), self.kv_norm.weight, self.config.rms_norm_eps)
        return entry_rows(rope(kv, tables), self.config.qk_rope_head_dim, flags.quantise)

    def output(self, out: Tensor, tables: Tensor, flags: Flags) -> Tensor:
        """What the heads read [B, T, H, d] -> [B, T, D]."""
        groups = self.config.o_groups
        grouped = rope(out, tables, inverse=True).flatten(2).unflatten(-1, (groups, -1))
        plain = self.wo_a.rounded(flags, out.dtype).unflatten(0, (groups, -1))
        mixed = torch.einsum("btgk,grk->btgr", grouped, plain).flatten(2)
        return self.wo_b.linear(mixed, flags)


class Experts(nn.Module):
    """w1, w3 [E, I, D] and w2 [E, D, I]; without E for the shared expert."""

    def __init__(self, leading: tuple[int, ...], hidden: int, width: int, out_std: float, official: str) -> None:
        super().__init__()
        self.w1 = Weight(*leading, width, hidden, official=official)
        self.w2 = Weight(*leading, hidden, width, std=out_std, official=official)
        self.w3 = Weight(*leading, width, hidden, official=official)

    def forward(self, x: Tensor, weights: Tensor | None, limit: float, flags: Flags) -> Tensor:
        """x [N, D], weights [N, E] (zero where an expert was not chosen) or None for the shared expert."""
        x = straight_through(x, fp8_rows(x, 128), flags.quantise)
        gate, up = (F.linear(x, w.rounded(flags, x.dtype).flatten(0, -2)) for w in (self.w1, self.w3))
        hidden = F.silu(wide(gate).clamp(max=limit)) * wide(up).clamp(-limit, limit)
        down = self.w2.rounded(flags, x.dtype)
        if weights is not None:
            hidden = (hidden.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1)).flatten(1)
            down = down.transpose(0, 1).flatten(1)  # [D, E I]
        hidden = hidden.to(x.dtype)
        return F.linear(straight_through(hidden, fp8_rows(hidden, 128), flags.quantise), down)


class Gate(Weight):
    """The router. Hash layers keep a table, the others a bias that balances the load and takes no gradient."""

    def __init__(self, config: ModelConfig, is_hash: bool) -> None:
        super().__init__(config.n_routed_experts, config.hidden_size)
        table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
        self.register_buffer("tid2eid" if is_hash else "bias", table if is_hash else torch.zeros(len(self.weight)))
        self.is_hash = is_hash


class Moe(nn.Module):
    def __init__(self, config: ModelConfig, layer: LayerSpec, out_std: float) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config, layer.router is RouterKind.HASH)
        self.shared_experts = Experts((), hidden, width, out_std, "fp8")
        self.experts = Experts((config.n_routed_experts,), hidden, width, out_std, "mxfp4")

    def forward(self, x: Tensor, token_ids: Tensor, flags: Flags) -> tuple[Tensor, Tensor]:
        """x [B, T, D] -> out, and how many tokens each expert got [E]."""
        config = self.config
        rows = x.flatten(0, 1)
        scores = F.softplus(self.gate.wide_linear(rows, x.dtype)).sqrt()
        if self.gate.is_hash:
            chosen = self.gate.tid2eid[token_ids.flatten()]
        else:
            chosen = (scores.detach() + self.gate.bias).topk(config.num_experts_per_tok, -1).indices
        values = scores.gather(-1, chosen)
        values = values / values.sum(-1, keepdim=True) * config.routed_scaling_factor
        weights = torch.zeros_like(scores).scatter(-1, chosen, values)
        out = wide(self.experts(rows, weights, config.swiglu_limit, flags))
        out = out + wide(self.shared_experts(rows, None, config.swiglu_limit, flags))
        return out.to(x.dtype).view_as(x), (weights.detach() > 0).sum(0)


def _hyper(module: nn.Module, name: str, config: ModelConfig, rows: int, num_scales: int) -> None:
    """Starts near a plain residual: reads the mean of the streams, writes to all, keeps each where it is."""
    n = config.hc_mult
    base = torch.full((rows,), -1.0986)  # sigmoid = 1 / 4
    base[n:] = 0.0
    if rows > n:
        base[2 * n :] = 4.0 * torch.eye(n).flatten()
    fn = torch.randn(rows, n * config.hidden_size) * (n * config.hidden_size) ** -0.5
    for suffix, value in (("fn", fn), ("base", base), ("scale", torch.full((num_scales,), 0.2))):
        module.register_parameter(f"{name}_{suffix}", nn.Parameter(value))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: LayerSpec, dropout: float) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        depth = (2 * config.num_hidden_layers) ** -0.5
        self.attn_norm, self.ffn_norm = Weight(config.hidden_size), Weight(config.hidden_size)
        for name in ("hc_attn", "hc_ffn"):
            _hyper(self, name, config, config.hc_mult * (config.hc_mult + 2), 3)
        self.attn = Attention(config, layer, depth * (config.o_groups * config.o_lora_rank) ** -0.5)
        self.ffn = Moe(config, layer, depth * config.moe_intermediate_size**-0.5)

    def forward(
        self, streams: Tensor, token_ids: Tensor, tables: Tensor, quantise: Tensor, select: Tensor, sees_entries: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """-> streams, tokens per expert, the indexer's loss and recall (None without one)."""
        flags = Flags(quantise, select, sees_entries)
        streams, loss, recall = self._sublayer(streams, "attn", lambda x: self.attn(x, tables, flags))
        streams, load = self._sublayer(streams, "ffn", lambda x: self.ffn(x, token_ids, flags))
        return streams, load, loss, recall

    def _sublayer(self, streams: Tensor, name: str, run: Callable[[Tensor], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`run` ("attn" or "ffn") between its collapse and its hyper-connection -> streams, and what else it gives."""
        config = self.config
        fn, base, scale = (getattr(self, f"hc_{name}_{suffix}") for suffix in ("fn", "base", "scale"))
        hidden, post, comb = hc_pre(
            streams, fn, base, scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )
        out, *rest = run(rms_norm(hidden, getattr(self, f"{name}_norm").weight, config.rms_norm_eps))
        return hc_post(F.dropout(out, self.dropout, self.training), streams, post, comb), *rest


class Head(nn.Module):
    """Final collapse and norm, as mixed into the model and the MTP block under the checkpoint's names."""

    def _add_head(self, config: ModelConfig) -> None:
        self.norm = Weight(config.hidden_size)
        _hyper(self, "hc_head", config, config.hc_mult, 1)

    def _collapsed(self, streams: Tensor, config: ModelConfig) -> Tensor:
        return hc_head(
            streams, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, config.hc_eps, config.rms_norm_eps
        )

    def _hidden(self, streams: Tensor, config: ModelConfig) -> Tensor:
        return rms_norm(self._collapsed(streams, config), self.norm.weight, config.rms_norm_eps)


class Mtp(Block, Head):
    def __init__(self, config: ModelConfig, layer: LayerSpec, dropout: float) -> None:
        super().__init__(config, layer, dropout)
        hidden = config.hidden_size
        self.e_proj, self.h_proj = Weight(hidden, hidden, official="fp8"), Weight(hidden, hidden, official="fp8")
        self.enorm, self.hnorm = Weight(hidden), Weight(hidden)
        self._add_head(config)

    def mix(self, streams: Tensor, embedding: Tensor, flags: Flags) -> Tensor:
        eps = self.config.rms_norm_eps
        from_token = self.e_proj.linear(rms_norm(embedding, self.enorm.weight, eps), flags)
        return from_token.unsqueeze(2) + self.h_proj.linear(rms_norm(streams, self.hnorm.weight, eps), flags)


@dataclass
class Output:
    """logits [B, T, V]; mtp_logits [B, T, V] predict one token further; loads [layers, E]; indexer loss and recall;
    last [B, T, D], what the vocabulary is projected from; taps [B, T, taps * D], the means of the streams after the
    tapped layers."""

    logits: Tensor
    mtp_logits: Tensor | None
    loads: Tensor
    index_loss: Tensor
    index_recall: Tensor
    last: Tensor
    taps: Tensor | None


class DemoModel(Head):
    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, max_tokens: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        schedule = build_schedule(config, with_mtp=True)
        num_layers = config.num_hidden_layers
        self.embed = Weight(config.vocab_size, config.hidden_size, std=0.3)
        self.layers = nn.ModuleList(Block(config, layer, dropout) for layer in schedule[:num_layers])
        self.mtp = nn.ModuleList(Mtp(config, layer, dropout) for layer in schedule[num_layers:])
        self._add_head(config)
        self.head = Weight(config.vocab_size, config.hidden_size, std=0.02)
        self.kinds = [layer.attention for layer in schedule]
        positions = torch.arange(-(-max_tokens // config.sliding_window) * config.sliding_window)
        rope_dim = config.qk_rope_head_dim
        plain = rope_frequencies(rope_dim, config.rope_theta, None)
        yarn = rope_frequencies(rope_dim, config.compress_rope_theta, config.rope_scaling)
        self.register_buffer("window_tables", torch.stack(rope_tables(positions, plain)), persistent=False)
        self.register_buffer("compressed_tables", torch.stack(rope_tables(positions, yarn)), persistent=False)
        self.register_buffer("quantise", torch.tensor(False), persistent=False)
        self.register_buffer("select", torch.tensor(False), persistent=False)

    def forward(
        self, token_ids: Tensor, following_ids: Tensor | None = None,
        hidden: dict[AttentionKind, Tensor] | None = None, tapped: tuple[int, ...] = (),
    ) -> Output:  # fmt: skip
        """token_ids [B, T]; with following_ids (the same shifted by one) the MTP block runs too. `hidden` says, per
        kind of layer, which sequences [B] its compressed entries are hidden from; default: none. `tapped`: layers whose
        streams are tapped, ascending.

        T is padded to whole windows inside; nothing looks forward, so the padding changes nothing.
        """
        length, window = token_ids.shape[1], self.config.sliding_window
        padded = F.pad(token_ids, (0, -length % window))
        embedding = F.embedding(padded, self.embed.weight).to(self.dtype)
        streams = embedding.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        all_see = torch.ones(len(token_ids), dtype=torch.bool, device=token_ids.device)
        sees = {kind: ~hidden[kind] if hidden and kind in hidden else all_see for kind in AttentionKind}
        loads, losses, recalls, taps = [], [], [], []
        for layer_idx, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=False)):
            streams, load, loss, recall = layer(
                streams, padded, self._tables(kind, padded), self.quantise, self.select, sees[kind]
            )
            loads.append(load)
            if layer_idx in tapped:
                taps.append(wide(streams[:, :length]).mean(2).to(self.dtype))
            if loss is not None:
                losses.append(loss)
                recalls.append(recall)
        last = self._hidden(streams, self.config)[:, :length]
        logits = self.head.wide_linear(last, self.dtype)
        mtp_logits = None
        if following_ids is not None:
            following = F.pad(following_ids, (0, -length % window))
            block = self.mtp[0]
            embedding = F.embedding(following, self.embed.weight).to(self.dtype)
            mixed = block.mix(streams, embedding, Flags(self.quantise, self.select, all_see))
            tables = self._tables(AttentionKind.SWA, padded)
            drafted, load, _, _ = block(mixed, following, tables, self.quantise, self.select, all_see)
            loads.append(load)
            mtp_logits = self.head.wide_linear(block._hidden(drafted, self.config)[:, :length], self.dtype)
        zero = logits.new_zeros(())
        return Output(
            logits, mtp_logits, torch.stack(loads), sum(losses, zero) / max(len(losses), 1),
            torch.stack(recalls).mean() if recalls else zero, last, torch.cat(taps, -1) if taps else None,
        )  # fmt: skip

    def _tables(self, kind: AttentionKind, token_ids: Tensor) -> Tensor:
        tables = self.window_tables if kind is AttentionKind.SWA else self.compressed_tables
        return tables[:, : token_ids.shape[1]]
