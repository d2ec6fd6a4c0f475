"""The sum of a token's parts where other ranks computed them: the end of `_down_kernel` as a launch of its own."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


@jit
def _fold_parts_kernel(parts_ptr, shared_ptr, out_ptr, D: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = cols < D
    # (ordered_sum(parts.float(), 1) + shared.float()).to(bf16), as `_sum_parts` in kernel_down.py adds
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + place) * D + cols, mask=is_col, other=0.0).to(tl.float32)
    total += tl.load(shared_ptr + token * D + cols, mask=is_col, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + cols, total.to(tl.bfloat16), mask=is_col)
