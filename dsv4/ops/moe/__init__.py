"""Experts: routed and shared in one op or in pieces, the sort of (token, choice) pairs, and one FP4 linear."""

from dsv4.ops.moe.launch import (
    are_prepared,
    launch_moe,
    moe,
    prepare_experts,
    prepare_routed,
    prepare_shared,
    takes_rounded,
)
from dsv4.ops.moe.launch_halves import moe_fold, moe_parts, moe_shared
from dsv4.ops.moe.launch_linear import fp4_linear, launch_fp4_linear
from dsv4.ops.moe.op import Matrices, experts_ref, moe_fold_ref, moe_parts_ref, moe_ref, moe_shared_ref
from dsv4.ops.moe.plan import (
    FEW_CONFIG,
    FEW_TOKENS,
    NARROW_ROWS,
    TILES_CONFIG,
    WIDE_CONFIG,
    Form,
    GemmConfig,
    MoeConfig,
    Ranges,
    pick_moe_config,
)
from dsv4.ops.moe.sort import expert_sort, expert_sort_ref, launch_expert_sort, max_tiles

__all__ = [
    "FEW_CONFIG", "FEW_TOKENS", "NARROW_ROWS", "TILES_CONFIG", "WIDE_CONFIG", "Form", "GemmConfig", "Matrices",
    "MoeConfig", "Ranges", "are_prepared", "expert_sort", "expert_sort_ref", "experts_ref", "fp4_linear",
    "launch_expert_sort", "launch_fp4_linear", "launch_moe", "max_tiles", "moe", "moe_fold", "moe_fold_ref",
    "moe_parts", "moe_parts_ref", "moe_ref", "moe_shared", "moe_shared_ref", "pick_moe_config", "prepare_experts",
    "prepare_routed", "prepare_shared", "takes_rounded",
]
