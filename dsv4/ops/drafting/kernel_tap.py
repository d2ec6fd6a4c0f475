"""The mean of the streams: a few rows and columns a program."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


@jit(do_not_specialize=("num_tokens",))
def _tap_streams_kernel(
    streams_ptr, out_ptr, num_tokens, stride_st, stride_sn, stride_ot,
    NUM_STREAMS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]  # [1, COLS]
    mask = (tokens < num_tokens) & (cols < D)
    # sum(others, first) / n
    total = tl.load(streams_ptr + tokens * stride_st + cols, mask=mask, other=0.0).to(tl.float32)  # [ROWS, COLS]
    for stream in tl.static_range(1, NUM_STREAMS):
        total += tl.load(streams_ptr + tokens * stride_st + stream * stride_sn + cols, mask=mask, other=0.0).to(
            tl.float32
        )
    mean = tl.div_rn(total, total * 0.0 + NUM_STREAMS)
    tl.store(out_ptr + tokens * stride_ot + cols, mean.to(out_ptr.dtype.element_ty), mask=mask)
