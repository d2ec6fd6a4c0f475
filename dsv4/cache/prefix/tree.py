"""`PrefixTree`: which prefixes the cache still knows, in blocks of 128 tokens. No torch.

A node is one block of one prefix. Its key is a hash of its parent's key and its own 128 token ids, so that a key names
a whole prefix; the first parent is a hash of the salt. A node may own the device block with its rows, and a snapshot:
the rest of what a request needs to go on from the end of the node. A request passes the nodes of all its tokens, and
holds the blocks of the first ones: those it took over, and those it has left here.

* Every ancestor of a node with a block has one, and a request that holds a node's block holds its ancestors'.
* What is held is never given up. Blocks without a holder are idle: they count as free, and are taken back from the
  least recently used snapshot on that has no block behind it.
* An idle block that leads to no snapshot can serve no hit, and a node without a block that no request passes names
  nothing: both are gone at once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.errors import require_integrity
from dsv4.config import BLOCK_TOKENS

KEY_BYTES = 32


class ChainKeys:
    """Keys of the prefixes of one request's tokens, made as far as they are asked for. `token_ids` may grow, unless the
    chain `is_complete`: nothing behind them is of use to others."""

    is_complete = False

    def __init__(self, token_ids: Sequence[int], salt: str | None, fingerprint: str = "") -> None:
        self.token_ids = token_ids
        self.salt = salt
        seed = b"no salt" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass")
        self._last = _hash(fingerprint.encode("utf-8"), seed)
        self._keys: list[bytes] = []

    def up_to(self, num_tokens: int) -> ChainKeys:
        """The chain of a whole number of blocks of these tokens, which stay as they are now."""
        part = object.__new__(ChainKeys)
        part.token_ids = list(self.token_ids[:num_tokens])
        part.salt = self.salt
        part._keys = self.first(num_tokens // BLOCK_TOKENS)
        part._last = part._keys[-1]
        return part

    @property
    def num_known(self) -> int:
        """Whole blocks of known tokens."""
        return len(self.token_ids) // BLOCK_TOKENS

    def first(self, num_blocks: int) -> list[bytes]:
        """The keys of the first `num_blocks` blocks, whose tokens must be known."""
        assert num_blocks <= self.num_known, (num_blocks, len(self.token_ids))
        start = len(self._keys)
        tokens = array("q", self.token_ids[start * BLOCK_TOKENS : num_blocks * BLOCK_TOKENS])
        for place in range(num_blocks - start):
            block = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
            self._last = _hash(self._last, block.tobytes())
            self._keys.append(self._last)
        return self._keys[:num_blocks]


def _hash(parent: bytes, content: bytes) -> bytes:
    # the parent's length is fixed or stands in front, so that no two pairs read as the same bytes
    return hashlib.blake2b(len(parent).to_bytes(8, "little") + parent + content, digest_size=KEY_BYTES).digest()


class Node:
    """The block `depth` (1 is the first) of a prefix."""

    __slots__ = (
        "block", "depth", "holders", "is_rolling", "key", "num_block_children", "num_children", "parent", "slots",
        "snapshot",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.block: int | None = None
        self.snapshot: int | None = None
        self.is_rolling = False  # the snapshot makes room for the next one of the same request
        self.num_children = self.num_block_children = 0
        self.slots: set[int] = set()  # of the requests that pass it
        self.holders: set[int] = set()  # slots of the requests that hold its block

    @property
    def position(self) -> int:
        """Tokens of the prefix that ends here."""
        return self.depth * BLOCK_TOKENS

    def path(self) -> list[Node]:
        """From the first block to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Nodes, the blocks and snapshots they own, and the order in which they were last of use."""

    def __init__(self, allocator: BlockAllocator, num_snapshots: int) -> None:
        self._allocator = allocator
        self._num_snapshots = num_snapshots
        self._free_snapshots = list(range(num_snapshots - 1, -1, -1))
        self._nodes: dict[bytes, Node] = {}
        self._lru: OrderedDict[Node, None] = OrderedDict()  # nodes with a snapshot, least recently used first
        self._of_block: dict[int, Node] = {}
        self.touched: set[bytes] | None = None  # keys whose snapshots came or went, where they are watched
        self.num_idle_blocks = 0
        self.num_evictions = 0

    @property
    def num_snapshots(self) -> int:
        """Snapshots held."""
        return len(self._lru)

    @property
    def block_ids(self) -> Iterable[int]:
        """Blocks held, those in use included."""
        return self._of_block.keys()

    def owns(self, block_id: int) -> bool:
        return block_id in self._of_block

    def walk(self, keys: Sequence[bytes]) -> Iterator[Node]:
        """The known nodes of a prefix, from its first block on."""
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                return
            yield node

    # ---- requests ----

    def enter(self, slot: int, keys: Sequence[bytes], parent: Node | None) -> list[Node]:
        """The nodes of `keys`, which follow `parent`, made where there are none, and passed by `slot` from now on."""
        nodes = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node(key, parent)
                if parent is not None:
                    parent.num_children += 1
            node.slots.add(slot)
            nodes.append(node)
            parent = node
        return nodes

    def hold(self, slot: int, nodes: Sequence[Node]) -> list[int]:
        """`slot` takes over the blocks of the first nodes that it passes, and owns them too."""
        blocks = [node.block for node in nodes if node.block is not None]
        assert len(blocks) == len(nodes), "a node without a block"
        self._allocator.retain(blocks)
        for node in nodes:
            self._add_holder(slot, node)
        return blocks

    def leave(self, slot: int, nodes: Sequence[Node]) -> None:
        """`slot` passes and holds these nodes no more; its own share of the blocks is its own business."""
        for node in reversed(nodes):
            if slot in node.holders:
                self.let_go(slot, [node])
            node.slots.remove(slot)
            self._trim(node)

    def let_go(self, slot: int, nodes: Sequence[Node]) -> None:
        """`slot` holds these blocks no more, but passes the nodes."""
        for node in reversed(nodes):
            node.holders.remove(slot)
            self.num_idle_blocks += not node.holders
            self._trim(node)

    def keep_block(self, slot: int, node: Node, block_id: int) -> int:
        """The node keeps a block of a request that passes it. If it has one, with the same rows, the request takes that
        instead and its own is free. Returns the block the request has now."""
        if node.block is None:
            self._allocator.retain([block_id])
            node.block = block_id
            self._of_block[block_id] = node
            if node.parent is not None:
                node.parent.num_block_children += 1
            node.holders.add(slot)
        elif node.block != block_id:
            self._allocator.retain([node.block])
            self._allocator.release([block_id])
            self._add_holder(slot, node)
        return node.block

    def _add_holder(self, slot: int, node: Node) -> None:
        self.num_idle_blocks -= not node.holders
        node.holders.add(slot)

    # ---- snapshots ----

    def take_snapshot(self) -> int | None:
        """A free snapshot, the least recently used one if there is no other; None only if there are none at all."""
        if not self._free_snapshots and self._lru:
            self.num_evictions += 1
            self.drop_snapshot(next(iter(self._lru)))
        return self._free_snapshots.pop() if self._free_snapshots else None

    def give_back(self, snapshot: int) -> None:
        """A snapshot that was taken and belongs to no node."""
        self._free_snapshots.append(snapshot)

    def own_snapshot(self, node: Node, snapshot: int, *, is_rolling: bool) -> None:
        """The node keeps a snapshot that was taken; one that has a snapshot keeps that."""
        assert node.block is not None, "a snapshot without its blocks is of no use"
        if node.snapshot is None:
            node.snapshot, node.is_rolling = snapshot, is_rolling
            self._touch(node)
        else:
            self.give_back(snapshot)
            node.is_rolling = node.is_rolling and is_rolling
        self.touch(node)

    def get(self, key: bytes) -> int | None:
        """The snapshot at the end of this prefix."""
        node = self._nodes.get(key)
        return None if node is None else node.snapshot

    def all_keys(self) -> list[bytes]:
        """Of all snapshots."""
        return [node.key for node in self._lru]

    def _touch(self, node: Node) -> None:
        if self.touched is not None:
            self.touched.add(node.key)

    def touch(self, node: Node) -> None:
        """The node's snapshot was of use now."""
        self._lru[node] = None
        self._lru.move_to_end(node)

    def drop_snapshot(self, node: Node) -> None:
        assert node.snapshot is not None
        self._free_snapshots.append(node.snapshot)
        node.snapshot, node.is_rolling = None, False
        del self._lru[node]
        self._touch(node)
        self._trim(node)

    def clear(self) -> None:
        """Give up every snapshot, and the blocks that led to them. No request passes a node."""
        for node in list(self._lru):
            self.drop_snapshot(node)

    def make_room(self, num_blocks: int) -> None:
        """Give up idle blocks until this many are free, or none is idle."""
        while self._allocator.num_free < num_blocks and self.num_idle_blocks:
            leaf = next(node for node in self._lru if not node.holders and not node.num_block_children)
            self.num_evictions += 1
            self.drop_snapshot(leaf)

    def freed_without(self, slots: set[int], block_id: int) -> bool:
        """Whether a kept block is idle once these requests are gone."""
        return self._of_block[block_id].holders <= slots

    def _trim(self, node: Node) -> None:
        """Give up a block that can serve no hit, a node that names nothing, and then the same of its ancestors."""
        here: Node | None = node
        while here is not None and self._nodes.get(here.key) is here:
            parent = here.parent
            is_changed = False
            if here.block is not None and not (here.holders or here.num_block_children or here.snapshot is not None):
                is_changed = True
                self.num_idle_blocks -= 1
                del self._of_block[here.block]
                self._allocator.release([here.block])
                here.block = None
                if parent is not None:
                    parent.num_block_children -= 1
            if here.block is None and not here.slots and not here.num_children:
                is_changed = True
                del self._nodes[here.key]
                if parent is not None:
                    parent.num_children -= 1
            if not is_changed:
                return
            here = parent

    # ---- checks ----

    def check_integrity(self, num_taken: int) -> None:
        """Recompute the truth. `num_taken` snapshots belong to requests and not yet to nodes."""
        for key, node in self._nodes.items():
            require_integrity(node.key == key, "a node lies under another key")
            parent = node.parent
            if parent is not None:
                require_integrity(self._nodes.get(parent.key) is parent, "a node's parent is gone")
                require_integrity(node.slots <= parent.slots, "a request passes a node and not its parent")
                require_integrity(node.holders <= parent.holders, "a request holds a node and not its parent")
                require_integrity(node.block is None or parent.block is not None, "a gap in a prefix's blocks")
            require_integrity(node.holders <= node.slots, "a request holds a block that it does not pass")
            require_integrity(node.block is not None or not node.holders, "a block that is not there is held")
            require_integrity(node.snapshot is None or node.block is not None, "a snapshot without blocks")
            require_integrity((node.snapshot is not None) == (node in self._lru), "the order of use is incomplete")
        children = Counter(node.parent.key for node in self._nodes.values() if node.parent is not None)
        block_children = Counter(
            node.parent.key for node in self._nodes.values() if node.parent is not None and node.block is not None
        )
        for key, node in self._nodes.items():
            counts = (children[key], block_children[key])
            require_integrity(counts == (node.num_children, node.num_block_children), "children are miscounted")
            is_named = node.slots or node.num_children or node.block is not None
            require_integrity(bool(is_named), "a node that names nothing is kept")
            is_of_use = node.block is None or node.holders or node.snapshot is not None or node.num_block_children
            require_integrity(bool(is_of_use), "a block that can serve no hit is kept")
        owned = {node.block: node for node in self._nodes.values() if node.block is not None}
        require_integrity(owned == self._of_block, "the blocks of nodes differ from the list of them")
        idle = [block_id for block_id, node in owned.items() if not node.holders]
        require_integrity(len(idle) == self.num_idle_blocks, f"{len(idle)} idle blocks, counted {self.num_idle_blocks}")
        is_alone = all(self._allocator.num_owners(block_id) == 1 for block_id in idle)
        require_integrity(is_alone, "a block that counts as idle has another owner")
        held = [node.snapshot for node in self._lru]
        everything = len(held) + len(self._free_snapshots) + num_taken
        require_integrity(everything == self._num_snapshots, f"{everything} snapshots of {self._num_snapshots}")
        require_integrity(len({*held, *self._free_snapshots}) == everything - num_taken, "a snapshot is held twice")
