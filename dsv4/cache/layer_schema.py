"""What one layer of a cache holds: row formats, rings and tails. Arithmetic only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.config import BLOCK_TOKENS, CSA_RATIO, EngineConfig, ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec
from dsv4.formats.rows import RowFormat, RowKind

POSITION_BYTES = 4  # int32 in the rings and in the block table
CSA_ENTRIES_PER_BLOCK = BLOCK_TOKENS // CSA_RATIO


@dataclass(frozen=True)
class TailSchema:
    """A ring of raw projections: kv and score of `ring_len` tokens, `dim` values each."""

    ring_len: int
    dim: int
    itemsize: int


@dataclass(frozen=True)
class CompressorSchema:
    """`own` feeds the block a token is in, `following` (CSA only) the next one."""

    own: TailSchema
    following: TailSchema | None


@dataclass(frozen=True)
class LayerCacheSchema:
    """The cache of one layer: row formats, rows per block and per slot."""

    layer_idx: int
    attention: AttentionKind
    ring_len: int
    window: RowFormat
    entries_per_block: int
    entries: RowFormat | None
    index_keys: RowFormat | None
    compressor: CompressorSchema | None
    index_compressor: CompressorSchema | None


def _ring_slack(config: ModelConfig, schedule: Sequence[LayerSpec], engine: EngineConfig) -> int:
    """Rows a ring has beyond the window. A DSpark head writes a whole block of rows in front of the window it reads."""
    dspark = config.dspark if any(layer.is_mtp for layer in schedule) else None
    return max(engine.max_draft_tokens, 0 if dspark is None else dspark.block_size)


def layer_schema(
    config: ModelConfig, layer: LayerSpec, engine: EngineConfig, plain_itemsize: int | None, ring_len: int
) -> LayerCacheSchema:
    entry_format = _entry_format(config, plain_itemsize)
    compressor = index_compressor = index_format = None
    if layer.attention is not AttentionKind.SWA:
        compressor = _compressor_schema(layer, config.head_dim, engine, plain_itemsize)
    if layer.has_indexer:
        index_format = _index_format(config, engine, plain_itemsize)
        index_compressor = _compressor_schema(layer, config.index_head_dim, engine, plain_itemsize)
    return LayerCacheSchema(
        layer_idx=layer.layer_idx,
        attention=layer.attention,
        ring_len=ring_len,
        window=entry_format,
        entries_per_block=BLOCK_TOKENS // layer.ratio if layer.ratio else 0,
        entries=entry_format if layer.ratio else None,
        index_keys=index_format,
        compressor=compressor,
        index_compressor=index_compressor,
    )


def _entry_format(config: ModelConfig, plain_itemsize: int | None) -> RowFormat:
    if plain_itemsize is not None:
        return RowFormat(RowKind.PLAIN, config.head_dim, itemsize=plain_itemsize)
    return RowFormat(RowKind.ENTRY_FP8, config.head_dim, rope_dim=config.qk_rope_head_dim)


def _index_format(config: ModelConfig, engine: EngineConfig, plain_itemsize: int | None) -> RowFormat:
    if plain_itemsize is not None:
        return RowFormat(RowKind.PLAIN, config.index_head_dim, itemsize=plain_itemsize)
    kind = RowKind.INDEX_FP4 if engine.index_key_format == "fp4" else RowKind.INDEX_FP8
    return RowFormat(kind, config.index_head_dim)


def _compressor_schema(
    layer: LayerSpec, dim: int, engine: EngineConfig, plain_itemsize: int | None
) -> CompressorSchema:
    """Rings long enough for the blocks an entry is made of, and for drafts that are taken back."""
    itemsize = 8 if plain_itemsize == 8 else 4
    own = TailSchema(layer.ratio + engine.max_draft_tokens, dim, itemsize)
    if layer.attention is AttentionKind.HCA:
        return CompressorSchema(own, None)
    # the next block's entry reads this block's rows too, so they live for two blocks
    return CompressorSchema(own, TailSchema(2 * layer.ratio + engine.max_draft_tokens, dim, itemsize))
