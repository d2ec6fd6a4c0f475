"""`expert_sort`: the oracle against a naive version, the kernel against the oracle, integer for integer."""

from dataclasses import fields

import pytest
import torch

from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.moe import expert_sort, expert_sort_ref, launch_expert_sort, max_tiles
from dsv4.testing.inputs import around, generator, kernel_device, strided
from dsv4.testing.numeric import assert_bitwise


def random_experts(tokens, top_k, num_experts, seed=0):
    return torch.randint(-1, num_experts, (tokens, top_k), generator=generator(seed)).to(kernel_device())


def assert_same(found, expected):
    for field in fields(expected):
        assert_bitwise(getattr(found, field.name), getattr(expected, field.name), field.name)


def naive(experts, num_experts, tile_rows):
    pairs, tiles, counts = [], [], []
    for expert in range(num_experts):
        own = [
            token * len(row) + place
            for token, row in enumerate(experts)
            for place, id_ in enumerate(row)
            if id_ == expert
        ]
        tiles += [(expert, len(pairs) + start) for start in range(0, len(own), tile_rows)]
        pairs += own
        counts.append(len(own))
    return counts, pairs, tiles


@pytest.mark.parametrize("tile_rows", [1, 4, 16])
def test_the_oracle_is_the_naive_version(tile_rows):
    experts = random_experts(40, 3, 7)
    order = expert_sort_ref(experts, 7, tile_rows)
    counts, pairs, tiles = naive(experts.tolist(), 7, tile_rows)
    assert order.counts.tolist() == counts
    assert order.offsets.tolist() == [sum(counts[:expert]) for expert in range(8)]
    assert order.pairs.tolist() == pairs + [-1] * (120 - len(pairs))
    unused = [-1] * (max_tiles(120, 7, tile_rows) - len(tiles))
    assert order.tile_experts.tolist() == [expert for expert, _ in tiles] + unused
    assert order.tile_starts.tolist() == [start for _, start in tiles] + unused


@pytest.mark.parametrize(("num_pairs", "num_experts", "tile_rows"), [(9, 4, 3), (3, 8, 16), (50, 5, 1), (64, 3, 16)])
def test_the_bound_of_tiles_is_reached_and_never_passed(num_pairs, num_experts, tile_rows):
    bound = max_tiles(num_pairs, num_experts, tile_rows)
    # one pair for every expert but one, the others in one expert
    met = min(num_pairs, num_experts)
    worst = torch.tensor([[*range(1, met)] + [0] * (num_pairs - met + 1)])
    assert (expert_sort_ref(worst, num_experts, tile_rows).tile_experts >= 0).sum() == bound
    for seed in range(20):
        experts = random_experts(num_pairs, 1, num_experts, seed).cpu()
        counts = torch.bincount(experts[experts >= 0], minlength=num_experts)
        assert ((counts + tile_rows - 1) // tile_rows).sum() <= bound


@pytest.mark.parametrize("tokens", [1, *around(21), *around(43)])  # chunks have 128 pairs
@pytest.mark.parametrize("count_first", [0, 2048], ids=["counted first", "one launch"])
def test_follows_the_oracle(tokens, count_first):
    experts = random_experts(tokens, 6, 40, seed=tokens)
    assert_same(launch_expert_sort(experts, 40, 4, count_first), expert_sort_ref(experts, 40, 4))


@pytest.mark.parametrize("expert", [0, 4, -1, 5, 1 << 40])
def test_all_pairs_alike(expert):
    experts = torch.full((12, 4), expert, device=kernel_device())
    for count_first in (0, 2048):
        assert_same(launch_expert_sort(experts, 5, 16, count_first), expert_sort_ref(experts, 5, 16))


def test_dtypes_strides_and_empty():
    experts = random_experts(20, 6, 30)
    expected = expert_sort_ref(experts, 30, 16)
    assert_same(expert_sort(experts.int(), 30, 16), expected)
    assert_same(expert_sort(strided(experts, 1), 30, 16), expected)
    assert_same(expert_sort(experts[:0], 30, 16), expert_sort_ref(experts[:0], 30, 16))


def test_padding_changes_nothing():
    experts = random_experts(10, 6, 30)
    padded = torch.cat((experts, torch.full_like(experts[:7], -1)))
    alone, together = expert_sort(experts, 30, 4), expert_sort(padded, 30, 4)
    assert_bitwise(together.counts, alone.counts)
    assert_bitwise(together.pairs[:60], alone.pairs)
    num_tiles = len(alone.tile_experts)
    assert_bitwise(together.tile_experts[:num_tiles], alone.tile_experts)
    assert (together.tile_experts[num_tiles:] == -1).all()


def test_rejects():
    experts = random_experts(3, 2, 4)
    for arguments, part in [
        ((experts.float(), 4, 4), "float32"),
        ((experts[0], 4, 4), r"\(2,\)"),
        ((experts, 0, 4), "found 0"),
    ]:
        with pytest.raises(KernelInputError, match=part):
            expert_sort(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [256, 384])
@pytest.mark.parametrize("tokens", [1, 64, 85, 86, 512, 4096])
def test_full_size(num_experts, tokens):
    experts = random_experts(tokens, 6, num_experts, seed=tokens)
    for tile_rows in (16, 64, 128):
        assert_same(expert_sort(experts, num_experts, tile_rows), expert_sort_ref(experts, num_experts, tile_rows))
