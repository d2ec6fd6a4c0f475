"""`Budget`: what a model takes of one rank's memory under given limits. No torch.

Exact: the weights (tensor by tensor) and the cache (`cache/schema.py`, the very arithmetic the cache allocates by).
Reserves, by formulas fitted to measurements: workspace, exchange between GPUs, CUDA graphs and context
(engine/offload/placement.py, where slots of offloaded experts are counted too).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from dsv4.cache.schema import CacheSchema, blocks_for_tokens, build_cache_schema
from dsv4.config import BLOCK_TOKENS, EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec, build_schedule
from dsv4.dist.shares import rank_limits
from dsv4.engine.offload.placement import (
    CONTEXT_BYTES,
    ModelBytes,
    exchange_bytes,
    graph_bytes,
    workspace_bytes,
)
from dsv4.engine.schedule.chunk import pick_chunk
from dsv4.loader.header import TensorInfo
from dsv4.tools.plan.sizes import WeightSizes, count_weights

_DRAFT = re.compile(r"(^|\.)mtp\.\d+\.")  # a draft block's tensors, in every spelling

MOST_BLOCKS = 2**18  # of one rank, 33 million tokens: the host keeps a list entry for each


@dataclass(frozen=True)
class MemoryBudget:
    """What one GPU must hold for one workload, in bytes; `host` is what all experts take in the machine's memory."""

    weights: int
    cache: int
    workspace: int = 0
    graphs: int = 0
    context: int = 0
    exchange: int = 0
    host: int = 0

    @property
    def reserve(self) -> int:
        return self.workspace + self.exchange + self.graphs + self.context

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.reserve


@dataclass(frozen=True)
class WeightBytes(ModelBytes):
    """Of a checkpoint, and what decides its cache. `plain_itemsize`: of numerics that dequantise."""

    has_drafter: bool
    plain_itemsize: int | None = None

    @classmethod
    def of(cls, tensors: Iterable[TensorInfo], config: ModelConfig, plain_itemsize: int | None = None) -> WeightBytes:
        """By the headers; where weights are dequantised, by the config."""
        resident = routed = 0
        has_drafter = False
        for tensor in tensors:
            has_drafter = has_drafter or _DRAFT.search(tensor.name) is not None
            is_routed = ".experts." in tensor.name and "shared_experts" not in tensor.name
            resident += 0 if is_routed else tensor.nbytes
            routed += tensor.nbytes if is_routed else 0
        if plain_itemsize is not None:
            sizes = count_weights(config, "bf16", with_draft=has_drafter)
            scale = plain_itemsize / 2
            routed = int(sizes.routed_expert_bytes * scale)
            resident = int(sizes.total_bytes * scale) - routed
        return cls(resident, routed, _num_moe_blocks(config, has_drafter), has_drafter, plain_itemsize)

    @classmethod
    def counted(cls, sizes: WeightSizes, config: ModelConfig, *, with_draft: bool) -> WeightBytes:
        """Of a checkpoint that is not there."""
        routed = sizes.routed_expert_bytes
        return cls(sizes.total_bytes - routed, routed, _num_moe_blocks(config, with_draft), with_draft)


def _num_moe_blocks(config: ModelConfig, with_draft: bool) -> int:
    return config.num_hidden_layers + (config.num_draft_layers if with_draft else 0)


