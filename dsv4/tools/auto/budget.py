"""`Budget`: what a model takes of one rank's memory under given limits, by the arithmetic of `dsv4 plan`. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
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
from dsv4.loader.header import TensorInfo
from dsv4.tools.plan.plan import largest
from dsv4.tools.plan.sizes import count_weights

_DRAFT = re.compile(r"(^|\.)mtp\.\d+\.")  # a draft block's tensors, in every spelling

MOST_BLOCKS = 2**18  # of one rank, 33 million tokens: the host keeps books of each


@dataclass(frozen=True)
class WeightBytes:
    """Of a checkpoint: all but the routed experts, the routed experts, and what holds them."""

    resident: int
    routed: int
    num_moe_blocks: int
    has_drafter: bool
    plain_itemsize: int | None = None  # of numerics that dequantise

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
        num_blocks = config.num_hidden_layers + (config.num_draft_layers if has_drafter else 0)
        return cls(resident, routed, num_blocks, has_drafter, plain_itemsize)

    @property
    def total(self) -> int:
        return self.resident + self.routed


@dataclass(frozen=True)
class Budget:
    """One of `num_ranks` ranks. Limits are of all ranks together, as `EngineConfig` has them under `--gpus`;
    `num_experts` of each layer are on a rank's device, None: all that it owns."""

    config: ModelConfig
    weights: WeightBytes
    num_ranks: int = 1
    has_reserves: bool = True  # of a GPU: workspace, graphs, context

    def _schedule(self, limits: EngineConfig) -> tuple[LayerSpec, ...]:
        is_drafting = self.weights.has_drafter and limits.max_draft_tokens > 0
        return self._schedules[is_drafting]

    @cached_property
    def _schedules(self) -> dict[bool, tuple[LayerSpec, ...]]:
        return {with_mtp: build_schedule(self.config, with_mtp=with_mtp) for with_mtp in (False, True)}

    def schema(self, limits: EngineConfig) -> CacheSchema:
        share = rank_limits(replace(limits, verify_hits=0.0), self.num_ranks)
        return build_cache_schema(
            self.config, self._schedule(limits), share, plain_itemsize=self.weights.plain_itemsize
        )

    @property
    def num_own(self) -> int:
        """The most experts that one rank owns."""
        return -(-self.config.n_routed_experts // self.num_ranks)

    def weight_bytes(self, num_experts: int | None = None) -> int:
        """On the device; `num_experts` of each layer, beside room to bring others."""
        sizes = ModelBytes(self.weights.resident, self.own_routed, self.weights.num_moe_blocks, 0)
        if num_experts is None:
            return self.weights.resident + self.own_routed
        return self.weights.resident + sizes.staging + num_experts * sizes.slot(self.num_own)

    @property
    def own_routed(self) -> int:
        return self.weights.routed // self.config.n_routed_experts * self.num_own

    def cache_bytes(self, limits: EngineConfig) -> int:
        return self.schema(limits).total_bytes

    def reserve_bytes(self, limits: EngineConfig) -> int:
        if not self.has_reserves:
            return 0
        share = rank_limits(replace(limits, verify_hits=0.0), self.num_ranks)
        exchange = exchange_bytes(self.config, share, self.num_ranks)
        return workspace_bytes(self.config, share) + graph_bytes(self.config, share) + exchange + CONTEXT_BYTES

    def total(self, limits: EngineConfig, num_experts: int | None = None) -> int:
        return self.weight_bytes(num_experts) + self.cache_bytes(limits) + self.reserve_bytes(limits)

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
