"""Rows written into the real cache and read back: error of the FP8 half, exactness of the rope half, isolation."""

from dataclasses import replace

import pytest
import torch

from dsv4.cache.batch import COLUMNS, Chunk, TokenBatch, columns_of
from dsv4.cache.manager import KVCacheManager
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.formats.row_store import decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind

FP8_ROUND_TRIP = 0.036  # of a row's norm; the bound the entry format promises
ENTRY = RowFormat(RowKind.ENTRY_FP8, 512, rope_dim=64)


@pytest.mark.parametrize("magnitude", [2.0**-10, 1.0, 300.0, 2.0**20])
def test_entry_round_trip(magnitude):
    generator = torch.Generator().manual_seed(5)
    values = (torch.randn(257, 512, generator=generator) * magnitude).bfloat16()
    decoded = decode_rows(encode_rows(values, ENTRY))
    assert torch.equal(decoded[:, 448:], values[:, 448:])
    error = (decoded[:, :448].double() - values[:, :448].double()).norm(dim=-1)
    assert (error / values[:, :448].double().norm(dim=-1)).max().item() < FP8_ROUND_TRIP
    assert error.max() > 0  # it is quantised at all


@pytest.mark.parametrize("plain_dtype", [None, torch.float32])
def test_rows_go_to_their_place_and_nowhere_else(plain_dtype):
    config = ModelConfig.tiny()
    engine = EngineConfig(max_context_tokens=512, max_concurrent_requests=2)
    manager = KVCacheManager(config, build_schedule(config), engine, device="cpu", plain_dtype=plain_dtype)
    generator = torch.Generator().manual_seed(6)
    values = torch.randn(2, config.head_dim, generator=generator).to(plain_dtype or torch.bfloat16)
    before = [manager.handle(layer).entries.rows.data.clone() for layer in (1, 2, 3, 4)]
    store = manager.handle(3).entries.rows
    index = (torch.tensor([5, 2]), torch.tensor([31, 0]))
    store[index] = encode_rows(values, store.format)
    assert torch.equal(decode_rows(store[index]), decode_rows(encode_rows(values, store.format)))
    for layer, old in zip((1, 2, 3, 4), before, strict=True):
        changed = (manager.handle(layer).entries.rows.data != old).any(-1).nonzero().tolist()
        assert changed == ([[2, 0], [5, 31]] if layer == 3 else [])


CHUNKS = [Chunk(3, 7, [10, 11]), Chunk(0, 0, []), Chunk(1, 4, [12])]


def columns(pad_to=0):
    slots, starts, lengths = [3, 0, 1], [7, 0, 4], [2, 0, 1]
    return columns_of(slots, starts, lengths, [10, 11, 12], pad_to).tolist()


def test_chunks_stand_side_by_side_and_padding_behind():
    """Up to an even number of columns: each then begins at a multiple of 16 bytes."""
    assert columns() == [[10, 11, 12, 0], [7, 8, 4, 0], [3, 3, 1, -1], [7, 7, 4, 0], [9, 9, 5, 0]]
    assert columns(pad_to=2) == columns()
    assert [column[3:] for column in columns(pad_to=5)] == [[0] * 3, [0] * 3, [-1] * 3, [0] * 3, [0] * 3]
    assert columns_of([], [], [], []).tolist() == [[]] * 5


def test_a_batch_has_the_columns_by_name():
    table = torch.zeros(4, 2, dtype=torch.int32)
    batch = TokenBatch.of(CHUNKS, table)
    assert [getattr(batch, name).tolist() for name in COLUMNS] == [column[:3] for column in columns()]
    assert batch.block_table is table
    assert all(getattr(batch, name).dtype == torch.int64 for name in COLUMNS)
    assert TokenBatch.of([], table).num_tokens == 0


def test_a_batch_over_columns_is_a_view():
    columns = torch.arange(20).view(5, 4)
    batch = TokenBatch.over(columns, torch.zeros(1, 1, dtype=torch.int32), 3)
    columns[2] = -1
    assert batch.slots.tolist() == [-1, -1, -1]
    assert batch.num_tokens == 3


def test_what_is_derived_is_made_once_a_batch():
    batch = TokenBatch.of(CHUNKS, torch.zeros(4, 2, dtype=torch.int32))
    made = [batch.once("positions", batch.positions.tolist) for _ in range(2)]
    assert made[0] is made[1]
    assert batch.once("slots", batch.slots.tolist) == [3, 3, 1]
    moved = replace(batch, positions=batch.positions + 1)
    assert moved.once("positions", moved.positions.tolist) == [8, 9, 5]
    assert batch.once("positions", moved.positions.tolist) == [7, 8, 4]
