"""Cases of ops/attention/inputs.py: 64 heads of 512, rows of 512, and on CSA layers 64 index heads of 128. Up to the
number of tokens of a draft the rows go into the ring as well.
"""

from __future__ import annotations

import torch

from benchmarks.cases_append_swa import ENTRY, EPS, decode, ring_of
from dsv4.cache.handle import PagedView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.attention import attention_inputs
from dsv4.testing.bench import BenchCase, Work, nbytes

HEADS, INDEX_HEADS, INDEX_DIM = 64, 64, 128
KEYS = RowFormat(RowKind.INDEX_FP4, INDEX_DIM)


def _case(tokens: int, has_index: bool, appends: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        q = torch.randn(tokens, HEADS, ENTRY.dim, device=device, dtype=torch.bfloat16)
        kv = torch.randn(tokens, ENTRY.dim, device=device, dtype=torch.bfloat16)
        index_q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=device, dtype=torch.bfloat16)
        weight, freqs = torch.randn(512, device=device, dtype=torch.bfloat16), torch.rand(32, device=device)
        keys = PagedView(RowStore.allocate((1, 32), KEYS, torch.bfloat16, device))
        window, batch = ring_of(tokens, device), decode(tokens, device)
        index = (index_q, keys) if has_index else (None, None)
        moved = nbytes(q, index_q) if has_index else nbytes(q)

        def call() -> torch.Tensor:
            return attention_inputs(
                q, kv, index[0], weight, freqs, EPS, window, index[1], batch, appends=appends
            )[0]  # fmt: skip

        return Work(call, moved + nbytes(kv, weight) + 24 * tokens, moved + tokens * (1 + appends) * ENTRY.row_bytes)

    name = f"{'csa' if has_index else 'hca'}-{tokens}{'-ring' if appends else ''}"
    return BenchCase("attention_inputs", name, {"tokens": tokens, "index": int(has_index)}, build)


CASES = [
    _case(1, False, True),
    _case(1, True, True),
    *(_case(tokens, has_index, False) for tokens in (16, 64, 256, 4096) for has_index in (False, True)),
]
