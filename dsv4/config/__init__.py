"""`ModelConfig` and `EngineConfig`, frozen and strict; the layer schedule; the spellings of config.json. No torch."""

from dsv4.config.engine import CPU_CHUNK_TOKENS, EngineConfig, IndexKeyFormat
from dsv4.config.model import (
    BLOCK_TOKENS,
    CSA_RATIO,
    HCA_RATIO,
    MAX_DRAFT_BLOCKS,
    MAX_DRAFT_TOKENS,
    MAX_MTP_DRAFTS,
    NUM_DSPARK_LAYERS,
    ConfigError,
    DSparkConfig,
    ModelConfig,
    RopeScaling,
    is_positive_real,
    is_size,
    shown,
    unique_keys,
)

__all__ = [
    "BLOCK_TOKENS",
    "CPU_CHUNK_TOKENS",
    "CSA_RATIO",
    "HCA_RATIO",
    "MAX_DRAFT_BLOCKS",
    "MAX_DRAFT_TOKENS",
    "MAX_MTP_DRAFTS",
    "NUM_DSPARK_LAYERS",
    "ConfigError",
    "DSparkConfig",
    "EngineConfig",
    "IndexKeyFormat",
    "ModelConfig",
    "RopeScaling",
    "is_positive_real",
    "is_size",
    "shown",
    "unique_keys",
]
