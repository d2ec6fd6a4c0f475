"""Cases of ops/indexer: 64 heads of 128, FP4 and FP8 keys, 512 picks; scores alone, and with the selection.

Floors: keys are read once a request, queries and weights once; 2 * 64 * 128 operations for every pair of a query and an
entry it sees.
"""

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.indexer import index_scores, score_config
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

HEADS, DIM, RATIO, PER_BLOCK, TOP_K = 64, 128, 4, 32, 512
FORMATS = {"fp4": RowFormat(RowKind.INDEX_FP4, DIM), "fp8": RowFormat(RowKind.INDEX_FP8, DIM)}


def batch_at(requests: int, tokens: int, context: int, device: torch.device) -> TokenBatch:
    """Each request's last `tokens` of `context` tokens."""
    num_blocks = -(-context // 128)
    slots = torch.arange(requests, device=device).repeat_interleave(tokens, output_size=requests * tokens)
    positions = (torch.arange(tokens, device=device) + context - tokens).repeat(requests)
    table = torch.arange(requests * num_blocks, dtype=torch.int32, device=device).view(requests, num_blocks)
    return TokenBatch(slots, positions, slots, positions, positions + 1, table)


def random_keys(num_blocks: int, row_format: RowFormat, device: torch.device) -> PagedView:
    """Keys of about unit size."""
    shape = (num_blocks, PER_BLOCK)
    if row_format.kind is RowKind.INDEX_FP4:
        data = torch.randint(0, 256, (*shape, 64), dtype=torch.uint8, device=device)
        scales = torch.randint(124, 127, (*shape, 4), dtype=torch.uint8, device=device)
    else:
        data = torch.randint(0, 126, (*shape, 128), dtype=torch.uint8, device=device)
        scales = torch.full((*shape, 1), 2.0**-8, device=device).view(torch.uint8)
    return PagedView(RowStore(data, scales, row_format))


def make_work(
    requests: int, tokens: int, context: int, kind: str, is_whole: bool, device: torch.device, heads: int = HEADS,
    top_k: int = TOP_K,
) -> Work:  # fmt: skip
    batch = batch_at(requests, tokens, context, device)
    row_format = FORMATS[kind]
    keys = random_keys(requests * -(-context // 128), row_format, device)
    q = torch.randn(requests * tokens, heads, DIM, device=device, dtype=torch.bfloat16)
    weights = torch.randn(requests * tokens, heads, device=device)
    num_entries = context // RATIO
    read = requests * num_entries * row_format.row_bytes + nbytes(q, weights)
    pairs = requests * tokens * num_entries
    flops = 2 * heads * DIM * pairs
    if is_whole:
        call = op_call("index_topk", q=q, weights=weights, keys=keys, batch=batch, ratio=RATIO, top_k=top_k)
        return Work(call, read, requests * tokens * top_k * 8, flops)

    def score() -> torch.Tensor:
        return index_scores(q, weights, keys, batch, slice(None), RATIO, top_k, score_config(q.device))[0]

    def defined(scores: torch.Tensor) -> torch.Tensor:
        visible = (batch.positions + 1).unsqueeze(1) // RATIO
        is_written = (torch.arange(scores.shape[1], device=device) < visible) & (visible > top_k)
        return scores.masked_fill_(~is_written, 0.0)

    return Work(score, read, 4 * pairs, flops, defined=defined)


def _case(
    requests: int, tokens: int, context: int, kind: str, is_whole: bool, heads: int = HEADS, top_k: int = TOP_K
) -> BenchCase:
    shape: dict[str, int | str] = {"requests": requests, "tokens": tokens, "context": context, "keys": kind}
    name = f"{requests}x{tokens}-at-{context}-{kind}"
    op = "index_topk" if is_whole else "index_scores"
    return BenchCase(
        op, name, shape, lambda device: make_work(requests, tokens, context, kind, is_whole, device, heads, top_k)
    )


SHAPES = [(1, 1, 65536), (1, 1, 1 << 20), (64, 1, 65536), (1, 2048, 65536)]
BATCH_AT_1M = (16, 1, 1 << 20)
CASES = [
    *(_case(*shape, "fp4", is_whole) for shape in [*SHAPES, BATCH_AT_1M] for is_whole in (False, True)),
    *(_case(*shape, "fp8", False) for shape in SHAPES[1:]),
    _case(1, 1, 2048, "fp4", True),  # everything fits: nothing is scored
]
SMALL = [_case(3, 1, 900, kind, True, heads=4, top_k=64) for kind in FORMATS]
