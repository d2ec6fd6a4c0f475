"""Random lives of requests with common prefixes: hits on device, host and disk, evictions, drafts, damage, restarts.

A row's label is a hash of the salt and of every token up to its own. What a continuation of any request would read
must carry the labels of exactly that request's tokens, wherever the rows came from; everything that nobody may read is
NaN.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from row_cases import CONFIG, check_rows, write_rows

from dsv4.cache.errors import OutOfBlocks
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.tiers.host import UNIT_BYTES
from dsv4.config import EngineConfig
from dsv4.config.layers import build_schedule

MAX_CONTEXT, NUM_SLOTS, NUM_BLOCKS = 700, 3, 9
CHUNKS = (1, 3, 127, 128, 129, 200, 500)
prompts = st.tuples(
    st.sampled_from([(), (7,), (7, 8), (7, 7), (7, 7, 8), (7, 7, 7, 8)]),
    st.sampled_from([1, 2, 60, 127]),
    st.sampled_from([None, None, "x"]),
)


class Request:
    def __init__(self, token_ids, salt):
        self.token_ids, self.salt = list(token_ids), salt
        self.fed = []  # tokens in the cache, known or not

    def labels(self, num_tokens=None):
        return chain_labels(self.salt, self.fed if num_tokens is None else self.fed[:num_tokens])


def chain_labels(salt, token_ids):
    digest, labels = hashlib.blake2b(repr(salt).encode(), digest_size=6), []
    for token_id in token_ids:
        digest.update(b"%d," % token_id)
        labels.append(int.from_bytes(digest.digest(), "little") + 1)
    return labels


def admit_read(manager, max_tokens, chain):
    """A slot for a request, once the longest prefix that only files have has been read."""
    if manager.match(chain).is_loading:
        manager.wait_for_files(60.0)
    return manager.admit(max_tokens, chain)


def make_manager(folder, slack, num_snapshots, host_units, disk_files, fingerprint="tests"):
    def engine(**limits):
        return EngineConfig(
            max_context_tokens=MAX_CONTEXT, max_concurrent_requests=NUM_SLOTS, num_blocks=NUM_BLOCKS,
            max_draft_tokens=slack, snapshot_interval_tokens=256, **limits,
        )  # fmt: skip

    one = KVCacheManager(CONFIG, build_schedule(CONFIG), engine(), device="cpu", plain_dtype=torch.float64)
    size = one.schema.bytes_per_snapshot
    limits = {"prefix_cache_bytes": num_snapshots * size + 2**12}
    if host_units:
        limits["cache_host_bytes"] = host_units * UNIT_BYTES
        if disk_files:
            limits |= {"cache_dir": str(folder), "cache_disk_bytes": disk_files * (size + 2**16)}
    return KVCacheManager(
        CONFIG, build_schedule(CONFIG), engine(**limits), device="cpu", plain_dtype=torch.float64,
        fingerprint=fingerprint,
    )  # fmt: skip


class PrefixLife(RuleBasedStateMachine):
    folder = None

    @initialize(
        slack=st.sampled_from([0, 0, 3]), num_snapshots=st.sampled_from([1, 3, 9]),
        host_units=st.sampled_from([0, 4, 40, 40]), disk_files=st.sampled_from([0, 3, 100, 100]),
    )  # fmt: skip
    def start(self, slack, num_snapshots, host_units, disk_files):
        self.folder = Path(tempfile.mkdtemp())
        self.slack = slack
        self.make = lambda: make_manager(self.folder, slack, num_snapshots, host_units, disk_files)
        self.manager = self.make()
        self.running, self.ended = {}, []

    def teardown(self):
        if self.folder is not None:
            self.manager.close()
            shutil.rmtree(self.folder)

    # ---- coming and going ----

    @rule(prompt=prompts)
    def admit(self, prompt):
        chunks, rest, salt = prompt
        self._admit(Request([token for token in chunks for _ in range(128)] + [9] * rest, salt))

    @rule(
        prompt=prompts,
        length=st.sampled_from(CHUNKS[2:]),
        num_drawn=st.sampled_from([0, 1, 70, 128]),
        ends=st.booleans(),
    )
    def turn(self, prompt, length, num_drawn, ends):
        """A whole prompt and some of its answer."""
        before = set(self.running)
        self.admit(prompt)
        for slot in set(self.running) - before:
            request = self.running[slot]
            while pending := request.token_ids[len(request.fed) :]:
                piece = pending[: min(length, self.manager.next_stop(slot) - len(request.fed))]
                if not self._feed(slot, piece):
                    return
                self.manager.launched(slot)
            self._decode_to(slot, min(len(request.fed) + num_drawn, MAX_CONTEXT))
            if ends:
                self.release_one(slot)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), extra=st.integers(0, 130))
    def come_again(self, data, extra):
        """A preempted request, or the next turn of a conversation."""
        before = data.draw(st.sampled_from(self.ended))
        self._admit(Request((before.token_ids + [5] * extra)[: MAX_CONTEXT - 1], before.salt))

    def _admit(self, request):
        manager = self.manager
        chain = manager.chain(request.token_ids, request.salt)
        match = manager.match(chain)
        needed = match.position // 128 - match.num_busy
        if len(self.running) == NUM_SLOTS or needed > manager.num_free_blocks:
            return
        before = manager.num_free_blocks
        slot = manager.admit(MAX_CONTEXT, chain)
        position = manager.position(slot)
        assert position % 128 == 0
        assert position < len(request.token_ids)
        assert match.is_loading or (position, before - manager.num_free_blocks) == (match.position, needed)
        request.fed = request.token_ids[:position]
        self.running[slot] = request
        check_rows(manager, slot, request.labels())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        freed, before = self.manager.blocks_freed_by([slot]), self.manager.num_free_blocks
        self.manager.release(slot, keep=keep)
        assert self.manager.num_free_blocks - before == freed
        request = self.running.pop(slot)
        if request.token_ids:
            self.ended.append(request)

    @precondition(lambda self: self.running)
    @rule()
    def release_all(self):
        slots = sorted(self.running)
        freed, before = self.manager.blocks_freed_by(slots), self.manager.num_free_blocks
        for slot in slots:
            self.release_one(slot)
        assert self.manager.num_free_blocks - before == freed
        assert self.manager.num_free_blocks == NUM_BLOCKS

    def release_one(self, slot):
        self.manager.release(slot)
        self.ended.append(self.running.pop(slot))

    # ---- running ----

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.sampled_from(CHUNKS), lazy=st.booleans())
    def forward(self, data, length, lazy):
        """A piece of what is known; or a drawn token, whose id may be known only after the launch."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[slot]
        position = len(request.fed)
        pending = request.token_ids[position:]
        if pending:
            self._feed(slot, pending[: min(length, self.manager.next_stop(slot) - position)])
            self.manager.launched(slot)
        elif position < MAX_CONTEXT:
            token = data.draw(st.sampled_from([5, 6]))
            if not lazy:
                request.token_ids.append(token)
            if self._feed(slot, [token]) or not lazy:
                self.manager.launched(slot)
                if lazy:
                    request.token_ids.append(token)

    @precondition(lambda self: self.running and self.slack)
    @rule(data=st.data(), accepted=st.integers(0, 3), early=st.booleans(), near=st.sampled_from([None, 1, 2, 3]))
    def draft(self, data, accepted, early, near):
        """Tokens of which some are taken back, before or after the cache is told of the call."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[slot]
        if near is not None and not self._decode_to(slot, (len(request.fed) // 128 + 1) * 128 - near):
            return
        position = len(request.fed)
        if position != len(request.token_ids) or position + 1 + self.slack > MAX_CONTEXT:
            return
        tokens = [5] + [6] * self.slack
        if not self._feed(slot, tokens):
            return
        if early:
            self.manager.launched(slot)
        self.manager.rewind(slot, position + 1 + accepted)
        request.fed = request.fed[: position + 1 + accepted]
        request.token_ids += tokens[: 1 + accepted]
        self.manager.launched(slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def decode_to_the_next_block(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self._decode_to(slot, (len(self.running[slot].fed) // 128 + 1) * 128)

    def _decode_to(self, slot, target):
        request = self.running[slot]
        if request.token_ids[len(request.fed) :] or target > MAX_CONTEXT:
            return False
        while len(request.fed) < target:
            request.token_ids.append(5)
            if not self._feed(slot, [5]):
                return False
            self.manager.launched(slot)
        return True

    def _feed(self, slot, tokens):
        request = self.running[slot]
        try:
            self.manager.make_batch([slot], [tokens])
        except OutOfBlocks:
            return False
        request.fed += tokens
        write_rows(self.manager, slot, request.labels(), len(tokens))
        return True

    # ---- what may happen to a cache ----

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def evict(self, num_blocks):
        self.manager.prefix.tree.make_room(num_blocks)

    @precondition(lambda self: self.manager.tiers is not None)
    @rule(is_killed=st.booleans())
    def restart(self, is_killed):
        tiers = self.manager.tiers
        if is_killed and tiers.disk is not None:
            tiers.disk._writer.shutdown(cancel_futures=True)
            tiers.disk._reader.shutdown(cancel_futures=True)
            if tiers.disk._lock is not None:
                os.close(tiers.disk._lock)
            (tiers.disk.folder / ".0.1.tmp").write_bytes(b"half a file")
        else:
            self.manager.close()
        self.manager = self.make()
        self.ended += self.running.values()
        self.running = {}

    @precondition(lambda self: self.manager.tiers is not None and self.manager.tiers.disk is not None)
    @rule(
        data=st.data(), where=st.floats(0, 1, exclude_max=True), how=st.sampled_from(["flip", "flip", "cut", "gone"]),
        first=st.booleans(), then=st.booleans(),
    )  # fmt: skip
    def damage(self, data, where, how, first, then):
        """One file, while it is known or before it is found; then perhaps somebody wants it."""
        self.manager.tiers.flush()
        if first:
            self.restart(is_killed=False)
        self._damage(data, where, how)
        if then:
            self.restart(is_killed=False)
        if self.ended:
            self.come_again(data, 1)

    def _damage(self, data, where, how):
        files = sorted(self.folder.rglob("*.safetensors"))
        if not files:
            return
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        place = int(where * len(content))
        if how == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content[:place] if how == "cut" else content)
        if how == "gone":
            file.unlink()

    # ---- what must hold ----

    @invariant()
    def everything_is_there(self):
        if self.folder is None:
            return
        manager = self.manager
        manager.check_integrity()
        assert manager.num_free_slots == NUM_SLOTS - len(self.running)
        for slot, request in self.running.items():
            assert manager.position(slot) == len(request.fed)
            check_rows(manager, slot, request.labels())
        assert manager.memory_bytes() == manager.schema.total_bytes
        poison(manager)


def poison(manager):
    """NaN in every block, slot and snapshot that nobody may read."""
    free_blocks = sorted(manager._allocator._free)
    for pool in manager._paged.pools.values():
        pool.all_layers[:, free_blocks] = float("nan")
    for slot in manager._free_slots:
        for name, pool in manager._state.pools.items():
            pool.all_layers[:, slot].fill_(10**6 if name == "window.positions" else float("nan"))
    for pool in manager._snapshots.pools.values():
        pool.all_layers[:, sorted(manager.prefix.tree._free_snapshots)] = float("nan")


TestPrefixLife = PrefixLife.TestCase
TestPrefixLife.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("slack", [0, 1, 5])
def test_a_snapshot_may_be_taken_as_late_as_the_rings_allow(slack):
    """With room for drafts, a call may pass a multiple of 128 by as many tokens."""
    manager = make_manager(None, slack, 9, 0, 0)
    for late in range(slack + 2):
        tokens = [20 + late] * 300
        slot = manager.admit(MAX_CONTEXT, manager.chain(tokens, None))
        labels = chain_labels(None, tokens)
        manager.make_batch([slot], [tokens[: 128 + late]])
        write_rows(manager, slot, labels[: 128 + late], 128 + late)
        manager.launched(slot)
        manager.release(slot)
        again = manager.admit(MAX_CONTEXT, manager.chain(tokens, None))
        assert manager.position(again) == (128 if late <= slack else 0)
        check_rows(manager, again, labels[: manager.position(again)])
        manager.release(again)
