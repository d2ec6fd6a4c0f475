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

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.formats.fp8 import fp8_dequantize, fp8_quantize
from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import ACTIVATION_GROUP, QuantActivation, Weight, dequantize
from dsv4.ops.lib.invariant import accumulator, rows_matmul
from dsv4.ops.linear.bundle import LinearBundle, takes_codes


def linear_ref(x: Tensor | QuantActivation, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] in `out_dtype` (x's dtype if None; bf16 for codes).

    x may be the codes of a row instead of the row, for weights whose input is quantised: the same bits.
    """
    if isinstance(x, QuantActivation):
        if not takes_codes(weight):
            raise ValueError("expected a plain input for a weight that takes its input as it is, found FP8 codes")
        out_dtype, x = out_dtype or torch.bfloat16, x.dequantize()
    elif takes_codes(weight):
        out_dtype, x = out_dtype or x.dtype, fp8_dequantize(*fp8_quantize(x, ACTIVATION_GROUP), ACTIVATION_GROUP)
    return rows_matmul(x, dequantize(weight, accumulator(x))).to(out_dtype or x.dtype)


def linears_ref(
    x: Tensor | QuantActivation, weights: Sequence[Weight] | LinearBundle, out_dtypes: Sequence[torch.dtype | None],
    codes: QuantActivation | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Several weights [N_i, K] on one input: (`linear` of each). `codes`: those of x, where a norm has made them."""
    weights = weights.weights if isinstance(weights, LinearBundle) else weights
    plain_dtype = torch.bfloat16 if isinstance(x, QuantActivation) else x.dtype
    return tuple(
        linear_ref(x if codes is None or not takes_codes(weight) else codes, weight, out_dtype or plain_dtype)
        for weight, out_dtype in zip(weights, out_dtypes, strict=True)
    )


def grouped_linear_ref(x: Tensor, weight: Weight | ShuffledTensor) -> Tensor:
    """x [T, G, K], weight [G * R, K] -> [T, G, R]: group g of the input meets rows [g R, (g + 1) R) of the weight.

    The published model turns this weight (wo_a) into the activation dtype and quantises nothing here.
    """
    weight = unshuffle(weight) if isinstance(weight, ShuffledTensor) else weight
    plain = dequantize(weight, x.dtype).unflatten(0, (x.shape[1], -1))  # [G, R, K]
    return torch.stack([rows_matmul(x[:, g], plain[g]) for g in range(x.shape[1])], 1).to(x.dtype)
