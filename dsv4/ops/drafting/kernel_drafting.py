"""The mean of the streams: a few rows and columns a program. How sure a head is of its drafts: a row a program. Which
drafts stay: 128 requests a program, one draft after the other."""

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


@jit
def _confidence_kernel(
    hidden_ptr, embedded_ptr, weight_ptr, out_ptr, stride_ht, stride_et,
    D: tl.constexpr, RANK: tl.constexpr, COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COLS], tl.float32)  # [COLS]
    # rows_matmul(cat((hidden, embedded), -1), weight)
    for start in range(0, D, COLS):
        cols = start + tl.arange(0, COLS)
        value = tl.load(hidden_ptr + row * stride_ht + cols, mask=cols < D, other=0.0).to(tl.float32)  # [COLS]
        total += value * tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    for start in range(0, RANK, COLS):
        cols = start + tl.arange(0, COLS)
        value = tl.load(embedded_ptr + row * stride_et + cols, mask=cols < RANK, other=0.0).to(tl.float32)
        total += value * tl.load(weight_ptr + D + cols, mask=cols < RANK, other=0.0).to(tl.float32)
    score = tl.sum(total, axis=0)
    tl.store(out_ptr + row, 1.0 / (1.0 + tl.exp(-score)))


@jit(do_not_specialize=("num_requests", "stride_dr", "stride_wr"))
def _accept_kernel(
    drafts_ptr, num_drafts_ptr, drawn_ptr, positions_ptr, num_accepted_ptr, next_ptr, newest_ptr, num_requests,
    stride_dr, stride_wr, MOST: tl.constexpr, ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    mask = rows < num_requests
    num_drafts = tl.load(num_drafts_ptr + rows, mask=mask, other=-1)  # [ROWS]
    is_real = num_drafts >= 0
    count = rows * 0
    goes_on = is_real
    newest = tl.load(drawn_ptr + rows * stride_wr, mask=is_real, other=-1)
    for i in tl.static_range(MOST):
        # is_same.cumprod(-1): `newest` is what was drawn before draft i
        draft = tl.load(drafts_ptr + rows * stride_dr + i, mask=goes_on & (i < num_drafts), other=-1)  # [ROWS]
        goes_on = goes_on & (draft == newest) & (draft >= 0)
        count += goes_on.to(tl.int64)
        newest = tl.where(goes_on, tl.load(drawn_ptr + rows * stride_wr + i + 1, mask=goes_on, other=-1), newest)
    position = tl.load(positions_ptr + rows, mask=mask, other=0)
    tl.store(num_accepted_ptr + rows, count, mask=mask)
    tl.store(next_ptr + rows, tl.where(is_real, position + count + 1, position), mask=mask)
    tl.store(newest_ptr + rows, newest, mask=mask)
