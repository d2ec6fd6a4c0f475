"""`index_topk` against its oracle, and what must not change a score or a pick.

Exact data (small integers, weights of few bits) makes every score exact in fp32 whatever the order of the sum: picks
are then the oracle's, index for index, ties included. On other data scores are held to the policy of float ops, and
picks to the scores the kernel itself found.
"""

from dataclasses import replace

import pytest
import torch
from cache_cases import BLOCKS_PER_SLOT, CSA, INDEX_FP4, INDEX_FP8, NUM_BLOCKS, batch_of

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.indexer import (
    SCORE_CONFIG,
    ScoreConfig,
    entry_rows,
    entry_scores,
    index_scores,
    index_topk,
    index_topk_ref,
    launch_index_topk,
    num_visible,
    row_bytes,
    turned_queries,
)
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.rows import Turn, rope_frequencies
from dsv4.ops.select import TOPK_CONFIG, TopkConfig, topk_select_ref
from dsv4.testing.inputs import generator, kernel_device, normal, poison, strided
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

FORMATS = pytest.mark.parametrize("fmt", [INDEX_FP4, INDEX_FP8], ids=lambda fmt: fmt.kind.value)
FREQS = rope_frequencies(64, 160000.0, None).to(kernel_device())
HEADS, PER_BLOCK = 4, 32
GROUPS = ScoreConfig(few_tokens=0, shares=1, group_tile=128)
LONE = TopkConfig(long_row=64, lone_rows=132, lone_keys=64, max_lone_keys=256, long_programs=2, long_warps=2)
SHARED = replace(LONE, lone_rows=0, long_keys=64, long_tile=64)
ALONE = replace(SHARED, short_row=64, long_programs=1)
CHUNKS = {
    "decode": [(2, 400, 1), (0, 1535, 1), (3, 3, 1), (1, 0, 1)],
    "chunks": [(1, 500, 3), (2, 78, 5), (0, 1022, 2)],
}


def positions_of(num_tokens, factor=37):
    return torch.arange(num_tokens, device=kernel_device()) * factor


def pages_of(values, batch, fmt):
    """Keys whose entries [slot, e] are `values`, where some token of the batch sees them; NaN everywhere else."""
    data = torch.full((NUM_BLOCKS, PER_BLOCK, fmt.data_bytes), 0xFF, dtype=torch.uint8, device=kernel_device())
    scales = torch.full((NUM_BLOCKS, PER_BLOCK, fmt.scale_bytes), 0xFF, dtype=torch.uint8, device=kernel_device())
    rows = RowStore(data, scales, fmt)
    encoded = encode_rows(values, fmt)
    for slot, position in zip(batch.slots.tolist(), batch.positions.tolist(), strict=True):
        entries = torch.arange((position + 1) // CSA if slot >= 0 else 0, device=kernel_device())
        blocks = batch.block_table[slot, entries // PER_BLOCK].long()
        rows[blocks, entries % PER_BLOCK] = encoded[torch.full_like(entries, slot), entries]
    return PagedView(rows)


def exact_case(chunks, fmt, *, heads=HEADS, padding=2, seed=0):
    """q, weights, keys and batch of few significant bits, with many equal scores."""
    batch = batch_of(chunks, padding=padding)
    source = generator(seed)
    values = torch.randint(-2, 3, (4, BLOCKS_PER_SLOT * PER_BLOCK, 128), generator=source).bfloat16()
    values[..., 0] = 3.0  # every group has the same scale
    values[..., ::32] = 3.0
    q = torch.randint(-3, 4, (batch.num_tokens, heads, 128), generator=source).bfloat16()
    weights = torch.randint(-4, 5, (batch.num_tokens, heads), generator=source) / 8
    keys = pages_of(values.to(kernel_device()), batch, fmt)
    q, weights = q.to(kernel_device()), weights.to(kernel_device())
    if padding:
        poison(q[-padding:]), poison(weights[-padding:])
    return q, weights, keys, batch


def random_case(chunks, fmt, *, heads, seed=0):
    batch = batch_of(chunks)
    keys = pages_of(normal((4, BLOCKS_PER_SLOT * PER_BLOCK, 128), seed=seed), batch, fmt)
    q = turned_queries(normal((batch.num_tokens, heads, 128), seed=seed + 1), Turn.of(batch.positions, FREQS), fmt)
    return q, normal((batch.num_tokens, heads), torch.float32, seed + 2), keys, batch


def scores_of(q, weights, keys, batch, config=SCORE_CONFIG, top_k=1):
    """Scores with everything a token does not see set to -inf."""
    scores, lengths = index_scores(q, weights, keys, batch, slice(None), CSA, top_k, config)
    hidden = torch.arange(scores.shape[1], device=scores.device) >= lengths.unsqueeze(-1)
    return scores.masked_fill(hidden, float("-inf"))


def part_of(batch, order):
    names = ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")
    return TokenBatch(**{name: getattr(batch, name)[order] for name in names}, block_table=batch.block_table)


# ---- picks ----


@FORMATS
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("topk_config", [TOPK_CONFIG, LONE, SHARED], ids=["short", "lone", "shared"])
def test_picks_are_the_oracle_s(fmt, chunks, topk_config):
    q, weights, keys, batch = exact_case(chunks, fmt)
    found = launch_index_topk(q, weights, keys, batch, CSA, 20, SCORE_CONFIG, topk_config)
    assert_bitwise(found, index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=20))
    assert (found[-2:] == -1).all()


@pytest.mark.parametrize("top_k", [99, 100, 101])
def test_as_many_picks_as_entries(top_k):
    """The token at 400 sees 100 entries, those at 399 and 403 see 100 and 101."""
    q, weights, keys, batch = exact_case([(2, 399, 5)], INDEX_FP4)
    found = index_topk(q, weights, keys, batch, ratio=CSA, top_k=top_k)
    assert_bitwise(found, index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=top_k))


