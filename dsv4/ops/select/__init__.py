"""The k largest of many scores."""

from dsv4.ops.select.config import MAX_COLUMNS, MAX_K, TOPK_CONFIG, TopkConfig
from dsv4.ops.select.launch import launch_topk, select, topk_select
from dsv4.ops.select.op import topk_select_ref

__all__ = [
    "MAX_COLUMNS", "MAX_K", "TOPK_CONFIG", "TopkConfig", "launch_topk", "select", "topk_select", "topk_select_ref",
]  # fmt: skip
