"""Cases of ops/attention: Flash (64 heads, 512 picks) and Pro (128 heads, 1024 picks), rows of 512 values.

Decode: one token a request, its window in the ring, picks spread over the whole context. Requests share one pool of
blocks, 1.2 GB at most, so that a million tokens of context times a batch need no memory of their own.
Prefill: the last queries of one chunk.
Operations: 4 x heads x keys x 512 a query.

Inputs: 64 heads of 512, rows of 512, and on CSA layers 64 index heads of 128. Up to the number of tokens of a draft the
rows go into the ring as well.
"""

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView, WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.cases.rows import ENTRY, EPS, SMALL_ENTRY, WINDOW, decode, random_rows, ring_of
from dsv4.testing.op_call import op_call

CSA, HCA = 4, 128
K64, M1 = 65536, 1048576
POOL_ROWS = 1 << 21  # 1.2 GB of entries
HEADS = {"flash": 64, "pro": 128, "small": 3}
PICKS = {"flash": 512, "pro": 1024, "small": 64}
REAL = ("flash", "pro")
ROW_FORMATS = {"flash": ENTRY, "pro": ENTRY, "small": SMALL_ENTRY}
INPUT_HEADS, INDEX_HEADS, INDEX_DIM = 64, 64, 128
KEYS = RowFormat(RowKind.INDEX_FP4, INDEX_DIM)


