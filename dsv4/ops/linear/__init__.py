"""Linear layers, several on one input in one launch, and the grouped output projection."""

from dsv4.ops.linear.bundle import LinearBundle, Segment, is_kernel_weight, takes_codes
from dsv4.ops.linear.launch import (
    grouped_codes,
    grouped_linear,
    launch_grouped,
    launch_linears,
    launch_shuffled,
    linear,
    linears,
    prepare_grouped,
    widened,
)
from dsv4.ops.linear.op import grouped_codes_ref, grouped_linear_ref, linear_ref, linears_ref, segments_ref
from dsv4.ops.linear.plan import num_splits

__all__ = [
    "LinearBundle", "Segment", "grouped_codes", "grouped_codes_ref", "grouped_linear", "grouped_linear_ref",
    "is_kernel_weight", "launch_grouped", "launch_linears", "launch_shuffled", "linear", "linear_ref", "linears",
    "linears_ref", "num_splits", "prepare_grouped", "segments_ref", "takes_codes", "widened",
]
