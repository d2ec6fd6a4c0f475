"""The maths of the training graph on whole sequences: norms, rope, hyper-connections, pooling, attention.

Shapes carry a batch: x [B, T, D]. Everything differentiates. Sums run in at least fp32 and round once to the compute
dtype, as in the oracles under `dsv4/ops`, which state the same maths token by token; a test holds the two together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    values = wide(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(x.dtype).to(normed.dtype)
    return normed.to(x.dtype)


def rope(x: Tensor, tables: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last dims of x [B, T, ..., K] by tables [2, T, rope_dim / 2] (cos, sin)."""
    half = tables.shape[-1]
    shape = (1, x.shape[1], *(1,) * (x.dim() - 3), half)
    cos, sin = tables[0].view(shape), tables[1].view(shape)
    if inverse:
        sin = -sin
    pairs = wide(x[..., -2 * half :]).unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., : -2 * half], rotated.to(x.dtype)), -1)


GRADIENT_ITERS = 3  # of Sinkhorn's steps, the last ones: the earlier ones have all but converged to the same scales


def sinkhorn(logits: Tensor, num_iters: int, eps: float) -> Tensor:
    """logits [n, n, N] (source, destination, token) -> comb of the same shape; columns last.

    Dividing rows and columns in turn only ever scales them, so the steps run on the two scale vectors: comb = rows *
    kernel * columns. Gradients reach the kernel directly and through the last few steps, which keeps the graph short.
    """
    kernel = torch.softmax(logits, 1) + eps
    with torch.no_grad():
        rows = torch.ones_like(kernel[:, :1])
        columns = 1 / (kernel.sum(0, keepdim=True) + eps)
        for _ in range(num_iters - 1 - GRADIENT_ITERS):
            rows, columns = _rescale(kernel, rows, columns, eps)
    for _ in range(min(num_iters - 1, GRADIENT_ITERS)):
        rows, columns = _rescale(kernel, rows, columns, eps)
    return rows * kernel * columns


