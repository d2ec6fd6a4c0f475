"""Loading a model on one rank or several: each reads its own experts, rank 0 shows the progress of all, an error ends
all ranks."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.dist.control import Leader
from dsv4.dist.errors import RankFailed
from dsv4.dist.shares import expert_range
from dsv4.dist.world import World, is_started_by_torchrun, local_rank
from dsv4.engine.fingerprint import Identity
from dsv4.engine.offload.load import OffloadExperts, check_offload, choose_placement, load_offloaded
from dsv4.engine.offload.placement import Placement, divide_slots, exchange_bytes
from dsv4.engine.offload.pool import ExpertPool
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.weights import load_params, plan_load, share_bytes
from dsv4.model.parameters import ModelParams
from dsv4.ops import Backend


def rank_device(device: torch.device, num_ranks: int) -> torch.device:
    """This rank's own device, from now on the current one: kernels are launched there. `ConfigError` if the machine has
    too few."""
    if device.type != "cuda" or num_ranks == 1:
        return device
    found, needed = torch.cuda.device_count(), local_rank() + 1 if is_started_by_torchrun() else num_ranks
    if device.index is not None:
        raise ConfigError(f"device must be 'cuda' with gpus {num_ranks}: rank r takes the r-th, found {str(device)!r}")
    is_shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch's own: ranks try one GPU
    if found < needed and not is_shared:
        raise ConfigError(f"gpus is {num_ranks}, which needs {needed} CUDA devices here; this machine has {found}")
    own = torch.device("cuda", local_rank() % found)
    torch.cuda.set_device(own)
    return own


@contextmanager
def failing_together(world: World | None) -> Iterator[None]:
    """A rank that cannot load, or cannot go on, says so before it ends; rank 0 ends the others."""
    try:
        yield
    except BaseException as error:
        if world is None:
            raise
        if isinstance(world.link, Leader):
            world.link.stop()
        elif not isinstance(error, (RankFailed, SystemExit)):  # rank 0 knows of these
            world.link.report(error)
        raise


def check_alike(world: World, identity: Identity) -> None:
    """`ConfigError` on all ranks if one of them would compute other bits than rank 0: before weights are read."""
    facts = {
        "checkpoint": identity.checkpoint, "kernels": identity.kernels, "libraries": identity.libraries,
        "numerics": identity.numerics, "processor": identity.processor.split(".")[0],
    }  # fmt: skip
    first, *others = map(json.loads, world.gather_texts(json.dumps(facts)))
    for rank, found in enumerate(others, 1):
        for what, value in found.items():
            if value != first[what]:
                raise ConfigError(
                    f"rank {rank} and rank 0 must agree in {what}, found {value} and {first[what]}: tokens would "
                    "depend on a request's rank. Use one checkpoint, one installation and GPUs of one kind for all"
                )


@dataclass(frozen=True)
class Share:
    """What one rank loads of a checkpoint, and onto what. Without a `world`: all of it."""

    checkpoint: Checkpoint
    config: ModelConfig
    world: World | None
    device: torch.device
    dequantize_to: torch.dtype | None

    def placement(
        self, wanted: OffloadExperts, asked: EngineConfig, limits: EngineConfig, cache_bytes: int
    ) -> Placement | None:  # fmt: skip
        """Where the rank's experts live: as many of them on the device as fit on every rank, so that all ranks capture
        the same calls. `asked` are the limits of all ranks, `limits` one rank's."""
        config, world = self.config, self.world
        size = 1 if world is None else world.size
        if check_offload(wanted, config, size) is None:
            return None
        own = choose_placement(
            wanted, self.checkpoint, config, asked, cache_bytes + exchange_bytes(config, limits, size),
            device=self.device, dequantize_to=self.dequantize_to, num_ranks=size,
        )  # fmt: skip
        if world is None:
            return own
        num_own = config.n_routed_experts // world.size
        fewest = world.least(num_own if own is None else own.num_slots)
        return divide_slots(fewest, replace(config, n_routed_experts=num_own), asked) if fewest < num_own else None

    def load(
        self, placement: Placement | None, backend: Backend, progress: Progress
    ) -> tuple[ModelParams, ExpertPool | None]:  # fmt: skip
        """As `load_params`, with this rank's experts alone."""
        world, config = self.world, self.config
        if world is None:
            return self._load(placement, backend, progress)
        if not isinstance(world.link, Leader):
            loaded = self._load(placement, backend, world.progress.load)
            world.link.ready()
            return loaded
        leader, num_shown = world.link, 0
        plan = plan_load(self.checkpoint, config)
        ranges = [expert_range(config.n_routed_experts, world.size, rank) for rank in range(world.size)]
        with byte_progress(progress, sum(share_bytes(plan, one) for one in ranges), "loading weights") as advance:

            def show() -> None:
                nonlocal num_shown
                num_done = leader.bytes_loaded
                advance(num_done - num_shown)
                num_shown = num_done

            def note(done: int, total: int) -> None:
                world.progress.load(done, total)
                show()

            loaded = self._load(placement, backend, note)
            leader.wait_until_ready(show)
            show()
        return loaded

    def _load(
        self, placement: Placement | None, backend: Backend, report: Progress
    ) -> tuple[ModelParams, ExpertPool | None]:  # fmt: skip
        config, (size, rank) = self.config, (1, 0) if self.world is None else (self.world.size, self.world.rank)
        if placement is None:
            own = None if size == 1 else expert_range(config.n_routed_experts, size, rank)
            params = load_params(
                self.checkpoint, config, device=self.device, dequantize_to=self.dequantize_to, experts=own,
                progress=report,
            )  # fmt: skip
            return params, None
        return load_offloaded(
            self.checkpoint, config, placement, backend, device=self.device, dequantize_to=self.dequantize_to,
            progress=report, num_ranks=size, rank=rank,
        )  # fmt: skip
