"""`Sleeper`: gives a resting engine's memory back, weights and cache each on its own, and takes it again.

Tensors stay the objects they are; their memory is given back and taken again, at another address. So captured graphs
are let go, and captured again once everything is awake; kernels are not compiled again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import storages_of, wide_weights_of
from dsv4.request import RequestError

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)
LEVELS = (1, 2)


class Sleeper:
    """asleep  the tags whose memory is given back"""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self._kept: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def check(self, level: int, tags: Sequence[str] | None) -> set[str]:
        """The tags that `sleep` would put to sleep; `RequestError` if there is nothing to do, or no such thing."""
        if level not in LEVELS or isinstance(level, bool):
            raise RequestError(f"level must be 1 (weights to host memory) or 2 (weights dropped), found {level!r}")
        wanted = _checked(tags) - self.asleep
        if not wanted:
            raise RequestError("the engine sleeps already: wake() it first")
        return wanted

    def sleep(
        self, level: int, wanted: set[str], weights: Any, pool: ExpertPool | None, cache: KVCacheManager,
        runner: Runner,
    ) -> None:  # fmt: skip
        """Level 1 keeps the weights in host memory, level 2 drops them. The cache is dropped. Nothing may hold rows of
        it."""
        self.asleep |= wanted
        runner.drop_graphs()
        if cache.device.type == "cuda":
            torch.cuda.synchronize()
        if WEIGHTS in wanted:
            for wide in wide_weights_of(weights):
                wide.forget_operands()
            if pool is not None:
                pool.staging.clear()  # made again when it is needed
            stacks = [] if pool is None else [layer.stack for layer in pool.layers]
            for storage in storages_of((weights, stacks)):
                if storage.resizable():
                    self._kept.append((storage, storage.nbytes(), _on_host(storage) if level == 1 else None))
                    storage.resize_(0)
        if CACHE in wanted:
            cache.drop_rows()
        if cache.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, tags: Sequence[str] | None, cache: KVCacheManager, runner: Runner) -> None:
        """Take memory again: of the weights, of the cache, by default of all that sleeps."""
        wanted = _checked(tags) & self.asleep
        if WEIGHTS in wanted:
            for storage, num_bytes, copy in self._kept:
                storage.resize_(num_bytes)
                if copy is not None:
                    _bytes_of(storage).copy_(copy)
            self._kept.clear()
        if CACHE in wanted:
            cache.restore_rows()
        self.asleep -= wanted
        if wanted and not self.asleep:
            runner.capture_graphs()


def _checked(tags: Sequence[str] | None) -> set[str]:
    wanted = set(TAGS) if tags is None else set(tags)
    if not wanted <= set(TAGS):
        raise RequestError(f"tags must be among {', '.join(TAGS)}, found {', '.join(sorted(wanted - set(TAGS)))}")
    return wanted


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    data = _bytes_of(storage)
    copy = torch.empty(data.shape, dtype=torch.uint8, pin_memory=data.is_cuda)
    return copy.copy_(data)
