"""The live view: what the engine is doing now, for the page. Experts are counted only while a page reads it."""

import time
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema
from dsv4.engine.serving import Serving
from dsv4.engine.stats import EngineStats
from dsv4.tools.experts import expert_counts

_WATCH_SECONDS = 5.0
_DECAY = 0.9  # of a step's counts, per step: the view shows about the last ten steps


class LiveView:
    """Both methods run in the engine's thread, `on_step` after every step."""

    def __init__(self, engine: Serving) -> None:
        self._engine = engine
        config = engine.model.config
        self._num_experts = config.n_routed_experts
        self._counts = torch.zeros(config.num_hidden_layers, config.n_routed_experts)
        self._is_counting = False
        self._watched_until = 0.0

    def on_step(self) -> None:
        """Count experts while a page has asked recently; stop when none has."""
        is_watched, observers = time.monotonic() < self._watched_until, self._engine.observers
        if is_watched and not self._is_counting:
            observers.append(self._count)
        elif self._is_counting and not is_watched:
            observers.remove(self._count)
            self._counts.zero_()  # whoever looks next does not see what was long ago
        elif is_watched:
            self._counts *= _DECAY
        self._is_counting = is_watched

    def _count(self, chosen: Tensor) -> None:
        self._counts += expert_counts(chosen, self._num_experts)

    def snapshot(self) -> dict[str, Any]:
        """The fields of `Live` now, but for the model's name. Asking keeps the experts counted for the next seconds."""
        self._watched_until = time.monotonic() + _WATCH_SECONDS
        stats = self._engine.stats()
        return {
            "seconds": time.monotonic(),
            "waiting": stats.num_waiting,
            "running": stats.num_running,
            "slots": stats.num_slots,
            "blocks_used": stats.num_blocks_used,
            "blocks": stats.num_blocks,
            "steps": stats.num_steps,
            "prompt_tokens": stats.num_prompt_tokens,
            "output_tokens": stats.num_output_tokens,
            "cache": cache_kinds(self._engine.cache.schema, stats),
            "experts": _digits(self._counts),
            "step_tokens": None if stats.drafts is None else stats.drafts.tokens_per_step,
            "accepted": [] if stats.drafts is None else list(stats.drafts.acceptance),
        }


def cache_kinds(schema: CacheSchema, stats: EngineStats) -> list[dict[str, Any]]:
    """Bytes by kind of row: entries and keys grow with blocks, windows and compressor state with requests."""
    per_block = {
        "CSA entries": schema.bytes_of("csa.entries"),
        "CSA index keys": schema.bytes_of("csa.index_keys"),
        "HCA entries": schema.bytes_of("hca.entries"),
    }
    per_request = {
        "Window rings": schema.window_bytes_per_request + schema.position_bytes_per_request,
        "Compressor state": schema.state_bytes_per_request,
    }
    kinds = [
        _kind(name, "block", size, stats.num_blocks_used, stats.num_blocks) for name, size in per_block.items() if size
    ]
    return kinds + [
        _kind(name, "request", size, stats.num_running, stats.num_slots) for name, size in per_request.items() if size
    ]


def _kind(name: str, unit: str, size: int, num_used: int, num_total: int) -> dict[str, Any]:
    return {"name": name, "unit": unit, "used_bytes": size * num_used, "total_bytes": size * num_total}


def _digits(counts: Tensor) -> list[str]:
    """Counts [layers, experts] as digits relative to the busiest expert."""
    top = counts.max().item()
    scaled = (counts * (9.0 / top)).ceil() if top > 1e-3 else torch.zeros_like(counts)
    return ["".join(str(int(value)) for value in row) for row in scaled.clamp(0, 9).tolist()]
