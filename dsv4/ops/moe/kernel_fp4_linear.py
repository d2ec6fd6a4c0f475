"""One FP4 linear, x [T, K] to [T, N]: few rows with mma.sync, many with wgmma (Hopper), the same bits. How products are
formed, and why, is said in kernel_gate_up.py and kernel_wide.py.
"""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger
from dsv4.ops.moe.kernel_products import product
from dsv4.ops.moe.kernel_rows import shared_rows, shared_sub_rows
from dsv4.ops.moe.many.kernel_wide import wide_products


@jit(do_not_specialize=("num_rows",))
def _fp4_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    rows, is_row = shared_sub_rows(tl.program_id(0) // N_TILES, num_rows, ROWS)  # of [8] each
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    pdl_trigger()
    # out = x @ weight.T
    sums = product(
        x_ptr, rows, is_row, data_ptr, scale_ptr, first_out, 0, BLOCK, K, FORMAT, FORMAT != 0, UNROLL, 1, False, False
    )  # of [BLOCK, 8] each
    factor = tl.load(out_scale_ptr)
    outs = first_out + tl.arange(0, BLOCK)
    for sub in tl.static_range(len(rows)):
        target = out_ptr + (rows[sub] * N)[None, :] + outs[:, None]
        mask = is_row[sub][None, :] & (outs < N)[:, None]
        tl.store(target, (sums[sub] * factor).to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=("num_rows",))
def _wide_linear_kernel(
    x_ptr, data_ptr, scale_ptr, out_scale_ptr, out_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    N_TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first_out = (tl.program_id(0) % N_TILES) * BLOCK
    rows, is_row = shared_rows(tl.program_id(0) // N_TILES, num_rows, 0, ROWS, ROWS)  # [R]
    pdl_trigger()
    # out = x @ weight.T
    sums = wide_products(x_ptr, rows, (data_ptr,), (scale_ptr,), (first_out,), BLOCK, K, FORMAT, False, 1)[0]
    factor = tl.load(out_scale_ptr)
    outs = first_out + tl.arange(0, BLOCK)
    target = out_ptr + (rows * N)[:, None] + outs[None, :]
    mask = is_row[:, None] & (outs < N)[None, :]
    tl.store(target, tl.trans(sums * factor).to(out_ptr.dtype.element_ty), mask=mask)
