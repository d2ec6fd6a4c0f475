"""Step 2 of the hyper-connections' kernels (kernel_few.py): from a token's partials to its weights, the Sinkhorn
iteration, and the collapse with its norm and codes.
"""

from __future__ import annotations

from dsv4.ops.hyper.kernel_streams import MIX_COLS
from dsv4.ops.lib.codecs import fake_quantize_e4m3, quantize_e4m3
from dsv4.ops.lib.guard import INTERPRET, jit, tl
from dsv4.ops.lib.maths import exp_fp32, to_bf16
from dsv4.ops.norm.kernel_norm import inverse_rms

NO_CODES, AS_CODES, AS_VALUES = 0, 1, 2  # what else is stored of the normed row: nothing, FP8 codes, or their values

_MIX_COLS = tl.constexpr(MIX_COLS)
_NO_CODES, _AS_CODES = tl.constexpr(NO_CODES), tl.constexpr(AS_CODES)


# ---- weights ----


@jit
def load_scales(base_ptr, scale_ptr, NUM_MIXES: tl.constexpr):
    """base and scale of every mix [MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    scale_idx = tl.minimum(mixes // 4, 2) if NUM_MIXES > 4 else mixes * 0
    return (
        tl.load(base_ptr + mixes, mask=mixes < NUM_MIXES, other=0.0),
        tl.load(scale_ptr + scale_idx, mask=mixes < NUM_MIXES, other=0.0),
    )


@jit
def load_partial(ptr, row, NUM_SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, NUM_MIXES: tl.constexpr):
    """The partials [splits, MIX_COLS] of a row. Other multiprocessors wrote them: .cg reads from the cache they share.
    The hint makes a lane take one mix and a warp whole rows, whatever else is known of the pointer: the order of the
    sum is the same in both kernels."""
    splits, mixes = tl.arange(0, SPLIT_BLOCK), tl.arange(0, _MIX_COLS)
    mask = (splits < NUM_SPLITS)[:, None] & (mixes <= NUM_MIXES)[None, :]
    offsets = splits.to(tl.int64)[:, None] * _MIX_COLS + mixes.to(tl.int64)[None, :]
    places = ptr + row * (NUM_SPLITS * _MIX_COLS) + tl.multiple_of(offsets, [1, 1])
    return tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")


@jit
def token_weights(partial, base, scale, norm_eps, hc_eps, D: tl.constexpr, NUM_MIXES: tl.constexpr):
    """Sum a token's partials -> its 4 pre weights, 4 post weights and 16 exponentials, side by side [MIX_COLS]."""
    mixes = tl.arange(0, _MIX_COLS)
    sums = tl.sum(partial, axis=0)  # [MIX_COLS]
    # rows_matmul(wide.flatten(1), fn) * rsqrt(mean_square + norm_eps)
    mean_square = tl.div_rn(tl.sum(tl.where(mixes == NUM_MIXES, sums, 0.0), axis=0), 4.0 * D)
    logits = sums * tl.div_rn(1.0, tl.sqrt_rn(mean_square + norm_eps)) * scale + base
    # sigmoid(z) for pre and post, from exp(-|z|); exp(z - max of its row) for comb: one exp serves all
    rows_of_four = tl.reshape(logits, [_MIX_COLS // 4, 4])  # [MIX_COLS / 4, 4]
    row_max = tl.broadcast_to(tl.max(rows_of_four, axis=1)[:, None], [_MIX_COLS // 4, 4])
    is_gate = mixes < 8
    power = exp_fp32(tl.where(is_gate, tl.abs(logits) * -1.0, logits - tl.reshape(row_max, [_MIX_COLS])))
    gate = tl.div_rn(tl.where(logits < 0.0, power, 1.0), 1.0 + power)
    gate = tl.where(mixes < 4, gate + hc_eps, gate * 2.0)
    return tl.where(is_gate, gate, power)


@jit
def store_post(new_post_ptr, values, token):
    mixes = tl.arange(0, _MIX_COLS)
    tl.store(new_post_ptr + token * 4 + mixes - 4, values, mask=(mixes >= 4) & (mixes < 8))


# ---- Sinkhorn ----


@jit
def _reciprocal(x):
    """1 / x for x between 1e-6 and 8: an approximation and one Newton step, without the slow path of a division."""
    if INTERPRET:
        return 1.0 / x
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(-x, guess, 1.0), guess, guess)


@jit
def _normalise(row, eps):
    """Four numbers over their sum plus eps."""
    inverse = _reciprocal((((row[0] + row[1]) + row[2]) + row[3]) + eps)
    return row[0] * inverse, row[1] * inverse, row[2] * inverse, row[3] * inverse


@jit
def _softmax_row(row, eps):
    """Four exponentials over their sum, plus eps."""
    inverse = _reciprocal(((row[0] + row[1]) + row[2]) + row[3])
    return row[0] * inverse + eps, row[1] * inverse + eps, row[2] * inverse + eps, row[3] * inverse + eps


@jit
def _column(rows, INDEX: tl.constexpr):
    return rows[0][INDEX], rows[1][INDEX], rows[2][INDEX], rows[3][INDEX]


@jit
def _normalise_each(rows, eps):
    return _normalise(rows[0], eps), _normalise(rows[1], eps), _normalise(rows[2], eps), _normalise(rows[3], eps)


@jit
def _transposed(rows):
    return _column(rows, 0), _column(rows, 1), _column(rows, 2), _column(rows, 3)


@jit
def iterate(rows, eps, NUM_ITERS: tl.constexpr):
    """Exponentials -> comb. The 4 x 4 matrix is four rows of four variables, so that no step leaves a thread."""
    # comb = comb / ordered_sum(comb, -1).unsqueeze(-1) + eps
    row0, row1 = _softmax_row(rows[0], eps), _softmax_row(rows[1], eps)
    comb = row0, row1, _softmax_row(rows[2], eps), _softmax_row(rows[3], eps)
    # comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
    comb = _transposed(_normalise_each(_transposed(comb), eps))
    for _ in range(NUM_ITERS - 1):
        # comb = comb / (ordered_sum(comb, -1).unsqueeze(-1) + eps)
        comb = _normalise_each(comb, eps)
        # comb = comb / (ordered_sum(comb, -2).unsqueeze(-2) + eps)
        comb = _transposed(_normalise_each(_transposed(comb), eps))
    return comb


# ---- collapse ----


@jit
def load_rows(x_ptr, token, cols, mask, D: tl.constexpr, IS_SHARED: tl.constexpr):
    """A token's four streams, each whole: [1, BLOCK]. `IS_SHARED`: x is [T, D], the same row for every stream."""
    STEP: tl.constexpr = 0 if IS_SHARED else D
    row_ptr = x_ptr + token * (D if IS_SHARED else 4 * D) + cols
    return (
        tl.load(row_ptr, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + STEP, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + 2 * STEP, mask=mask, other=0.0, cache_modifier=".cg"),
        tl.load(row_ptr + 3 * STEP, mask=mask, other=0.0, cache_modifier=".cg"),
    )


@jit
def _scalar(values, INDEX: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, _MIX_COLS) == INDEX, values, 0.0), axis=0)


@jit
def _collapse(x, values):
    """y = sum_j pre[j] X[j], rounded."""
    y = _scalar(values, 0) * x[0].to(tl.float32)
    for stream in tl.static_range(1, 4):
        y = y + _scalar(values, stream) * x[stream].to(tl.float32)
    return to_bf16(y)


@jit
def _store_codes(
    codes_ptr, scale_ptr, hidden, token, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr
):
    """FP8 codes of a row [1, BLOCK], as `_rms_norm_kernel` of ops/norm writes them; or what they stand for."""
    groups = tl.arange(0, BLOCK // GROUP)
    wide = tl.reshape(hidden.to(tl.float32), [BLOCK // GROUP, GROUP])  # [groups, GROUP]
    group_mask = groups < D // GROUP
    code_offsets = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if CODES == _AS_CODES:
        codes, scale = quantize_e4m3(wide)
        tl.store(codes_ptr + token * D + code_offsets, codes, mask=group_mask[:, None])
        tl.store(scale_ptr + token * (D // GROUP) + groups, scale, mask=group_mask)
    else:
        tl.store(codes_ptr + token * D + code_offsets, fake_quantize_e4m3(wide), mask=group_mask[:, None])


@jit
def store_hidden(
    x, values, norm_weight, norm_eps, hidden_ptr, codes_ptr, code_scale_ptr, token, cols, mask,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, HAS_NORM: tl.constexpr, CODES: tl.constexpr,
):
    """Collapse a token's streams [1, BLOCK], norm and encode the result, store both."""
    hidden = _collapse(x, values)  # [1, BLOCK]
    if HAS_NORM:
        # rms_norm_ref(hidden, norm_weight, norm_eps)
        wide = hidden.to(tl.float32)
        normed = wide * inverse_rms(wide, D, norm_eps)[:, None] * norm_weight.to(tl.float32)
        hidden = to_bf16(normed)
    tl.store(hidden_ptr + token * D + cols, hidden, mask=mask)
    if CODES != _NO_CODES:
        _store_codes(codes_ptr, code_scale_ptr, hidden, token, D, BLOCK, GROUP, CODES)