def build_inputs(
    heads: int, k: int, row_format: RowFormat, ratio: int, context: int, requests: int, chunk: int, device: torch.device
) -> dict[str, object]:
    """Arguments of `sparse_attention`: `requests` requests with `chunk` new tokens each, k picks of CSA entries."""
    num_tokens, num_blocks = requests * chunk, context // 128
    per_block = 128 // ratio
    pool_blocks = max(1, min(requests * num_blocks, POOL_ROWS // per_block))
    starts = torch.full((num_tokens,), context - chunk, device=device)
    slots = torch.arange(requests, device=device).repeat_interleave(chunk)
    positions = starts + torch.arange(chunk, device=device).repeat(requests)
    table = torch.randint(0, pool_blocks, (requests, num_blocks), dtype=torch.int32, device=device)
    ring_positions = torch.full((requests, WINDOW), context - chunk - WINDOW, dtype=torch.int32, device=device)
    ring_positions += torch.arange(WINDOW, dtype=torch.int32, device=device)
    shift = (context - chunk - WINDOW) % WINDOW
    picks = None
    if ratio == CSA:
        # one in every stretch of context / k entries: ascending, no duplicates
        stretch = (context - chunk) // ratio // k
        picks = torch.arange(k, device=device) * stretch + torch.randint(0, stretch, (num_tokens, k), device=device)
    return {
        "q": torch.randn(num_tokens, heads, row_format.dim, device=device, dtype=torch.bfloat16),
        "rows": random_rows((num_tokens,), device, row_format),
        "window": WindowView(random_rows((requests, WINDOW), device, row_format), ring_positions.roll(shift, 1)),
        "entries": PagedView(random_rows((pool_blocks, per_block), device, row_format)),
        "picks": picks,
        "sink": torch.randn(heads, device=device),
        "batch": TokenBatch(positions, positions, slots, starts, starts + chunk, table),
        "window_len": WINDOW,
        "freqs": torch.rand(32, device=device),
    }


def work(model: str, ratio: int, context: int, requests: int, chunk: int, device: torch.device) -> Work:
    """The fewest bytes: every distinct row once (window rows of a chunk are shared), q in, the output out."""
    heads, num_tokens, row_format = HEADS[model], requests * chunk, ROW_FORMATS[model]
    inputs = build_inputs(heads, PICKS[model], row_format, ratio, context, requests, chunk, device)
    behind = PICKS[model] if ratio == CSA else context // HCA
    touched = min(num_tokens * behind, requests * context // ratio)  # entries; a prefill's queries share them
    out_bytes = num_tokens * heads * row_format.dim * 2
    read = out_bytes + (requests * (WINDOW + chunk) + touched) * row_format.row_bytes
    read += num_tokens * behind * 8 if ratio == CSA else 0
    flops = 4 * heads * (WINDOW + behind) * row_format.dim * num_tokens
    return Work(op_call("sparse_attention", **inputs), read, out_bytes, flops)


def case(model: str, ratio: int, context: int, requests: int, chunk: int = 1) -> BenchCase:
    kind = "csa" if ratio == CSA else "hca"
    length = {M1: "1m", K64: "64k"}.get(context, str(context))
    name = f"{model}-{kind}-{length}-{requests if chunk == 1 else f'prefill-{chunk}'}"
    shape: dict[str, int | str] = {
        "model": model, "ratio": ratio, "context": context, "requests": requests, "tokens": requests * chunk,
        "heads": HEADS[model], "keys": WINDOW + (PICKS[model] if ratio == CSA else context // HCA),
    }  # fmt: skip
    return BenchCase(
        "sparse_attention", name, shape,
        lambda device: work(model, ratio, context, requests, chunk, device),
    )  # fmt: skip


def _inputs(
    tokens: int, has_index: bool, appends: bool, heads: int = INPUT_HEADS, row_format: RowFormat = ENTRY
) -> BenchCase:
    def build(device: torch.device) -> Work:
        q = torch.randn(tokens, heads, row_format.dim, device=device, dtype=torch.bfloat16)
        kv = torch.randn(tokens, row_format.dim, device=device, dtype=torch.bfloat16)
        index_q = torch.randn(tokens, min(heads, INDEX_HEADS), INDEX_DIM, device=device, dtype=torch.bfloat16)
        weight, freqs = torch.randn(row_format.dim, device=device, dtype=torch.bfloat16), torch.rand(32, device=device)
        keys = PagedView(RowStore.allocate((1, 32), KEYS, torch.bfloat16, device))
        window, batch = ring_of(tokens, device, row_format), decode(tokens, device)
        index = (index_q, keys) if has_index else (None, None)
        moved = nbytes(q, index_q) if has_index else nbytes(q)

        op = op_call(
            "attention_inputs", q=q, kv=kv, index_q=index[0], kv_norm=weight, freqs=freqs, eps=EPS, window=window,
            keys=index[1], batch=batch, appends=appends,
        )  # fmt: skip
        read, written = moved + nbytes(kv, weight) + 24 * tokens, moved + tokens * (1 + appends) * row_format.row_bytes
        return Work(lambda: op()[0], read, written, op=op)

    name = f"{'csa' if has_index else 'hca'}-{tokens}{'-ring' if appends else ''}"
    return BenchCase("attention_inputs", name, {"tokens": tokens, "index": int(has_index)}, build)


BATCHES = (1, 2, 8, 32, 64, 128, 256)
CASES = [
    *(case(model, CSA, K64, batch) for model in REAL for batch in BATCHES),
    *(case("flash", HCA, K64, batch) for batch in (1, 64)),
    *(case("flash", HCA, M1, batch) for batch in (1, 4, 16, 64)),
    case("pro", HCA, M1, 16),
    case("flash", HCA, M1, 1, 2048),
    *(case("flash", CSA, M1, batch) for batch in (1, 64)),
    *(case("flash", CSA, K64, 1, chunk) for chunk in (2048, 8192)),
    case("pro", CSA, K64, 1, 8192),
    *(_inputs(tokens, has_index, True) for tokens in (1, 16, 64, 256) for has_index in (False, True)),
    *(_inputs(tokens, has_index, False) for tokens in (16, 64, 256, 4096) for has_index in (False, True)),
]
SMALL = [
    case("small", CSA, 512, 2),
    case("small", HCA, 512, 1),
    case("small", CSA, 512, 1, 2),
    *(_inputs(3, has_index, appends, 3, SMALL_ENTRY) for has_index in (False, True) for appends in (False, True)),
]
