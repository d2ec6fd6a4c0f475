"""`Capacity`: tokens of KV cache on several GPUs, as dsv4 divides a model and as tensor parallelism would. No torch.

dsv4 runs data-parallel attention beside expert parallelism: every GPU has all weights but the experts of others, and
the cache of its own requests. Tensor parallelism divides all weights; but a layer has one K=V row a token for all
heads, so every GPU of the group keeps the rows of all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dsv4.tools.plan.hardware import Gpu

GPU_COUNTS = (2, 4, 8)


@dataclass(frozen=True)
class Capacity:
    """Tokens over all GPUs, without what a request takes besides; 0 where the weights leave no room."""

    gpus: int
    tokens: int
    tensor_parallel_tokens: int


def capacities(
    gpu: Gpu, counts: Sequence[int], bytes_per_token: Fraction, total_weights: int,
    needed: Callable[[int], tuple[int, int]],
) -> tuple[Capacity, ...]:  # fmt: skip
    """On this kind of GPU. `needed` takes a number of GPUs; of one of them: the bytes of its weights, and of all else
    but cache. A tensor-parallel GPU is taken to need as much besides weights."""
    found = []
    for gpus in counts:
        weights, rest = needed(gpus)
        room = gpu.usable_bytes - weights - rest
        divided = gpu.usable_bytes - total_weights // gpus - rest
        found.append(Capacity(gpus, gpus * max(0, int(room / bytes_per_token)), max(0, int(divided / bytes_per_token))))
    return tuple(found)
