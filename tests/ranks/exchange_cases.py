"""The exchange through shared memory and experts that store their parts there, as four ranks of Flash launch them: for
the compile check."""

import torch

from dsv4.dist.symmetric import Layout, SymmetricExchange
from dsv4.formats.tensors import QuantFormat
from dsv4.ops.moe import moe_parts
from dsv4.testing.bench import BenchCase, Work
from dsv4.testing.cases.moe import random_layer

RANKS, EXPERTS, TOP_K, DIM, LIMIT = 4, 256, 6, 4096, 10.0


def _case(num_tokens: int) -> BenchCase:
    def build(device: torch.device) -> Work:
        layout = Layout.of(RANKS, num_tokens, TOP_K, DIM)
        buffer = torch.empty(layout.size, dtype=torch.uint8, device=device)
        pointers = torch.empty(RANKS, dtype=torch.int64, device=device)
        exchange = SymmetricExchange(
            buffer, pointers, lambda: None, 1, layout, max_rows=num_tokens, num_experts=EXPERTS, top_k=TOP_K, dim=DIM
        )
        x = torch.empty(num_tokens, DIM, dtype=torch.bfloat16, device=device)
        experts = torch.empty(num_tokens, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(num_tokens, TOP_K, device=device)
        slots = torch.empty(num_tokens, dtype=torch.int64, device=device)
        parts = torch.empty(RANKS * num_tokens, TOP_K, DIM, dtype=torch.bfloat16, device=device)
        matrices = random_layer("flash", QuantFormat.NVFP4, device, EXPERTS // RANKS)

        def call() -> None:
            rows = exchange.dispatch(x, experts, weights, slots)
            stored = moe_parts(
                rows.x, rows.experts, rows.weights, *matrices, limit=LIMIT, peer_buffers=rows.peer_buffers
            )
            exchange.collect(stored, rows)
            exchange.collect(parts, rows)

        return Work(call, 0, 0)

    return BenchCase("exchange", f"flash-{num_tokens}-of-{RANKS}", {"tokens": num_tokens, "ranks": RANKS}, build)


CASES = [_case(num_tokens) for num_tokens in (1, 16, 256, 2048)]
