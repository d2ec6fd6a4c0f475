"""Which experts a model used: an observer of `Engine.observe` or `Transformer.forward` that counts choices by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.block import BlockOutput
from dsv4.schedule import LayerSpec, build_schedule


@dataclass(frozen=True)
class LayerExperts:
    """One layer's choices: how often each routed expert was chosen, over all tokens seen."""

    layer: LayerSpec
    counts: tuple[int, ...]

    @property
    def num_used(self) -> int:
        return sum(count > 0 for count in self.counts)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all choices, by expert; they sum to 1, or are all 0 where nothing was seen."""
        total = sum(self.counts)
        return tuple(count / max(total, 1) for count in self.counts)


class ExpertCounter:
    """`engine.observe = ExpertCounter(config)`, then run, then `layers()`.

    Every processed token counts, the prompt's too. Choices stay on the device until they are asked for.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._schedule = build_schedule(config)
        self._num_experts = config.n_routed_experts
        self._counts: list[Tensor | None] = [None] * len(self._schedule)

    def __call__(self, layer_idx: int, output: BlockOutput) -> None:
        found = torch.bincount(output.experts.flatten(), minlength=self._num_experts)
        known = self._counts[layer_idx]
        self._counts[layer_idx] = found if known is None else known + found

    def layers(self) -> list[LayerExperts]:
        return [
            LayerExperts(layer, tuple([0] * self._num_experts if counts is None else counts.tolist()))
            for layer, counts in zip(self._schedule, self._counts, strict=True)
        ]
