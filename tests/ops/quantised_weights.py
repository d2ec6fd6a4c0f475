"""Weights of every format, quantised from plain values [.., N, K]. Shared by the tests of several families."""

from functools import partial

import torch

from dsv4.formats.fp4 import mxfp4_quantize, nvfp4_quantize
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.testing.inputs import normal


def quantised(form, weight):
    """A matrix, or a stack of them."""
    if form == "bf16":
        return weight.bfloat16()
    if weight.dim() > 2:
        parts = [quantised(form, matrix) for matrix in weight]
        given = None if parts[0].global_scale is None else torch.stack([part.global_scale for part in parts])
        data, scale = (torch.stack([getattr(part, name) for part in parts]) for name in ("data", "scale"))
        return QuantTensor(data, scale, parts[0].format, given)
    if form == "fp8":
        return QuantTensor(*fp8_block_quantize(weight, (128, 128)), QuantFormat.FP8_BLOCK)
    if form == "mxfp4":
        return QuantTensor(*mxfp4_quantize(weight), QuantFormat.MXFP4)
    data, scale, given = nvfp4_quantize(weight)
    return QuantTensor(data, scale, QuantFormat.NVFP4, given)


fp8, mxfp4, nvfp4 = (partial(quantised, form) for form in ("fp8", "mxfp4", "nvfp4"))


def fp8_weight(num_rows, width, fp32_scale=False, seed=0):
    weight = normal((num_rows, width), torch.float32, seed)
    weight[: num_rows // 2] *= 17.0  # scales that differ
    return QuantTensor(*fp8_block_quantize(weight, (128, 128), fp32_scale), QuantFormat.FP8_BLOCK)
