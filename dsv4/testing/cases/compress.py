"""Cases of ops/compress. Flash and Pro have the same shapes: CSA 2 x 512 and 2 x 128 columns, HCA 512.

`closing` puts every request on the last token of a block (for CSA that is every fourth step), `open` on another one.
The variants are other cuts of the same work (`CompressPlan`); those that the launchers use have no variant in their
name.
"""

from dataclasses import replace

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import CompressorView, PagedView, TailView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.compress import (
    CSA_MANY,
    HCA_MANY,
    Compression,
    CompressorSpec,
    CompressPlan,
    launch_compress,
    launch_compress_pair,
)
from dsv4.ops.lib.launch import LaunchConfig
from dsv4.testing.bench import BenchCase, Work
from dsv4.testing.cases.rows import ENTRY, SMALL_ENTRY, decode, one_chunk
from dsv4.testing.op_call import op_call

EPS = 1e-6
CSA, HCA = 4, 128
INDEX = RowFormat(RowKind.INDEX_FP4, 128)
CLOSING, OPEN = 5119, 5117  # the last token of a CSA block and of an HCA block; neither


def compression(fmt: RowFormat, ratio: int, batch: TokenBatch, device: torch.device) -> Compression:
    slots, width = batch.block_table.shape[0], fmt.dim * (2 if ratio == CSA else 1)

    def tail(length: int) -> TailView:
        shape = (slots, length, fmt.dim)
        return TailView(torch.randn(shape, device=device), torch.randn(shape, device=device))

    spec = CompressorSpec(
        ratio=ratio,
        ape=torch.randn(ratio, width, device=device),
        norm_weight=torch.randn(fmt.dim, device=device, dtype=torch.bfloat16),
        freqs=torch.rand(32, device=device),
        eps=EPS,
        dtype=torch.bfloat16,
    )
    return Compression(
        kv=torch.randn(batch.num_tokens, width, device=device),
        gate=torch.randn(batch.num_tokens, width, device=device),
        spec=spec,
        state=CompressorView(tail(ratio), tail(2 * ratio) if ratio == CSA else None),
        pages=PagedView(RowStore.allocate((batch.block_table.numel(), 128 // ratio), fmt, torch.bfloat16, device)),
    )


def _bytes(fmt: RowFormat, ratio: int, tokens: int, *, is_decode: bool, is_closing: bool) -> tuple[int, int]:
    """Read and written, at the least: the new rows, the ring rows a closing token needs, tails, entries."""
    halves = 2 if ratio == CSA else 1
    row = 2 * fmt.dim * 4  # kv and score of one half
    if not is_decode:
        last = (ratio + 2 * ratio if ratio == CSA else ratio) * row
        return tokens * halves * row + last, last + tokens // ratio * fmt.row_bytes
    ring = tokens * (halves * ratio - 1) * row if is_closing else 0
    return tokens * halves * row + ring, tokens * (halves * row + (fmt.row_bytes if is_closing else 0))


def _case(
    ratio: int, tokens: int, kind: str, variant: str = "", plan: CompressPlan | None = None, entry: RowFormat = ENTRY
) -> BenchCase:
    """CSA: both compressors of a layer."""
    formats = (entry, INDEX) if ratio == CSA else (entry,)

    def build(device: torch.device) -> Work:
        if kind == "prefill":
            batch = one_chunk(tokens, device, num_blocks=-(-tokens // 128))
        else:
            batch = decode(tokens, device, CLOSING if kind == "closing" else OPEN)
        jobs = [compression(fmt, ratio, batch, device) for fmt in formats]
        moved = [
            _bytes(fmt, ratio, tokens, is_decode=kind != "prefill", is_closing=kind == "closing") for fmt in formats
        ]

        first = jobs[0]
        if ratio == HCA:
            op = op_call(
                "compress", kv=first.kv, gate=first.gate, spec=first.spec, state=first.state, pages=first.pages,
                batch=batch,
            )  # fmt: skip
        else:
            op = op_call("compress_pair", attention=first, index=jobs[1], batch=batch)

        def call() -> tuple[torch.Tensor | None, ...]:
            if plan is None:
                op()
            elif ratio == HCA:
                launch_compress(first, batch, plan)
            else:
                launch_compress_pair(first, jobs[1], batch, plan)
            # not the tails, which it also writes: a replay with other tails would make other entries
            return tuple(part for job in jobs for part in (job.pages.rows.data, job.pages.rows.scales))

        read, written = (sum(column) for column in zip(*moved, strict=True))
        return Work(call, read, written, op=op if plan is None else None)

    op = "compress_pair" if ratio == CSA else "compress"
    name = f"{'csa' if ratio == CSA else 'hca'}-{kind}-{tokens}" + (f"-{variant}" if variant else "")
    return BenchCase(op, name, {"tokens": tokens, "ratio": ratio, "kind": kind, "variant": variant}, build)


def _rows(rows: int) -> CompressPlan:
    return replace(CSA_MANY, config=LaunchConfig(rows=rows, num_warps=4))


CASES = [
    *(_case(CSA, tokens, kind) for kind in ("closing", "open") for tokens in (1, 16, 64, 256)),
    *(_case(HCA, tokens, kind) for kind in ("closing", "open") for tokens in (1, 16, 64, 256)),
    *(_case(CSA, tokens, "prefill") for tokens in (512, 4096, 8192, 32768)),
    *(_case(HCA, tokens, "prefill") for tokens in (512, 4096, 8192, 32768)),
    _case(CSA, 256, "closing", "shared", CSA_MANY),
    _case(CSA, 512, "prefill", "shared", CSA_MANY),
    *(_case(CSA, 8192, "prefill", f"{rows}-rows", _rows(rows)) for rows in (4, 8)),
    *(_case(HCA, tokens, kind, "split", HCA_MANY) for kind in ("closing", "open") for tokens in (1, 64)),
]
SMALL = [
    *(_case(CSA, 2, kind, entry=SMALL_ENTRY) for kind in ("closing", "open")),
    _case(HCA, 1, "closing", entry=SMALL_ENTRY),
    _case(HCA, 2, "open", entry=SMALL_ENTRY),
    _case(CSA, 9, "prefill", entry=SMALL_ENTRY),
]
