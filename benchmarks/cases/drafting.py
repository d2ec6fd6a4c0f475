"""Cases of ops/drafting at the shapes of Flash (hidden 4096, rank 256) and Pro (7168, 512), and the attention of a
DSpark block: five rows a request that read the same 133 keys.
"""

from __future__ import annotations

import torch

from benchmarks.cases.attention import HEADS, random_rows
from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.ops.attention import sparse_attention
from dsv4.ops.drafting import accept, confidence, tap_streams
from dsv4.testing.bench import BenchCase, Work, nbytes

BLOCK, WINDOW = 5, 128


def _tap(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        streams = torch.randn(rows, 4, width, device=device, dtype=torch.bfloat16)
        out = torch.empty(rows, 3 * width, device=device, dtype=torch.bfloat16)[:, width : 2 * width]

        def call() -> torch.Tensor:
            tap_streams(streams, out)
            return out

        return Work(call, nbytes(streams), nbytes(out))

    return BenchCase("tap_streams", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _confidence(requests: int, width: int, rank: int) -> BenchCase:
    rows = requests * BLOCK

    def build(device: torch.device) -> Work:
        hidden, embedded, weight = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((rows, width), (rows, rank), (1, width + rank))
        )
        return Work(lambda: confidence(hidden, embedded, weight), nbytes(hidden, embedded, weight), 4 * rows)

    return BenchCase("confidence", f"{rows}x{width}", {"rows": rows, "width": width, "rank": rank}, build)


def _accept(requests: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        drafts, drawn = (torch.randint(0, 2, (requests, n), device=device) for n in (BLOCK, BLOCK + 1))
        counts, positions = (torch.full((requests,), n, device=device) for n in (BLOCK, 1000))
        read = nbytes(drafts, drawn, counts, positions)
        return Work(lambda: accept(drafts, counts, drawn, positions), read, 24 * requests)

    return BenchCase("accept", f"{requests}", {"requests": requests}, build)


def _block_attention(model: str, requests: int) -> BenchCase:
    heads, num_rows, ring_len = HEADS[model], requests * BLOCK, WINDOW + BLOCK

    def build(device: torch.device) -> Work:
        q = torch.randn(num_rows, heads, 512, device=device, dtype=torch.bfloat16)
        positions = torch.arange(ring_len, device=device, dtype=torch.int32).repeat(requests, 1)
        window = WindowView(random_rows((requests, ring_len), device), positions)
        rows, sink = random_rows((num_rows,), device), torch.randn(heads, device=device)
        slots = torch.arange(requests, device=device).repeat_interleave(BLOCK)
        last = torch.full_like(slots, ring_len - 1)
        table = torch.zeros(requests, 1, device=device, dtype=torch.int32)
        batch = TokenBatch(slots, last, slots, last + 1, last + 1, table)
        read = nbytes(q, sink, window.rows.data, positions)
        return Work(
            lambda: sparse_attention(q, rows, window, None, None, sink, batch, window_len=ring_len),
            read, nbytes(q), 4 * num_rows * heads * ring_len * 512,
        )  # fmt: skip

    shape = {"model": model, "requests": requests, "rows": num_rows}
    return BenchCase("block_attention", f"{model}-{requests}", shape, build)


CASES = [
    *(_tap(rows, width) for width in (4096, 7168) for rows in (1, 64, 4096)),
    *(_confidence(requests, *sizes) for sizes in ((4096, 256), (7168, 512)) for requests in (1, 64)),
    *(_accept(requests) for requests in (1, 256)),
    *(_block_attention("flash", requests) for requests in (1, 64)),
    _block_attention("pro", 16),
]
