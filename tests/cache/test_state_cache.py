"""The tensors of the fixed part: what a fresh slot holds, and that resetting one touches no other."""

import pytest
import torch

from dsv4.cache.errors import UnknownSlot
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import ALIGNMENT, build_cache_schema
from dsv4.cache.state import StateCache
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule

CONFIG = ModelConfig.tiny()


def make_state(plain_dtype=None, num_slots=4):
    engine = EngineConfig(max_context_tokens=256, max_concurrent_requests=num_slots, max_draft_tokens=1)
    itemsize = None if plain_dtype is None else plain_dtype.itemsize
    schema = build_cache_schema(CONFIG, build_schedule(CONFIG, with_mtp=True), engine, plain_itemsize=itemsize)
    return StateCache(schema, device=torch.device("cpu"), plain_dtype=plain_dtype)


def poison(state):
    """NaN in every float, 0xff in every byte and position of the whole allocation, padding included."""
    for pool in state.pools.values():
        pool.storage.fill_(255)


@pytest.mark.parametrize("plain_dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("slot", [0, 2, 3])
def test_reset_restores_a_new_request_and_touches_no_other_slot(plain_dtype, slot):
    fresh, state = make_state(plain_dtype), make_state(plain_dtype)
    poison(state)
    before = {name: pool.storage.clone() for name, pool in state.pools.items()}
    state.reset_slots([slot])
    for name, pool in state.pools.items():
        expected = before[name].view(len(pool.schema.layer_ids), pool.schema.layer_stride)
        slot_bytes = pool.schema.layer_bytes // state.num_slots
        part = slice(slot * slot_bytes, (slot + 1) * slot_bytes)
        new = fresh.pools[name].storage.view_as(expected)
        expected[:, part] = new[:, part]
        assert torch.equal(pool.storage.view_as(expected), expected), name


def test_a_fresh_slot():
    engine = EngineConfig(max_context_tokens=256, max_concurrent_requests=4, max_draft_tokens=1)
    schedule = build_schedule(CONFIG, with_mtp=True)
    manager = KVCacheManager(CONFIG, schedule, engine, device="cpu", plain_dtype=None)
    for layer in schedule:
        handle = manager.handle(layer.layer_idx)
        window = handle.window
        assert (window.positions == -1).all()
        assert window.positions.dtype == torch.int32
        assert window.positions.shape == (4, 129)
        assert window.rows.scales is not None
        assert not window.rows.data.any()
        assert not window.rows.scales.any()
        for compressor in (handle.compressor, handle.index_compressor):
            for tail in () if compressor is None else (compressor.own, compressor.following):
                if tail is not None:
                    assert (tail.kv == 0).all()
                    assert (tail.score == float("-inf")).all()
                    assert tail.kv.dtype == tail.score.dtype == torch.float32
    csa, hca = manager.handle(1).compressor, manager.handle(2).compressor
    assert (csa.own.ring_len, csa.following.ring_len, hca.own.ring_len, hca.following) == (5, 9, 129, None)
    assert manager.handle(2).index_compressor is None
    assert manager.handle(0).compressor is None


def test_views_are_contiguous_and_aligned_alike_on_every_layer():
    state = make_state()
    for pool in state.pools.values():
        for layer_idx in pool.schema.layer_ids:
            view = pool.layer(layer_idx)
            assert view.is_contiguous()
            assert (view.data_ptr() - pool.storage.data_ptr()) % ALIGNMENT == 0


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_that_do_not_exist(slot):
    state = make_state()
    with pytest.raises(UnknownSlot, match="not all among 0 .. 3"):
        state.reset_slots([slot])
