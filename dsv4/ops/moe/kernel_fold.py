"""The sum of a token's parts as a launch of its own: what is the end of `_down_kernel` where its programs sum."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.moe.kernel_parts import sum_parts


@jit(do_not_specialize=("num_tokens",))
def _sum_parts_kernel(
    parts_ptr, experts_ptr, out_ptr, num_tokens,
    D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """out [T, D] of parts by pair, then by token, of the shared expert. Parts of pairs without an expert are not
    read."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sum_parts(
        tokens, tokens < num_tokens, tl.program_id(1) * COLS, parts_ptr, parts_ptr, experts_ptr, out_ptr, parts_ptr,
        parts_ptr, num_tokens, COLS, D, E, TOP_K, 1, 1,
    )


@jit
def _fold_parts_kernel(parts_ptr, shared_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = cols < D
    # (ordered_sum(parts.float(), 1) + shared.float()).to(bf16), as `sum_parts` in kernel_down.py adds
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + place) * D + cols, mask=is_col, other=0.0).to(tl.float32)
    total += tl.load(shared_ptr + token * D + cols, mask=is_col, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + cols, total.to(tl.bfloat16), mask=is_col)
