"""A token's own row: rotary embedding, the encoded row, and the window ring it is written to."""

from dsv4.ops.rows.launch import RowLaunch, append_swa, rope, window_rows
from dsv4.ops.rows.op import Turn, append_swa_ref, rope_frequencies, rope_ref, rope_tables, rotate, window_rows_ref

__all__ = [
    "RowLaunch", "Turn", "append_swa", "append_swa_ref", "rope", "rope_frequencies", "rope_ref", "rope_tables",
    "rotate", "window_rows", "window_rows_ref",
]