def test_the_comparison_sees_a_wrong_limit():
    q, weights, keys, batch = exact_case([(2, 403, 1)], INDEX_FP4)
    expected = index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=100)
    early = replace(batch, positions=batch.positions - CSA)
    assert (index_topk(q, weights, keys, early, ratio=CSA, top_k=100) != expected).any()


@pytest.mark.parametrize("topk_config", [SHARED, ALONE], ids=["shared", "alone"])
def test_how_the_work_is_divided_does_not_matter(topk_config):
    """A workspace of one token and of several, groups of all tokens, of two and of one, few programs."""
    q, weights, keys, batch = exact_case(CHUNKS["chunks"], INDEX_FP4)
    expected = index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=20)
    for config, workspace in [
        (SCORE_CONFIG, 1),
        (replace(GROUPS, multiprocessors=1, group_programs=2), 1 << 20),
        (replace(GROUPS, max_group=1), 3 * row_bytes(BLOCKS_PER_SLOT * PER_BLOCK)),
        (replace(GROUPS, max_group=2, group_tile=64), 5 * row_bytes(BLOCKS_PER_SLOT * PER_BLOCK)),
        (ScoreConfig(tile=64, multiprocessors=2, programs=1), 1 << 20),
    ]:
        found = launch_index_topk(q, weights, keys, batch, CSA, 20, config, topk_config, workspace)
        assert_bitwise(found, expected)


