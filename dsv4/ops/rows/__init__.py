"""A token's own row: rotary embedding, the encoded row, and the window ring it is written to."""

from dsv4.ops.rows.launch import RowLaunch, append_swa, head_norm_rope, rope, store_window, window_rows
from dsv4.ops.rows.op import (
    Turn,
    append_swa_ref,
    head_norm_rope_ref,
    rope_frequencies,
    rope_ref,
    rope_tables,
    rotate,
    store_window_ref,
    window_rows_ref,
)

__all__ = [
    "RowLaunch", "Turn", "append_swa", "append_swa_ref", "head_norm_rope", "head_norm_rope_ref", "rope",
    "rope_frequencies", "rope_ref", "rope_tables", "rotate", "store_window", "store_window_ref", "window_rows",
    "window_rows_ref",
]
