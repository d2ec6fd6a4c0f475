"""`TokenBatch` of chunks: five columns, padding, and views of one tensor."""

from dataclasses import replace

import torch

from dsv4.cache.batch import COLUMNS, Chunk, TokenBatch, columns_of

CHUNKS = [Chunk(3, 7, [10, 11]), Chunk(0, 0, []), Chunk(1, 4, [12])]


def columns(pad_to=0):
    slots, starts, lengths = [3, 0, 1], [7, 0, 4], [2, 0, 1]
    return columns_of(slots, starts, lengths, [10, 11, 12], pad_to).tolist()


def test_chunks_stand_side_by_side_and_padding_behind():
    assert columns() == [[10, 11, 12], [7, 8, 4], [3, 3, 1], [7, 7, 4], [9, 9, 5]]
    assert columns(pad_to=2) == columns()
    assert [column[3:] for column in columns(pad_to=5)] == [[0, 0], [0, 0], [-1, -1], [0, 0], [0, 0]]
    assert columns_of([], [], [], []).tolist() == [[]] * 5


def test_a_batch_has_the_columns_by_name():
    table = torch.zeros(4, 2, dtype=torch.int32)
    batch = TokenBatch.of(CHUNKS, table)
    assert [getattr(batch, name).tolist() for name in COLUMNS] == columns()
    assert batch.block_table is table
    assert all(getattr(batch, name).dtype == torch.int64 for name in COLUMNS)
    assert TokenBatch.of([], table).num_tokens == 0


def test_a_batch_over_columns_is_a_view():
    columns = torch.arange(15).view(5, 3)
    batch = TokenBatch.over(columns, torch.zeros(1, 1, dtype=torch.int32))
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
