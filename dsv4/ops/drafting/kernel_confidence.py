"""How sure a head is of its drafts: a row a program."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


@jit
def _confidence_kernel(
    hidden_ptr, embedded_ptr, weight_ptr, out_ptr, stride_ht, stride_et,
    D: tl.constexpr, RANK: tl.constexpr, COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COLS], tl.float32)  # [COLS]
    # rows_matmul(cat((hidden, embedded), -1), weight)
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)
        value = tl.load(hidden_ptr + row * stride_ht + cols, mask=cols < D, other=0.0).to(tl.float32)  # [COLS]
        total += value * tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    for start in range(0, RANK, COLS):
        cols = start + tl.arange(0, COLS)
        value = tl.load(embedded_ptr + row * stride_et + cols, mask=cols < RANK, other=0.0).to(tl.float32)
        total += value * tl.load(weight_ptr + D + cols, mask=cols < RANK, other=0.0).to(tl.float32)
    score = tl.sum(total, axis=0)
    tl.store(out_ptr + row, 1.0 / (1.0 + tl.exp(-score)))
