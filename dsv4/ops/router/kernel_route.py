"""The gate product on tensor cores (bf16 operands, exact products, fp32 sums), and the choice.

A token's logits become scores, which are picked, sorted and renormalised. With few rows the product is cut along D over
many programs, which leave partial sums; those that arrive last wait for the few still missing and finish a row each:
one launch. With many rows one program sums its splits itself and a second launch has a program per row. Either way a
logit is the sum, in split order, of sums over SPLIT_LEN columns: a row's bits do not depend on the number of rows.

Waiting cannot hang: a program waits for programs of its own tile, which a GPU starts before those of later tiles, and a
tile has fewer programs than a GPU runs at once. In the interpreter, where programs run one after another, the last one
does all the work.
"""

from __future__ import annotations

from dsv4.ops.lib.arrivals import arrive_and_share, wait_for_arrivals
from dsv4.ops.lib.guard import jit, tl
from dsv4.ops.lib.maths import ordered_bits, softplus
from dsv4.ops.lib.pdl import pdl_trigger, pdl_wait
from dsv4.ops.router.plan import BLOCK_K, SPLIT_LEN

_SPLIT_LEN, _BLOCK_K = tl.constexpr(SPLIT_LEN), tl.constexpr(BLOCK_K)


@jit
def _split_product(
    x_ptr, gate_ptr, rows, experts, split, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, WAITS: tl.constexpr,
):
    """gate x^T of one split, fp32 [experts, rows]. The gate is the left operand: its 64 rows fill the tensor core's
    tile. WAITS: the gate is asked for before the launch that makes x has ended.
    """
    sums = tl.zeros([experts.shape[0], rows.shape[0]], dtype=tl.float32)  # [experts, rows]
    gates = ()
    for step in tl.static_range(_SPLIT_LEN // _BLOCK_K):
        columns = split * _SPLIT_LEN + step * _BLOCK_K + tl.arange(0, _BLOCK_K)  # [BLOCK_K]
        gate_mask = (experts < E)[:, None] & (columns < D)[None, :]
        places = gate_ptr + experts[:, None] * stride_ge + columns[None, :] * stride_gd
        gates += (tl.load(places, mask=gate_mask, other=0.0),)  # type: ignore[assignment]
    if WAITS:
        pdl_wait()
        pdl_trigger()
    for step in tl.static_range(_SPLIT_LEN // _BLOCK_K):
        columns = split * _SPLIT_LEN + step * _BLOCK_K + tl.arange(0, _BLOCK_K)
        x_mask = (rows < num_rows)[None, :] & (columns < D)[:, None]
        x = tl.load(x_ptr + rows[None, :] * stride_xt + columns[:, None] * stride_xd, mask=x_mask, other=0.0)
        sums = tl.dot(gates[step], x, sums)
    return sums


@jit
def _store_products(
    x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, NUM_SPLITS: tl.constexpr,
    EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
):
    """Logits [1, T, E], or (`IS_SPLIT`) the partial sums [NUM_SPLITS, T, E]: one program's part."""
    rows = tl.program_id(1).to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
    NUM_TILES: tl.constexpr = (E + EXPERT_TILE - 1) // EXPERT_TILE
    experts = (tl.program_id(0) % NUM_TILES) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    split = tl.program_id(0) // NUM_TILES
    if IS_SPLIT:
        sums = _split_product(
            x_ptr, gate_ptr, rows, experts, split, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, True
        )
    else:
        pdl_wait()
        pdl_trigger()
        sums = tl.zeros([EXPERT_TILE, ROW_TILE], dtype=tl.float32)
        for part in range(NUM_SPLITS):
            sums += _split_product(
                x_ptr, gate_ptr, rows, experts, part, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, False
            )
    places = (split * num_rows + rows)[None, :] * E + experts[:, None]
    tl.store(logits_ptr + places, sums, mask=(rows < num_rows)[None, :] & (experts < E)[:, None])


@jit
def _choose_row(
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, row, stride_ls, stride_lt, stride_le,
    num_ids, scale, E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr,
):
    """One token: sum the splits, score, choose (or look up), sort, renormalise."""
    ids = tl.arange(0, E_BLOCK)  # [E_BLOCK], the experts
    lanes = tl.arange(0, K_BLOCK)  # [K_BLOCK], places of the choice
    picks = tl.full([K_BLOCK], E_BLOCK, tl.int32)  # [K_BLOCK]
    logits = tl.zeros([E_BLOCK], dtype=tl.float32)  # [E_BLOCK]
    for split in tl.static_range(NUM_SPLITS):
        place = split * stride_ls + row * stride_lt + ids * stride_le
        # other multiprocessors may have written it: .cg reads from the cache they share
        logits += tl.load(logits_ptr + place, mask=ids < E, other=0.0, cache_modifier=".cg")
    # softplus(logits.double()).sqrt().to(logits.dtype)
    scores = tl.sqrt(softplus(logits.to(tl.float64))).to(tl.float32)  # [E_BLOCK]
    if HAS_TABLE:
        token_id = tl.load(token_ids_ptr + row)
        is_known = (token_id >= 0) & (token_id < num_ids)
        picks = tl.load(table_ptr + token_id * TOP_K + lanes, mask=is_known & (lanes < TOP_K), other=-1).to(tl.int32)
        picks = tl.where(lanes < TOP_K, picks, E_BLOCK)
    else:
        ranked = scores  # [E_BLOCK]
        if HAS_BIAS:
            ranked += tl.load(bias_ptr + ids, mask=ids < E, other=0.0).to(tl.float32)
        composite = ((ordered_bits(ranked).to(tl.int64) + 0x80000000) << 16) | (0xFFFF - ids).to(tl.int64)
        composite = tl.where(ids < E, composite, -1)
        for place in tl.static_range(TOP_K):
            pick = 0xFFFF - (tl.max(composite, 0) & 0xFFFF).to(tl.int32)
            composite = tl.where(ids == pick, -1, composite)
            picks = tl.where(lanes == place, pick, picks)
    values = tl.gather(scores, tl.minimum(tl.maximum(picks, 0), E_BLOCK - 1), 0)  # [K_BLOCK]
    # experts.sort(-1), by counting; a table may name an expert twice
    is_before = (picks[None, :] < picks[:, None]) | (
        (picks[None, :] == picks[:, None]) & (lanes[None, :] < lanes[:, None])
    )
    rank = tl.sum(is_before.to(tl.int32), 1)  # [K_BLOCK]
    # chosen / ordered_sum(chosen, -1) * scale; torch keeps a running sum of fp32 in fp64
    total = tl.full([], 0.0, tl.float64)
    for place in tl.static_range(TOP_K):
        total += tl.sum(tl.where(rank == place, values, 0.0), 0).to(tl.float64)
    weights = tl.where(picks < 0, 0.0, tl.div_rn(values, total.to(tl.float32) + tl.zeros_like(values)) * scale)
    tl.store(experts_ptr + row * TOP_K + rank, picks.to(tl.int64), mask=lanes < TOP_K)
    tl.store(weights_ptr + row * TOP_K + rank, weights, mask=lanes < TOP_K)


@jit(do_not_specialize=("num_rows",))
def _gate_kernel(
    x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd,
    D: tl.constexpr, E: tl.constexpr, NUM_SPLITS: tl.constexpr,
    EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IS_SPLIT: tl.constexpr,
):
    _store_products(
        x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, NUM_SPLITS,
        EXPERT_TILE, ROW_TILE, IS_SPLIT,
    )


@jit(do_not_specialize=("num_rows", "stride_ls"))
def _choose_kernel(
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, num_rows, stride_ls, stride_lt, stride_le,
    num_ids, scale, E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr,
):
    pdl_wait()
    pdl_trigger()
    _choose_row(
        logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, tl.program_id(0).to(tl.int64),
        stride_ls, stride_lt, stride_le, num_ids, scale, E, E_BLOCK, NUM_SPLITS, TOP_K, K_BLOCK, HAS_BIAS, HAS_TABLE,
    )


@jit(do_not_specialize=("num_rows", "stride_ls"))
def _route_kernel(
    x_ptr, gate_ptr, stride_xt, stride_xd, stride_ge, stride_gd, counter_ptr,
    logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr, num_rows, stride_ls, stride_lt, stride_le,
    num_ids, scale, D: tl.constexpr, EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    E: tl.constexpr, E_BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_TABLE: tl.constexpr,
):
    """`_gate_kernel` with IS_SPLIT, and `_choose_kernel`, in one launch. The counter only grows."""
    NUM_PROGRAMS: tl.constexpr = (E + EXPERT_TILE - 1) // EXPERT_TILE * NUM_SPLITS
    _store_products(
        x_ptr, gate_ptr, logits_ptr, num_rows, stride_xt, stride_xd, stride_ge, stride_gd, D, E, NUM_SPLITS,
        EXPERT_TILE, ROW_TILE, True,
    )
    tile = tl.program_id(1)
    tile_rows = tl.minimum(num_rows - tile * ROW_TILE, ROW_TILE)
    worker, num_workers, complete = arrive_and_share(counter_ptr + tile, tile_rows, NUM_PROGRAMS, NUM_PROGRAMS)
    if worker >= 0:
        wait_for_arrivals(counter_ptr + tile, complete)
        for row in range(worker, tile_rows, num_workers):
            _choose_row(
                logits_ptr, bias_ptr, table_ptr, token_ids_ptr, experts_ptr, weights_ptr,
                tile.to(tl.int64) * ROW_TILE + row, stride_ls, stride_lt, stride_le, num_ids, scale, E, E_BLOCK,
                NUM_SPLITS, TOP_K, K_BLOCK, HAS_BIAS, HAS_TABLE,
            )
