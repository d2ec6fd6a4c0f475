"""Which drafts stay: 128 requests a program, one draft after the other."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


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
