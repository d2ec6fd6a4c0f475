"""RMSNorm: x * rsqrt(mean(x^2) + eps), optionally times a weight; with FP8 codes of the result in the same pass.

Kernel: one program per LaunchConfig.rows rows, each row whole in registers, so that x is read once. The tile depends on
K alone: a row's sum has the same order in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation
from dsv4.ops.invariant import accumulator
from dsv4.ops.tl_utils import (
    KernelInputError,
    LaunchConfig,
    check_launch,
    jit,
    pdl_trigger,
    pdl_wait,
    pick_config,
    quantize_e4m3,
    tl,
)


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., K], weight [K] or None -> [..., K] in x's dtype. Maths in at least fp32, one rounding at the end."""
    wide = x.to(accumulator(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    return normed.to(x.dtype)


def rms_norm_quant_ref(
    x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool
) -> tuple[Tensor | None, QuantActivation]:
    """`rms_norm` of x [..., K] and its FP8 codes: what an FP8 linear layer would make of the rounded result.

    K is a multiple of 128. The plain result is returned where other layers need it (`keep_plain`), else None.
    """
    normed = rms_norm_ref(x, weight, eps)
    codes, scale = fp8_quantize(normed, ACTIVATION_GROUP)
    return (normed if keep_plain else None), QuantActivation(codes, scale)


# key: K rounded up to a power of two. Tiles of 4,096 values on four warps: a thread has four 16-byte loads of bf16
# under way. `head_norm_rope` uses the same tiles, so that a row's sum has the same order there: fused and unfused
# agree in every bit.
ROW_CONFIGS = {
    64: LaunchConfig(rows=8, num_warps=1),
    128: LaunchConfig(rows=8, num_warps=1),
    256: LaunchConfig(rows=8, num_warps=2),
    512: LaunchConfig(rows=8, num_warps=4),
    1024: LaunchConfig(rows=4, num_warps=4),
    2048: LaunchConfig(rows=2, num_warps=4),
    4096: LaunchConfig(rows=1, num_warps=4),
    8192: LaunchConfig(rows=1, num_warps=8),
    16384: LaunchConfig(rows=1, num_warps=16),
}
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
):  # fmt: skip
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


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See `rms_norm_ref`. bf16, fp16 or fp32, any strides; the result is contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, out, None)
    return out


def rms_norm_quant(
    x: Tensor, weight: Tensor | None, eps: float, keep_plain: bool
) -> tuple[Tensor | None, QuantActivation]:
    """See `rms_norm_quant_ref`. The result is contiguous."""
    if x.shape[-1] % ACTIVATION_GROUP:
        raise KernelInputError(f"FP8 codes need a multiple of {ACTIVATION_GROUP} columns, found {x.shape[-1]}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep_plain else None
    scale_shape = (*x.shape[:-1], x.shape[-1] // ACTIVATION_GROUP)
    quant = QuantActivation(
        codes=torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        scale=torch.empty(scale_shape, dtype=torch.uint8, device=x.device),
    )
    _launch(x, weight, eps, out, quant)
    return out, quant


def _launch(x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None, quant: QuantActivation | None) -> None:
    check_launch(x, weight)
    if x.dtype not in KERNEL_DTYPES:
        raise KernelInputError(f"expected one of {KERNEL_DTYPES}, found {x.dtype}")
    width = x.shape[-1]
    if weight is not None and weight.shape != (width,):
        raise KernelInputError(f"expected a weight of shape ({width},), found {tuple(weight.shape)}")
    if x.numel() == 0:
        return
    rows = x.reshape(-1, width)
    block, config = pick_config(ROW_CONFIGS, width, "the row of an RMSNorm")
    # an unused pointer still needs a tensor of the right kind
    _rms_norm_kernel[(-(-rows.shape[0] // config.rows),)](
        rows, rows if weight is None else weight.contiguous(), rows if out is None else out,
        rows if quant is None else quant.codes, rows if quant is None else quant.scale,
        rows.shape[0], rows.stride(0), rows.stride(1), eps,
        K=width, BLOCK=block, ROWS=config.rows, GROUP=ACTIVATION_GROUP,
        HAS_WEIGHT=weight is not None, HAS_OUT=out is not None, HAS_CODES=quant is not None,
        launch_pdl=True, **config.options,
    )  # fmt: skip
