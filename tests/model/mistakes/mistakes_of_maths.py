"""Mistakes in the maths of one token: hyper-connections, experts, router, rope. Each plants itself in a `Bed`."""

from collections.abc import Callable

import torch
from planted import Bed

from dsv4.ops.hyper import hc_split_ref, sinkhorn_ref
from dsv4.ops.hyper.op import _mixes
from dsv4.ops.lib.invariant import rows_matmul, silu, sqrt_softplus
from dsv4.ops.linear import segments_ref
from dsv4.ops.moe import experts_ref
from dsv4.ops.rows import rope_frequencies, rope_ref, rope_tables, rotate

YARN_MSCALE = 1.2772588722239782  # 0.1 ln 16 + 1, what generic YaRN code multiplies with

# ---- hyper-connections ----


def transposed_comb(bed: Bed) -> None:
    bed.op("hc_post", lambda right, out, streams, post, comb: right(out, streams, post, comb.transpose(1, 2)))


def one_sinkhorn_iteration(bed: Bed) -> None:
    bed.config(hc_sinkhorn_iters=1)


def sinkhorn_of_columns_first(bed: Bed) -> None:
    """Softmax over the columns, rows and columns exchanged throughout."""
    bed.function(
        sinkhorn_ref,
        lambda right, logits, num_iters, eps: right(logits.transpose(1, 2), num_iters, eps).transpose(1, 2),
    )


def norm_of_each_stream(bed: Bed) -> None:
    """The hyper-connection's norm over D of each stream instead of over all streams together."""

    def wrong(right, streams, fn, norm_eps):
        wide = streams.float()
        return rows_matmul((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)).flatten(1), fn)

    bed.function(_mixes, wrong)


def post_without_the_factor_two(bed: Bed) -> None:
    def wrong(right, *args):
        pre, post, comb = right(*args)
        return pre, post / 2, comb

    bed.function(hc_split_ref, wrong)


# ---- experts ----


def _without_clamp(bed: Bed, limits: Callable[[float], tuple[float, float]]) -> None:
    """`limits` of the routed experts and of the shared one, which comes last."""

    def wrong(right, x, matrices, counts, limit, weight):
        of_routed, of_shared = (right(x, matrices, counts, wanted, weight) for wanted in limits(limit))
        return torch.cat((of_routed[: -counts[-1]], of_shared[-counts[-1] :]))

    bed.function(experts_ref, wrong)


def shared_expert_without_clamp(bed: Bed) -> None:
    _without_clamp(bed, lambda limit: (limit, float("inf")))


def routed_experts_without_clamp(bed: Bed) -> None:
    _without_clamp(bed, lambda limit: (float("inf"), limit))


def gate_clamped_below_too(bed: Bed) -> None:
    def wrong(right, x, matrices, counts, limit, weight):
        gate, up = segments_ref(x, [(w1, w3) for w1, _, w3 in matrices], counts).float().chunk(2, -1)
        hidden = silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit) * weight.unsqueeze(-1)
        return segments_ref(hidden.to(x.dtype), [(w2,) for _, w2, _ in matrices], counts)

    bed.function(experts_ref, wrong)


def _other_weights(bed: Bed, weigh: Callable) -> None:
    """Experts as they should be; `weigh(scores, experts, bias, scale)` gives their weights."""

    def wrong(right, x, gate, bias, tid2eid, token_ids, *, top_k, scale):
        experts, _ = right(x, gate, bias, tid2eid, token_ids, top_k=top_k, scale=scale)
        return experts, weigh(sqrt_softplus(rows_matmul(x, gate)), experts, bias, scale)

    bed.op("route", wrong)


def uniform_hash_weights(bed: Bed) -> None:
    _other_weights(bed, lambda scores, experts, bias, scale: torch.full(experts.shape, scale / experts.shape[1]))


def bias_in_router_weights(bed: Bed) -> None:
    def weigh(scores, experts, bias, scale):
        chosen = (scores + bias).gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True) * scale

    _other_weights(bed, weigh)


def no_route_scale(bed: Bed) -> None:
    bed.config(routed_scaling_factor=1.0)


def router_weights_not_normalised(bed: Bed) -> None:
    _other_weights(bed, lambda scores, experts, bias, scale: scores.gather(-1, experts) * scale)


def bias_ignored_in_the_choice(bed: Bed) -> None:
    bed.op("route", lambda right, x, gate, bias, *args, **kwargs: right(x, gate, None, *args, **kwargs))


# ---- rope ----


def yarn_on_swa_layers(bed: Bed) -> None:
    config = bed.llm.config
    bed.context(window_freqs=rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling))


def compressed_theta_on_swa_layers(bed: Bed) -> None:
    config = bed.llm.config
    bed.context(window_freqs=rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, None))


def main_theta_on_compressed_layers(bed: Bed) -> None:
    config = bed.llm.config
    bed.context(compressed_freqs=rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling))


def no_yarn_on_compressed_layers(bed: Bed) -> None:
    config = bed.llm.config
    bed.context(compressed_freqs=rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, None))


def mscale_in_cos_and_sin(bed: Bed) -> None:
    bed.function(rope_tables, lambda right, *args: tuple(table * YARN_MSCALE for table in right(*args)))


def mscale_in_the_softmax(bed: Bed) -> None:
    bed.op("sparse_attention", lambda right, q, *args, **kwargs: right(q * YARN_MSCALE**2, *args, **kwargs))


def rope_on_the_first_dims(bed: Bed) -> None:
    shift = bed.llm.config.qk_rope_head_dim

    def wrong(right, x, turn, inverse=False):
        return right(x.roll(-shift, -1), turn, inverse).roll(shift, -1)

    bed.function(rotate, wrong)


def rope_on_split_halves(bed: Bed) -> None:
    """Dim i paired with dim i + 32 instead of with its neighbour."""
    rope_dim = bed.llm.config.qk_rope_head_dim

    def wrong(right, x, turn, inverse=False):
        nope, rope = x[..., :-rope_dim], x[..., -rope_dim:]
        neighbours = rope.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        rotated = right(torch.cat((nope, neighbours), -1), turn, inverse)[..., -rope_dim:]
        return torch.cat((nope, rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)), -1)

    bed.function(rotate, wrong)


def output_not_unrotated(bed: Bed) -> None:
    bed.op("sparse_attention", lambda right, *args, freqs, **rest: right(*args, **rest))


def output_rotated_forward(bed: Bed) -> None:
    def forward(right, *args, freqs, **rest):
        batch = args[-1]
        return rope_ref(right(*args, **rest), batch.positions, freqs)

    bed.op("sparse_attention", forward)
