"""The cache's arithmetic: published figures, rounding of blocks, and that a plan of bytes is what gets allocated."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import (
    ALIGNMENT,
    blocks_at_position,
    blocks_for_tokens,
    build_cache_schema,
)
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.config.layers import AttentionKind, build_schedule
from dsv4.formats.rows import RowKind
from dsv4.formats.trees import storages_of

FLASH, PRO = ModelConfig.flash(), ModelConfig.pro()


def schema_of(config, *, with_mtp=False, plain_itemsize=None, **limits):
    schedule = build_schedule(config, with_mtp=with_mtp)
    return build_cache_schema(config, schedule, EngineConfig(**limits), plain_itemsize=plain_itemsize)


@pytest.mark.parametrize(
    ("config", "index_key_format", "bytes_per_token", "window_bytes"),
    [
        (FLASH, "fp4", Fraction("3514.25"), 3_214_336),
        (FLASH, "fp8", Fraction("3850.25"), 3_214_336),
        (PRO, "fp4", Fraction("5031.4375"), 4_559_872),
        (PRO, "fp8", Fraction("5511.4375"), 4_559_872),
    ],
)
def test_published_figures(config, index_key_format, bytes_per_token, window_bytes):
    schema = schema_of(config, index_key_format=index_key_format)
    assert schema.state_bytes_per_request == (11_776_000 if config is FLASH else 18_096_128)
    assert schema.bytes_per_token == bytes_per_token
    assert schema.window_bytes_per_request == window_bytes
    with_mtp = schema_of(config, with_mtp=True, index_key_format=index_key_format)
    assert with_mtp.bytes_per_token == bytes_per_token
    assert with_mtp.window_bytes_per_request == window_bytes + 74_752


@pytest.mark.parametrize(("drafts", "ring_len"), [(0, 133), (2, 133), (5, 133), (7, 135)])
def test_a_dspark_head_keeps_windows_and_room_for_its_block(drafts, ring_len):
    """Rows of 584 bytes; every ring has the room, since all of them have one length."""
    flash = ModelConfig.flash_0731()
    with_head, without = (schema_of(flash, with_mtp=is_there, max_draft_tokens=drafts) for is_there in (True, False))
    assert [layer.ring_len for layer in with_head.layers] == [ring_len] * 46
    assert with_head.window_bytes_per_request == 46 * ring_len * 584
    assert without.window_bytes_per_request == 43 * (128 + drafts) * 584
    assert with_head.state_bytes_per_request == without.state_bytes_per_request
    assert with_head.bytes_per_token == Fraction("3514.25")


def test_flash_layers_have_the_formats_and_lengths_of_their_kind():
    schema = schema_of(FLASH, max_draft_tokens=3)
    layers = schema.layers
    kinds = [layer.attention for layer in layers]
    assert [kinds.count(kind) for kind in AttentionKind] == [2, 21, 20]
    for layer in layers:
        assert (layer.window.kind, layer.window.row_bytes, layer.ring_len) == (RowKind.ENTRY_FP8, 584, 131)
    swa, csa, hca = layers[0], layers[2], layers[3]
    assert (swa.entries, swa.compressor) == (None, None)
    assert (csa.entries_per_block, csa.entries.row_bytes, csa.index_keys.row_bytes) == (32, 584, 68)
    assert (csa.compressor.own.ring_len, csa.compressor.following.ring_len, csa.compressor.own.dim) == (7, 11, 512)
    assert (csa.index_compressor.own.ring_len, csa.index_compressor.following.ring_len) == (7, 11)
    assert csa.index_compressor.own.dim == 128
    assert (hca.entries_per_block, hca.entries.row_bytes, hca.index_keys) == (1, 584, None)
    assert (hca.compressor.own.ring_len, hca.compressor.following, hca.index_compressor) == (131, None, None)
    assert (schema.window_bytes_per_request, schema.position_bytes_per_request) == (43 * 131 * 584, 43 * 131 * 4)
    assert schema.bytes_of("csa.entries") == 21 * 32 * 584
    assert schema.bytes_of("csa.index_keys") == 21 * 32 * 68
    assert schema.bytes_of("hca.") - schema.bytes_of("hca.entries") == 20 * 131 * 512 * 2 * 4
    assert schema.bytes_of("csa.compressor") + schema.bytes_of("csa.index_compressor") == 21 * 18 * (512 + 128) * 2 * 4


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_plain_rows(itemsize):
    schema = schema_of(FLASH, plain_itemsize=itemsize)
    assert schema.bytes_per_token == itemsize * Fraction(6880, 2)  # the reference's BF16 figure, scaled
    tails = {layer.compressor.own.itemsize for layer in schema.layers if layer.compressor is not None}
    assert tails == {8 if itemsize == 8 else 4}


def test_blocks_round_up():
    assert [blocks_for_tokens(n) for n in (0, 1, 127, 128, 129, 256, 257)] == [0, 1, 1, 1, 2, 2, 3]
    # a block is owned from the moment its first CSA entry closes
    assert [blocks_at_position(p) for p in (0, 3, 4, 128, 131, 132, 256, 259, 260)] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert all(blocks_at_position(p) <= blocks_for_tokens(p) for p in range(1000))


def test_every_slot_can_reach_the_longest_context():
    for context, requests, num_blocks in ((128, 1, 1), (129, 1, 2), (129, 5, 10), (1048576, 2, 16384)):
        assert schema_of(FLASH, max_context_tokens=context, max_concurrent_requests=requests).num_blocks == num_blocks


def test_impossible_schemas():
    with pytest.raises(ConfigError, match="max_position_embeddings 1048576, found 1048577"):
        schema_of(FLASH, max_context_tokens=1048577)
    with pytest.raises(ConfigError, match="plain_itemsize must be None, 2, 4 or 8 bytes, found 3"):
        schema_of(FLASH, plain_itemsize=3)
    with pytest.raises(ValueError, match="multiple of 64"):
        schema_of(ModelConfig.tiny(head_dim=96))
    schema_of(ModelConfig.tiny(head_dim=96), plain_itemsize=2)


def test_every_layer_share_is_aligned_and_the_cost_is_counted():
    schema = schema_of(ModelConfig.tiny(), max_context_tokens=640, max_concurrent_requests=3, max_draft_tokens=1)
    pools = (*schema.paged_pools, *schema.state_pools, *schema.snapshot_pools)
    assert all(pool.layer_stride % ALIGNMENT == 0 for pool in pools)
    assert 0 < schema.padding_bytes < sum(len(pool.layer_ids) for pool in pools) * ALIGNMENT
    data = schema.num_blocks * schema.bytes_per_block + schema.num_slots * (
        schema.window_bytes_per_request + schema.position_bytes_per_request + schema.state_bytes_per_request
    )
    data += schema.num_snapshots * schema.bytes_per_snapshot
    assert schema.num_snapshots == schema.num_blocks, "the budget would allow more, but they could be of no use"
    assert schema.total_bytes == data + schema.padding_bytes + schema.table_bytes


def test_snapshots_stay_within_their_budget():
    one = schema_of(ModelConfig.tiny(), prefix_cache_bytes=2**39).bytes_per_snapshot
    for budget, count in [(0, 0), (one - 1, 0), (3 * one + 2**14, 3), (10 * one, 10)]:
        schema = schema_of(ModelConfig.tiny(), prefix_cache_bytes=budget)
        assert (schema.num_snapshots, schema.snapshot_cache_bytes <= budget) == (count, True)
    assert schema_of(ModelConfig.tiny(), prefix_cache_bytes=0).snapshot_pools == ()


def test_a_prefix_of_flash_costs_what_was_planned():
    """Everything counted: blocks by token, and a snapshot of 43 windows and 21 CSA layers' last four tokens."""
    schema = schema_of(FLASH)
    tails = 21 * 4 * (512 + 128) * 2 * 4
    assert schema.bytes_per_snapshot == 3_214_336 + tails == 3_644_416
    assert schema.bytes_per_token < 3600
    assert schema.num_snapshots == 256 * 2**20 // 3_644_416 == 73
    # drafts lengthen the rings, not the snapshot; the MTP block's window belongs to it
    drafting = schema_of(FLASH, with_mtp=True, max_draft_tokens=3)
    assert drafting.bytes_per_snapshot == 3_644_416 + 128 * 584


