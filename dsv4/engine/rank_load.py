"""Ranks while a model is loaded: each reads its own experts, rank 0 shows the progress of all, errors end everybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dsv4.config import ConfigError, ModelConfig
from dsv4.dist.control import Leader
from dsv4.dist.shares import expert_range
from dsv4.dist.world import World, is_started_by_torchrun, local_rank
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.progress import Progress, byte_progress
from dsv4.loader.weights import load_params, plan_load, share_bytes
from dsv4.model.parameters import ModelParams


def rank_device(device: torch.device, num_ranks: int) -> torch.device:
    """This rank's own device; `ConfigError` if the machine has too few."""
    if device.type != "cuda" or num_ranks == 1:
        return device
    found, needed = torch.cuda.device_count(), local_rank() + 1 if is_started_by_torchrun() else num_ranks
    if device.index is not None:
        raise ConfigError(f"device must be 'cuda' with gpus {num_ranks}: rank r takes the r-th, found {str(device)!r}")
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":
        return torch.device("cuda", local_rank() % found)  # torch's own switch: several ranks try one GPU, slowly
    if found < needed:
        raise ConfigError(f"gpus is {num_ranks}, which needs {needed} CUDA devices here; this machine has {found}")
    return torch.device("cuda", local_rank())


@contextmanager
def failing_together(world: World) -> Iterator[None]:
    """A rank that cannot load, or cannot go on, says so before it ends; rank 0 ends the others."""
    try:
        yield
    except BaseException as error:
        if isinstance(world.link, Leader):
            world.link.stop()
        else:
            world.link.report(error)
        raise


def load_share(
    checkpoint: Checkpoint, config: ModelConfig, world: World, *, device: torch.device,
    dequantize_to: torch.dtype | None, progress: Progress,
) -> ModelParams:  # fmt: skip
    """As `load_params`, with this rank's experts alone."""
    own = expert_range(config.n_routed_experts, world.size, world.rank)

    def load(report: Progress) -> ModelParams:
        return load_params(
            checkpoint, config, device=device, dequantize_to=dequantize_to, experts=own, progress=report
        )  # fmt: skip

    if not isinstance(world.link, Leader):
        params = load(world.progress.load)
        world.link.answer(b"")
        return params
    leader, num_shown = world.link, 0
    plan = plan_load(checkpoint, config)
    ranges = [expert_range(config.n_routed_experts, world.size, rank) for rank in range(world.size)]
    with byte_progress(progress, sum(share_bytes(plan, one) for one in ranges), "loading weights") as advance:

        def show() -> None:
            nonlocal num_shown
            num_done, _ = leader.bytes_loaded()
            advance(num_done - num_shown)
            num_shown = num_done

        def note(done: int, total: int) -> None:
            world.progress.load(done, total)
            show()

        params = load(note)
        leader.answers(show)
        show()
    return params
