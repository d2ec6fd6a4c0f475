"""Launchers of the small ops of drafting."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.drafting.kernel_drafting import _accept_kernel, _confidence_kernel, _tap_streams_kernel
from dsv4.ops.drafting.op import Acceptance
from dsv4.ops.drafting.plan import ACCEPT_ROWS, CONFIDENCE_COLS, TAP_COLS, TAP_ROWS
from dsv4.ops.lib.guard import KernelInputError, check_launch


def accept(drafts: Tensor, num_drafts: Tensor, drawn: Tensor, positions: Tensor) -> Acceptance:
    """See `accept_ref`. Contiguous columns. One launch."""
    check_launch(drafts, num_drafts, drawn, positions)
    num_requests, most = drafts.shape
    tensors = (drafts, num_drafts, drawn, positions)
    shapes = ((num_requests, most), (num_requests,), (num_requests, most + 1), (num_requests,))
    if tuple(tuple(x.shape) for x in tensors) != shapes or {x.dtype for x in tensors} != {torch.int64}:
        raise KernelInputError(
            f"expected drafts [R, k], num_drafts [R], drawn [R, k + 1] and positions [R] in int64, found "
            f"{[(x.dtype, tuple(x.shape)) for x in tensors]}"
        )
    drafts, drawn = (x if x.stride(1) == 1 else x.contiguous() for x in (drafts, drawn))
    found = torch.empty(3, num_requests, dtype=torch.int64, device=drafts.device)
    if num_requests:
        _accept_kernel[(-(-num_requests // ACCEPT_ROWS),)](
            drafts, num_drafts.contiguous(), drawn, positions.contiguous(), *found.unbind(0), num_requests,
            drafts.stride(0), drawn.stride(0), MOST=most, ROWS=ACCEPT_ROWS, num_warps=4, enable_fp_fusion=False,
        )
    return Acceptance(*found.unbind(0))


def tap_streams(streams: Tensor, out: Tensor) -> None:
    """See `tap_streams_ref`. Contiguous columns of one of bf16, fp16 and fp32; the same bits. One launch."""
    check_launch(streams, out)
    num_tokens, num_streams, hidden_size = streams.shape
    if out.shape != (num_tokens, hidden_size) or out.stride(1) != 1 or out.dtype != streams.dtype:
        raise KernelInputError(
            f"expected out [{num_tokens}, {hidden_size}] in {streams.dtype} with contiguous columns, found {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    streams = streams if streams.stride(2) == 1 else streams.contiguous()
    if num_tokens:
        _tap_streams_kernel[(-(-num_tokens // TAP_ROWS), -(-hidden_size // TAP_COLS))](
            streams, out, num_tokens, *streams.stride()[:2], out.stride(0),
            NUM_STREAMS=num_streams, D=hidden_size, ROWS=TAP_ROWS, COLS=TAP_COLS, num_warps=4, enable_fp_fusion=False,
        )


def confidence(hidden: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """See `confidence_ref`. Inputs in one of bf16, fp16 and fp32, the result in fp32; sums in another order, the same
    for every row. One launch.
    """
    check_launch(hidden, embedded, weight)
    num_rows, hidden_size = hidden.shape
    rank = embedded.shape[1]
    if embedded.shape != (num_rows, rank) or weight.shape != (1, hidden_size + rank):
        raise KernelInputError(
            f"expected embedded [{num_rows}, r] and a weight [1, {hidden_size} + r], found {tuple(embedded.shape)} and "
            f"{tuple(weight.shape)}"
        )
    hidden, embedded = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, embedded))
    out = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    if num_rows:
        _confidence_kernel[(num_rows,)](
            hidden, embedded, weight.contiguous(), out, hidden.stride(0), embedded.stride(0),
            D=hidden_size, RANK=rank, COLS=CONFIDENCE_COLS, num_warps=4, enable_fp_fusion=False,
        )
    return out
