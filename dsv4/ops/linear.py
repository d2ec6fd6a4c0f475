"""Linear layers. The weight's format decides what happens to the input, exactly as in the published model.

| weight | input | product |
|---|---|---|
| fp8 | quantised to E4M3 per row and 128 channels | fp32 |
| mxfp4 | the same | fp32 |
| nvfp4 | as it is (weight-only) | fp32 |
| plain tensor | as it is | at least fp32 |
One rounding to the output dtype at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_dequantize, fp8_quantize
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantFormat, QuantTensor, Weight, dequantize
from dsv4.ops.invariant import accumulator, rows_matmul


def linear_ref(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] in `out_dtype` (x's dtype if None)."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, QuantTensor) and weight.format is not QuantFormat.NVFP4:
        x = fp8_dequantize(*fp8_quantize(x, ACTIVATION_GROUP), ACTIVATION_GROUP)
    return rows_matmul(x, dequantize(weight, accumulator(x))).to(out_dtype)


def grouped_linear_ref(x: Tensor, weight: Weight) -> Tensor:
    """x [T, G, K], weight [G * R, K] -> [T, G, R]: group g of the input meets rows [g R, (g + 1) R) of the weight.

    The published model turns this weight (wo_a) into the activation dtype and quantises nothing here.
    """
    plain = dequantize(weight, x.dtype).unflatten(0, (x.shape[1], -1))  # [G, R, K]
    return torch.stack([rows_matmul(x[:, g], plain[g]) for g in range(x.shape[1])], 1).to(x.dtype)
