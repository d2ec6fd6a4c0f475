"""One program per token and HEADS heads.

The whole head is read once for its norm (or to be copied), its last dims are read again from cache as pairs; a token's
32 cosines and sines are computed once per program.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import cos_sin
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.norm.kernel_norm import inverse_rms


@jit
def rotate_pairs(x, cos, sin):
    """fp32 [R, 2 P] of interleaved pairs, cos and sin [P] -> rotated [R, 2 P]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    # stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    rotated_even = even * cos[None, :] - odd * sin[None, :]
    rotated_odd = even * sin[None, :] + odd * cos[None, :]
    return tl.reshape(tl.join(rotated_even, rotated_odd), [x.shape[0], x.shape[1]])


@jit
def rope_cos_sin(position, freqs_ptr, PAIRS: tl.constexpr):
    """A token's cos and sin [PAIRS], exact to fp32; the angle is an fp32 product."""
    return cos_sin(position.to(tl.float32) * tl.load(freqs_ptr + tl.arange(0, PAIRS)))


@jit(do_not_specialize=("num_heads",))
def _rope_kernel(
    x_ptr, out_ptr, positions_ptr, freqs_ptr, num_heads, stride_xt, stride_xh, stride_xk,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):
    pdl_trigger()
    rope_heads(
        x_ptr, out_ptr, positions_ptr, freqs_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS, num_heads,
        stride_xt, stride_xh, stride_xk, 0.0, HEAD_DIM, ROPE_DIM, BLOCK, HEADS, False, INVERSE,
    )


@jit
def rope_heads(
    x_ptr, out_ptr, positions_ptr, freqs_ptr, token, first_head, num_heads, stride_xt, stride_xh, stride_xk, eps,
    HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr, INVERSE: tl.constexpr,
):
    """HEADS heads of a token from `first_head` on, normed or not, and roped."""
    heads = first_head + tl.arange(0, HEADS)
    head_mask = (heads < num_heads)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    x_rows = x_ptr + token * stride_xt + heads[:, None] * stride_xh
    out_rows = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM
    x = tl.load(x_rows + cols * stride_xk, mask=head_mask & (cols < HEAD_DIM), other=0.0)  # [HEADS, BLOCK]
    NOPE_DIM: tl.constexpr = HEAD_DIM - ROPE_DIM
    rope_cols = NOPE_DIM + tl.arange(0, ROPE_DIM)[None, :]
    pairs = tl.load(x_rows + rope_cols * stride_xk, mask=head_mask, other=0.0)  # [HEADS, ROPE_DIM]

    cos, sin = rope_cos_sin(tl.load(positions_ptr + token), freqs_ptr, ROPE_DIM // 2)  # [P] each
    if INVERSE:
        sin = sin * -1.0  # `-sin` is 0 - sin in Triton, which loses the sign of a zero
    if HAS_NORM:
        # rope_ref(rms_norm_ref(q, None, eps), positions, freqs): the norm is rounded before it is rotated
        scale = inverse_rms(x.to(tl.float32), HEAD_DIM, eps)[:, None]
        x = (x.to(tl.float32) * scale).to(x.dtype)
        pairs = (pairs.to(tl.float32) * scale).to(x.dtype)
    tl.store(out_rows + cols, x, mask=head_mask & (cols < NOPE_DIM))
    rotated = rotate_pairs(pairs.to(tl.float32), cos, sin)
    tl.store(out_rows + rope_cols, rotated.to(x.dtype), mask=head_mask)
