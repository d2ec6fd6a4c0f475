"""The exchange through shared memory, with buffers of one process in place of GPUs: the kernels, not the barriers."""

import pytest
import torch

from dsv4.dist.exchange import NO_EXPERT
from dsv4.dist.shares import expert_range
from dsv4.dist.symmetric import Layout, SymmetricExchange
from dsv4.ops.lib.guard import KernelInputError
from dsv4.testing.inputs import kernel_device
from tools.compiled.compile_check import CompileFailure, reports

EXPERTS, TOP_K, DIM, MAX_ROWS = 7, 3, 1100, 5


def ranks_of(size):
    layout = Layout.of(size, MAX_ROWS, TOP_K, DIM)
    # NaN, whatever is read
    buffers = [torch.full((layout.size,), 0xFF, dtype=torch.uint8, device=kernel_device()) for _ in range(size)]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=kernel_device())
    shape = {"max_rows": MAX_ROWS, "num_experts": EXPERTS, "top_k": TOP_K, "dim": DIM}
    return [
        SymmetricExchange(buffer, pointers, lambda: None, rank, layout, **shape) for rank, buffer in enumerate(buffers)
    ]


@pytest.mark.parametrize(("size", "num_tokens"), [(2, 5), (3, 2)])
def test_inputs_reach_owners_and_parts_come_back(size, num_tokens):
    """Two calls, the second with other rows: nothing of the first is left where it matters."""
    ranks = ranks_of(size)
    columns = torch.arange(DIM, device=kernel_device()) / 1024
    generator = torch.Generator().manual_seed(size)
    for _ in range(2):
        x = torch.randn(size, num_tokens, DIM, generator=generator).bfloat16()
        scores = torch.rand(size, num_tokens, EXPERTS, generator=generator)
        experts = scores.topk(TOP_K).indices.sort(-1).values
        slots = torch.zeros(size, num_tokens, dtype=torch.int64)
        slots[-1, -1] = -1  # padding
        weights = torch.rand(size, num_tokens, TOP_K, generator=generator)
        given = tuple(part.to(kernel_device()) for part in (x, experts, weights, slots))
        for rank, exchange in enumerate(ranks):  # all store, then all read: what the barrier is for
            exchange.dispatch(*(part[rank] for part in given))
        all_rows = [exchange.dispatch(*(part[rank] for part in given)) for rank, exchange in enumerate(ranks)]
        x, experts, weights, slots = given
        experts = experts.masked_fill(slots.unsqueeze(-1) < 0, NO_EXPERT)
        chosen_by_all = experts.view(-1, TOP_K)
        sent = []
        for rank, rows in enumerate(all_rows):
            own = expert_range(EXPERTS, size, rank)
            assert torch.equal(rows.weights, weights.view(-1, TOP_K))
            is_own = (chosen_by_all >= own.start) & (chosen_by_all < own.stop)
            assert torch.equal(rows.experts, torch.where(is_own, chosen_by_all - own.start, NO_EXPERT))
            wanted = is_own.any(1)
            assert torch.equal(rows.x[wanted], x.view(-1, DIM)[wanted])
            # a part that says which expert made it, for which token
            marks = chosen_by_all.unsqueeze(-1) + rows.x[:, None, :1].float() + columns
            sent.append(torch.where(is_own.unsqueeze(-1), marks, float("nan")).bfloat16())
        for rank, exchange in enumerate(ranks):
            exchange.collect(sent[rank], all_rows[rank])
        for rank, exchange in enumerate(ranks):
            parts = exchange.collect(sent[rank], all_rows[rank])
            expected = experts[rank].unsqueeze(-1) + x[rank][:, None, :1].float() + columns
            chosen = experts[rank] >= 0
            assert torch.equal(parts[chosen], expected.bfloat16()[chosen])


def test_rejects_more_rows_than_the_buffers_hold():
    exchange = ranks_of(2)[0]
    x = torch.zeros(MAX_ROWS + 1, DIM, dtype=torch.bfloat16)
    experts, slots = torch.zeros(MAX_ROWS + 1, TOP_K, dtype=torch.int64), torch.zeros(MAX_ROWS + 1)
    with pytest.raises(KernelInputError, match="expected at most 5 bf16 rows of 1100 .* feed them in chunks"):
        exchange.dispatch(x, experts, torch.zeros(MAX_ROWS + 1, TOP_K), slots)


def test_compiles_for_gpus():
    found = reports(90, ["tests.ranks.exchange_cases"])
    assert [report.error for report in found if isinstance(report, CompileFailure)] == []
    kernels = {report.kernel for report in found}
    downs = {"_few_down_kernel", "_down_kernel", "_wide_down_kernel", "expert_tiles_kernel"}
    assert kernels >= {"_send_rows_kernel", "_send_parts_kernel", *downs}
    assert all(report.spill_bytes == 0 for report in found if report.kernel != "expert_tiles_kernel")
    assert all(report.loop_spills == 0 for report in found)
