"""`Place`: where a server's model runs, and with how much memory: which GPUs, how many ranks, or the CPU. No torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4.config import ConfigError, ModelConfig
from dsv4.dist.shares import check_ranks
from dsv4.tools.auto.machine import Accelerator, Machine
from dsv4.tools.auto.settings import GIB, GIVEN, Choice, Wishes, size
from dsv4.tools.plan.budget import WeightBytes

SMALL_MODEL_BYTES = 8 * GIB  # stays on one GPU: an exchange costs more than a second GPU brings
BUSY_SHARE = 0.05  # of a GPU's memory: what others may hold without a word
ALIKE_SHARE = 0.75  # of the freest GPU's memory, that others must have free to be used beside it
LEAST_ARCHITECTURE = 80  # that kernels are written for (dsv4/ops/lib/arch.py)
ALL = "everything that is visible"


@dataclass(frozen=True)
class Place:
    """Where the model runs: memory of one rank, and how that was chosen."""

    device: str
    gpus: int
    usable: int | None
    where: str
    choice: Choice
    notes: tuple[Choice, ...] = ()
    visible: str | None = None

    @property
    def has_gpu(self) -> bool:
        return self.device != "cpu"


def choose_place(config: ModelConfig, weights: WeightBytes, wishes: Wishes, machine: Machine) -> Place:
    kind, _, number = wishes.device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, found {wishes.device!r}")
    usable = tuple(gpu for gpu in machine.gpus if gpu.architecture >= LEAST_ARCHITECTURE)
    if kind == "cuda" and not machine.gpus:
        raise ConfigError(f"--device {wishes.device}: {machine.why_no_gpu}; leave --device out to use the CPU")
    if kind == "cpu" or (kind == "auto" and len(usable) < max(len(machine.gpus), 1)):
        return _host(config, weights, wishes, machine)
    if number and int(number) >= len(machine.gpus):
        raise ConfigError(f"--device {wishes.device}: this machine shows {len(machine.gpus)} GPUs, numbered from 0")
    wanted = 1 if number or wishes.limits.verify_hits else wishes.gpus
    if wanted is None and weights.total < SMALL_MODEL_BYTES:
        wanted = 1
    picked = _pick(machine.gpus, wanted, int(number) if number else None)
    num_ranks = check_ranks(wanted or min(len(picked), config.n_routed_experts), config.n_routed_experts)
    num_here = _ranks_here(num_ranks)
    shares = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch's own: ranks try one GPU
    if num_here > len(picked) and not shares:
        needs = f"--gpus {num_ranks}" if num_here == num_ranks else f"--gpus {num_ranks} ({num_here} on this machine)"
        raise ConfigError(f"{needs}: this machine shows {len(machine.gpus)}")
    used = [machine.gpus[idx] for idx in picked[:num_here]]
    ranks_a_gpu = -(-num_here // len(used))
    bytes_of = [_usable(gpu, wishes.memory) // ranks_a_gpu for gpu in used]
    is_given = number or wishes.gpus
    why = GIVEN if is_given else ALL if len(used) == len(machine.gpus) else "free, and all that it needs"
    device = f"cuda:{picked[0]}" if num_ranks == 1 and picked[0] else "cuda"
    where = "each GPU" if num_ranks > 1 else "the GPU"
    value = f"{device}: {num_ranks} x {used[0].name}, {size(used[0].total_bytes)}"
    are_first = picked[:num_here] == list(range(len(used)))
    return Place(
        device, num_ranks, min(bytes_of), where, Choice("device", value, why, "--device, --gpus"),
        tuple(_busy(machine.gpus)), None if num_ranks == 1 or are_first else ",".join(gpu.uuid for gpu in used),
    )  # fmt: skip


def _ranks_here(num_ranks: int) -> int:
    """Of the ranks, those of this machine: torchrun says so where it starts them on several."""
    return min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))


def _pick(gpus: tuple[Accelerator, ...], wanted: int | None, number: int | None) -> list[int]:
    """Which GPUs, by their places: the one that was named; the freest of those wanted; or all that are about as free as
    the freest, and of its kind."""
    if number is not None:
        return [number]
    by_room = sorted(range(len(gpus)), key=lambda idx: -gpus[idx].free_bytes)
    first = gpus[by_room[0]]
    if wanted is None:
        return [
            idx
            for idx, gpu in enumerate(gpus)
            if gpu.free_bytes >= ALIKE_SHARE * first.free_bytes and gpu.architecture == first.architecture
        ]
    return sorted(by_room[:wanted])


def _is_busy(gpu: Accelerator) -> bool:
    return gpu.total_bytes - gpu.free_bytes > BUSY_SHARE * gpu.total_bytes


def _usable(gpu: Accelerator, share: float) -> int:
    """A share of the whole GPU, or of what is free where others hold much of it: both leave a margin."""
    return min(int(share * (gpu.free_bytes if _is_busy(gpu) else gpu.total_bytes)), gpu.free_bytes)


def _busy(gpus: tuple[Accelerator, ...]) -> Iterator[Choice]:
    for idx, gpu in enumerate(gpus):
        if _is_busy(gpu):
            value = f"GPU {idx}: {size(gpu.free_bytes)} of {size(gpu.total_bytes)} are free"
            yield Choice("busy", value, "other processes hold the rest", "CUDA_VISIBLE_DEVICES")


def _host(config: ModelConfig, weights: WeightBytes, wishes: Wishes, machine: Machine) -> Place:
    num_ranks = check_ranks(wishes.gpus or 1, config.n_routed_experts)
    usable = None
    if machine.host_bytes is not None:
        usable = int(machine.host_bytes * wishes.memory) // num_ranks
    old = [gpu.name for gpu in machine.gpus if gpu.architecture < LEAST_ARCHITECTURE]
    why = GIVEN if wishes.device == "cpu" else f"no kernels for {old[0]}" if old else machine.why_no_gpu
    value = "cpu" if num_ranks == 1 else f"cpu, {num_ranks} processes"
    return Place("cpu", num_ranks, usable, "this machine", Choice("device", value, why, "--device, --gpus"))
