"""A stand-in for the ops: rows that carry the label of their token, written and read by the rules alone."""

import torch

from dsv4.config import ModelConfig

WINDOW = 16
CSA_LAYER, HCA_LAYER = 0, 1
CONFIG = ModelConfig.tiny(
    num_hidden_layers=2, compress_ratios=(4, 128), sliding_window=WINDOW, num_nextn_predict_layers=0, num_hash_layers=0
)


def tails(manager):
    """Each ring of tails with its ratio and the number of blocks an entry reads from it."""
    csa, hca = manager.handle(CSA_LAYER), manager.handle(HCA_LAYER)
    return [
        (csa.compressor.own, 4, 1),
        (csa.compressor.following, 4, 2),
        (csa.index_compressor.own, 4, 1),
        (csa.index_compressor.following, 4, 2),
        (hca.compressor.own, 128, 1),
    ]


def paged(manager):
    csa, hca = manager.handle(CSA_LAYER), manager.handle(HCA_LAYER)
    return [(csa.entries, 4), (csa.index_keys, 4), (hca.entries, 128)]


def write_rows(manager, slot, labels, num_new):
    """What a forward call of the last `num_new` tokens writes, by the rules of the ring and of the table."""
    end = len(labels)
    all_labels = torch.tensor(labels, dtype=torch.float64)
    positions = torch.arange(end - num_new, end)
    for layer_idx in (CSA_LAYER, HCA_LAYER):
        window = manager.handle(layer_idx).window
        recent = positions[-window.ring_len :]
        window.positions[slot, recent % window.ring_len] = recent.int()
        window.rows.data[slot, recent % window.ring_len, 0] = all_labels[recent]
        window.rows.data[slot, recent % window.ring_len, 1] = all_labels[recent] + layer_idx
    for tail, _, _ in tails(manager):
        recent = positions[-tail.ring_len :]
        tail.kv[slot, recent % tail.ring_len, 0] = all_labels[recent]
        tail.score[slot, recent % tail.ring_len, 0] = -all_labels[recent]
    for view, ratio in paged(manager):
        entries = torch.arange((end - num_new) // ratio, end // ratio)
        blocks = manager.block_table[slot, entries // view.entries_per_block].long()
        assert (blocks >= 0).all()  # allocated before the forward call
        view.rows.data[blocks, entries % view.entries_per_block, 0] = all_labels[entries * ratio + ratio - 1]


def check_rows(manager, slot, labels):
    """What the request's next token reads."""
    end = len(labels)
    all_labels = torch.tensor(labels, dtype=torch.float64)
    for layer_idx in (CSA_LAYER, HCA_LAYER):
        window = manager.handle(layer_idx).window
        read = torch.arange(max(0, end - WINDOW + 1), end)
        assert torch.equal(window.positions[slot, read % window.ring_len].long(), read)
        assert torch.equal(window.rows.data[slot, read % window.ring_len, 0], all_labels[read])
        assert torch.equal(window.rows.data[slot, read % window.ring_len, 1], all_labels[read] + layer_idx)
    for tail, ratio, blocks_read in tails(manager):
        read = torch.arange(end // ratio * ratio - (blocks_read - 1) * ratio, end)
        absent, read = read[read < 0], read[read >= 0]
        assert torch.equal(tail.kv[slot, read % tail.ring_len, 0], all_labels[read])
        assert torch.equal(tail.score[slot, read % tail.ring_len, 0], -all_labels[read])
        # before the first block there is nothing, and it weighs nothing
        assert (tail.score[slot, absent % tail.ring_len] == float("-inf")).all()
        assert (tail.kv[slot, absent % tail.ring_len] == 0).all()
    for view, ratio in paged(manager):
        entries = torch.arange(end // ratio)
        blocks = manager.block_table[slot, entries // view.entries_per_block].long()
        stored = view.rows.data[blocks, entries % view.entries_per_block, 0]
        assert torch.equal(stored, all_labels[entries * ratio + ratio - 1])
