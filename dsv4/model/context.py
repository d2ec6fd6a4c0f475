"""`ModelContext`: what every block of a running model shares. Frozen; travels as an argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec
from dsv4.dist.exchange import Exchange
from dsv4.model.branches import Branches
from dsv4.ops import Backend, OpSet
from dsv4.ops.rows import rope_frequencies


@dataclass(frozen=True)
class ModelContext:
    """The config, the backend, the activation dtype, the two rope tables' frequencies (fp32), branches; and, where
    other ranks hold some of the experts, the way to them."""

    config: ModelConfig
    backend: Backend
    dtype: torch.dtype
    window_freqs: Tensor
    compressed_freqs: Tensor
    branches: Branches
    exchange: Exchange | None = None

    @classmethod
    def build(
        cls, config: ModelConfig, backend: Backend, dtype: torch.dtype, device: torch.device,
        exchange: Exchange | None = None,
    ) -> ModelContext:  # fmt: skip
        rope_dim = config.qk_rope_head_dim
        return cls(
            config=config,
            backend=backend,
            dtype=dtype,
            window_freqs=rope_frequencies(rope_dim, config.rope_theta, None).to(device),
            compressed_freqs=rope_frequencies(rope_dim, config.compress_rope_theta, config.rope_scaling).to(device),
            branches=Branches(device),
            exchange=exchange,
        )

    @property
    def ops(self) -> OpSet:
        return self.backend.ops

    def freqs(self, layer: LayerSpec) -> Tensor:
        """A layer has one frequency table for everything in it; only layers that compress use YaRN."""
        return self.window_freqs if layer.attention is AttentionKind.SWA else self.compressed_freqs