TINY_CONFIGS = {
    "tiny": ModelConfig.tiny(),
    "hca first": ModelConfig.tiny(compress_ratios=(128, 128, 4, 128, 4, 0), head_dim=192, index_head_dim=64),
    "window only": ModelConfig.tiny(compress_ratios=(0, 0, 0, 0, 0, 0)),
    "dspark": ModelConfig.tiny().with_dspark(noise_token_id=1, markov_rank=16),
    "no hca": ModelConfig.tiny(num_hidden_layers=2, compress_ratios=(4, 4, 0), sliding_window=33, num_hash_layers=0),
}


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("plain_dtype", [None, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_plan_equals_allocation_byte_for_byte(name, plain_dtype, with_mtp):
    config = TINY_CONFIGS[name]
    engine = EngineConfig(
        max_context_tokens=389, max_concurrent_requests=3, max_draft_tokens=2 if with_mtp else 0, index_key_format="fp8"
    )
    schedule = build_schedule(config, with_mtp=with_mtp)
    itemsize = None if plain_dtype is None else plain_dtype.itemsize
    for limits in (engine, replace(engine, num_blocks=7, index_key_format="fp4")):
        schema = build_cache_schema(config, schedule, limits, plain_itemsize=itemsize)
        manager = KVCacheManager(config, schedule, limits, device="cpu", plain_dtype=plain_dtype)
        assert manager.memory_bytes() == held_bytes(manager) == schema.total_bytes
        assert manager.schema == schema


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
def test_whole_allocation_of_long_contexts_is_within_five_percent(config):
    engine = EngineConfig(max_context_tokens=config.max_position_embeddings, max_concurrent_requests=2)
    # the meta device allocates nothing, but its tensors have the sizes they would have
    manager = KVCacheManager(config, build_schedule(config), engine, device="meta", plain_dtype=None)
    schema = manager.schema
    figures = 2 * (schema.bytes_per_token * config.max_position_embeddings + schema.window_bytes_per_request)
    assert figures < manager.memory_bytes() < figures * Fraction(105, 100)


def held_bytes(manager):
    """Bytes of the distinct storages behind every view the ops get, of snapshots and of the table."""
    handles = [manager.handle(layer.layer_idx) for layer in manager.schedule]
    storages = storages_of(
        [manager.block_table, *(pool.storage for pool in manager._snapshots.pools.values()), *handles]
    )
    return sum(storage.nbytes() for storage in storages)


def test_a_request_grows_block_by_block():
    """Flash: 3,514.25 bytes a token, in blocks of 128; window, positions and tails are there from the start."""
    schema = schema_of(FLASH)
    fixed, block = 3_214_336 + 22_016 + 11_776_000, 449_824
    sizes = [schema.request_bytes(position) for position in (0, 3, 4, 131, 132, 8192)]
    assert sizes == [fixed + count * block for count in (0, 0, 1, 1, 2, 64)]
