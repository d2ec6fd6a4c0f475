"""Loading a checkpoint whose experts do not fit on the device: each goes from the mapped file to its home, once.

Memory while loading, beyond what the loaded model keeps (other weights and slots on the device; the experts without a
fixed slot on the host, each once): one expert, on the device if the kernels want it in another layout, which is made
there. The file itself is mapped, not read into memory of our own.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch

from dsv4.config import EngineConfig, ModelConfig, is_size, shown
from dsv4.dist.shares import expert_range
from dsv4.engine.offload.placement import (
    CONTEXT_BYTES,
    GIB,
    ModelBytes,
    OffloadError,
    Placement,
    divide_slots,
    place_experts,
)
from dsv4.engine.offload.pool import ExpertPool, LayerExperts
from dsv4.formats.tensors import QuantTensor, Weight
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.names import Role
from dsv4.loader.progress import Progress
from dsv4.loader.resolve import Source
from dsv4.loader.weights import load_params, plan_load
from dsv4.model.parameters import ExpertParams, ModelParams
from dsv4.ops import Backend

OffloadExperts = bool | str | int | None  # None or False: no; True or "auto": as many as must; a number: slots a layer
CPU_BYTES = 139 * GIB  # a CPU has no memory of its own to fill: placed as on an H200


class ExpertsOnTheirWay:
    """Experts on their way into a pool. Layers come in any order, as a file has them. `layers`: those there are
    already, whose experts get new weights."""

    def __init__(self, pool: ExpertPool, layers: Iterable[LayerExperts] = ()) -> None:
        self._pool = pool
        self._layers = {layer.layer_idx: layer for layer in layers}
        self._changed: set[LayerExperts] = set()

    def put(self, layer_idx: int, expert_idx: int, weights: ExpertParams) -> None:
        prepared = self._prepare(weights)
        if layer_idx not in self._layers:
            self._layers[layer_idx] = LayerExperts(self._pool, layer_idx, prepared)
        self._layers[layer_idx].put(expert_idx, prepared)
        self._changed.add(self._layers[layer_idx])

    def experts(self, layer_idx: int) -> ExpertParams:
        return cast(ExpertParams, self._layers[layer_idx])

    def forget_copies(self) -> None:
        """The device's copies of what has new weights at home."""
        for layer in self._changed:
            self._pool.forget_copies(layer)

    def hand_over(self, num_main: int) -> None:
        """Every layer to the pool. No forward call goes on from the model's last layer to a draft block."""
        for layer_idx in sorted(self._layers):
            self._pool.adopt(self._layers[layer_idx], is_next=layer_idx < num_main)

    def _prepare(self, weights: ExpertParams) -> tuple[Weight, ...]:
        """As the backend's `moe` takes them: as model/prepare.py does for whole stacks."""
        matrices = weights.w1, weights.w2, weights.w3
        prepare = self._pool.inner.layout.routed
        if prepare is None or not all(isinstance(weight, QuantTensor) for weight in matrices):
            return matrices
        on_device = [cast(QuantTensor, weight).to(self._pool.device) for weight in matrices]
        return cast(tuple[Weight, ...], tuple(prepare(on_device)))


def load_offloaded(
    checkpoint: Checkpoint, config: ModelConfig, placement: Placement, backend: Backend, *, device: torch.device,
    dequantize_to: torch.dtype | None = None, progress: Progress = False, num_ranks: int = 1, rank: int = 0,
) -> tuple[ModelParams, ExpertPool]:  # fmt: skip
    """As `load_params`, with the routed experts of every block, draft blocks too, in a pool; they come prepared. Of one
    of several ranks: its own experts."""
    own = expert_range(config.n_routed_experts, num_ranks, rank)
    pool = ExpertPool(placement, len(own), config.num_experts_per_tok, backend, device=device, num_ranks=num_ranks)
    home = ExpertsOnTheirWay(pool)
    params = load_params(
        checkpoint, config, device=device, dequantize_to=dequantize_to, home=home, experts=own, progress=progress
    )  # fmt: skip
    home.hand_over(config.num_hidden_layers)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what preparing took is the cache's to have
    return params, pool