def test_a_key_of_nan_is_not_picked():
    q, weights, keys, batch = exact_case([(1, 300, 2)], INDEX_FP4, padding=0)
    bad = [3, 40, 74]
    for entry in bad:
        poison(keys.rows.scales[batch.block_table[1, entry // PER_BLOCK], entry % PER_BLOCK])
    found = index_topk(q, weights, keys, batch, ratio=CSA, top_k=70)
    assert_bitwise(found, index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=70))
    assert not torch.isin(found, torch.tensor(bad, device=found.device)).any()


# ---- scores ----


@FORMATS
@pytest.mark.parametrize("heads", [1, 5, 64])
def test_scores_are_close_to_the_oracle(fmt, heads):
    q, weights, keys, batch = random_case([(1, 1000, 2)], fmt, heads=heads)
    num_entries = int(num_visible(batch.positions, CSA).min())
    found = scores_of(q, weights, keys, batch)[:, :num_entries]

    def oracle(dtype):
        values = decode_rows(entry_rows(keys, batch, 1, torch.arange(num_entries, device=q.device)))
        return entry_scores(q.to(dtype), weights.to(dtype), values)

    assert_close_to_oracle(found, oracle)


def test_every_scale_a_key_commonly_has():
    """A power of two on all of a key is one on its score, bit for bit, from 2^-60 to 2^60; a scale of 2^65 is NaN."""
    q, weights, keys, batch = random_case([(1, 127, 1)], INDEX_FP4, heads=16)
    expected = scores_of(q, weights, keys, batch)[:, :32]
    codes = keys.rows.scales[batch.block_table[1, 0]]
    for shift in (-60, -1, 60):
        codes += shift
        found = scores_of(q, weights, keys, batch)[:, :32]
        assert_bitwise(found, expected * 2.0**shift)
        codes -= shift
    codes[5, 2] = 127 + 65
    found = scores_of(q, weights, keys, batch)[:, :32]
    assert found[0, 5].isnan()
    found[0, 5] = expected[0, 5]
    assert_bitwise(found, expected)


def test_dimensions_stay_apart():
    """One dimension of the query and one of the key, each pair of a few: the same dimension or nothing."""
    q, weights, keys, batch = exact_case([(1, 511, 1)], INDEX_FP4, heads=16, padding=0)
    values = torch.zeros(4, BLOCKS_PER_SLOT * PER_BLOCK, 128, dtype=torch.bfloat16)
    values[:, torch.arange(128), torch.arange(128)] = 4.0
    dims = torch.tensor([0, 1, 7, 8, 31, 32, 63, 64, 77, 96, 100, 119, 120, 125, 126, 127])
    q = torch.zeros(1, 16, 128, dtype=torch.bfloat16)
    q[0, torch.arange(16), dims] = 2.0
    weights = torch.arange(1.0, 17.0).unsqueeze(0)
    expected = torch.zeros(1, 128)
    expected[0, dims] = 8.0 * weights[0]
    for fmt in (INDEX_FP4, INDEX_FP8):
        keys = pages_of(values.to(kernel_device()), batch, fmt)
        for config in (SCORE_CONFIG, GROUPS):
            found = scores_of(q.to(kernel_device()), weights.to(kernel_device()), keys, batch, config)[:, :128]
            assert_bitwise(found, expected.to(kernel_device()))


@FORMATS
@pytest.mark.parametrize("config", [SCORE_CONFIG, GROUPS], ids=["tokens", "groups"])
def test_a_scale_of_the_weights_is_rounded_once(fmt, config):
    """Weights as they are projected, in bf16, are scaled where they are read; not before, and not the scores."""
    q, weights, keys, batch = random_case([(1, 1000, 2)], fmt, heads=5)
    weights, scale = weights.bfloat16(), 128**-0.5 * 64**-0.5
    args = keys, batch, slice(None), CSA, 1, config
    found, lengths = index_scores(q, weights, *args, scale)
    seen = slice(0, int(lengths.min()))
    assert_bitwise(found[:, seen], index_scores(q, weights.float() * scale, *args)[0][:, seen])
    assert not torch.equal(found[:, seen], index_scores(q, (weights * scale), *args)[0][:, seen])
    picks = launch_index_topk(q, weights, keys, batch, CSA, 20, config, TOPK_CONFIG, scale=scale)
    assert_bitwise(picks, launch_index_topk(q, weights.float() * scale, keys, batch, CSA, 20, config, TOPK_CONFIG))
    negative = index_topk_ref(q, weights, keys, batch, ratio=CSA, top_k=20, scale=-scale)
    assert_bitwise(negative, index_topk_ref(q, -weights.float() * scale, keys, batch, ratio=CSA, top_k=20))
    assert not torch.equal(negative, picks)


@pytest.mark.parametrize("topk_config", [TOPK_CONFIG, LONE, SHARED], ids=["short", "lone", "shared"])
def test_picks_are_the_best_of_the_scores(topk_config):
    q, weights, keys, batch = random_case([(1, 1000, 2), (0, 400, 1)], INDEX_FP4, heads=64)
    scores = scores_of(q, weights, keys, batch)
    found = launch_index_topk(q, weights, keys, batch, CSA, 33, SCORE_CONFIG, topk_config)
    assert_bitwise(found, topk_select_ref(scores, 33, ascending=True))


@FORMATS
def test_a_score_does_not_depend_on_the_batch(fmt):
    q, weights, keys, batch = random_case([(1, 1000, 3), (2, 300, 2)], fmt, heads=16)
    whole = scores_of(q, weights, keys, batch)
    assert_bitwise(scores_of(q, weights, keys, batch, GROUPS), whole, "in groups")
    for order in (torch.tensor([3, 4, 0, 1, 2]), torch.tensor([1]), torch.tensor([4])):
        order = order.to(q.device)
        assert_bitwise(scores_of(q[order], weights[order], keys, part_of(batch, order)), whole[order])


# ---- edges ----


def test_nothing_to_do():
    q, weights, keys, batch = exact_case([(1, 40, 2)], INDEX_FP4)
    no_blocks = replace(batch, block_table=batch.block_table[:, :0])
    assert (index_topk(q, weights, keys, no_blocks, ratio=CSA, top_k=8) == -1).all()
    assert index_topk(q, weights, keys, batch, ratio=CSA, top_k=0).shape == (4, 0)


def test_strides():
    q, weights, keys, batch = exact_case([(1, 300, 3)], INDEX_FP8)
    expected = index_topk(q, weights, keys, batch, ratio=CSA, top_k=8)
    rows = replace(keys.rows, data=strided(keys.rows.data, 0), scales=strided(keys.rows.scales, 0))
    wide = replace(batch, block_table=strided(batch.block_table, 0))
    assert_bitwise(index_topk(q, weights, PagedView(rows), wide, ratio=CSA, top_k=8), expected)


def test_what_cannot_be_done_is_said():
    q, weights, keys, batch = exact_case([(1, 40, 2)], INDEX_FP4)
    with pytest.raises(KernelInputError, match=r"expected bf16 q \[4, Hi, 128\], found torch.float32"):
        index_topk(q.float(), weights, keys, batch, ratio=CSA, top_k=8)
    with pytest.raises(KernelInputError, match=r"expected weights \(4, 4\) in one of .*, found torch.float64"):
        index_topk(q, weights.double(), keys, batch, ratio=CSA, top_k=8)
    with pytest.raises(KernelInputError, match="expected top_k up to 1024"):
        index_topk(q, weights, keys, batch, ratio=CSA, top_k=1025)
    plain = RowFormat(RowKind.PLAIN, 128, itemsize=2)
    rows = RowStore.allocate((3, PER_BLOCK), plain, torch.bfloat16, kernel_device())
    with pytest.raises(KernelInputError, match="found plain"):
        index_topk(q, weights, PagedView(rows), batch, ratio=CSA, top_k=8)


# ---- real sizes ----


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize(("num_tokens", "context"), [(1, 262144), (3, 65536), (300, 65537), (1400, 65536), (40, 2100)])
def test_real_sizes(fmt, num_tokens, context):
    """64 heads, 512 picks: the picks are the best of the kernel's scores, and a token alone has the same scores. 1,400
    tokens at 65,536 take the workspace twice.
    """
    device, num_blocks = kernel_device(), -(-context // 128)
    table = torch.randperm(num_blocks, generator=generator(1)).to(torch.int32).to(device).unsqueeze(0)
    positions = torch.arange(context - num_tokens, context, device=device)
    slots = torch.zeros_like(positions)
    batch = TokenBatch(slots, positions, slots, positions, positions + 1, table)
    keys = PagedView(encode_rows(normal((num_blocks, PER_BLOCK, 128), seed=2), fmt))
    q = turned_queries(normal((num_tokens, 64, 128), seed=3), Turn.of(positions, FREQS), fmt)
    weights = normal((num_tokens, 64), torch.float32, 4)
    found = index_topk(q, weights, keys, batch, ratio=CSA, top_k=512)
    scores = scores_of(q, weights, keys, batch, top_k=512)
    is_scored = num_visible(positions, CSA) > 512
    assert_bitwise(found[is_scored], topk_select_ref(scores[is_scored], 512, ascending=True))
    few = found[~is_scored]
    assert (few.amax(-1) + 1 == num_visible(positions, CSA)[~is_scored]).all()
    for token in {0, num_tokens - 1}:
        one = torch.tensor([token], device=device)
        alone = scores_of(q[one], weights[one], keys, part_of(batch, one), top_k=512)
        assert_bitwise(alone, scores[one])


def test_programs_follow_the_number_of_multiprocessors():
    """One token of 262,144 entries, and 32 groups of tokens: as many programs as the GPU at hand runs at once."""
    for multiprocessors in (66, 132, 264):
        config = replace(SCORE_CONFIG, multiprocessors=multiprocessors)
        assert 0.9 < config.grid(1, 1 << 18)[0] / (4 * multiprocessors) <= 1.0, "a wave that is nearly full"
        assert config.grid(2048, 1 << 18) == (-(-8 * multiprocessors // 32), 32)
