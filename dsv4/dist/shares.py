"""Which rank owns which experts, and which requests it may hold. No torch."""

from __future__ import annotations

from dataclasses import replace

from dsv4.config import ConfigError, EngineConfig, ModelConfig, is_size, shown


def check_ranks(gpus: int, num_experts: int) -> int:
    """The number of ranks; `ConfigError` if a model of so many experts cannot have it."""
    if not is_size(gpus) or gpus > num_experts:
        raise ConfigError(f"gpus must be from 1 to the number of experts {num_experts}, found {shown(gpus)}")
    return gpus


def expert_range(num_experts: int, num_ranks: int, rank: int) -> range:
    """Experts of one rank: neighbours, as many as on any other rank or one less."""
    return range(rank * num_experts // num_ranks, (rank + 1) * num_experts // num_ranks)


def decode_rows(config: ModelConfig, engine: EngineConfig) -> int:
    """Rows of a rank's largest call for requests that decode: one and its drafts each, or a DSpark block."""
    block = 0 if config.dspark is None or not engine.max_draft_tokens else config.dspark.block_size
    return engine.max_concurrent_requests * max(1 + engine.max_draft_tokens, block)


def most_rows(config: ModelConfig, engine: EngineConfig) -> int:
    """Rows of a rank's largest call."""
    return max(engine.max_chunk_tokens, decode_rows(config, engine))


def rank_limits(engine: EngineConfig, num_ranks: int) -> EngineConfig:
    """One rank's share of the limits: requests are divided; context, chunk, blocks and snapshots are each rank's own.
    `ConfigError` for what rank 0 cannot keep books of: memory and files below the other ranks' devices."""
    if num_ranks == 1:
        return engine
    for name in ("cache_host_bytes", "cache_dir", "verify_hits"):
        if getattr(engine, name):
            raise ConfigError(
                f"{name} needs one rank, found gpus {num_ranks}: prefixes of several ranks stay on their devices"
            )
    return replace(engine, max_concurrent_requests=-(-engine.max_concurrent_requests // num_ranks))