def _rescale(kernel: Tensor, rows: Tensor, columns: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / (sum x + eps) of the scaled kernel, for rows and then for columns, written for the scales."""
    rows = 1 / ((kernel * columns).sum(1, keepdim=True) + eps / rows)
    return rows, 1 / ((kernel * rows).sum(0, keepdim=True) + eps / columns)


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """streams [B, T, n, D] -> [rows, B * T], the norm over all streams applied after the product."""
    flat = wide(streams).flatten(2).flatten(0, 1)
    return F.linear(flat, fn.to(flat.dtype)).mul(torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)).t()


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """pre [n, B * T] -> sum_j pre[j] X[j]."""
    weights = pre.t().reshape(*streams.shape[:3], 1)
    return (weights * wide(streams)).sum(2).to(streams.dtype)


def hc_pre(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, num_iters: int, hc_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [B, T, n, D] -> sublayer input [B, T, D], post [n, B * T], comb [n, n, B * T]."""
    n = streams.shape[2]
    mixes = _mixes(streams, fn, norm_eps)
    base = base.to(mixes.dtype).unsqueeze(-1)
    pre = torch.sigmoid(mixes[:n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((mixes[2 * n :] * scale[2] + base[2 * n :]).unflatten(0, (n, n)), num_iters, hc_eps)
    return _collapse(streams, pre), post, comb


def hc_post(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'[k] = post[k] o + sum_j comb[j, k] X[j]."""
    batch, length, n, _ = streams.shape
    flat = wide(streams).flatten(0, 1)  # [N, n, D]
    mixed = post.t().unsqueeze(-1) * wide(out).flatten(0, 1).unsqueeze(1)  # [N, destination, D]
    for source in range(n):  # four fused multiply-adds; a batched 4 x 4 product is far slower
        mixed = mixed + comb[source].t().unsqueeze(-1) * flat[:, source : source + 1]
    return mixed.to(streams.dtype).view(batch, length, n, -1)


def hc_head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    mixes = _mixes(streams, fn, norm_eps)
    return _collapse(streams, torch.sigmoid(mixes * scale + base.to(mixes.dtype).unsqueeze(-1)) + hc_eps)


def pool(kv: Tensor, score: Tensor, ratio: int, dim: int) -> Tensor:
    """kv, score [B, T, w] -> entries [B, T // ratio, dim]: learned softmax over 4 + 4 (w = 2 dim) or 128 tokens.

    Columns [0, dim) of an overlapping compressor belong to the next block's entry, the rest to the token's own.
    """
    num_entries = kv.shape[1] // ratio
    kv, score = (part[:, : num_entries * ratio].unflatten(1, (num_entries, ratio)) for part in (kv, score))
    slots_kv, slots_score = kv[..., -dim:], score[..., -dim:]  # [B, n, ratio, dim]
    if kv.shape[-1] == 2 * dim and num_entries:
        before_kv = F.pad(kv[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0))
        before_score = F.pad(score[:, :-1, :, :dim], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        slots_kv, slots_score = torch.cat((before_kv, slots_kv), 2), torch.cat((before_score, slots_score), 2)
    return (torch.softmax(slots_score, 2) * slots_kv).sum(2)


def window_mask(num_blocks: int, window: int, device: torch.device) -> Tensor:
    """bool [num_blocks, window, 2 window]: which of its own and the previous block's keys a query sees."""
    age = torch.arange(window, device=device)[:, None] + window - torch.arange(2 * window, device=device)
    mask = ((age >= 0) & (age < window)).expand(num_blocks, -1, -1).clone()
    mask[0, :, :window] = False
    return mask


def visible_entries(length: int, ratio: int, num_entries: int, device: torch.device) -> Tensor:
    """bool [T, n]: entry s is seen from token t when s < (t + 1) // ratio."""
    limit = (torch.arange(length, device=device) + 1) // ratio
    return torch.arange(num_entries, device=device) < limit.unsqueeze(-1)


def attend(
    q: Tensor, kv: Tensor, entries: Tensor | None, selected: Tensor | None, seen: Tensor | None, sink: Tensor,
    window: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Window and compressed keys under one softmax with a sink.

    q [B, T, H, d]; kv [B, T, d]; entries [B, n, d]; selected [B or 1, T, n] which entries each query reads; seen [T, n]
    which it could read. -> out [B, T, H, d], and (detached) the attention mass over all seen entries, summed over the
    heads, [B, T, n]. T is a multiple of `window`; each query meets 2 * window + n keys.
    """
    batch, length, heads, dim = q.shape
    num_blocks = length // window
    blocks = kv.unflatten(1, (num_blocks, window))
    keys = torch.cat((F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks), 2).flatten(0, 1)  # [B nb, 2 window, d]
    scale = dim**-0.5
    rows = q.reshape(batch * num_blocks, window * heads, dim)
    near = torch.bmm(wide(rows), wide(keys).transpose(1, 2)).mul(scale).view(batch, num_blocks, window, heads, -1)
    near = near.masked_fill(~window_mask(num_blocks, window, q.device)[None, :, :, None], float("-inf"))
    near = near.view(batch, length, heads, -1)
    highest = near.detach().amax(-1, keepdim=True)
    far = None
    if entries is not None:
        far = torch.bmm(wide(q.flatten(1, 2)), wide(entries).transpose(1, 2)).mul(scale)
        far = far.view(batch, length, heads, -1).masked_fill(~seen[None, :, None], float("-inf"))
        highest = torch.maximum(highest, far.detach().amax(-1, keepdim=True))
    near = torch.exp(near - highest)
    total = near.sum(-1, keepdim=True) + torch.exp(sink.to(near.dtype).view(1, 1, -1, 1) - highest)
    mass = None
    if far is not None:
        far = torch.exp(far - highest)
        mass = (far / (total + far.sum(-1, keepdim=True))).detach().sum(2)
        far = far * selected.unsqueeze(2)
        total = total + far.sum(-1, keepdim=True)
    near_rows = near.to(q.dtype).view(batch * num_blocks, window * heads, -1)
    out = wide(torch.bmm(near_rows, keys)).view(batch, length, heads, dim)
    if far is not None:
        out = out + wide(torch.bmm(far.to(q.dtype).flatten(1, 2), entries)).view(batch, length, heads, dim)
    return (out / total).to(q.dtype), mass


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]): q [B, T, Hi, Di], weights [B, T, Hi], keys [B, n, Di]."""
    dots = torch.bmm(wide(q).flatten(1, 2), wide(keys).transpose(1, 2)).unflatten(1, q.shape[1:3])
    return (dots.relu() * wide(weights).unsqueeze(-1)).sum(2)


@torch.no_grad()
def top_entries(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """bool [B, T, n]: the `top_k` best of the entries each query sees."""
    if scores.shape[-1] <= top_k:
        return seen.expand_as(scores)
    best = scores.masked_fill(~seen, float("-inf")).topk(top_k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


def index_loss(scores: Tensor, mass: Tensor, seen: Tensor) -> Tensor:
    """KL from the indexer's softmax to the attention mass over seen entries, averaged over queries that see any."""
    target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-20)
    log_scores = torch.log_softmax(scores.masked_fill(~seen, -1e30), -1)
    terms = torch.xlogy(target, target) - target * log_scores.masked_fill(~seen, 0.0)
    return terms.sum() / (seen.any(-1).sum() * scores.shape[0]).clamp_min(1)
