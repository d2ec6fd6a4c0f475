"""Ways to get a prefix cache wrong. Each takes a `monkeypatch` and makes one mistake in the code."""

from array import array
from dataclasses import replace

import pytest

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix import cache as prefix
from dsv4.cache.prefix import snapshots
from dsv4.cache.prefix import tree as prefix_tree
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.snapshots import SnapshotStore
from dsv4.cache.prefix.tree import ChainKeys, PrefixTree
from dsv4.cache.tiers import segment_file
from dsv4.cache.tiers.disk import DiskTier
from dsv4.cache.tiers.host import HostTier
from dsv4.cache.tiers.payload import Payload
from dsv4.cache.tiers.segments import Segment, SegmentTree
from dsv4.cache.tiers.tiers import Tiers

# ---- names ----


def salt_ignored(monkeypatch):
    """Requests of different tenants share."""
    real = ChainKeys.__init__
    monkeypatch.setattr(
        ChainKeys, "__init__", lambda self, tokens, salt, fingerprint="": real(self, tokens, None, fingerprint)
    )


def key_of_the_block_alone(monkeypatch):
    """A block's key depends on the salt and on its own tokens, not on those before it."""

    def first(self, num_blocks):
        blocks = [self.token_ids[128 * block : 128 * (block + 1)] for block in range(num_blocks)]
        return [prefix_tree._hash(self._last, array("q", block).tobytes()) for block in blocks]

    monkeypatch.setattr(ChainKeys, "first", first)


def fingerprint_ignored(monkeypatch):
    """Another model's files are one's own."""
    real = DiskTier.__init__
    monkeypatch.setattr(DiskTier, "__init__", lambda self, folder, size, fingerprint: real(self, folder, size, "tests"))
    keys = ChainKeys.__init__
    monkeypatch.setattr(
        ChainKeys, "__init__", lambda self, tokens, salt, fingerprint="": keys(self, tokens, salt, "tests")
    )


def last_token_not_fed(monkeypatch):
    """A prompt that is known as a whole has nothing left to compute logits from."""
    monkeypatch.setattr(prefix, "_usable_blocks", lambda chain: chain.num_known)


# ---- snapshots ----


def tails_left_out(monkeypatch):
    """A snapshot keeps the windows only."""
    real = SnapshotStore.save

    def save(self, slot, position, snapshot):
        pools = self.pools
        self.pools = {name: pool for name, pool in pools.items() if "following" not in name}
        real(self, slot, position, snapshot)
        self.pools = pools

    monkeypatch.setattr(SnapshotStore, "save", save)


def ring_one_row_off(monkeypatch):
    """Restored rows lie one place further than their positions say."""
    real = SnapshotStore.restore
    monkeypatch.setattr(SnapshotStore, "restore", lambda self, slot, at, snapshot: real(self, slot, at + 1, snapshot))


def wrap_forgotten(monkeypatch):
    """Only the first run of a ring that wraps around is copied."""
    real = snapshots._runs
    monkeypatch.setattr(snapshots, "_runs", lambda *given: real(*given)[:1])


def positions_not_restored(monkeypatch):
    """The ring's rows are there, and nobody knows of which tokens."""
    real = SnapshotStore.restore

    def restore(self, slot, position, snapshot):
        before = self._positions.clone()
        real(self, slot, position, snapshot)
        self._positions.copy_(before)

    monkeypatch.setattr(SnapshotStore, "restore", restore)


def snapshot_too_late(monkeypatch):
    """A snapshot is taken however far the request has gone beyond it."""
    real = PrefixCache.__init__
    monkeypatch.setattr(
        PrefixCache, "__init__", lambda self, *given, **named: real(self, *given, **named | {"slack": 99})
    )


def snapshot_one_block_late(monkeypatch):
    """A snapshot is named as the state one block before the one it was taken at."""
    real = PrefixCache._save
    monkeypatch.setattr(
        PrefixCache, "_save", lambda self, slot, held, position: real(self, slot, held, max(128, position - 128))
    )


def drafts_kept(monkeypatch):
    """A snapshot of drafts that were taken back gets the name of the tokens that came instead."""
    monkeypatch.setattr(PrefixCache, "rewind", lambda self, slot, position: None)


def failed_request_kept(monkeypatch):
    """What a request leaves is trusted though its call failed."""
    real = PrefixCache.end
    monkeypatch.setattr(PrefixCache, "end", lambda self, slot, blocks, *, keep: real(self, slot, blocks, keep=True))


def snapshot_used_while_free(monkeypatch):
    """A snapshot goes back to the free ones and stays the node's."""
    real = PrefixTree.own_snapshot

    def own(self, node, snapshot, *, is_rolling):
        real(self, node, snapshot, is_rolling=is_rolling)
        if node.snapshot == snapshot:
            self._free_snapshots.append(snapshot)

    monkeypatch.setattr(PrefixTree, "own_snapshot", own)


# ---- blocks ----


def taken_over_without_retaining(monkeypatch):
    """A request uses blocks of a prefix and is not counted among their owners."""
    real = PrefixTree.hold

    def hold(self, slot, nodes):
        blocks = real(self, slot, nodes)
        self._allocator.release(blocks)
        return blocks

    monkeypatch.setattr(PrefixTree, "hold", hold)


