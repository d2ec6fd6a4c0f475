"""The manager's calls one by one: what they do, and that a refused call changes nothing."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch

from dsv4.cache.errors import (
    BlockTableOverflow,
    CacheError,
    DuplicateSlot,
    IntegrityError,
    NoFreeSlot,
    OutOfBlocks,
    PositionMismatch,
    RequestNeverFits,
    RequestTooLong,
    RewindTooFar,
    UnknownSlot,
)
from dsv4.cache.manager import KVCacheManager
from dsv4.config import ConfigError, EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule

CONFIG = ModelConfig.tiny()
HOST_STATE = ("_blocks", "_positions", "_highest", "_max_tokens", "_free_slots")


def make_manager(plain_dtype=None, **limits):
    limits = {"max_context_tokens": 640, "max_concurrent_requests": 3, "max_draft_tokens": 4, **limits}
    schedule = build_schedule(CONFIG, with_mtp=True)
    return KVCacheManager(CONFIG, schedule, EngineConfig(**limits), device="cpu", plain_dtype=plain_dtype)


def snapshot(manager):
    """Every byte of every tensor and everything the host remembers."""
    pools = {**manager._paged.pools, **manager._state.pools}
    host = {name: [*map(copy.copy, getattr(manager, name))] for name in HOST_STATE}
    tensors = {name: pool.storage.clone() for name, pool in pools.items()}
    return host, copy.deepcopy(vars(manager._allocator)), {**tensors, "table": manager.block_table.clone()}


def assert_unchanged(manager, before):
    host, allocator, tensors = snapshot(manager)
    assert (host, allocator) == before[:2]
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in tensors.items())
    manager.check_integrity()


def busy_manager(**limits):
    """Slot 0 at 200 (two blocks), slot 1 at 3 (none), slot 2 free; every byte of the tensors is set."""
    manager = make_manager(**limits)
    for pool in (*manager._paged.pools.values(), *manager._state.pools.values()):
        pool.storage.random_(0, 256, generator=torch.Generator().manual_seed(1))
    assert [manager.admit(640), manager.admit(10)] == [0, 1]
    manager.prepare_forward([0, 1], [0, 0], [200, 3])
    return manager


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.admit(641), RequestTooLong, "641 tokens, max_context_tokens is 640"),
        (lambda m: m.admit(0), CacheError, "at least one token"),
        (lambda m: m.prepare_forward([0], [199], [1]), PositionMismatch, "continues at position 200.*start at 199"),
        (lambda m: m.prepare_forward([0], [201], [1]), PositionMismatch, "start at 201; positions may not be skipped"),
        (lambda m: m.prepare_forward([1, 0], [3, 199], [4, 1]), PositionMismatch, "rewind first"),
        (lambda m: m.prepare_forward([1, 0], [3, 200], [4, 0]), PositionMismatch, "0 new tokens"),
        (lambda m: m.prepare_forward([0], [200], [-1]), PositionMismatch, "-1 new tokens"),
        (lambda m: m.prepare_forward([0, 0], [200, 201], [1, 1]), DuplicateSlot, r"slots \[0\]"),
        (lambda m: m.prepare_forward([0, 1], [200, 3], [440, 8]), BlockTableOverflow, "slot 1 to 11.*admitted for 10"),
        (lambda m: m.prepare_forward([0], [200], [441]), BlockTableOverflow, "slot 0 to 641.*admitted for 640"),
        (lambda m: m.prepare_forward([0], [200], [1, 1]), CacheError, "1 slots, 1 positions and 2 token counts"),
        (lambda m: m.prepare_forward([0, 2], [200, 0], [1, 1]), UnknownSlot, "slot 2 is free"),
        (lambda m: m.prepare_forward([0, -1], [200, 0], [1, 1]), UnknownSlot, "slot -1 is not one of 0 .. 2"),
        (lambda m: m.make_batch([0, 1], [[5] * 100, [1] * 8]), BlockTableOverflow, "admitted for 10"),
        (lambda m: m.make_batch([0, 1], [[5], [512]]), CacheError, "token id 512 of slot 1 is outside"),
        (lambda m: m.make_batch([0, 1], [[5, -1], [1]]), CacheError, "token id -1 of slot 0 is outside"),
        (lambda m: m.make_batch([0, 1], [[5], []]), PositionMismatch, "slot 1 is given 0 new tokens"),
        (lambda m: m.make_batch([0], [[5], [5]]), CacheError, "1 slots, but tokens of 2 requests"),
        (lambda m: m.make_batch([2], [[5]]), UnknownSlot, "slot 2 is free"),
        (lambda m: m.rewind(0, 195), RewindTooFar, "5 tokens back, the rings hold 4"),
        (lambda m: m.rewind(0, 201), RewindTooFar, "cannot be rewound to 201"),
        (lambda m: m.rewind(1, -1), RewindTooFar, "cannot be rewound to -1"),
        (lambda m: m.rewind(2, 0), UnknownSlot, "slot 2 is free"),
        (lambda m: m.release(2), UnknownSlot, "slot 2 is free"),
        (lambda m: m.release(3), UnknownSlot, "slot 3 is not one of"),
        (lambda m: m.release(-1), UnknownSlot, "slot -1 is not one of"),
        (lambda m: m.position(2), UnknownSlot, "slot 2 is free"),
        (lambda m: m.handle(-1), CacheError, "layer -1 is not one of 0 .. 5"),
        (lambda m: m.handle(6), CacheError, "layer 6 is not one of 0 .. 5"),
    ],
)
def test_refused_calls_change_nothing(call, error, message):
    manager = busy_manager()
    # ring rows of a real forward, so that the integrity check has something to look at
    for layer in manager.schedule:
        positions = manager.handle(layer.layer_idx).window.positions
        positions.fill_(-1)
        positions[0] = torch.tensor([p + 132 if p < 68 else p for p in range(132)], dtype=torch.int32)
        positions[1, :3] = torch.arange(3, dtype=torch.int32)
    manager.check_integrity()
    before = snapshot(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert_unchanged(manager, before)


def fresh_rings(manager):
    for layer in manager.schedule:
        manager.handle(layer.layer_idx).window.positions.fill_(-1)


def test_admitting_past_the_slots():
    manager = busy_manager()
    fresh_rings(manager)
    assert manager.admit(1) == 2
    before = snapshot(manager)
    with pytest.raises(NoFreeSlot, match="all 3 slots"):
        manager.admit(1)
    assert_unchanged(manager, before)


def test_what_can_never_fit_is_refused_at_once():
    manager = make_manager(num_blocks=2)
    with pytest.raises(RequestNeverFits, match="260 tokens needs 3 blocks, the whole cache has 2"):
        manager.admit(260)
    slot = manager.admit(259)  # the last three tokens close no entry
    manager.prepare_forward([slot], [0], [259])
    manager.check_integrity()


def test_out_of_blocks_rolls_back_the_whole_call():
    manager = busy_manager(num_blocks=5)
    fresh_rings(manager)
    before = snapshot(manager)
    with pytest.raises(OutOfBlocks, match="4 blocks needed, 3 free of 5"):
        manager.prepare_forward([1, 0], [3, 200], [7, 440])
    assert_unchanged(manager, before)
    manager.prepare_forward([1, 0], [3, 200], [7, 312])
    manager.check_integrity()
    assert manager.num_free_blocks == 0


def test_blocks_follow_positions_and_the_table_stays_one_tensor():
    manager = make_manager()
    address = manager.block_table.data_ptr()
    first, second = manager.admit(640), manager.admit(640)
    position = 0
    for num_new, num_blocks in [(3, 0), (1, 1), (124, 1), (3, 1), (1, 2), (124, 2), (4, 3), (300, 5)]:
        manager.prepare_forward([first], [position], [num_new])
        position += num_new
        assert manager.position(first) == position
        row = manager.block_table[first].tolist()
        assert all(block >= 0 for block in row[:num_blocks])
        assert row[num_blocks:] == [-1] * (5 - num_blocks)
        manager.check_integrity()
    manager.prepare_forward([second], [0], [5])
    assert manager.block_table.tolist() == [[0, 1, 2, 3, 4], [5, -1, -1, -1, -1], [-1] * 5]
    manager.release(first)
    assert manager.block_table.tolist() == [[-1] * 5, [5, -1, -1, -1, -1], [-1] * 5]
    assert manager.block_table.data_ptr() == address
    assert manager.admit(7) == first  # the lowest free slot
    manager.check_integrity()


def test_make_batch():
    manager = make_manager()
    for _ in range(3):
        manager.admit(640)
    manager.make_batch([2, 0], [[7] * 10, [8] * 5])
    batch = manager.make_batch([0, 2], [[1, 2, 3], [4]])
    assert batch.token_ids.tolist() == [1, 2, 3, 4]
    assert batch.positions.tolist() == [5, 6, 7, 10]
    assert batch.slots.tolist() == [0, 0, 0, 2]
    assert batch.chunk_starts.tolist() == [5, 5, 5, 10]
    assert batch.chunk_ends.tolist() == [8, 8, 8, 11]
    assert batch.num_tokens == 4
    columns = (batch.token_ids, batch.positions, batch.slots, batch.chunk_starts, batch.chunk_ends)
    assert all(column.dtype == torch.int64 and column.is_contiguous() for column in columns)
    assert batch.block_table is manager.block_table
    assert [manager.position(slot) for slot in range(3)] == [8, 0, 11]
    manager.check_integrity()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_rows_that_no_request_has_used_take_no_memory():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    manager = make_manager(num_blocks=16384)
    assert manager.memory_bytes() > 2**26
    assert resident() - before < 2**24
    for pool in manager._paged.pools.values():
        pool.storage.fill_(1)
    assert resident() - before > 2**26
    manager.drop_rows()
    manager.restore_rows()
    assert resident() - before < 2**24
    assert not any(pool.storage.any() for pool in manager._paged.pools.values())


def test_admission_resets_the_slot_and_no_other():
    manager, fresh = busy_manager(), make_manager()
    before = {name: pool.all_layers.clone() for name, pool in manager._state.pools.items()}
    slot = manager.admit(640)
    for name, pool in manager._state.pools.items():
        expected = fresh._state.pools[name].all_layers[:, slot]
        assert torch.equal(pool.all_layers[:, slot], expected)
        same = pool.all_layers[:, :slot].contiguous().view(torch.uint8)
        assert torch.equal(same, before[name][:, :slot].contiguous().view(torch.uint8))


def test_handles_are_made_once_and_match_the_layers():
    manager = make_manager(plain_dtype=torch.float32)
    for layer in manager.schedule:
        handle = manager.handle(layer.layer_idx)
        assert handle is manager.handle(layer.layer_idx)
        assert handle.window.ring_len == 132
        assert (handle.entries is not None) == (handle.compressor is not None) == (layer.ratio > 0)
        assert (handle.index_keys is not None) == (handle.index_compressor is not None) == layer.has_indexer
        if handle.entries is not None:
            assert handle.entries.entries_per_block == 128 // layer.ratio
            assert handle.entries.rows.data.shape == (15, 128 // layer.ratio, CONFIG.head_dim)
    assert manager.handle(1).entries.rows.data.data_ptr() != manager.handle(3).entries.rows.data.data_ptr()


def test_rewind_at_the_edge_of_the_slack():
    manager = make_manager()
    slot = manager.admit(640)
    manager.prepare_forward([slot], [0], [132])
    assert manager.block_table[slot].tolist() == [0, 1, -1, -1, -1]
    manager.rewind(slot, 132)  # nothing to take back
    manager.rewind(slot, 131)
    assert manager.block_table[slot].tolist() == [0, -1, -1, -1, -1]
    assert manager.num_free_blocks == 14
    # the distance counts from the highest position written: 132 - 128 is the last that is allowed
    manager.prepare_forward([slot], [131], [1])
    manager.rewind(slot, 129)
    manager.rewind(slot, 128)
    with pytest.raises(RewindTooFar, match="written up to position 132; rewinding to 127 is 5 tokens back"):
        manager.rewind(slot, 127)
    manager.prepare_forward([slot], [128], [3])
    with pytest.raises(RewindTooFar, match="5 tokens back"):
        manager.rewind(slot, 127)
    manager.check_integrity()
    manager.release(slot)
    assert manager.admit(640) == slot
    manager.prepare_forward([slot], [0], [2])
    manager.rewind(slot, 0)  # what an earlier request wrote does not count
    manager.check_integrity()


def test_without_draft_tokens_nothing_can_be_taken_back():
    manager = make_manager(max_draft_tokens=0)
    slot = manager.admit(640)
    manager.prepare_forward([slot], [0], [2])
    with pytest.raises(RewindTooFar, match=r"the rings hold 0 \(max_draft_tokens\)"):
        manager.rewind(slot, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.block_table.__setitem__((2, 0), 3),
        lambda m: m.block_table.__setitem__((0, 0), -1),
        lambda m: m._blocks[1].append(0),
        lambda m: m._positions.__setitem__(0, 300),
        lambda m: m._positions.__setitem__(0, 190),
        lambda m: m._positions.__setitem__(2, 1),
        lambda m: m._free_slots.append(0),
        lambda m: m._free_slots.clear(),
        lambda m: m._allocator.acquire(1),
        lambda m: m._allocator.retain([0]),
        lambda m: m.handle(2).window.positions.__setitem__((0, 5), 6),
        lambda m: m.handle(2).window.positions.__setitem__((0, 68), 200),
    ],
)
def test_check_integrity_sees_damage(damage):
    manager = busy_manager()
    fresh_rings(manager)
    manager.check_integrity()
    damage(manager)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_integer_rows_are_refused():
    with pytest.raises(CacheError, match="floating-point"):
        make_manager(plain_dtype=torch.int32)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        make_manager(max_context_tokens=16385)
