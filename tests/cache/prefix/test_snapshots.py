"""Snapshots against a copy row by row: rings of any length, rows of any width, the draft block's last row left out."""

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.tiers.payload import Payload
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule

# head_dim 74 and its scales make rows that are no multiple of eight, or of four bytes
WIDTHS = {"plain": {"head_dim": 37, "qk_rope_head_dim": 4, "index_head_dim": 32}, "quantised": {}}


def make_manager(kind, slack, device="cpu"):
    config = ModelConfig.tiny(num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), num_hash_layers=0, **WIDTHS[kind])
    engine = EngineConfig(
        max_context_tokens=4096, max_concurrent_requests=2, num_blocks=40, max_draft_tokens=slack,
        cache_host_bytes=2**24, snapshot_interval_tokens=256,
    )  # fmt: skip
    return KVCacheManager(
        config, build_schedule(config, with_mtp=True), engine, device=device,
        plain_dtype=torch.bfloat16 if kind == "plain" else None,
    )  # fmt: skip


def random_bytes(pool, seed):
    generator = torch.Generator().manual_seed(seed)
    pool.storage.copy_(torch.randint(0, 256, pool.storage.shape, dtype=torch.uint8, generator=generator))


def run_request(manager, token_ids):
    """From start to end beside other work of the device; how much was known, and the bytes of what it leaves."""
    busy = torch.ones(512, 512, device=manager.device)
    chain = manager.chain(token_ids, None)
    slot = manager.admit(len(token_ids), chain)
    start = position = manager.position(slot)
    while position < len(token_ids):
        busy = busy @ busy
        position = min(len(token_ids), manager.next_stop(slot))
        manager.make_batch([slot], [token_ids[manager.position(slot) : position]])
        manager.launched(slot)
    node = manager.prefix.path_to(chain.up_to((len(token_ids) - 1) // 128 * 128))[-1]
    payload = Payload(manager._paged, manager._snapshots)
    found = payload.gather(manager._blocks[slot][: node.depth], node.snapshot)
    manager.release(slot)
    return start, found.cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_long_prefix_comes_back_from_host_memory(device):
    """Fifteen segments, every byte of the device overwritten meanwhile."""
    manager = make_manager("quantised", 0, device)
    pools = [*manager._paged.pools.values(), *manager._snapshots.pools.values()]
    for seed, pool in enumerate([*pools, *manager._state.pools.values()]):
        random_bytes(pool, seed)
    manager._state.reset_slots([0])
    token_ids = torch.randint(1, 200, (3900,), generator=torch.Generator().manual_seed(3)).tolist()
    start, expected = run_request(manager, token_ids)
    assert start == 0
    for _ in range(3):
        manager.prefix.tree.make_room(manager.schema.num_blocks)
        for pool in pools:
            pool.storage.fill_(255)
        start, found = run_request(manager, token_ids)
        assert start == 3840
        assert torch.equal(found, expected)
    assert manager.prefix.stats.num_host_hits == 3
    manager.check_integrity()


@pytest.mark.parametrize("kind", ["plain", "quantised"])
@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("position", [128, 256, 384, 3968])
def test_a_slot_is_restored_row_by_row(kind, slack, position):
    manager = make_manager(kind, slack)
    store, state, window = manager._snapshots, manager._state, manager.config.sliding_window
    for seed, pool in enumerate([*state.pools.values(), *store.pools.values()]):
        random_bytes(pool, seed)
    source = {name: pool.words[:, 0].clone() for name, pool in state.pools.items()}
    state.reset_slots([1])
    fresh = {name: pool.words[:, 1].clone() for name, pool in state.pools.items()}
    store.save(0, position, 2)
    store.restore(1, position, 2)
    for name, pool in state.pools.items():
        assert torch.equal(pool.words[:, 0], source[name]), "a snapshot changes nothing where it is taken"
        if name == "window.positions":
            continue
        kept = {"window": window}.get(name.partition(".")[0], 4 if ".following." in name else 0)
        rows = [place % pool.schema.shape[1] for place in range(max(0, position - kept), position)]
        expected = fresh[name].clone()
        expected[:, rows] = source[name][:, rows]
        assert torch.equal(pool.words[:, 1], expected), name
    positions = manager._state.pools["window.positions"].all_layers[:, 1]  # [layers, ring_len]
    for layer, found in zip(manager.schedule, positions, strict=True):
        held = set(range(max(0, position - window), position - layer.is_mtp))
        assert {int(one) for one in found if one >= 0} == held
        assert all(int(found[one % len(found)]) == one for one in held)


@pytest.mark.parametrize("kind", ["plain", "quantised"])
def test_a_payload_comes_back_bit_by_bit(kind):
    manager = make_manager(kind, 0)
    payload = Payload(manager._paged, manager._snapshots)
    pools = [*manager._paged.pools.values(), *manager._snapshots.pools.values()]
    for seed, pool in enumerate(pools):
        random_bytes(pool, seed)
    before = {pool.schema.name: pool.words.clone() for pool in pools}
    flat = payload.gather([5, 2, 9], 3)
    assert flat.numel() == payload.num_bytes(3)
    for seed, pool in enumerate(pools):
        random_bytes(pool, 100 + seed)
    after = {pool.schema.name: pool.words.clone() for pool in pools}
    payload.scatter(flat, 3, [2, 0], [7, 8])
    payload.put_snapshot(flat, 3, 1)
    for name, pool in manager._paged.pools.items():
        after[name][:, [7, 8]] = before[name][:, [9, 5]]
        assert torch.equal(pool.words, after[name]), name
    for name, pool in manager._snapshots.pools.items():
        after[name][:, 1] = before[name][:, 3]
        assert torch.equal(pool.words, after[name]), name
