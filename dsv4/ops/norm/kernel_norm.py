"""One program per LaunchConfig.rows rows, each row whole in registers, so that x is read once."""

from __future__ import annotations

from dsv4.ops.lib.codecs import quantize_e4m3
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait


@jit
def inverse_rms(x, K, eps):
    """fp32 [R, BLOCK], zero beyond K columns -> 1 / sqrt(mean(x^2) + eps) [R], root and quotients correctly rounded."""
    mean_square = tl.div_rn(tl.sum(x * x, axis=1), K * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))


@jit(do_not_specialize=("num_rows",))
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, codes_ptr, scale_ptr, num_rows, stride_xr, stride_xk, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_OUT: tl.constexpr, HAS_CODES: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < K)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    pdl_trigger()
    pdl_wait()
    x = tl.load(x_ptr + rows[:, None] * stride_xr + cols[None, :] * stride_xk, mask=mask, other=0.0)
    # wide * rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    wide = x.to(tl.float32)
    normed = wide * inverse_rms(wide, K, eps)[:, None]
    if HAS_WEIGHT:
        normed = normed * weight[None, :]
    rounded = normed.to(x_ptr.dtype.element_ty)
    if HAS_OUT:
        tl.store(out_ptr + rows[:, None] * K + cols[None, :], rounded, mask=mask)
    if HAS_CODES:
        # codes, scale = fp8_quantize(normed, GROUP). Stored as groups, not as rows: a store of bytes in the shape of
        # the load would widen the load's layout, and with it change the order of the sum.
        NUM_GROUPS: tl.constexpr = BLOCK // GROUP
        codes, scale = quantize_e4m3(tl.reshape(rounded.to(tl.float32), [ROWS * NUM_GROUPS, GROUP]))
        tile_groups = tl.arange(0, ROWS * NUM_GROUPS)
        group_rows = tl.program_id(0).to(tl.int64) * ROWS + tile_groups // NUM_GROUPS
        groups = tile_groups % NUM_GROUPS
        group_mask = (group_rows < num_rows) & (groups < K // GROUP)
        group_offsets = group_rows * (K // GROUP) + groups
        code_offsets = group_offsets[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(codes_ptr + code_offsets, codes, mask=group_mask[:, None])
        tl.store(scale_ptr + group_offsets, scale, mask=group_mask)
