"""A DSpark head as a differentiable graph: many anchors of whole sequences at once. Names are the checkpoint's own.

What a block of drafts is: dsv4/model/dspark.py. The token before each row is given (the text's own), so all rows of all
blocks are computed together; `greedy_drafts` chooses them one after the other, as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from functions import rms_norm, wide
from model import Block, DemoModel, Flags, Head, Weight
from torch import Tensor, nn

from dsv4.config import ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule


@dataclass(frozen=True)
class Anchors:
    """R places where drafts begin: the sequence [R] each is in, and its position [R] there."""

    rows: Tensor
    positions: Tensor

    def spans(self, length: int) -> Tensor:
        """Positions [R, length] from each anchor's on."""
        return self.positions.unsqueeze(1) + torch.arange(length, device=self.positions.device)

    def gather(self, values: Tensor, length: int, offset: int = 0) -> Tensor:
        """values [B, T, ...] -> [R, length, ...] from `offset` behind each anchor's position on."""
        return values[self.rows.unsqueeze(1), self.spans(length) + offset]


@dataclass(frozen=True)
class Blocks:
    """hidden [R, g, D] before the norm; base_logits [R, g, V] before the Markov bias; loads [layers, E]."""

    hidden: Tensor
    base_logits: Tensor
    loads: Tensor


