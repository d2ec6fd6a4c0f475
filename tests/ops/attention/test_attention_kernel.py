"""Sparse attention kernels: near the oracle, which sees the dequantised cache; the same bits however a batch is put
together and however its keys are cut; nothing read that must not be.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import ENTRY, SMALL_ENTRY, batch_of

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.attention import PLAN, AttentionPlan, launch, launch_attention, sparse_attention, sparse_attention_ref
from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, IN_TURN, RUN
from dsv4.ops.attention.kernel_attend import WHOLE as ONE_RUN
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.rows import rope, rope_frequencies
from dsv4.testing.inputs import generator, kernel_device, normal, padded_rows, poison, strided
from dsv4.testing.numeric import assert_bitwise, assert_close_to_oracle

CSA, HCA = 4, 128
FREQS = rope_frequencies(64, 10000.0, None).to(kernel_device())
SHORT_RUN = 3  # two tiles of the window and one of 64 entries


def always(cut):
    return type("Always", (AttentionPlan,), {"cut": lambda self, *counts: cut})()


SPLIT, RUNS, TURNS, COLUMNS = always(BY_TILE), always(BY_RUN), always(IN_TURN), always(BY_COLUMNS)


class WithoutParts(AttentionPlan):
    """A program takes a query, of however many runs."""

    def cut(self, num_programs, num_tiles, run_tiles):
        return IN_TURN if num_tiles > run_tiles else ONE_RUN


WHOLE = WithoutParts()


def poisoned(leading, fmt):
    """Every byte 0xFF: codes, rope values and scales are all NaN."""
    rows = RowStore.allocate(leading, fmt, torch.bfloat16, kernel_device())
    poison(rows.data)
    poison(rows.scales)
    return rows


def picks_of(visible, k, source):
    """The newest entry and others, ascending, with holes; and two to be ignored: not visible yet, out of the table."""
    num = min(visible, k - 5)
    chosen = torch.randperm(visible, generator=source)[:num].sort().values
    if num:
        chosen[-1] = visible - 1
    picks = torch.full((k,), -1, dtype=torch.int64)
    places = torch.randperm(k, generator=source)
    picks[places[:num].sort().values] = chosen
    picks[places[num]], picks[places[num + 1]] = visible, 1 << 30
    return picks


def case_of(chunks, *, ratio=CSA, k=70, fmt=SMALL_ENTRY, heads=3, padding=0, ring_len=150, seed=0, scale=1.0):
    """Arguments of `sparse_attention`. Only what a query may see is finite, in the ring and in the pages; blocks are
    shuffled, and there are only those somebody reads.
    """
    source, num_slots, per_block = generator(seed), 4, 128 // ratio
    batch = batch_of(chunks, padding=padding)
    window = WindowView(
        poisoned((num_slots, ring_len), fmt),
        torch.full((num_slots, ring_len), -1, dtype=torch.int32, device=kernel_device()),
    )
    table = torch.full((num_slots, max([(s + n) // 128 for _, s, n in chunks], default=0) + 1), -1, dtype=torch.int32)
    picks = torch.full((batch.num_tokens, k), 0, dtype=torch.int64)  # of padding too
    token, seen = 0, []
    for slot, start, num in chunks:
        for position in range(max(0, start - ring_len), start):
            at = torch.tensor([slot]), torch.tensor([position % ring_len])
            window.positions[at[0], at[1]] = position  # rows older than the window are there, and are NaN
            if position > start - 128:
                values = torch.randn(1, fmt.dim, generator=source).to(torch.bfloat16)
                window.rows[tuple(i.to(kernel_device()) for i in at)] = encode_rows(values.to(kernel_device()), fmt)
        for position in range(start, start + num):
            visible = (position + 1) // ratio
            picks[token] = picks_of(visible, k, source)
            chosen = picks[token][(picks[token] >= 0) & (picks[token] < visible)].tolist()
            seen += [(slot, entry) for entry in (chosen if ratio == CSA else range(visible))]
            token += 1
    needed = sorted({(slot, entry // per_block) for slot, entry in seen})
    order = torch.randperm(len(needed) + 3, generator=source)
    pages = PagedView(poisoned((len(needed) + 3, per_block), fmt))
    for (slot, block), physical in zip(needed, order.tolist(), strict=False):
        table[slot, block] = physical
    if seen:
        slots, ids = (torch.tensor(column) for column in zip(*sorted(set(seen)), strict=True))
        values = torch.randn(len(ids), fmt.dim, generator=source).to(torch.bfloat16).to(kernel_device())
        at = table[slots, ids // per_block].long(), ids % per_block
        pages.rows[tuple(i.to(kernel_device()) for i in at)] = encode_rows(values, fmt)
    rows = encode_rows(normal((batch.num_tokens, fmt.dim), seed=seed + 1), fmt)
    q = scale * normal((batch.num_tokens, heads, fmt.dim), seed=seed + 2)
    if padding:
        poison(rows.data[-padding:])
        poison(q[-padding:])
    return {
        "q": q,
        "rows": rows,
        "window": window,
        "entries": pages,
        "picks": picks.to(kernel_device()) if ratio == CSA else None,
        "sink": normal((heads,), torch.float32, seed=seed + 3),
        "batch": replace(batch, block_table=table.to(kernel_device())),
        "window_len": 128,
        "freqs": FREQS,
    }


def run(case, plan=SPLIT, run_tiles=RUN):
    return launch_attention(plan, **case, run_tiles=run_tiles)


def plain(rows, dtype):
    """Decoded rows as plain ones; NaN rows stay NaN."""
    values = decode_rows(rows).to(dtype)
    return RowStore(values, None, RowFormat(RowKind.PLAIN, values.shape[-1], itemsize=dtype.itemsize))


def assert_follows_oracle(case, plan=SPLIT, run_tiles=RUN):
    """Against the oracle on the dequantised cache, which for bf16 are the values it sees anyway."""
    real = case["batch"].slots >= 0
    found = run(case, plan, run_tiles)

    def oracle(dtype):
        changed = {name: case[name] for name in ("picks", "batch", "window_len", "freqs")} | {
            "q": case["q"].to(dtype),
            "sink": case["sink"].to(torch.promote_types(dtype, torch.float32)),
            "rows": plain(case["rows"], dtype),
            "window": replace(case["window"], rows=plain(case["window"].rows, dtype)),
            "entries": None if case["entries"] is None else PagedView(plain(case["entries"].rows, dtype)),
        }
        return sparse_attention_ref(**changed)[real]

    assert_close_to_oracle(found[real], oracle)
    assert not found[~real].any(), "a padded row gives zeros"
    return found


CHUNKS = {
    "decode, ring wraps": [(2, 300, 1), (0, 5, 1)],
    "first tokens": [(1, 0, 3)],
    "drafts across a boundary of 4": [(0, 254, 3)],
    "across 128": [(3, 126, 3)],
    "a chunk beside decoding": [(1, 60, 3), (0, 400, 1)],
}


@pytest.mark.parametrize("ratio", [CSA, HCA])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_follows_the_oracle_in_all_forms(chunks, ratio):
    case = case_of(chunks, ratio=ratio, padding=1)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found, "all tiles in one program")
    assert_bitwise(run(case, COLUMNS), found, "by columns")


def test_head_dim_512_and_two_blocks_of_heads():
    case = case_of([(1, 300, 1)], fmt=ENTRY, heads=65)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found)
    assert_bitwise(run(case, COLUMNS), found)


def test_a_million_tokens():
    case = case_of([(0, 1048575, 1)], k=64)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found)


def test_many_entries_without_picks():
    case = case_of([(1, 128 * 130 - 1, 1)], ratio=HCA)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found)


def test_sharp_logits():
    """One key takes all, in any tile: what underflows must do so in all forms alike."""
    case = case_of([(1, 400, 1)], scale=20.0)
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found)
    assert_bitwise(run(case, COLUMNS), found)


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


def test_window_layers_have_no_entries():
    case = case_of([(1, 200, 1), (0, 0, 1)]) | {"entries": None, "picks": None}
    found = assert_follows_oracle(case)
    assert_bitwise(run(case, WHOLE), found)
    assert_bitwise(run(case, COLUMNS), found)


@pytest.mark.parametrize("window_len", [1, 63, 65])
def test_other_windows(window_len):
    case = case_of([(1, 200, 2)]) | {"window_len": window_len}
    assert_bitwise(run(case, COLUMNS), assert_follows_oracle(case))


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


def of_tokens(case, tokens):
    """The same queries in another batch. Requests stay whole."""
    batch = case["batch"]
    fields = {n: getattr(batch, n)[tokens] for n in ("token_ids", "positions", "slots", "chunk_starts", "chunk_ends")}
    return case | {
        "q": case["q"][tokens],
        "rows": case["rows"][(tokens,)],
        "picks": None if case["picks"] is None else case["picks"][tokens],
        "batch": replace(batch, **fields),
    }


@pytest.mark.parametrize("ratio", [CSA, HCA])
def test_the_batch_does_not_matter(ratio):
    case = case_of([(1, 60, 2), (0, 400, 1), (3, 131, 1)], ratio=ratio)
    whole = run(case)
    order = torch.tensor([3, 2, 0, 1], device=kernel_device())
    assert_bitwise(run(of_tokens(case, order), WHOLE), whole[order], "another order")
    tokens = torch.tensor([2], device=kernel_device())
    assert_bitwise(run(of_tokens(case, tokens), WHOLE), whole[tokens], "fewer requests")
    # a wider table, as for a longer request beside these, and padding
    batch = case["batch"]
    wide = torch.cat((batch.block_table, torch.full_like(batch.block_table, -1)), 1)
    longer = {
        n: torch.cat((getattr(batch, n), getattr(batch, n)[:2])) for n in ("token_ids", "positions", "chunk_starts")
    }
    padded = case | {
        "q": padded_rows(case["q"], 2),
        "rows": case["rows"][(torch.tensor([0, 1, 2, 3, 0, 0], device=kernel_device()),)],
        "picks": None if case["picks"] is None else torch.cat((case["picks"], case["picks"][:2])),
        "batch": TokenBatch(
            longer["token_ids"], longer["positions"], torch.cat((batch.slots, batch.slots[:2] * 0 - 1)),
            longer["chunk_starts"], torch.cat((batch.chunk_ends, batch.chunk_ends[:2])), wide,
        ),
    }  # fmt: skip
    assert_bitwise(run(padded)[:4], whole, "padding")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What is allocated and not written is NaN: results and what parts store."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        found = empty(*args, **kwargs)
        poison(found)
        return found

    monkeypatch.setattr(torch, "empty", poisoned_empty)


def long_and_short():
    """Of runs of three tiles: three runs; one, then two with one key in the second; one of the window alone; between
    them padding.
    """
    case = case_of([(0, 128 * 320 - 1, 1), (2, 128 * 65 - 2, 2), (3, 5, 1)], ratio=HCA, padding=2)
    return of_tokens(case, torch.tensor([0, 4, 1, 2, 5, 3], device=kernel_device()))


@pytest.mark.usefixtures("poisoned_memory")
def test_runs_of_tiles():
    case = long_and_short()
    found = assert_follows_oracle(case, SPLIT, SHORT_RUN)
    assert_bitwise(run(case, RUNS, SHORT_RUN), found, "a program a run")
    for max_states in (18, 7, 1):
        # the second token of a request finds the row of the first in the range before
        in_turn = run(case, TURNS._replace(max_states=max_states), SHORT_RUN)
        assert_bitwise(in_turn, found, f"a program a query, {max_states // 3 or 1} at a time")


@pytest.mark.usefixtures("poisoned_memory")
def test_a_query_of_one_run_does_not_see_the_room_for_more():
    case = long_and_short()
    found = run(case, RUNS, SHORT_RUN)
    narrow = case | {"batch": replace(case["batch"], block_table=case["batch"].block_table[:, :64].contiguous())}
    for token in (2, 5):  # the last position that sees 64 entries, and so the last of one run; one that sees none
        alone = of_tokens(narrow, torch.tensor([token], device=kernel_device()))
        assert_bitwise(run(alone, WHOLE, SHORT_RUN), found[token : token + 1], "one program, one launch")


@pytest.mark.usefixtures("poisoned_memory")
def test_runs_of_picks_and_two_blocks_of_heads():
    case = case_of([(1, 2000, 1), (0, 7, 1)], k=150, heads=65, padding=1)
    found = assert_follows_oracle(case, RUNS, SHORT_RUN)
    assert_bitwise(run(case, SPLIT, SHORT_RUN), found)
    assert_bitwise(run(case, TURNS._replace(max_states=8), SHORT_RUN), found)


def only_rounding():
    """A query for which half of every output is a sum that cancels. What is left of it is rounding, and so it shows in
    which order things were added, which 16 bits of anything else would hide.
    """
    num_entries = 320
    case = case_of([(1, 128 * num_entries - 1, 1)], ratio=HCA)
    case["window"].positions[:] = -1
    case["q"][..., 64:] = 0.0
    case["rows"].data[:, 64:] = 0
    places = case["batch"].block_table[1, :num_entries].long()
    first, second = places[: num_entries // 2], places[num_entries // 2 :]
    data, scales = case["entries"].rows.data, case["entries"].rows.scales
    data[second] = data[first]
    data[second, :, 65::2] ^= 0x80  # signs of the rope values
    scales[second] = scales[first]
    return case | {"freqs": None}


@pytest.mark.usefixtures("poisoned_memory")
def test_columns_take_any_tiles_and_follow_no_address_that_nobody_stored():
    """Queries of two to seven tiles in a table with room for eight, padding first and last."""
    case = case_of([(0, 128 * 310, 1), (3, 128 * 40, 1), (1, 20, 1)], ratio=HCA, padding=2)
    case = of_tokens(case, torch.tensor([3, 0, 1, 2, 4], device=kernel_device()))
    found = run(case)
    for share in (1, 3, 8):
        plan = type("Shared", (type(COLUMNS),), {"share": lambda self, *counts, share=share: share})()
        assert_bitwise(run(case, plan), found, f"{share} tiles a program")


def test_columns_agree_where_only_rounding_is_left(monkeypatch):
    case = only_rounding()
    found = run(case, SPLIT)
    assert_bitwise(run(case, COLUMNS), found)

    class Swapped:
        """The sums of columns with two tiles exchanged. The first two alone would not show: a + b is b + a."""

        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(tiles, *args, **kwargs):
                order = torch.tensor([0, 1, 2, 5, 4, 3, 6], device=kernel_device())
                self.kernel[grid](type(tiles)(*(state[order].contiguous() for state in tiles)), *args, **kwargs)

            return launch

    monkeypatch.setattr(launch, "_values_kernel", Swapped(launch._values_kernel))
    assert not torch.equal(run(case, COLUMNS)[..., 64:], found[..., 64:]), "another order is other bits"


class Tampered:
    """The fold with something done to what it is given."""

    def __init__(self, kernel, change):
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            for state in args[0]:
                self.change(state)
            self.kernel[grid](*args, **kwargs)

        return launch


def test_cuts_agree_where_only_rounding_is_left(monkeypatch):
    case = only_rounding()
    found = run(case, SPLIT, SHORT_RUN)
    assert_bitwise(run(case, RUNS, SHORT_RUN), found)
    assert_bitwise(run(case, TURNS, SHORT_RUN), found)
    assert not torch.equal(run(case, SPLIT, 4)[..., 64:], found[..., 64:]), "other runs are other bits"

    def swap_runs(state):
        state[:3] = state[[2, 1, 0]]  # the first two alone would not show: a + b is b + a

    monkeypatch.setattr(launch, "_combine_kernel", Tampered(launch._combine_kernel, swap_runs))
    assert not torch.equal(run(case, RUNS, SHORT_RUN)[..., 64:], found[..., 64:]), "another order is other bits"


def test_a_lost_run_is_seen(monkeypatch):
    case = case_of([(1, 128 * 130 - 1, 1)], ratio=HCA)

    def lose_last_run(state):
        state[1] = -1.0e30 if state.dim() == 2 else 0.0

    assert_follows_oracle(case, RUNS, SHORT_RUN)
    monkeypatch.setattr(launch, "_combine_kernel", Tampered(launch._combine_kernel, lose_last_run))
    with pytest.raises(AssertionError):
        assert_follows_oracle(case, RUNS, SHORT_RUN)


def test_what_a_program_takes():
    """The fastest of what was measured. Tiles of a table with room for a million tokens: 2 + 128, 256K: 34. Pro has two
    blocks of heads and 18 tiles with picks, Flash has 10.
    """
    cuts = {num: PLAN.cut(num, 130, RUN) for num in (1, 4, 5, 8, 16, 32, 64, 110, 130, 200, 264, 8192)}
    assert [num for num, cut in cuts.items() if cut == BY_TILE] == [1, 4, 5]
    assert [num for num, cut in cuts.items() if cut == BY_RUN] == [8, 16, 32, 64, 200]
    assert [num for num, cut in cuts.items() if cut == IN_TURN] == [110, 130, 264, 8192]
    assert [PLAN.cut(num, 34, RUN) for num in (16, 64)] == [BY_TILE, BY_RUN]
    assert [PLAN.cut(num, 10, RUN) for num in (1, 8, 13)] == [BY_TILE] * 3
    assert [PLAN.cut(num, 10, RUN) for num in (16, 24, 32, 48, 64, 80, 160)] == [BY_COLUMNS] * 7
    assert [PLAN.cut(num, 10, RUN) for num in (96, 112, 128, 200, 256, 8192)] == [ONE_RUN] * 6
    assert [PLAN.cut(num, 18, RUN) for num in (2, 8, 16, 64, 128)] == [BY_TILE] * 2 + [BY_COLUMNS] * 2 + [ONE_RUN]
    assert [PLAN.share(num, 10) for num in (16, 32, 64, 80)] == [1, 2, 3, 4]
    assert PLAN._replace(max_states=127).cut(16, 130, RUN) == IN_TURN
    assert [PLAN.range_tokens(num) for num in (8, 16, 24, 4096, 9999)] == [528, 264, 176, 1, 1]


def test_strided_inputs():
    case = case_of([(1, 300, 1), (0, 7, 1)])
    rows, window, pages = case["rows"], case["window"], case["entries"]
    views = case | {
        "q": strided(case["q"], 0),
        "rows": replace(rows, data=strided(rows.data, 0), scales=strided(rows.scales, 0)),
        "window": replace(
            window,
            rows=replace(window.rows, data=strided(window.rows.data, 0), scales=strided(window.rows.scales, 1)),
            positions=strided(window.positions, 0),
        ),
        "entries": PagedView(
            replace(pages.rows, data=strided(pages.rows.data, 1), scales=strided(pages.rows.scales, 0))
        ),
        "picks": case["picks"].t().contiguous().t(),
        "sink": strided(case["sink"], 0),
    }
    assert_bitwise(run(views), run(case))


def test_no_tokens():
    case = of_tokens(case_of([(1, 3, 1)]), torch.zeros(0, dtype=torch.int64, device=kernel_device()))
    assert sparse_attention(**case).shape == (0, 3, 128)


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
    assert_bitwise(run(case, TURNS._replace(max_states=256)), found, "a program a query")
    if ratio == CSA:
        assert_bitwise(run(case, COLUMNS), found, "by columns")
    assert_bitwise(sparse_attention(**case), found, "as launched")
