"""Linear layers. The weight's format decides what happens to the input, exactly as in the published model.

| weight | input | product |
|---|---|---|
| fp8 | quantised to E4M3 per row and 128 channels | exact sums |
| mxfp4 | the same | exact sums |
| nvfp4 | as it is (weight-only) | exact sums for bf16 and fp16, else in x's dtype |
| plain tensor | as it is | the same |
One rounding to the output dtype at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dsv4.formats.exact_sums import in_runs, on_grid
from dsv4.formats.layouts import ShuffledTensor, unshuffle
from dsv4.formats.tensors import (
    AnyWeight,
    QuantActivation,
    WideWeight,
    dequantize,
    operand_of,
    quantised_runs,
)
from dsv4.ops.lib.invariant import exact_matmul, is_short, rows_matmul
from dsv4.ops.linear.bundle import LinearBundle, takes_codes


def linear_ref(x: Tensor | QuantActivation, weight: AnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] in `out_dtype` (x's dtype if None; bf16 for codes).

    x may be the codes of a row instead of the row, for weights whose input is quantised: the same bits.
    """
    return linears_ref(x, (weight,), (out_dtype,))[0]


def grouped_codes_ref(x: Tensor, weight: AnyWeight | ShuffledTensor) -> QuantActivation:
    """`grouped_linear_ref`, flat: the FP8 codes [T, G * R] of its result, for a layer that quantises its input."""
    return QuantActivation.of(grouped_linear_ref(x, weight).flatten(1))


def linears_ref(
    x: Tensor | QuantActivation, weights: Sequence[AnyWeight] | LinearBundle,
    out_dtypes: Sequence[torch.dtype | None], codes: QuantActivation | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Several weights [N_i, K] on one input: (`linear` of each). `codes`: those of x, where a norm has made them."""
    weights = weights.weights if isinstance(weights, LinearBundle) else weights
    plain_dtype = torch.bfloat16 if isinstance(x, QuantActivation) else x.dtype
    source = _Input(x, codes)
    products: dict[int, Tensor] = {}
    for has_codes in (True, False):
        places = [place for place, weight in enumerate(weights) if takes_codes(weight) is has_codes]
        if places:
            chosen = [weights[place] for place in places]
            joined = source.times(chosen)
            widths = [weight.shape[0] for weight in chosen]
            products |= zip(places, joined.split_with_sizes(widths, -1) if widths[1:] else [joined], strict=True)
    return tuple(products[place].to(out_dtype or plain_dtype) for place, out_dtype in enumerate(out_dtypes))


def segments_ref(x: Tensor, weights: Sequence[Sequence[AnyWeight]], counts: Sequence[int]) -> Tensor:
    """Rows of x [P, K] in segments of `counts`, each on weights of its own, which take their input alike -> [P, N] in
    x's dtype: `linears` of each segment, its weights' results side by side.
    """
    source, ends = _Input(x, None), accumulate(counts)
    parts = [
        source.times(chosen, slice(end - count, end)) for chosen, count, end in zip(weights, counts, ends, strict=True)
    ]
    return torch.cat(parts).to(x.dtype)


class _Input:
    """An input of several weights: what its products need is made once."""

    def __init__(self, x: Tensor | QuantActivation, codes: QuantActivation | None) -> None:
        self._x, self._codes = x, codes

    def times(self, weights: Sequence[AnyWeight], rows: slice | None = None) -> Tensor:
        """The products of all rows, or some, with weights that all take codes, or none of which does, side by side:
        [T, N], fp64 where sums are exact."""
        has_codes = takes_codes(weights[0])
        if not has_codes and not is_short(self._plain.dtype):
            x = self._plain if rows is None else self._plain[rows]
            return torch.cat([rows_matmul(x, weight) for weight in weights], -1)
        runs = self._quantised if has_codes else self._on_grid
        runs = runs if rows is None else runs[rows]
        wide = [weight for weight in weights if isinstance(weight, WideWeight)]
        if len(wide) < len(weights):
            return torch.cat([exact_matmul(runs, operand_of(weight)) for weight in weights], -1)
        return exact_matmul(runs, wide[0].joined_operand(tuple(wide[1:])))

    @property
    def _plain(self) -> Tensor:
        if isinstance(self._x, QuantActivation):
            raise ValueError("expected a plain input for a weight that takes its input as it is, found FP8 codes")
        return self._x

    @cached_property
    def _on_grid(self) -> Tensor:
        """fp64 [T, C, 128], for exact sums."""
        return on_grid(in_runs(self._plain))

    @cached_property
    def _quantised(self) -> Tensor:
        """The same of the codes."""
        if isinstance(self._x, QuantActivation):
            return self._x.runs
        return quantised_runs(self._x) if self._codes is None else self._codes.runs


def grouped_linear_ref(x: Tensor, weight: AnyWeight | ShuffledTensor) -> Tensor:
    """x [T, G, K], weight [G * R, K] -> [T, G, R]: group g of the input meets rows [g R, (g + 1) R) of the weight.

    The published model turns this weight (wo_a) into the activation dtype and quantises nothing here.
    """
    num_groups = x.shape[1]
    loaded = unshuffle(weight) if isinstance(weight, ShuffledTensor) else weight
    if is_short(x.dtype):
        runs = on_grid(in_runs(x))  # [T, G, C, run]
        operand = operand_of(loaded, x.dtype).unflatten(-1, (num_groups, -1))  # [C, run, G, R]
        products = [exact_matmul(runs[:, g], operand[:, :, g]) for g in range(num_groups)]
    else:
        plain = dequantize(loaded, x.dtype).unflatten(0, (num_groups, -1))  # [G, R, K]
        products = [rows_matmul(x[:, g], plain[g]) for g in range(num_groups)]
    return torch.stack(products, 1).to(x.dtype)
