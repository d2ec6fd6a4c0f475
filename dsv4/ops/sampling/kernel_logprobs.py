"""Kernels beside the draw: log-probabilities, and last tokens in place of ids not known yet."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import exp_fp32, exp_negative, log_positive

# ---- log-probabilities ----


@jit(do_not_specialize=("num_chunks",))
def _exp_sum_kernel(
    logits_ptr, chunk_max_ptr, chunk_sum_ptr, stride_lr, stride_lv, vocab_size, num_chunks, TILE: tl.constexpr
):
    """Largest logit of a chunk of TILE, and the sum of exp(logit - largest), both fp32."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = chunk * TILE + tl.arange(0, TILE)  # [TILE]
    is_token = columns < vocab_size
    x = tl.load(logits_ptr + row * stride_lr + columns * stride_lv, mask=is_token, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    # a chunk of -inf adds nothing to the others
    base = tl.where(largest == float("-inf"), 0.0, largest)
    terms = tl.where(is_token, exp_fp32(x - base), 0.0)
    tl.store(chunk_max_ptr + row * num_chunks + chunk, largest)
    tl.store(chunk_sum_ptr + row * num_chunks + chunk, tl.sum(terms, 0))


@jit(do_not_specialize=("num_chunks",))
def _logprob_kernel(
    logits_ptr, chunk_max_ptr, chunk_sum_ptr, token_ids_ptr, top_ids_ptr, chosen_ptr, top_ptr, stride_lr, stride_lv,
    num_chunks, NUM_TOP: tl.constexpr, TOP_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, C_BLOCK)  # [C_BLOCK]
    places, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    # a few chunks a row: fp64 from here on costs nothing
    chunk_max = tl.load(chunk_max_ptr + places, mask=is_chunk, other=float("-inf")).to(tl.float64)
    largest = tl.max(chunk_max, 0)
    sums = tl.load(chunk_sum_ptr + places, mask=is_chunk, other=0.0).to(tl.float64)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * exp_negative(chunk_max - largest)), 0)
    # log_softmax: logits - largest - log(sum(exp(logits - largest)))
    log_total = tl.where(total > 0.0, log_positive(total), float("nan"))
    row_ptr = logits_ptr + row * stride_lr
    token_id = tl.load(token_ids_ptr + row)
    chosen = tl.load(row_ptr + token_id * stride_lv, mask=token_id >= 0, other=float("nan")).to(tl.float64)
    tl.store(chosen_ptr + row, (chosen - largest - log_total).to(tl.float32))
    if NUM_TOP > 0:
        lanes = tl.arange(0, TOP_BLOCK)  # [TOP_BLOCK]
        is_lane = lanes < NUM_TOP
        ids = tl.load(top_ids_ptr + row * NUM_TOP + lanes, mask=is_lane, other=0)
        top = tl.load(row_ptr + ids * stride_lv, mask=is_lane, other=0.0).to(tl.float64)
        tl.store(top_ptr + row * NUM_TOP + lanes, (top - largest - log_total).to(tl.float32), mask=is_lane)


# ---- ids not known yet ----


@jit(do_not_specialize=("token_ids_ptr", "slots_ptr", "out_ptr", "num_tokens"))
def _resolve_kernel(token_ids_ptr, slots_ptr, last_tokens_ptr, out_ptr, num_tokens, BLOCK: tl.constexpr):
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    is_token = tokens < num_tokens
    token_ids = tl.load(token_ids_ptr + tokens, mask=is_token, other=0)
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    # torch.where(token_ids < 0, last_tokens[slots], token_ids), 0 where slots < 0
    last = tl.load(last_tokens_ptr + slots, mask=(slots >= 0) & (token_ids < 0), other=0)
    resolved = tl.where(token_ids < 0, last, token_ids)
    tl.store(out_ptr + tokens, tl.where(slots < 0, 0, resolved), mask=is_token)
