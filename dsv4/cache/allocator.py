"""`BlockAllocator`: which of a fixed number of blocks are free, and how many owners the others have. No torch.

The free list is a stack, so that many blocks are taken or given back as one slice; the order is a function of the call
history alone. A block may have several owners (`retain`); it is free again when the last one releases it.
"""

from collections.abc import Iterable

from dsv4.cache.errors import (
    BlockError,
    DoubleRelease,
    ForeignBlock,
    OutOfBlocks,
    UnallocatedBlock,
    require_integrity,
)


class BlockAllocator:
    """Blocks 0 .. num_blocks - 1. Every call either succeeds whole or raises and changes nothing."""

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise BlockError(f"num_blocks must be a positive integer, found {num_blocks!r}")
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # top of the stack last: block 0 goes first
        self._num_owners = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owners(self, block_id: int) -> int:
        """0 for a free block."""
        if not 0 <= block_id < self._num_blocks:
            raise ForeignBlock(f"block {block_id} is not one of 0 .. {self._num_blocks - 1}")
        return self._num_owners[block_id]

    def acquire(self, num_blocks: int) -> list[int]:
        """`num_blocks` free blocks with one owner each; `OutOfBlocks` if there are not that many."""
        free = self._free
        if num_blocks <= 0:
            if num_blocks < 0:
                raise BlockError(f"cannot acquire {num_blocks} blocks")
            return []
        if num_blocks > len(free):
            raise OutOfBlocks(num_blocks, len(free), self._num_blocks)
        block_ids = free[-num_blocks:]
        del free[-num_blocks:]
        block_ids.reverse()
        num_owners = self._num_owners
        for block_id in block_ids:
            num_owners[block_id] = 1
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """One more owner for each of the blocks, which must be allocated."""
        ids = list(block_ids)
        for block_id in ids:
            if self.num_owners(block_id) == 0:
                raise UnallocatedBlock(f"block {block_id} is free; acquire it instead")
        for block_id in ids:
            self._num_owners[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One owner fewer for each of the blocks; those without owners become free, first ones on top."""
        ids = list(block_ids)
        num_owners, num_blocks = self._num_owners, self._num_blocks
        freed = []
        for done, block_id in enumerate(ids):
            if not 0 <= block_id < num_blocks or num_owners[block_id] == 0:
                for taken in ids[:done]:
                    num_owners[taken] += 1
                if 0 <= block_id < num_blocks:
                    raise DoubleRelease(f"block {block_id} is released more often than it was acquired")
                raise ForeignBlock(f"block {block_id} is not one of 0 .. {num_blocks - 1}")
            num_owners[block_id] -= 1
            if num_owners[block_id] == 0:
                freed.append(block_id)
        freed.reverse()
        self._free += freed

    def check_integrity(self) -> None:
        """Every block is either free, once, or has owners."""
        require_integrity(len(self._num_owners) == self._num_blocks, "the number of blocks changed")
        require_integrity(min(self._num_owners) >= 0, "a block has a negative number of owners")
        expected = {block_id for block_id, owners in enumerate(self._num_owners) if owners == 0}
        require_integrity(len(self._free) == len(set(self._free)), "a block is in the free list twice")
        require_integrity(set(self._free) == expected, "the free list differs from the blocks without owners")
