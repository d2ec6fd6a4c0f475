"""Hyper-connections: the residual streams around every sublayer."""

from dsv4.ops.hyper.launch import HyperCall, hc_boundary, hc_enter, hc_head, hc_head_norm, hc_post, hc_pre, launch_hyper
from dsv4.ops.hyper.op import (
    HyperInput,
    HyperSettings,
    hc_boundary_ref,
    hc_enter_ref,
    hc_expand_ref,
    hc_head_norm_ref,
    hc_head_ref,
    hc_post_ref,
    hc_pre_ref,
    hc_split_ref,
    sinkhorn_ref,
)
from dsv4.ops.hyper.plan import MAX_ROWS, TILES, HyperTiles

__all__ = [
    "MAX_ROWS", "TILES", "HyperCall", "HyperInput", "HyperSettings", "HyperTiles", "hc_boundary", "hc_boundary_ref",
    "hc_enter", "hc_enter_ref", "hc_expand_ref", "hc_head", "hc_head_norm", "hc_head_norm_ref", "hc_head_ref",
    "hc_post", "hc_post_ref", "hc_pre", "hc_pre_ref", "hc_split_ref", "launch_hyper", "sinkhorn_ref",
]
