"""What makes room goes in the order of last use: snapshots and idle blocks on the device, segments below it."""

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.tree import ChainKeys, PrefixTree
from dsv4.cache.tiers.segments import Segment, SegmentTree


def tree_of_three():
    """Three prefixes with a snapshot at their ends, left in the order 0, 1, 2; then 0 was of use again. Neither the
    longest nor the shortest first is the order of their last use."""
    allocator = BlockAllocator(8)
    tree = PrefixTree(allocator, num_snapshots=3)
    nodes = []
    for slot, num_blocks in enumerate((2, 3, 1)):
        path = tree.enter(slot, ChainKeys([slot] * 128 * num_blocks, None).first(num_blocks), None)
        blocks = allocator.acquire(num_blocks)
        for node, block in zip(path, blocks, strict=True):
            tree.keep_block(slot, node, block)
        tree.own_snapshot(path[-1], tree.take_snapshot(), is_rolling=False)
        tree.leave(slot, path)
        allocator.release(blocks)
        nodes.append(path[-1])
    tree.touch(nodes[0])
    tree.check_integrity(0)
    return allocator, tree, nodes


def test_blocks_of_the_least_recently_used_prefix_go_first():
    allocator, tree, nodes = tree_of_three()
    for expected in (1, 2, 0):
        tree.make_room(allocator.num_free + 1)
        assert nodes[expected].block is None
        tree.check_integrity(0)
        nodes[expected] = None
        assert all(node is None or node.block is not None for node in nodes)
    assert tree.num_idle_blocks == 0


def test_the_least_recently_used_snapshot_is_taken():
    _, tree, nodes = tree_of_three()
    taken = [tree.take_snapshot()]
    assert [node.snapshot is None for node in nodes] == [False, True, False]
    taken.append(tree.take_snapshot())
    assert [node.snapshot is None for node in nodes] == [False, True, True]
    tree.check_integrity(len(taken))


def test_the_least_recently_used_segment_goes_first():
    tree = SegmentTree(max_bytes=30)
    segments = [Segment(bytes([key]), None, end=1, num_bytes=10) for key in range(3)]
    for segment in segments:
        tree.add(segment)
    tree.touch(segments[0])
    assert tree.evict_for(5, None) == [segments[1]]
    assert tree.evict_for(15, keep=segments[2]) == [segments[0]]
    tree.check_integrity()
