"""`Quantiser`: the rules by which `dsv4 quantize`, and updates of a running model, round weights to a format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.formats.fp4_search import (
    MXFP4_STEPS,
    NVFP4_STEPS,
    cast_to_nvfp4,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
)
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight, dequantize
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.resolve import Source
from dsv4.loader.weights import read_weight


class Quantiser:
    """search  try several scales for each FP4 group; without, the one that just reaches its largest value is taken

    `sources` are those of a checkpoint, or of one part of it that holds w1 and w3 of the same experts.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, sources: Iterable[Source], *, search: bool,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        self._checkpoint, self._config, self._device = checkpoint, config, torch.device(device)
        self._mxfp4_steps: Sequence[int] = MXFP4_STEPS if search else (0,)
        self._nvfp4_steps: Sequence[int] = NVFP4_STEPS if search else (0,)
        self._sources = {source.tensor.name: source for source in sources}

    def quantise(self, source: Source, weight: Weight, wanted: QuantFormat | None) -> Weight:
        """`weight`, read from `source`, in another format; None is BF16. `CheckpointError` for what is no number."""
        if wanted is None:
            return dequantize(weight, torch.bfloat16)
        values = finite_values(source, weight.to(self._device))
        if wanted is QuantFormat.FP8_BLOCK:
            block = self._config.weight_block_size
            return QuantTensor(*fp8_block_quantize(values, block), wanted, block=block)
        if wanted is QuantFormat.MXFP4:
            return quantize_mxfp4(values, self._mxfp4_steps)
        return self._to_nvfp4(source, weight, values)

    def _to_nvfp4(self, source: Source, weight: Weight, values: Tensor) -> QuantTensor:
        """w1 and w3 of an expert share the scale of the whole matrix: engines multiply them as one."""
        family = [weight, *(read_weight(self._checkpoint, twin, self._config) for twin in self._twins(source))]
        codes = [one for one in family if isinstance(one, QuantTensor) and one.format is QuantFormat.MXFP4]
        if len(codes) == len(family) and isinstance(weight, QuantTensor):
            exact = cast_to_nvfp4(weight, max(int(one.scale.max()) for one in codes))
            if exact is not None:
                return exact
        largest = torch.stack([dequantize(one, torch.float32).abs().max() for one in family]).max()
        return quantize_nvfp4(values, nvfp4_global_scale(largest).to(self._device), self._nvfp4_steps)

    def _twins(self, source: Source) -> list[Source]:
        name = source.tensor.name
        pair = {".w1.": ".w3.", ".w3.": ".w1."}
        return [self._sources[name.replace(own, other)] for own, other in pair.items() if own in name]


def finite_values(source: Source, weight: Weight) -> Tensor:
    """fp32. `CheckpointError` where there is nothing to round."""
    values = dequantize(weight, torch.float32)
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"{source.data} holds NaN or infinity: nothing to round; see `dsv4 audit`")
    return values