@dataclass(frozen=True)
class Budget:
    """One of `num_ranks` ranks. Limits are of all ranks together, as `EngineConfig` has them under `--gpus`;
    `num_experts` of each layer are on a rank's device, None: all that it owns."""

    config: ModelConfig
    weights: WeightBytes
    num_ranks: int = 1
    has_reserves: bool = True  # of a GPU: workspace, graphs, context

    @cached_property
    def _schedules(self) -> dict[bool, tuple[LayerSpec, ...]]:
        return {with_mtp: build_schedule(self.config, with_mtp=with_mtp) for with_mtp in (False, True)}

    def _share(self, limits: EngineConfig) -> EngineConfig:
        return rank_limits(replace(limits, verify_hits=0.0), self.num_ranks)

    def schema(self, limits: EngineConfig) -> CacheSchema:
        schedule = self._schedules[self.weights.has_drafter and limits.max_draft_tokens > 0]
        return build_cache_schema(
            self.config, schedule, self._share(limits), plain_itemsize=self.weights.plain_itemsize
        )

    @property
    def num_own(self) -> int:
        """The most experts that one rank owns."""
        return -(-self.config.n_routed_experts // self.num_ranks)

    @property
    def own_weights(self) -> ModelBytes:
        weights = self.weights
        own_routed = weights.routed // self.config.n_routed_experts * self.num_own
        return ModelBytes(weights.resident, own_routed, weights.num_moe_blocks)

    def weight_bytes(self, num_experts: int | None = None) -> int:
        """On the device; `num_experts` of each layer, beside room to bring others."""
        sizes = self.own_weights
        if num_experts is None:
            return sizes.total
        return sizes.resident + sizes.staging + num_experts * sizes.slot(self.num_own)

    @cached_property
    def _cache_bytes(self) -> dict[EngineConfig, int]:
        return {}

    def cache_bytes(self, limits: EngineConfig) -> int:
        """Searches come back to the same limits, so sizes are remembered."""
        if limits not in self._cache_bytes:
            self._cache_bytes[limits] = self.schema(limits).total_bytes
        return self._cache_bytes[limits]

    def parts(self, limits: EngineConfig, num_experts: int | None = None) -> MemoryBudget:
        weights, cache = self.weight_bytes(num_experts), self.cache_bytes(limits)
        if not self.has_reserves:
            return MemoryBudget(weights, cache)
        share = self._share(limits)
        return MemoryBudget(
            weights, cache, workspace_bytes(self.config, share), graph_bytes(self.config, share), CONTEXT_BYTES,
            exchange_bytes(self.config, share, self.num_ranks),
        )  # fmt: skip

    def reserve_bytes(self, limits: EngineConfig) -> int:
        return self.parts(limits).reserve

    def pick_chunk(self, limits: EngineConfig, usable: int, *, has_kernels: bool = True) -> tuple[int, str]:
        """For a GPU with `usable` bytes, beside all weights and the cache of `limits`: tokens, and why."""

        def reserve(chunk: int) -> int:
            return self.reserve_bytes(replace(limits, max_chunk_tokens=chunk))

        room = usable - self.weight_bytes()
        return pick_chunk(reserve, self.cache_bytes(limits), room, has_kernels=has_kernels)

    def total(self, limits: EngineConfig, num_experts: int | None = None) -> int:
        return self.parts(limits, num_experts).total

    # ---- a cache that fills what is left ----

    def least(self, limits: EngineConfig) -> EngineConfig:
        """The limits with the smallest cache that can serve them: a slot for each request, blocks for the longest."""
        per_rank = -(-limits.max_concurrent_requests // self.num_ranks)
        return replace(
            limits, num_blocks=max(blocks_for_tokens(limits.max_context_tokens), per_rank), prefix_cache_bytes=1
        )

    def snapshot_share(self, limits: EngineConfig) -> float:
        """Of the cache, so that as many snapshots fit as blocks of a long prompt leave behind: one for each
        `snapshot_interval_tokens`."""
        schema = self.schema(self.least(limits))
        blocks = schema.bytes_per_block * (limits.snapshot_interval_tokens // BLOCK_TOKENS)
        return schema.bytes_per_snapshot / (schema.bytes_per_snapshot + blocks) if blocks else 1.0

    def filled(self, limits: EngineConfig, usable: int, num_experts: int | None = None) -> EngineConfig | None:
        """The limits with blocks and snapshots that fill `usable` bytes; None if not even the least cache fits."""
        least = self.least(limits)
        assert least.num_blocks is not None
        spare = usable - self.total(least, num_experts)
        if spare < 0:
            return None
        share = self.snapshot_share(limits)
        with_snapshots = replace(least, prefix_cache_bytes=max(1, int(spare * share)))
        block_bytes = self.schema(least).bytes_per_block
        if not block_bytes:  # nothing is kept for each token
            return with_snapshots

        def more(num_more: int) -> EngineConfig:
            return replace(with_snapshots, num_blocks=(least.num_blocks or 0) + num_more)

        room = max(MOST_BLOCKS - least.num_blocks, 0)
        num_more = largest(lambda n: self.total(more(n), num_experts) <= usable, min(spare // block_bytes, room))
        found = more(num_more)
        most_snapshots = int(share / (1 - share) * block_bytes * (found.num_blocks or 0))  # where blocks are capped
        return replace(found, prefix_cache_bytes=max(1, min(found.prefix_cache_bytes, most_snapshots)))


def largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest n in 0 .. upper with fits(n), where fits is true up to some point; 0 needs no test."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
