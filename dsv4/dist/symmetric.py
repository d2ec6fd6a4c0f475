"""`SymmetricExchange`: the exchange of GPUs that can write into one another's memory. A graph can capture it.

Every rank has one buffer of the same layout, mapped by all (torch's symmetric memory). A kernel stores a rank's rows
into the buffers of the owners of their experts, then a barrier; the kernels that make parts store them into the buffers
of the tokens' ranks (`Rows.peer_buffers`), then another. Two barriers a layer are enough for one buffer: no rank writes
inputs before all have read the last ones (they have since sent parts), nor parts before all have folded the last ones
(they have since sent inputs).

    experts  int64 [N T, k]   |  weights  fp32 [N T, k]  |  x  bf16 [N T, D]  |  parts  bf16 [T, k, D]

Offsets are those of the largest call; T is the call's own, the same on every rank. An owner gets places in its own
stacks, and -1 for experts of others; x is sent only to ranks that own a chosen expert. Torch's default process group
must be there: symmetric memory meets through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.dist.exchange import Rows
from dsv4.ops.lib.guard import KernelInputError, jit, tl
from dsv4.ops.lib.launch import next_power_of_2

_ALIGNMENT = 256  # bytes
_COLS = 1024  # columns a step of a program copies


class Layout(NamedTuple):
    """Bytes from the start of a buffer to each part of it, and its size."""

    experts: int
    weights: int
    x: int
    parts: int
    size: int

    @classmethod
    def of(cls, num_ranks: int, max_rows: int, top_k: int, dim: int) -> Layout:
        rows = num_ranks * max_rows
        offsets = [0]
        for num_bytes in (8 * rows * top_k, 4 * rows * top_k, 2 * rows * dim, 2 * max_rows * top_k * dim):
            offsets.append(offsets[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        return cls(*offsets)


class SymmetricExchange:
    """See `Exchange`; x in bf16.

    buffer    this rank's own, uint8
    pointers  int64 [N]: where every rank's buffer is, in this rank's address space
    barrier   everything this rank has stored is seen by all, and all have come so far; on the current stream
    """

    can_capture = True

    def __init__(
        self, buffer: Tensor, pointers: Tensor, barrier: Callable[[], None], rank: int, layout: Layout, *,
        max_rows: int, num_experts: int, top_k: int, dim: int,
    ) -> None:  # fmt: skip
        self._buffer, self._pointers, self._barrier = buffer, pointers, barrier
        self._rank, self.size = rank, pointers.shape[0]
        self._layout, self._peer_buffers = layout, pointers + layout.parts
        self._max_rows, self._num_experts, self._top_k, self._dim = max_rows, num_experts, top_k, dim

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor) -> Rows:
        num_tokens, dim = x.shape
        if num_tokens > self._max_rows or dim != self._dim or x.dtype != torch.bfloat16:
            raise KernelInputError(
                f"expected at most {self._max_rows} bf16 rows of {self._dim} for ranks that share memory, found "
                f"{num_tokens} {x.dtype} rows of {dim}: feed them in chunks"
            )
        layout, num_rows = self._layout, self.size * num_tokens
        _send_rows_kernel[(num_tokens, self.size)](
            x.contiguous(), experts.contiguous(), weights.float().contiguous(), slots.contiguous(), self._pointers,
            self._rank, num_tokens, layout.experts, layout.weights, layout.x, D=dim, TOP_K=self._top_k,
            TOP_K_BLOCK=next_power_of_2(self._top_k), E=self._num_experts, N=self.size, COLS=_COLS,
        )  # fmt: skip
        self._barrier()
        return Rows(
            self._view(layout.x, (num_rows, dim), torch.bfloat16),
            self._view(layout.experts, (num_rows, self._top_k), torch.int64),
            self._view(layout.weights, (num_rows, self._top_k), torch.float32),
            experts,
            self._peer_buffers,
        )

    def collect(self, parts: Tensor | None, rows: Rows) -> Tensor:
        (num_rows, dim), (num_tokens, top_k) = rows.x.shape, rows.routing.shape
        if parts is not None:  # experts that no kernel runs
            _send_parts_kernel[(num_rows, top_k)](
                parts.contiguous(), rows.experts, self._peer_buffers, num_tokens, D=dim, TOP_K=top_k, COLS=_COLS
            )
        self._barrier()
        return self._view(self._layout.parts, (num_tokens, top_k, dim), torch.bfloat16)

    def _view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._buffer[offset : offset + num_bytes].view(dtype).view(shape)


def symmetric_exchange(
    group: Any, *, max_rows: int, num_experts: int, top_k: int, dim: int, device: torch.device
) -> SymmetricExchange:
    """Over `group`, a process group of torch whose ranks are on GPUs with peer access to one another."""
    import torch.distributed._symmetric_memory as symmetric_memory

    layout = Layout.of(group.size(), max_rows, top_k, dim)
    buffer = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(buffer, group.group_name)
    pointers = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    return SymmetricExchange(
        buffer, pointers, lambda: handle.barrier(channel=0), group.rank(), layout, max_rows=max_rows,
        num_experts=num_experts, top_k=top_k, dim=dim,
    )  # fmt: skip


@jit(do_not_specialize=("rank", "num_tokens"))
def _send_rows_kernel(
    x_ptr, experts_ptr, weights_ptr, slots_ptr, pointers_ptr, rank, num_tokens, experts_offset, weights_offset,
    x_offset,
    D: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, E: tl.constexpr, N: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Program (token, peer): places of the token's experts to the peer, and its row of x if the peer owns one."""
    token, peer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = rank * num_tokens + token
    base = tl.load(pointers_ptr + peer)
    places = tl.arange(0, TOP_K_BLOCK)
    is_place = places < TOP_K
    experts = tl.load(experts_ptr + token * TOP_K + places, mask=is_place, other=-1).to(tl.int64)
    weights = tl.load(weights_ptr + token * TOP_K + places, mask=is_place, other=0.0)
    first, end = peer * E // N, (peer + 1) * E // N
    is_owned = (experts >= first) & (experts < end) & (tl.load(slots_ptr + token) >= 0)
    target_experts_ptr = (base + experts_offset).to(tl.pointer_type(tl.int64))
    tl.store(target_experts_ptr + row * TOP_K + places, tl.where(is_owned, experts - first, -1), mask=is_place)
    target_weights_ptr = (base + weights_offset).to(tl.pointer_type(tl.float32))
    tl.store(target_weights_ptr + row * TOP_K + places, weights, mask=is_place)
    if tl.max(is_owned.to(tl.int32), 0) > 0:
        target_ptr = tl.multiple_of((base + x_offset).to(tl.pointer_type(tl.bfloat16)), 16)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            tl.store(target_ptr + row * D + cols, tl.load(x_ptr + token * D + cols, mask=cols < D), mask=cols < D)


@jit(do_not_specialize=("num_tokens",))
def _send_parts_kernel(
    parts_ptr, experts_ptr, peer_buffers_ptr, num_tokens, D: tl.constexpr, TOP_K: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Program (row, choice): the part to the row's own rank, if it was made here."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(experts_ptr + row * TOP_K + place) >= 0:
        target = (row % num_tokens) * TOP_K + place
        peer_ptr = tl.load(peer_buffers_ptr + row // num_tokens).to(tl.pointer_type(tl.bfloat16))
        target_ptr = tl.multiple_of(peer_ptr, 16)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            part = tl.load(parts_ptr + (row * TOP_K + place) * D + cols, mask=cols < D)
            tl.store(target_ptr + target * D + cols, part, mask=cols < D)
