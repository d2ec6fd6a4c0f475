"""Cases of ops/rows: rows of 512 values (Flash and Pro alike), a window of 128; query heads and attention outputs of
Flash (64 x 512) and Pro (128 x 512), index heads (64 x 128).
"""

from __future__ import annotations

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.ops.rows import append_swa, head_norm_rope, rope, store_window, window_rows
from dsv4.testing.bench import BenchCase, Work, nbytes

EPS = 1e-6
ENTRY = RowFormat(RowKind.ENTRY_FP8, 512, rope_dim=64)
WINDOW = 128
POSITION = 5000
ROPE_DIM = 64


def one_chunk(tokens: int, device: torch.device, start: int = 0, num_blocks: int = 1) -> TokenBatch:
    """One request in slot 0; its blocks in order."""
    positions = torch.arange(start, start + tokens, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
    return TokenBatch(slots, positions, slots, slots + start, slots + start + tokens, table)


def decode(requests: int, device: torch.device, position: int = POSITION) -> TokenBatch:
    """One token each, all at the same position; every request has blocks of its own."""
    slots = torch.arange(requests, device=device)
    positions = torch.full((requests,), position, device=device)
    num_blocks = position // 128 + 1
    table = torch.arange(requests * num_blocks, dtype=torch.int32, device=device).view(requests, num_blocks)
    return TokenBatch(slots, positions, slots, positions, positions + 1, table)


def ring_of(slots: int, device: torch.device) -> WindowView:
    positions = torch.full((slots, WINDOW), -1, dtype=torch.int32, device=device)
    return WindowView(RowStore.allocate((slots, WINDOW), ENTRY, torch.bfloat16, device), positions)


def _inputs(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv = torch.randn(tokens, 512, device=device, dtype=torch.bfloat16)
    return kv, torch.randn(512, device=device, dtype=torch.bfloat16), torch.rand(32, device=device)


def _window_rows(tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        kv, weight, freqs = _inputs(tokens, device)
        positions = torch.arange(tokens, device=device)
        written = tokens * ENTRY.row_bytes
        return Work(
            lambda: window_rows(kv, weight, positions, freqs, EPS, ENTRY), nbytes(kv, weight, positions), written
        )

    return BenchCase("window_rows", f"{tokens}", {"tokens": tokens, "dim": 512}, build)


def _store_window(tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        kv, weight, freqs = _inputs(tokens, device)
        window, batch = ring_of(tokens, device), decode(tokens, device)
        written = tokens * (2 * ENTRY.row_bytes + 4)
        return Work(
            lambda: store_window(kv, weight, freqs, EPS, window, batch), nbytes(kv, weight) + 24 * tokens, written
        )

    return BenchCase("store_window", f"{tokens}", {"tokens": tokens, "dim": 512}, build)


def _append(tokens: int, is_decode: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        rows = RowStore.allocate((tokens,), ENTRY, torch.bfloat16, device)
        batch = decode(tokens, device) if is_decode else one_chunk(tokens, device)
        window = ring_of(tokens if is_decode else 1, device)
        moved = tokens if is_decode else WINDOW  # a chunk leaves its last rows only

        def call() -> torch.Tensor:
            append_swa(rows, window, batch)
            return window.rows.data

        return Work(call, moved * ENTRY.row_bytes + 24 * tokens, moved * (ENTRY.row_bytes + 4))

    name = f"{'decode' if is_decode else 'chunk'}-{tokens}"
    return BenchCase("append_swa", name, {"tokens": tokens, "requests": tokens if is_decode else 1}, build)


def _rope(op: str, tokens: int, heads: int, head_dim: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = torch.randn(tokens, heads, head_dim, device=device, dtype=torch.bfloat16)
        positions = torch.randint(0, 1 << 20, (tokens,), device=device)
        freqs = torch.rand(ROPE_DIM // 2, device=device)

        def call() -> torch.Tensor:
            if op == "head_norm_rope":
                return head_norm_rope(x, positions, freqs, EPS)
            return rope(x, positions, freqs, inverse=op == "rope_inverse")

        return Work(call, nbytes(x, positions, freqs), nbytes(x))

    return BenchCase(op, f"{tokens}x{heads}x{head_dim}", {"tokens": tokens, "heads": heads, "dim": head_dim}, build)


CASES = [
    *(_window_rows(tokens) for tokens in (1, 16, 64, 256, 4096)),
    *(_store_window(tokens) for tokens in (1, 16, 64, 256)),
    *(_append(tokens, True) for tokens in (1, 16, 64, 256, 4096)),
    *(_append(tokens, False) for tokens in (4096,)),
    *(_rope("head_norm_rope", tokens, heads, 512) for heads in (64, 128) for tokens in (1, 16, 256, 4096)),
    *(_rope("rope_inverse", tokens, heads, 512) for heads in (64, 128) for tokens in (1, 16, 256, 4096)),
    *(_rope("rope", tokens, 64, 128) for tokens in (1, 4096)),
]
