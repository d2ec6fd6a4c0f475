"""`engine_info`: what clients must know of a model's engine before they send it anything."""

from typing import Any, Literal, Protocol

from dsv4.cache.manager import KVCacheManager
from dsv4.config import ModelConfig
from dsv4.engine.fingerprint import Identity
from dsv4.engine.link.messages import EngineInfo
from dsv4.model.transformer import Transformer

_REPLAY_BYTES = 12  # of one number: kept, packed, and as base64 in an answer


class Served(Protocol):
    """An `LLM`."""

    config: ModelConfig
    cache: KVCacheManager
    model: Transformer

    @property
    def engine(self) -> Any: ...

    @property
    def weight_version(self) -> str: ...

    def identity(self) -> Identity: ...


def engine_info(llm: Served, records: Literal["", "whole", "hashes"] = "") -> EngineInfo:
    config, schedule = llm.config, llm.model.schedule[: llm.config.num_hidden_layers]
    return EngineInfo(
        fingerprint=llm.identity().name,
        vocab_size=llm.config.vocab_size,
        eos_token_id=llm.config.eos_token_id,
        max_context_tokens=llm.cache.limits.max_context_tokens,
        num_slots=llm.engine.num_slots,
        num_blocks=llm.cache.schema.num_blocks,
        records=records,
        weight_version=llm.weight_version,
        expert_bytes=_REPLAY_BYTES * len(schedule) * config.num_experts_per_tok,
        pick_bytes=_REPLAY_BYTES * sum(layer.has_indexer for layer in schedule) * config.index_topk,
    )
