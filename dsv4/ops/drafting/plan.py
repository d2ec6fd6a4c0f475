"""Tiles of the small ops of drafting: constants, so a row's sum has the same order in every batch."""

from __future__ import annotations

ACCEPT_ROWS = 128
TAP_ROWS, TAP_COLS = 4, 256  # a warp reads 512 bytes of a row
CONFIDENCE_COLS = 1024