class MarkovHead(nn.Module):
    """A bias of the logits by the token before, of low rank. Starts as none."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = Weight(vocab_size, rank, std=1.0)
        self.markov_w2 = Weight(vocab_size, rank, std=0.0)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Weight(1, width, std=0.0)


class DraftBlock(Block, Head):
    """One layer of the head; the first has the projection of the taps, the last what is behind the layers."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, *, is_first: bool, is_last: bool) -> None:
        super().__init__(config, layer, 0.0)
        assert config.dspark is not None
        hidden, rank = config.hidden_size, config.dspark.markov_rank
        if is_first:
            self.main_proj = Weight(hidden, len(config.dspark.target_layer_ids) * hidden, official="fp8")
            self.main_norm = Weight(hidden)
        if is_last:
            self._add_head(config)
            self.markov_head = MarkovHead(config.vocab_size, rank)
            self.confidence_head = ConfidenceHead(hidden + rank)

    def forward(
        self, streams: Tensor, token_ids: Tensor, tables: Tensor, flags: Flags, context: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """streams [1, R g, n, D]; context [R, W, d] rows before the anchors, of which `seen` [R, W] there are."""
        (streams,) = self._sublayer(streams, "attn", lambda x: (self._attend(x, tables, flags, context, seen),))
        streams, load = self._sublayer(streams, "ffn", lambda x: self.ffn(x, token_ids, flags))
        return streams, load

    def _attend(self, x: Tensor, tables: Tensor, flags: Flags, context: Tensor, seen: Tensor) -> Tensor:
        attn, num_blocks = self.attn, len(context)
        q = attn.queries(x, tables, flags)[1][0].unflatten(0, (num_blocks, -1))  # [R, g, H, d]
        own = attn.rows(x, tables, flags)[0].unflatten(0, (num_blocks, -1))  # [R, g, d]
        seen = torch.cat((seen, seen.new_ones(own.shape[:2])), 1)
        out = attend_together(q, torch.cat((context, own), 1), seen, attn.attn_sink)
        return attn.output(out.flatten(0, 1).unsqueeze(0), tables, flags)


def attend_together(q: Tensor, keys: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
    """q [R, g, H, d] over the keys [R, K, d] that are `seen` [R, K], one softmax with a sink -> [R, g, H, d]. All rows
    of a block read the same keys, in both directions."""
    num_blocks, size, heads, dim = q.shape
    scores = torch.bmm(wide(q).flatten(1, 2), wide(keys).transpose(1, 2)).mul(dim**-0.5)  # [R, g H, K]
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.to(scores.dtype).repeat(size).view(1, -1, 1) - highest)
    return (wide(torch.bmm(weights.to(q.dtype), keys)) / total).to(q.dtype).view(num_blocks, size, heads, dim)


class DraftHead(nn.Module):
    """`config` is the whole model's, with the head's `dspark` keys. Embedding and vocabulary projection are those of
    the model whose taps it reads, and stay as they are."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.dspark is not None
        self.config, self.dspark, self.dtype = config, config.dspark, dtype
        layers = build_schedule(config, with_mtp=True)[config.num_hidden_layers :]
        self.mtp = nn.ModuleList(
            DraftBlock(config, layer, is_first=layer is layers[0], is_last=layer is layers[-1]) for layer in layers
        )
        self.register_buffer("quantise", torch.tensor(False), persistent=False)

    def forward(self, model: DemoModel, taps: Tensor, token_ids: Tensor, anchors: Anchors) -> Blocks:
        """taps [B, T, taps * D] of `model` over token_ids [B, T] -> the blocks of the anchors."""
        config, size = self.config, self.dspark.block_size
        eps, flags = config.rms_norm_eps, Flags(self.quantise, self.quantise, self.quantise)
        first, last = self.mtp[0], self.mtp[-1]
        context = rms_norm(first.main_proj.linear(taps, flags), first.main_norm.weight, eps)
        before = anchors.spans(config.sliding_window) - config.sliding_window  # [R, W]
        ids = torch.full((len(before), size), self.dspark.noise_token_id, device=taps.device)
        ids[:, 0] = token_ids[anchors.rows, anchors.positions]
        embedding = F.embedding(ids.view(1, -1), model.embed.weight).to(self.dtype)
        streams = embedding.unsqueeze(2).repeat(1, 1, config.hc_mult, 1)  # [1, R g, n, D]
        tables = model.window_tables[:, anchors.spans(size).flatten()]  # [2, R g, rope dim / 2]
        loads = []
        for block in self.mtp:
            rows = block.attn.rows(context, model.window_tables[:, : taps.shape[1]], flags)  # [B, T, d]
            near = rows[anchors.rows.unsqueeze(1), before.clamp_min(0)]
            streams, load = block(streams, ids, tables, flags, near, before >= 0)
            loads.append(load)
        hidden = last._collapsed(streams, config)
        logits = model.head.wide_linear(rms_norm(hidden, last.norm.weight, eps), self.dtype)
        shape = (len(before), size)
        return Blocks(hidden[0].unflatten(0, shape), logits[0].unflatten(0, shape), torch.stack(loads))

    def follow(self, blocks: Blocks, previous: Tensor) -> tuple[Tensor, Tensor]:
        """previous [R, k], the tokens before rows 0 .. k - 1 -> logits [R, k, V] and confidences' logits [R, k]."""
        count, last = previous.shape[1], self.mtp[-1]
        embedded = F.embedding(previous, last.markov_head.markov_w1.weight).to(self.dtype)
        logits = blocks.base_logits[:, :count] + last.markov_head.markov_w2.wide_linear(embedded, self.dtype)
        joined = torch.cat((blocks.hidden[:, :count], embedded), -1)
        return logits, last.confidence_head.proj.wide_linear(joined, self.dtype).squeeze(-1)

    @torch.no_grad()
    def greedy_drafts(self, blocks: Blocks, anchor_ids: Tensor) -> Tensor:
        """anchor_ids [R] -> drafts [R, g], each the most likely behind the one before."""
        tokens = anchor_ids.unsqueeze(1)
        for _ in range(self.dspark.block_size):
            following = self.follow(blocks, tokens)[0][:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), 1)
        return tokens[:, 1:]

    @torch.no_grad()
    def start_from(self, model: DemoModel) -> None:
        """Layers and end as those of the model's MTP block, trained for a similar end; of the taps, the last one read
        as that block reads the streams."""
        block = model.mtp[0]
        trained = block.state_dict()
        for layer in self.mtp:
            own = layer.state_dict()
            layer.load_state_dict(own | {name: value for name, value in trained.items() if name in own})
        projection = self.mtp[0].main_proj.weight
        projection.mul_(0.1)
        projection[:, -self.config.hidden_size :] += block.h_proj.weight * block.hnorm.weight
