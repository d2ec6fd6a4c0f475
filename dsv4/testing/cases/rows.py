"""Cases of ops/rows: rows of 512 values (Flash and Pro alike), a window of 128; query heads and attention outputs of
Flash (64 x 512) and Pro (128 x 512), index heads (64 x 128).
"""

import torch

from dsv4.cache.batch import TokenBatch
from dsv4.cache.handle import WindowView
from dsv4.formats.row_store import RowStore
from dsv4.formats.rows import RowFormat, RowKind
from dsv4.testing.bench import BenchCase, Work, nbytes
from dsv4.testing.op_call import op_call

EPS = 1e-6
ENTRY = RowFormat(RowKind.ENTRY_FP8, 512, rope_dim=64)
SMALL_ENTRY = RowFormat(RowKind.ENTRY_FP8, 128, rope_dim=64)
WINDOW = 128
POSITION = 5000
ROPE_DIM = 64


def one_chunk(tokens: int, device: torch.device, num_blocks: int = 1) -> TokenBatch:
    """One request in slot 0; its blocks in order."""
    positions = torch.arange(tokens, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
    return TokenBatch(slots, positions, slots, slots, slots + tokens, table)


def decode(requests: int, device: torch.device, position: int = POSITION) -> TokenBatch:
    """One token each, all at the same position; every request has blocks of its own."""
    slots = torch.arange(requests, device=device)
    positions = torch.full((requests,), position, device=device)
    num_blocks = position // 128 + 1
    table = torch.arange(requests * num_blocks, dtype=torch.int32, device=device).view(requests, num_blocks)
    return TokenBatch(slots, positions, slots, positions, positions + 1, table)


def ring_of(slots: int, device: torch.device, row_format: RowFormat = ENTRY) -> WindowView:
    positions = torch.full((slots, WINDOW), -1, dtype=torch.int32, device=device)
    return WindowView(RowStore.allocate((slots, WINDOW), row_format, torch.bfloat16, device), positions)


def random_rows(leading: tuple[int, ...], device: torch.device, row_format: RowFormat = ENTRY) -> RowStore:
    """Codes of finite values, rope values of a sane size, scales around one."""
    num_codes = row_format.dim - row_format.rope_dim
    codes = torch.randint(0, 0x78, (*leading, num_codes), dtype=torch.uint8, device=device)
    signs = torch.randint(0, 2, (*leading, num_codes), dtype=torch.uint8, device=device) * 128
    rope = torch.randn((*leading, 64), device=device).to(torch.bfloat16).view(torch.uint8)
    scales = torch.randint(118, 122, (*leading, row_format.scale_bytes), dtype=torch.uint8, device=device)
    return RowStore(torch.cat((codes + signs, rope), -1), scales, row_format)


def _inputs(tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv = torch.randn(tokens, 512, device=device, dtype=torch.bfloat16)
    return kv, torch.randn(512, device=device, dtype=torch.bfloat16), torch.rand(32, device=device)


def _window_rows(tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        kv, weight, freqs = _inputs(tokens, device)
        positions = torch.arange(tokens, device=device)
        written = tokens * ENTRY.row_bytes
        call = op_call(
            "window_rows", kv=kv, norm_weight=weight, positions=positions, freqs=freqs, eps=EPS, row_format=ENTRY
        )
        return Work(call, nbytes(kv, weight, positions), written)

    return BenchCase("window_rows", f"{tokens}", {"tokens": tokens, "dim": 512}, build)


def _append(tokens: int, is_decode: bool) -> BenchCase:
    def build(device: torch.device) -> Work:
        rows = random_rows((tokens,), device)
        batch = decode(tokens, device) if is_decode else one_chunk(tokens, device)
        window = ring_of(tokens if is_decode else 1, device)
        moved = tokens if is_decode else WINDOW  # a chunk leaves its last rows only

        op = op_call("append_swa", rows=rows, window=window, batch=batch)

        def call() -> torch.Tensor:
            op()
            return window.rows.data

        return Work(call, moved * ENTRY.row_bytes + 24 * tokens, moved * (ENTRY.row_bytes + 4), op=op)

    name = f"{'decode' if is_decode else 'chunk'}-{tokens}"
    return BenchCase("append_swa", name, {"tokens": tokens, "requests": tokens if is_decode else 1}, build)


def _rope(op: str, tokens: int, heads: int, head_dim: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        x = torch.randn(tokens, heads, head_dim, device=device, dtype=torch.bfloat16)
        positions = torch.randint(0, 1 << 20, (tokens,), device=device)
        freqs = torch.rand(ROPE_DIM // 2, device=device)
        call = op_call("rope", x=x, positions=positions, freqs=freqs, inverse=op == "rope_inverse")
        return Work(call, nbytes(x, positions, freqs), nbytes(x))

    return BenchCase(op, f"{tokens}x{heads}x{head_dim}", {"tokens": tokens, "heads": heads, "dim": head_dim}, build)


CASES = [
    *(_window_rows(tokens) for tokens in (1, 16, 64, 256, 4096)),
    *(_append(tokens, True) for tokens in (1, 16, 64, 256, 4096)),
    *(_append(tokens, False) for tokens in (4096,)),
    *(_rope("rope_inverse", tokens, heads, 512) for heads in (64, 128) for tokens in (1, 16, 256, 4096)),
    *(_rope("rope", tokens, 64, 128) for tokens in (1, 4096)),
]
SMALL = [
    _window_rows(5),
    _append(5, True),
    _append(140, False),
    _rope("rope", 5, 3, 128),
    _rope("rope_inverse", 5, 3, 512),
]
