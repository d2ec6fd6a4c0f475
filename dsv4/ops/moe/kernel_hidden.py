"""The activation between the two products of ops/moe: sums of gate and up become rows of hidden."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.moe.kernel_products import in_order


@jit
def activate(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit); both rounded to bf16 first."""
    gate = tl.minimum(gate.to(tl.bfloat16).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.bfloat16).to(tl.float32), -limit), limit)
    return tl.div_rn(gate, 1.0 + tl.exp(0.0 - gate)) * up


@jit
def hidden_row(gate, up, gate_scale, up_scale, rows, is_row, weights_ptr, limit, HAS_WEIGHTS: tl.constexpr):
    """Sums [outs, R] -> hidden bf16 [R, outs]."""
    hidden = activate(gate * gate_scale, up * up_scale, limit)  # [outs, R]
    if HAS_WEIGHTS:
        # hidden = hidden * weight.unsqueeze(-1)
        hidden = hidden * tl.load(weights_ptr + rows, mask=is_row, other=0.0)[None, :]
    return tl.trans(hidden.to(tl.bfloat16))


@jit
def store_hidden(
    gates, ups, gate_scale, up_scale, rows, is_row, outs, weights_ptr, hidden_ptr, limit,
    I: tl.constexpr, HAS_WEIGHTS: tl.constexpr, ORDER: tl.constexpr,
):
    """Columns `outs` of rows of hidden [., I], in the order ORDER. Sums and rows: tuples, item by item."""
    for sub in tl.static_range(len(rows)):
        hidden = hidden_row(
            gates[sub], ups[sub], gate_scale, up_scale, rows[sub], is_row[sub], weights_ptr, limit, HAS_WEIGHTS
        )
        target = hidden_ptr + (rows[sub] * I)[:, None] + outs[None, :]
        tl.store(target, in_order(hidden, ORDER), mask=is_row[sub][:, None])
