"""Which experts a model used: choices counted by layer, as `Engine.observers` get them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule


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


def expert_counts(chosen: Tensor, num_experts: int) -> Tensor:
    """chosen int64 [layers, T, k] -> how often each expert was: int64 [layers, experts]."""
    return torch.stack([torch.bincount(layer.flatten(), minlength=num_experts) for layer in chosen])


class ExpertCounter:
    """`engine.observers.append(counter)`, run, `engine.observers.remove(counter)`, then `counter.layers()`.

    Every processed token counts, the prompt's too.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._schedule = build_schedule(config)
        self._counts = torch.zeros(len(self._schedule), config.n_routed_experts, dtype=torch.int64)

    def __call__(self, chosen: Tensor) -> None:
        self._counts += expert_counts(chosen, self._counts.shape[1])

    def layers(self) -> list[LayerExperts]:
        return [
            LayerExperts(layer, tuple(counts))
            for layer, counts in zip(self._schedule, self._counts.tolist(), strict=True)
        ]
