"""Cases of ops/drafting at the shapes of Flash (hidden 4096, rank 256) and Pro (7168, 512), and the attention of a
DSpark block: five rows a request that read the same 133 keys.
"""

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.cases.attention import HEADS, ROW_FORMATS
from dsv4.testing.cases.rows import random_rows
from dsv4.testing.op_call import op_call

BLOCK, WINDOW = 5, 128


def _tap(rows: int, width: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        streams = torch.randn(rows, 4, width, device=device, dtype=torch.bfloat16)
        out = torch.empty(rows, 3 * width, device=device, dtype=torch.bfloat16)[:, width : 2 * width]

        op = op_call("tap_streams", streams=streams, out=out)

        def call() -> torch.Tensor:
            op()
            return out

        return Work(call, nbytes(streams), nbytes(out), op=op)

    return BenchCase("tap_streams", f"{rows}x{width}", {"rows": rows, "width": width}, build)


def _confidence(requests: int, width: int, rank: int) -> BenchCase:
    rows = requests * BLOCK

    def build(device: torch.device) -> Work:
        hidden, embedded, weight = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((rows, width), (rows, rank), (1, width + rank))
        )
        call = op_call("confidence", hidden=hidden, embedded=embedded, weight=weight)
        return Work(call, nbytes(hidden, embedded, weight), 4 * rows)

    return BenchCase("confidence", f"{rows}x{width}", {"rows": rows, "width": width, "rank": rank}, build)


def _accept(requests: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        drafts, drawn = (torch.randint(0, 2, (requests, n), device=device) for n in (BLOCK, BLOCK + 1))
        counts, positions = (torch.full((requests,), n, device=device) for n in (BLOCK, 1000))
        read = nbytes(drafts, drawn, counts, positions)
        call = op_call("accept", drafts=drafts, num_drafts=counts, drawn=drawn, positions=positions)
        return Work(call, read, 24 * requests)

    return BenchCase("accept", f"{requests}", {"requests": requests}, build)


def _block_attention(model: str, requests: int) -> BenchCase:
    heads, num_rows, ring_len = HEADS[model], requests * BLOCK, WINDOW + BLOCK
    row_format = ROW_FORMATS[model]

    def build(device: torch.device) -> Work:
        q = torch.randn(num_rows, heads, row_format.dim, device=device, dtype=torch.bfloat16)
        positions = torch.arange(ring_len, device=device, dtype=torch.int32).repeat(requests, 1)
        window = WindowView(random_rows((requests, ring_len), device, row_format), positions)
        rows, sink = random_rows((num_rows,), device, row_format), torch.randn(heads, device=device)
        slots = torch.arange(requests, device=device).repeat_interleave(BLOCK)
        last = torch.full_like(slots, ring_len - 1)
        table = torch.zeros(requests, 1, device=device, dtype=torch.int32)
        batch = TokenBatch(slots, last, slots, last + 1, last + 1, table)
        read = nbytes(q, sink, window.rows.data, positions)
        call = op_call(
            "sparse_attention", q=q, rows=rows, window=window, entries=None, picks=None, sink=sink, batch=batch,
            window_len=ring_len,
        )  # fmt: skip
        return Work(call, read, nbytes(q), 4 * num_rows * heads * ring_len * row_format.dim)

    shape: dict[str, int | str] = {"model": model, "requests": requests, "rows": num_rows}
    return BenchCase("block_attention", f"{model}-{requests}", shape, build)


CASES = [
    *(_tap(rows, width) for width in (4096, 7168) for rows in (1, 64, 4096)),
    *(_confidence(requests, *sizes) for sizes in ((4096, 256), (7168, 512)) for requests in (1, 64)),
    *(_accept(requests) for requests in (1, 256)),
    *(_block_attention("flash", requests) for requests in (1, 64)),
    _block_attention("pro", 16),
]
SMALL = [_tap(3, 256), _confidence(1, 256, 64), _accept(3)]
