"""Inputs, plans and comparisons of the attention kernels' tests."""

from dataclasses import replace

import torch
from cache_cases import SMALL_ENTRY, batch_of

from dsv4.cache.handle import PagedView, WindowView
from dsv4.formats.row_store import RowStore, decode_rows, encode_rows
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.attention import AttentionPlan, launch_attention, sparse_attention_ref
from dsv4.ops.attention.kernel_attend import BY_COLUMNS, BY_RUN, BY_TILE, RUN
from dsv4.ops.attention.kernel_attend import WHOLE as ONE_RUN
from dsv4.ops.rows import rope_frequencies
from dsv4.testing.inputs import generator, kernel_device, normal, poison
from dsv4.testing.numeric import assert_close_to_oracle

CSA, HCA = 4, 128
FREQS = rope_frequencies(64, 10000.0, None).to(kernel_device())
SHORT_RUN = 3  # two tiles of the window and one of 64 entries


def always(cut):
    return type("Always", (AttentionPlan,), {"cut": lambda self, *counts: cut})()


SPLIT, RUNS, COLUMNS = always(BY_TILE), always(BY_RUN), always(BY_COLUMNS)
if kernel_device().type == "cpu":  # the fold in fewer programs, which are what the interpreter's time goes by
    SPLIT = SPLIT._replace(combine_rows=64)


class FewestParts(AttentionPlan):
    """A program takes a query, or a run where a query has several."""

    def cut(self, num_programs, num_tiles, run_tiles):
        return BY_RUN if num_tiles > run_tiles else ONE_RUN


WHOLE = FewestParts()


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
