"""Which rank owns which experts, and which requests it may hold. No torch."""

from dataclasses import replace

from dsv4.config import ConfigError, EngineConfig, ModelConfig, is_size, shown


def check_ranks(gpus: int, num_experts: int) -> int:
    """The number of ranks; `ConfigError` if a model with this number of experts cannot have it."""
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
    return max(engine.chunk_tokens, decode_rows(config, engine))


def rank_folder(engine: EngineConfig, rank: int) -> EngineConfig:
    """The limits with the folder of one of several ranks: each finds what it wrote itself, rank 0 what one rank did."""
    if engine.cache_dir is None or rank == 0:
        return engine
    return replace(engine, cache_dir=f"{engine.cache_dir}/rank-{rank}")


def rank_limits(engine: EngineConfig, num_ranks: int) -> EngineConfig:
    """One rank's share of the limits: requests are divided; context, chunk, blocks, snapshots and what lies below the
    device are each rank's own. `ConfigError` for what only one rank can do."""
    if num_ranks == 1:
        return engine
    if engine.verify_hits:
        raise ConfigError(f"verify_hits needs one rank, found gpus {num_ranks}: a cold run would need all of them idle")
    return replace(engine, max_concurrent_requests=-(-engine.max_concurrent_requests // num_ranks))
