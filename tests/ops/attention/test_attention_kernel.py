"""Sparse attention kernels: near the oracle, which sees the dequantised cache; the same bits however a batch is put
together and however its keys are cut; nothing read that must not be.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    CHUNKS,
    COLUMNS,
    CSA,
    FREQS,
    HCA,
    RUNS,
    SPLIT,
    WHOLE,
    assert_follows_oracle,
    case_of,
    of_tokens,
    run,
)
from cache_cases import ENTRY, SMALL_ENTRY

from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import decode_rows, encode_rows
from dsv4.ops.attention import sparse_attention, sparse_attention_ref
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.rows import rope
from dsv4.testing.inputs import kernel_device, normal, poison, strided
from dsv4.testing.numeric import assert_bitwise


@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_follows_the_oracle_in_all_forms(chunks, ratio):
    case = case_of(chunks, ratio=ratio, padding=1)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found, "all tiles of a run in one program")
    assert_bitwise(run(case, COLUMNS), found, "by columns")


HARD = {
    "head dim 512 and two blocks of heads": lambda: case_of([(1, 300, 1)], fmt=ENTRY, heads=65),
    "a million tokens": lambda: case_of([(0, 1048575, 1)], k=64),
    "many entries without picks": lambda: case_of([(1, 128 * 130 - 1, 1)], ratio=HCA),
    # one key takes all, in any tile: what underflows must do so in all forms alike
    "sharp logits": lambda: case_of([(1, 400, 1)], scale=20.0),
    "window layers have no entries": lambda: case_of([(1, 200, 1), (0, 0, 1)]) | {"entries": None, "picks": None},
    **{f"window of {n}": lambda n=n: case_of([(1, 200, 2)]) | {"window_len": n} for n in (1, 63, 65)},
}


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_follow_the_oracle_in_all_forms(name):
    case = HARD[name]()
    found = assert_follows_oracle(case)
    for plan in (WHOLE, COLUMNS) if name not in ("a million tokens", "many entries without picks") else (WHOLE,):
        assert_bitwise(run(case, plan), found)


def test_a_draft_block_reads_one_window():
    """Every row as the last of its block, with all keys in the ring: what DSpark asks for. Rows of the batch itself,
    NaN here, are not read.
    """
    start, num = 200, 2
    window_len = 128 + num
    case = case_of([(1, start + num, num)], ring_len=window_len)
    places = torch.arange(start + num - window_len, start + num, device=kernel_device())
    at = torch.ones_like(places), places % window_len
    case["window"].rows[at] = encode_rows(normal((window_len, SMALL_ENTRY.dim), seed=9), SMALL_ENTRY)
    case["window"].positions[at] = places.to(torch.int32)
    poison(case["rows"].data)
    batch = case["batch"]
    last = torch.full_like(batch.positions, start + num - 1)
    shared = replace(batch, positions=last, chunk_starts=last + 1)
    case |= {"entries": None, "picks": None, "freqs": None, "window_len": window_len, "batch": shared}
    assert assert_follows_oracle(case).isfinite().all()
    seen = sparse_attention_ref(**case)
    case["window"].positions[1, places[0] % window_len] = -1
    assert not torch.equal(sparse_attention_ref(**case), seen), "the oldest key counts"


def test_nothing_picked_and_nothing_in_the_ring():
    """A request whose ring was lost sees its own row only; picks of -1 everywhere add nothing."""
    case = case_of([(1, 300, 1), (2, 301, 1)])
    case["picks"][:] = -1
    case["window"].positions[:] = -1
    found = run(case)
    fresh = decode_rows(case["rows"])
    assert_bitwise(run(case, WHOLE), found)
    assert_bitwise(run(case, COLUMNS), found)
    # with a sink of -inf one key is the whole average
    alone = run(case | {"sink": torch.full_like(case["sink"], float("-inf")), "freqs": None})
    assert_bitwise(alone, fresh.unsqueeze(1).expand_as(alone).contiguous())


@pytest.mark.parametrize("plan", [SPLIT, WHOLE, COLUMNS], ids=["split", "whole", "columns"])
def test_every_code_and_scale_is_decoded_exactly(plan):
    """A query that sees one row alone, with a sink of -inf, gives that row. Scales far outside what rows hold."""
    case = case_of([(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)], heads=1)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes[codes & 0x7F == 0x7F] = 0  # NaN comes from a scale
    case["rows"].data[:, :64] = codes.to(kernel_device())
    # around 2^7 the factor that undoes 2^-120 and the scale are together more than bf16 holds
    case["rows"].scales[:, 0] = torch.tensor([1, 134, 135, 245], dtype=torch.uint8, device=kernel_device())
    changed = {"q": torch.zeros_like(case["q"]), "sink": torch.full_like(case["sink"], float("-inf")), "freqs": None}
    assert_bitwise(run(case | changed, plan), decode_rows(case["rows"]).unsqueeze(1) + 0.0)  # a sum is never -0


@pytest.mark.parametrize("plan", [SPLIT, WHOLE, COLUMNS], ids=["split", "whole", "columns"])
def test_infinite_sinks(plan):
    case = case_of([(1, 300, 1)], padding=1)
    case["sink"][0], case["sink"][1] = float("inf"), float("-inf")
    found = assert_follows_oracle(case, plan)
    assert not found[:, 0].any()
    assert found[0, 1].any()


def test_a_nan_that_is_read_is_seen():
    """The other tests mean something: a poisoned row that is picked comes out."""
    case = case_of([(1, 300, 1)])
    case["picks"][0, :] = -1
    case["batch"].block_table[1, 0] = case["entries"].rows.data.shape[0] - 1
    poison(case["entries"].rows.data)
    poison(case["entries"].rows.scales)
    case["picks"][0, 5] = 3
    for plan in (SPLIT, WHOLE, COLUMNS):
        assert run(case, plan).isnan().all()


def test_without_frequencies_the_rotation_is_left_to_rope():
    case = case_of([(1, 300, 1), (0, 7, 1)])
    for plan in (SPLIT, WHOLE, COLUMNS):
        unfused = rope(run(case | {"freqs": None}, plan), case["batch"].positions, FREQS, inverse=True)
        assert_bitwise(run(case, plan), unfused)


@pytest.mark.parametrize("ratio", [CSA, HCA])
def test_the_batch_does_not_matter(ratio):
    case = case_of([(1, 60, 2), (0, 400, 1), (3, 131, 1)], ratio=ratio)
    whole = run(case)
    order = torch.tensor([3, 2, 0, 1], device=kernel_device())
    assert_bitwise(run(of_tokens(case, order), WHOLE), whole[order], "another order")
    tokens = torch.tensor([2], device=kernel_device())
    assert_bitwise(run(of_tokens(case, tokens), WHOLE), whole[tokens], "fewer requests")
    batch = case["batch"]
    wide = torch.cat((batch.block_table, torch.full_like(batch.block_table, -1)), 1)
    assert_bitwise(run(case | {"batch": replace(batch, block_table=wide)}), whole, "a longer request beside these")


def test_strided_rings_and_pages():
    case = case_of([(1, 300, 1), (0, 7, 1)])
    window, pages = case["window"], case["entries"]
    views = case | {
        "window": replace(
            window,
            rows=replace(window.rows, data=strided(window.rows.data, 0), scales=strided(window.rows.scales, 1)),
            positions=strided(window.positions, 0),
        ),
        "entries": PagedView(
            replace(pages.rows, data=strided(pages.rows.data, 1), scales=strided(pages.rows.scales, 0))
        ),
        "sink": strided(case["sink"], 0),
    }
    assert_bitwise(run(views), run(case))


def test_what_cannot_be_done_is_said():
    case = case_of([(1, 3, 2)])
    with pytest.raises(KernelInputError, match=r"expected q \[2, heads, 128\] in bf16 .* found torch.float32"):
        run(case | {"q": case["q"].float()})
    with pytest.raises(KernelInputError, match="expected 2 rows of"):
        run(case | {"rows": case["rows"][(torch.zeros(1, dtype=torch.int64, device=kernel_device()),)]})
    with pytest.raises(KernelInputError, match=r"expected a sink of shape \(3,\)"):
        run(case | {"sink": case["sink"][:2]})
    with pytest.raises(KernelInputError, match=r"expected entries and picks \[2, k\]"):
        run(case | {"picks": case["picks"][:1]})
    with pytest.raises(KernelInputError, match="expected fp32 frequencies of 64 dims"):
        run(case | {"freqs": FREQS[:16]})


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("ratio", [CSA, HCA])
def test_real_sizes(heads, ratio):
    chunks = (
        [(0, 40000, 1), (1, 9000, 8), (2, 3000, 150), (3, 0, 30)]
        if ratio == CSA
        else [(0, 1048574, 2), (1, 300000, 2), (2, 3000, 40), (3, 128 * 1025 - 2, 2)]
    )
    case = case_of(chunks, ratio=ratio, k=512, fmt=ENTRY, heads=heads, padding=3)
    found = assert_follows_oracle(case, WHOLE)
    assert_bitwise(run(case, SPLIT), found, "split")
    assert_bitwise(run(case, RUNS), found, "a program a run")
    assert_bitwise(run(case, RUNS._replace(max_states=256)), found, "in ranges of tokens")
    if ratio == CSA:
        assert_bitwise(run(case, COLUMNS), found, "by columns")
    assert_bitwise(sparse_attention(**case), found, "as launched")
