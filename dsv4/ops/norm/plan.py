"""Tiles of a norm's rows. They depend on K alone: a row's sum has the same order in every batch."""

from __future__ import annotations

import torch

from dsv4.ops.lib.launch import LaunchConfig

# key: K rounded up to a power of two. Tiles of 4,096 values on four warps: a thread has four 16-byte loads of bf16
# under way. `attention_inputs` uses the same tiles, so that a row's sum has the same order there: fused and unfused
# agree in every bit.
ROW_CONFIGS = {
    64: LaunchConfig(rows=8, num_warps=1),
    128: LaunchConfig(rows=8, num_warps=1),
    256: LaunchConfig(rows=8, num_warps=2),
    512: LaunchConfig(rows=8, num_warps=4),
    1024: LaunchConfig(rows=4, num_warps=4),
    2048: LaunchConfig(rows=2, num_warps=4),
    4096: LaunchConfig(rows=1, num_warps=4),
    8192: LaunchConfig(rows=1, num_warps=8),
    16384: LaunchConfig(rows=1, num_warps=16),
}
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
