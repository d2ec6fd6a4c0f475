"""Launchers of the norm."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation
from dsv4.ops.lib.arch import code_tensor, overlapping
from dsv4.ops.lib.guard import KernelInputError, check_launch
from dsv4.ops.lib.launch import pick_config
from dsv4.ops.norm.kernel_norm import _rms_norm_kernel
from dsv4.ops.norm.plan import KERNEL_DTYPES, ROW_CONFIGS


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
        rows if quant is None else code_tensor(quant.codes), rows if quant is None else quant.scale,
        rows.shape[0], rows.stride(0), rows.stride(1), eps,
        K=width, BLOCK=block, ROWS=config.rows, GROUP=ACTIVATION_GROUP,
        HAS_WEIGHT=weight is not None, HAS_OUT=out is not None, HAS_CODES=quant is not None,
        **config.options, **overlapping(),
    )