def exchanged_block_leaks(monkeypatch):
    """The request's own block stays owned when it takes the tree's instead."""
    real = PrefixTree.keep_block

    def keep(self, slot, node, block_id):
        if node.block is not None and node.block != block_id:
            self._allocator.retain([block_id])
        return real(self, slot, node, block_id)

    monkeypatch.setattr(PrefixTree, "keep_block", keep)


def held_block_evicted(monkeypatch):
    """When one of two holders goes, both are forgotten."""

    def let_go(self, slot, nodes):
        for node in reversed(nodes):
            node.holders.clear()
            self.num_idle_blocks += 1
            self._trim(node)

    monkeypatch.setattr(PrefixTree, "let_go", let_go)


def freed_block_still_known(monkeypatch):
    """Making room frees the block and leaves its node, with a snapshot, in the tree."""

    def make_room(self, num_blocks):
        for node in list(self._of_block.values()):
            if self._allocator.num_free < num_blocks and not node.holders:
                self._allocator.release([node.block])

    monkeypatch.setattr(PrefixTree, "make_room", make_room)


# ---- below the device ----


def payload_of_another_layer(monkeypatch):
    """A snapshot's rows come back to the layer after their own."""
    real = Payload.views

    def views(self, flat, num_blocks):
        return {name: view.roll(1, 0) for name, view in real(self, flat, num_blocks).items()}

    def put(self, flat, num_blocks, snapshot):
        rolled = views(self, flat, num_blocks)
        for part in self.parts:
            if not part.is_paged:
                part.pool.words[:, snapshot].copy_(rolled[part.name])

    monkeypatch.setattr(Payload, "put_snapshot", put)


def blocks_in_reverse(monkeypatch):
    """A segment's blocks come back in another order."""
    real = Payload.scatter
    monkeypatch.setattr(
        Payload, "scatter", lambda self, flat, count, rows, blocks: real(self, flat, count, rows, list(blocks)[::-1])
    )


def parent_not_fetched(monkeypatch):
    """A prefix comes back without the segments before its last."""
    real = Segment.path
    monkeypatch.setattr(Tiers, "fetch", _with_path(Tiers.fetch, lambda segment: real(segment)[-1:]))


def _with_path(call, path):
    def called(self, *given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Segment, "path", path)
            return call(self, *given)

    return called


def host_unit_given_twice(monkeypatch):
    """Units of a segment count as free while it has them."""
    real = HostTier.add

    def add(self, key, parent, end, units):
        self.give_back(list(units))
        return real(self, key, parent, end, units)

    monkeypatch.setattr(HostTier, "add", add)


def checksum_ignored(monkeypatch):
    """Whatever a file holds is believed."""
    monkeypatch.setattr(segment_file, "checksum_of", lambda label, tensors, data: "0" * 64)


def name_not_compared(monkeypatch):
    """A file is taken for what its name says, whatever its header says."""
    real = segment_file._read_header

    def read(path, file):
        content = path.read_bytes()
        key = content.split(b'"key":"')[1][:64].decode()
        label, text, found = real(path.with_name(segment_file.file_name(key)), file)
        return replace(label, key=path.stem), text.replace(key.encode(), path.stem.encode()), found

    monkeypatch.setattr(segment_file, "_read_header", read)
    checksum = segment_file.checksum_of
    monkeypatch.setattr(segment_file, "checksum_of", lambda label, *rest: checksum(replace(label, key=""), *rest))


def descendants_of_a_damaged_file_kept(monkeypatch):
    """A prefix is used whose beginning is damaged."""
    monkeypatch.setattr(Tiers, "_loaded", _believing(Tiers._loaded))


def _believing(real):
    def loaded(self, key, load):
        for segment, _, done in load.files:
            if segment.end != load.files[-1][0].end:
                done._result = None
        real(self, key, load)

    return loaded


def budget_not_kept(monkeypatch):
    """Nothing gives way to what comes."""
    monkeypatch.setattr(SegmentTree, "evict_for", lambda self, num_bytes, keep: [])


def counted_as_free_while_held(monkeypatch):
    """The allocator gives away a block that has owners."""
    real = BlockAllocator.release

    def release(self, block_ids):
        real(self, block_ids)
        for block_id in block_ids:
            if self.num_owners(block_id) == 1 and block_id not in self._free:
                self._free.append(block_id)

    monkeypatch.setattr(BlockAllocator, "release", release)


MISTAKES = [
    salt_ignored, key_of_the_block_alone, fingerprint_ignored, last_token_not_fed, tails_left_out, ring_one_row_off,
    wrap_forgotten, positions_not_restored, snapshot_too_late, snapshot_one_block_late, drafts_kept,
    failed_request_kept, snapshot_used_while_free, taken_over_without_retaining, exchanged_block_leaks,
    held_block_evicted, freed_block_still_known, payload_of_another_layer, blocks_in_reverse, parent_not_fetched,
    host_unit_given_twice, checksum_ignored, name_not_compared, descendants_of_a_damaged_file_kept, budget_not_kept,
    counted_as_free_while_held,
]  # fmt: skip
