"""Random weights, one tensor at a time: a tensor's values depend on its name and the seed alone, never on the order.

Values are shaped so that activations stay of order one: projections N(0, 1/K), norms near one, hyper-connections small
but far from degenerate, hash tables with distinct experts per token.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ConfigError, ModelConfig
from dsv4.formats.e8m0 import E2M1_MAX, E4M3_MAX
from dsv4.formats.fp4 import mxfp4_quantize, nvfp4_quantize
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.formats.tensors import QuantFormat, QuantTensor, Weight
from dsv4.loader.names import LogicalTensor, Role
from dsv4.loader.write.config_file import ExpertFormat

_CONTROL = {  # suffix -> mean and standard deviation
    "_base": (0.0, 0.5), "_scale": (0.5, 0.1), ".attn_sink": (0.0, 1.0), ".bias": (0.0, 0.05), ".ape": (0.0, 0.1),
}  # fmt: skip
_NVFP4_SIGMAS = 6.0  # weight_scale_2 covers values up to this many standard deviations


@dataclass(frozen=True)
class Recipe:
    """What to make: a model, the format of its routed experts (draft blocks may differ), a seed.

    mxfp4 and nvfp4 leave the other projections FP8 with E8M0 scales; fp8 is the Base variant (every block scale FP32);
    bf16 leaves nothing quantised.
    """

    config: ModelConfig
    experts: ExpertFormat = "mxfp4"
    mtp_experts: ExpertFormat | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("experts", "mtp_experts"):
            value = getattr(self, name)
            if value not in ("mxfp4", "nvfp4", "fp8", "bf16") and not (name == "mtp_experts" and value is None):
                raise ValueError(f"{name} must be 'mxfp4', 'nvfp4', 'fp8' or 'bf16', found {value!r}")
        formats = {self.experts, self.mtp_experts}
        groups = [g for f, g in (("mxfp4", MXFP4_GROUP), ("nvfp4", NVFP4_GROUP)) if f in formats]
        for name in ("hidden_size", "moe_intermediate_size"):
            for group in groups:
                if getattr(self.config, name) % group:
                    size = getattr(self.config, name)
                    raise ConfigError(f"{name} must be a multiple of {group} for FP4 experts, found {size}")

    def format_of(self, tensor: LogicalTensor) -> QuantFormat | None:
        """The format `tensor` is made in; None is plain."""
        if tensor.role is Role.LINEAR:
            return None if self.experts == "bf16" else QuantFormat.FP8_BLOCK
        if tensor.role is not Role.EXPERT:
            return None
        experts = (self.mtp_experts or self.experts) if tensor.name.startswith("mtp.") else self.experts
        return None if experts == "bf16" else QuantFormat(experts)

    @property
    def has_fp32_scales(self) -> bool:
        return self.experts == "fp8"


def random_weight(tensor: LogicalTensor, recipe: Recipe, device: torch.device | str = "cpu") -> Weight:
    """The weight of that name. The same on every machine for one device type; CPU and CUDA draw different numbers."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(f"{recipe.seed}:{tensor.name}".encode()))
    if tensor.role is Role.TABLE:
        return _random_table(tensor, recipe.config.n_routed_experts, generator)
    values = _random_values(tensor, generator)
    if tensor.role is Role.CONTROL:
        return values
    quant = recipe.format_of(tensor)
    if quant is None:
        return values.to(torch.bfloat16)
    if quant is QuantFormat.FP8_BLOCK:
        block = recipe.config.weight_block_size
        return QuantTensor(*fp8_block_quantize(values, block, recipe.has_fp32_scales), quant, block=block)
    if quant is QuantFormat.MXFP4:
        return QuantTensor(*mxfp4_quantize(values), quant)
    # from K alone, so that w1 and w3 of an expert share it as ModelOpt's do
    reach = _NVFP4_SIGMAS / math.sqrt(tensor.shape[1]) / (E2M1_MAX * E4M3_MAX)
    data, scale, global_scale = nvfp4_quantize(values, torch.tensor(reach, dtype=torch.float32, device=device))
    return QuantTensor(data, scale, quant, global_scale)


def _random_values(tensor: LogicalTensor, generator: torch.Generator) -> Tensor:
    """fp32 values."""
    mean, deviation = 0.0, 1.0
    if tensor.role is Role.CONTROL:
        spread = [value for suffix, value in _CONTROL.items() if tensor.name.endswith(suffix)]
        mean, deviation = spread[0] if spread else (0.0, 1 / math.sqrt(tensor.shape[-1]))  # the rest are hc `fn`
    elif len(tensor.shape) == 1:
        mean, deviation = 1.0, 0.1  # norms
    elif tensor.name != "embed.weight":
        deviation = 1 / math.sqrt(tensor.shape[-1])
    values = torch.randn(tensor.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return values.mul_(deviation).add_(mean)


def _random_table(tensor: LogicalTensor, num_experts: int, generator: torch.Generator) -> Tensor:
    """int64 [vocab, k]: k distinct experts per token."""
    vocab, num_chosen = tensor.shape
    keys = torch.rand((vocab, num_experts), generator=generator, device=generator.device)
    return keys.argsort(dim=1, stable=True)[:, :num_chosen].contiguous()
