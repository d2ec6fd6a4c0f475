"""The k largest of many scores."""

from dsv4.ops.select.launch import launch_topk, select, topk_select
from dsv4.ops.select.op import topk_select_ref
from dsv4.ops.select.plan import MAX_COLUMNS, MAX_K, TOPK_CONFIG, TopkConfig

__all__ = [
    "MAX_COLUMNS", "MAX_K", "TOPK_CONFIG", "TopkConfig", "launch_topk", "select", "topk_select", "topk_select_ref",
]