def choose_placement(
    wanted: OffloadExperts, checkpoint: Checkpoint, config: ModelConfig, engine: EngineConfig, cache_bytes: int, *,
    device: torch.device, dequantize_to: torch.dtype | None = None, num_ranks: int = 1,
) -> Placement | None:  # fmt: skip
    """What `offload_experts` means for this model on this device; None if its experts need not be offloaded. Of one of
    several ranks: for its share of them, `cache_bytes` being all else that it needs as a rank.

    Reads headers only. `OffloadError` for what cannot be, on the device or in the machine's memory.
    """
    slots = check_offload(wanted, config, num_ranks)
    if slots is None:
        return None
    sizes = weight_sizes(checkpoint, config, dequantize_to, num_ranks)
    num_own = config.n_routed_experts // num_ranks
    share = replace(config, n_routed_experts=num_own)
    if slots != "auto":
        placement: Placement | None = divide_slots(int(slots), share, engine)
    else:
        placement = place_experts(share, engine, sizes, cache_bytes, usable_bytes(device))
    if placement is not None:
        _check_host(num_ranks * (sizes.routed // num_own) * (num_own - placement.num_fixed))
    return placement


def check_offload(wanted: OffloadExperts, config: ModelConfig, num_ranks: int = 1) -> str | int | None:
    """`offload_experts` as None, "auto" or a number of slots; `OffloadError` if it is anything else."""
    if wanted is None or wanted is False:
        return None
    num_experts = config.n_routed_experts
    if num_experts % num_ranks or num_experts // num_ranks < config.num_experts_per_tok:
        raise OffloadError(
            f"offload_experts needs as many experts on every rank, and at least the {config.num_experts_per_tok} that "
            f"a token chooses: {num_experts} experts on {num_ranks} ranks; change gpus, or leave it out"
        )
    if wanted is True or wanted == "auto":
        return "auto"
    fewest, most = config.num_experts_per_tok, num_experts // num_ranks
    if not is_size(wanted) or not fewest <= int(wanted) <= most:
        raise OffloadError(
            f"offload_experts must be True, 'auto' or the number of experts of a layer to keep on the device, from "
            f"{fewest} (what a token chooses) to {most} (all there are{' on a rank' if num_ranks > 1 else ''}), found "
            f"{shown(wanted)}"
        )
    return int(wanted)


def weight_sizes(
    checkpoint: Checkpoint, config: ModelConfig, dequantize_to: torch.dtype | None, num_ranks: int = 1
) -> ModelBytes:  # fmt: skip
    """Of one of several ranks, from the headers alone."""
    load = plan_load(checkpoint, config)

    def bytes_of(source: Source) -> int:
        if dequantize_to is None or source.tensor.role is Role.TABLE:
            return source.nbytes
        return torch.Size(source.tensor.shape).numel() * dequantize_to.itemsize

    routed = sum(bytes_of(source) for source in load.sources if source.tensor.expert_idx is not None)
    total = sum(map(bytes_of, load.sources))
    return ModelBytes(total - routed, routed // num_ranks, config.num_hidden_layers + load.num_mtp)


def usable_bytes(device: torch.device) -> int:
    """The whole device, as `dsv4 plan` counts it, less what others hold."""
    if device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + CONTEXT_BYTES // 2)  # before the first kernel is loaded, half the reserve is taken


def _check_host(needed: int) -> None:
    """Before an hour of reading ends in a process killed for want of memory."""
    available = host_bytes_available()
    if available is not None and needed > available:
        raise OffloadError(
            f"offloaded experts need {needed / GIB:.1f} GiB of host memory, and {available / GIB:.1f} GiB "
            "are available: keep more of them on the device, or add memory"
        )


def host_bytes_available() -> int | None:
    """Memory programs could still get without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
