"""Ops with a planted mistake, to see that a comparison is red and names them. Each maker takes the sound ops."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dsv4.formats.tensors import QuantActivation
from dsv4.ops import OpSet

Op = Callable[..., Any]


def wrong_scale(ops: OpSet) -> Op:
    """`rms_norm_quant` whose last scale is twice what it should be."""

    def rms_norm_quant(*arguments: Any, **options: Any) -> Any:
        plain, codes = ops.rms_norm_quant(*arguments, **options)
        scale = codes.scale.clone()
        scale[-1, -1] += 1  # of one group of 128
        return plain, QuantActivation(codes.codes, scale)

    return rms_norm_quant


def follows_rows(ops: OpSet, most: int = 2) -> Op:
    """`hc_enter` that is off by little in calls of at most this many rows."""

    def hc_enter(*arguments: Any, **options: Any) -> Any:
        made = ops.hc_enter(*arguments, **options)
        return replace(made, comb=made.comb + 2**-12) if len(made.comb) <= most else made

    return hc_enter


def linear_follows_rows(ops: OpSet) -> Op:
    """`linear`, likewise."""

    def linear(*arguments: Any, **options: Any) -> Any:
        made = ops.linear(*arguments, **options)
        return made * (1 + 2**-6) if len(made) <= 2 else made

    return linear


def masked_tail(ops: OpSet) -> Op:
    """`sparse_attention` whose last row is left out."""

    def sparse_attention(*arguments: Any, **options: Any) -> Any:
        made = ops.sparse_attention(*arguments, **options)
        return torch.cat([made[:-1], torch.zeros_like(made[-1:])])

    return sparse_attention
