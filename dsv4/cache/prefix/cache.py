"""`PrefixCache`: what requests reuse of prefixes seen before, and leave for later requests. No torch.

A snapshot of a request at a multiple of 128 tokens is all it needs, beside its blocks, to go on from there; going on is
chunked prefill, so a hit gives the bits of a cold run. Snapshots are taken

* where the known tokens of an admitted request end (the last multiple before its last token, which is always fed),
* at every multiple of `interval` on the way there,
* where its tokens part from those of another request: of one that runs, so that both need the common part only once,
  or of one that was here before,
* at every multiple that decoding passes. These roll: the next one replaces the last, and what the request leaves is the
  end of its answer. A request that is preempted comes back from it.

Copies are launched when a forward call has been (`launched`), so they see the state right after it. The ids of tokens
drawn on the device may be unknown then: a snapshot waits without a name until they are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.errors import require_integrity
from dsv4.cache.prefix.tree import ChainKeys, Node, PrefixTree
from dsv4.config import BLOCK_TOKENS

if TYPE_CHECKING:  # they need torch
    from dsv4.cache.prefix.snapshots import SnapshotStore
    from dsv4.cache.tiers.tiers import Tiers

NO_STOP = 2**62
_MAX_TO_VERIFY = 64  # hits that wait to be looked at; older ones are forgotten


@dataclass(frozen=True)
class Match:
    """What the cache has for a request. It holds until anything is admitted, launched or released.

    position   tokens that need not be fed
    num_busy   how many of its blocks running requests hold already
    leaders    slots of running requests that will pass `expected`, up to which they have the same tokens
    loading    up to where more is being read from disk, or 0; a request that is admitted before does without
    nodes      of its prefix, as far as they have blocks
    num_hit    blocks of the longest prefix with a snapshot on the device
    num_host   and in host memory
    parting    where its tokens part from those that the cache knows
    """

    position: int = 0
    num_busy: int = 0
    leaders: tuple[int, ...] = ()
    expected: int = 0
    loading: int = 0
    nodes: Sequence[Node] = ()
    num_hit: int = 0
    num_host: int = 0
    parting: int = 0

    @property
    def is_loading(self) -> bool:
        return self.loading > 0


@dataclass
class PrefixStats:
    """Totals since the cache was made. Hits and misses count requests of more than one block; hits that came from host
    memory or from disk are among them."""

    num_hits: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_misses: int = 0
    num_cached_tokens: int = 0
    num_saved: int = 0


@dataclass
class _Held:
    """One running request."""

    chain: ChainKeys
    nodes: list[Node]  # of the blocks whose tokens are known
    stops: list[int]  # positions to take snapshots at, ascending
    unnamed: list[tuple[int, int]] = field(default_factory=list)  # position, snapshot
    last_saved: int = 0
    rolling: Node | None = None


class PrefixCache:
    """The tree, and what each slot does with it. The manager owns slots, tables and positions."""

    def __init__(
        self, allocator: BlockAllocator, copies: SnapshotStore, tiers: Tiers | None, *, num_snapshots: int,
        interval: int, slack: int, verify_share: float = 0.0,
    ) -> None:  # fmt: skip
        self._allocator = allocator
        self.tree = PrefixTree(allocator, num_snapshots)
        self.tiers = tiers
        self.stats = PrefixStats()
        self._copies = copies
        self._interval = interval
        self._verify_share = verify_share
        self._verify_due = 0.0
        self.to_verify: deque[ChainKeys] = deque(maxlen=_MAX_TO_VERIFY)
        self._slack = slack  # tokens the rings hold beyond a window: how late a snapshot may be taken
        self._held: dict[int, _Held] = {}

    # ---- coming ----

    def match(self, chain: ChainKeys, positions: NDArray[np.int64], num_below: int | None = None) -> Match:
        """The longest prefix that `chain` could start from; `positions` are those of all slots. Takes nothing; where
        only a file has more, reading it begins. `num_below`: count on this many blocks in host memory, whatever else
        there may be by now."""
        keys = chain.first(_usable_blocks(chain))
        nodes: list[Node] = []
        last: Node | None = None
        num_hit = num_host = num_loading = 0
        for node in self.tree.walk(keys):
            last = node
            if node.block is not None:
                nodes.append(node)
            if node.snapshot is not None:
                num_hit = node.depth
        if num_below is not None:
            num_host = num_below
        elif self.tiers is not None:
            num_loading = self.tiers.prepare(keys, num_hit)
            num_host = self.tiers.longest(keys)
        num_blocks = max(num_hit, num_host)
        position, parting = num_blocks * BLOCK_TOKENS, 0 if last is None else last.position
        leaders: tuple[int, ...] = ()
        if last is not None and last.position > position:
            leaders = tuple(slot for slot in sorted(last.slots) if positions[slot] < last.position)
        return Match(
            position, sum(bool(node.holders) for node in nodes[:num_blocks]), leaders,
            parting if parting > position else 0, num_loading * BLOCK_TOKENS, nodes, num_hit, num_host, parting,
        )  # fmt: skip

    def num_here(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest prefix that the device has a snapshot of."""
        return max((node.depth for node in self.tree.walk(keys) if node.snapshot is not None), default=0)

    def begin(self, slot: int, chain: ChainKeys, match: Match) -> list[int]:
        """A request starts from what `match` found for it a moment ago: the blocks it takes over, which it owns now,
        and its state up to there in the slot."""
        nodes = self.tree.enter(slot, chain.first(chain.num_known), None)
        held = self._held[slot] = _Held(chain, nodes, [])
        blocks = self._fetch(slot, nodes, match) if match.num_host > match.num_hit else []
        if not blocks:
            blocks = self.tree.hold(slot, nodes[: match.num_hit])
        start = held.last_saved = len(blocks) * BLOCK_TOKENS
        held.stops = self._stops(chain, start, match.parting)
        if _usable_blocks(chain):
            self.stats.num_hits += bool(start)
            self.stats.num_misses += not start
            self.stats.num_cached_tokens += start
        if blocks:
            self._choose_to_verify(chain, start)
            hit = nodes[len(blocks) - 1]
            assert hit.snapshot is not None
            hit.is_rolling = False  # of use to others: it stays
            self.tree.touch(hit)
            self._copies.restore(slot, hit.position, hit.snapshot)
        return blocks

    def _choose_to_verify(self, chain: ChainKeys, position: int) -> None:
        self._verify_due += self._verify_share
        if self._verify_due >= 1.0:
            self._verify_due -= 1.0
            self.to_verify.append(chain.up_to(position))

    def _fetch(self, slot: int, nodes: Sequence[Node], match: Match) -> list[int]:
        """Bring a prefix from host memory into the nodes that a request passes: all its blocks, which the request owns.
        None if there is no room for it."""
        assert self.tiers is not None
        num_held = min(len(match.nodes), match.num_host)
        num_new = match.num_host - num_held
        num_idle = sum(not node.holders for node in nodes[:num_held])  # those it takes over cannot make room
        if num_new > self._allocator.num_free + self.tree.num_idle_blocks - num_idle:
            return []
        taken = self.tree.hold(slot, nodes[:num_held])  # before anything is given up
        snapshot = self.tree.take_snapshot()
        if snapshot is None:
            self._allocator.release(taken)
            self.tree.let_go(slot, nodes[:num_held])
            return []
        self.tree.make_room(num_new)
        fetched = self._allocator.acquire(num_new)
        end = nodes[match.num_host - 1]
        is_from_disk = self.tiers.fetch(end.key, num_held, fetched, snapshot)
        for node, block_id in zip(nodes[num_held : match.num_host], fetched, strict=True):
            self.tree.keep_block(slot, node, block_id)
        self.tree.own_snapshot(end, snapshot, is_rolling=False)
        self.stats.num_disk_hits += is_from_disk
        self.stats.num_host_hits += not is_from_disk
        return taken + fetched

    def _stops(self, chain: ChainKeys, start: int, parting: int) -> list[int]:
        end = _usable_blocks(chain) * BLOCK_TOKENS
        first = (start // self._interval + 1) * self._interval
        stops = {*range(first, end, self._interval), end, parting}
        return sorted(stop for stop in stops if stop > start)

    # ---- running ----

    def next_stop(self, slot: int, position: int) -> int:
        """Where the piece that starts at `position` must end at the latest, so that a snapshot can be taken."""
        held = self._held.get(slot)
        if held is None:
            return NO_STOP
        place = bisect_right(held.stops, position)
        return held.stops[place] if place < len(held.stops) else NO_STOP

    def stop_at(self, slot: int, position: int) -> None:
        """A request waits for this prefix of a running request."""
        stops = self._held[slot].stops
        place = bisect_right(stops, position)
        if not place or stops[place - 1] != position:
            stops.insert(place, position)

    def launched(self, slot: int, position: int, blocks: list[int]) -> None:
        """A forward call up to `position` was launched. `blocks` are the request's, some of which may be exchanged for
        others with the same rows."""
        held = self._held.get(slot)
        if held is None:
            return
        last_multiple = position // BLOCK_TOKENS * BLOCK_TOKENS
        is_of_use = not held.chain.is_complete or last_multiple <= held.chain.num_known * BLOCK_TOKENS
        if is_of_use and last_multiple > held.last_saved and position - last_multiple <= self._slack:
            held.last_saved = last_multiple
            self._save(slot, held, last_multiple)
        self._name(slot, held, blocks)

    def _save(self, slot: int, held: _Held, position: int) -> None:
        num_known = held.chain.num_known * BLOCK_TOKENS
        if position <= num_known:
            node = self._node_at(slot, held, position)
            if node.snapshot is not None:  # another request left it meanwhile
                node.is_rolling = False
                self.tree.touch(node)
                return
        snapshot = self.tree.take_snapshot()
        if snapshot is not None:
            self._copies.save(slot, position, snapshot)
            held.unnamed.append((position, snapshot))
            self.stats.num_saved += 1

    def _node_at(self, slot: int, held: _Held, position: int) -> Node:
        """The node that ends at `position`, whose tokens are known."""
        num_blocks, num_nodes = position // BLOCK_TOKENS, len(held.nodes)
        if num_blocks > num_nodes:
            parent = held.nodes[-1] if held.nodes else None
            held.nodes += self.tree.enter(slot, held.chain.first(num_blocks)[num_nodes:], parent)
        return held.nodes[num_blocks - 1]

    def _name(self, slot: int, held: _Held, blocks: list[int]) -> None:
        """Put the snapshots whose tokens are all known into the tree, with the blocks before them. Where the tree has
        the same rows already, `blocks` gets its block."""
        while held.unnamed and held.unnamed[0][0] <= held.chain.num_known * BLOCK_TOKENS:
            position, snapshot = held.unnamed.pop(0)
            node = self._node_at(slot, held, position)
            for place, one in enumerate(held.nodes[: node.depth]):
                blocks[place] = self.tree.keep_block(slot, one, blocks[place])
            is_rolling = position not in held.stops
            self.tree.own_snapshot(node, snapshot, is_rolling=is_rolling)
            last = held.rolling
            if last is not None and last.is_rolling and last.snapshot is not None:
                self.tree.drop_snapshot(last)
            held.rolling = node if is_rolling else None
            if not is_rolling and self.tiers is not None:
                self.tiers.store(node)

    def rewind(self, slot: int, position: int) -> None:
        """Tokens from `position` on are taken back: a snapshot beyond it was of tokens that never were."""
        held = self._held.get(slot)
        if held is None:
            return
        for _, snapshot in (one for one in held.unnamed if one[0] > position):
            self.tree.give_back(snapshot)
        held.unnamed = [one for one in held.unnamed if one[0] <= position]
        held.last_saved = min(held.last_saved, position)

    # ---- going ----

    def end(self, slot: int, blocks: list[int], *, keep: bool) -> None:
        """The request leaves its slot. Without `keep` its snapshots without a name are not to be trusted."""
        held = self._held.pop(slot, None)
        if held is None:
            return
        if keep:
            self._name(slot, held, blocks)
            if held.rolling is not None and held.rolling.is_rolling:
                held.rolling.is_rolling = False
                if self.tiers is not None:
                    self.tiers.store(held.rolling)
        for _, snapshot in held.unnamed:
            self.tree.give_back(snapshot)
        self.tree.leave(slot, held.nodes)

    def clear(self) -> None:
        """Know no prefix any more. Running requests keep their blocks, and leave nothing to others."""
        for slot, held in self._held.items():
            for _, snapshot in held.unnamed:
                self.tree.give_back(snapshot)
            self.tree.leave(slot, held.nodes)
        self._held.clear()
        self.to_verify.clear()
        self.tree.clear()

    def path_to(self, chain: ChainKeys) -> list[Node] | None:
        """The nodes of all known blocks of a chain, if the device has a snapshot at their end."""
        nodes = list(self.tree.walk(chain.first(chain.num_known)))
        return nodes if len(nodes) == chain.num_known and nodes and nodes[-1].snapshot is not None else None

    def forget(self, chain: ChainKeys) -> None:
        """Never start from this prefix again; what others took from it stays theirs."""
        nodes = self.path_to(chain)
        if nodes is not None:
            self.tree.drop_snapshot(nodes[-1])
        if self.tiers is not None:
            self.tiers.forget(chain.first(chain.num_known)[-1])

    # ---- checks ----

    def check_integrity(self, blocks: Sequence[Sequence[int]]) -> None:
        """`blocks` are those of every slot."""
        self.tree.check_integrity(sum(len(held.unnamed) for held in self._held.values()))
        used: dict[bytes, set[int]] = {}
        for slot, held in self._held.items():
            require_integrity(held.stops == sorted(set(held.stops)), "a request's stops are out of order")
            keys = held.chain.first(len(held.nodes))
            require_integrity([node.key for node in held.nodes] == keys, "a request holds nodes of other tokens")
            for key in keys:
                used.setdefault(key, set()).add(slot)
        for slot, held in self._held.items():
            for node, key in zip(held.nodes, held.chain.first(len(held.nodes)), strict=True):
                require_integrity(node.slots == used[key], f"slot {slot}: a node's users are miscounted")
            for node, block_id in zip(held.nodes, blocks[slot], strict=False):
                is_right = slot not in node.holders or node.block == block_id
                require_integrity(is_right, f"slot {slot} holds a node's block, but has another")


def _usable_blocks(chain: ChainKeys) -> int:
    """Blocks before the last known token: that one is fed, because its logits are wanted."""
    return (len(chain.token_ids) - 1) // BLOCK_TOKENS
