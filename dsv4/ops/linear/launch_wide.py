"""Launcher of the linear layers' kernel for many rows (kernel_wide.py), and which calls it takes."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from dsv4.formats.tensors import QuantActivation, QuantTensor
from dsv4.ops.lib.arch import architecture, num_multiprocessors
from dsv4.ops.lib.guard import gl
from dsv4.ops.linear.kernel_wide import (
    ROW_BYTES,
    TILE_OUTPUTS,
    TILE_TOKENS,
    WideResult,
    WideScales,
    wide_linear_kernel,
)
from dsv4.ops.linear.outputs import Outputs
from dsv4.ops.linear.plan import WIDE

_STEP = 128  # columns, in either format
_NO_SEGMENT = (0,) * 6


def can_be_copied(matrix: Tensor) -> bool:
    """Whether the copy engine can take tiles of a matrix with contiguous columns."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    has_rows = matrix.stride(0) >= matrix.shape[1] and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
    return has_rows and architecture().has_copy_engine


def takes_wide(fp8: QuantTensor | None, plain: Tensor | None, x8: Tensor, x16: Tensor) -> bool:
    """Whether `launch_wide` can do it: on Hopper, whole steps."""
    matrices = [*(() if fp8 is None else (fp8.data, x8)), *(() if plain is None else (plain, x16))]
    return architecture().has_wide_kernels and all(
        matrix.shape[1] % _STEP == 0 and can_be_copied(matrix) for matrix in matrices
    )


def launch_wide(
    fp8: QuantTensor | None, plain: Tensor | None, codes: QuantActivation, x16: Tensor, outputs: Outputs,
    splits8: int, splits16: int,
) -> None:
    """`wide_linear_kernel`: as `linear_kernel`, into `outputs`. Where there is no FP8 weight, any codes."""
    num_tokens, width = x16.shape
    segments8, tiles8 = outputs.table(True, TILE_OUTPUTS)
    segments16, tiles16 = outputs.table(False, TILE_OUTPUTS)
    scales = WideScales(x16 if fp8 is None else fp8.scale.contiguous(), codes.scale, codes.scale.stride(0))
    num_tiles = -(-num_tokens // TILE_TOKENS) * (tiles8 + tiles16)
    takes_turns = plain is None and splits8 > 1
    wide_linear_kernel[(min(num_multiprocessors(x16.device), num_tiles),)](
        *((x16, x16) if fp8 is None else _operands(fp8.data, codes.codes)),
        *((x16, x16) if plain is None else _operands(plain, x16)),
        scales, WideResult(outputs.narrow, outputs.wide), num_tokens,
        K=width, SEGMENTS8=segments8 or _NO_SEGMENT, SEGMENTS16=segments16 or _NO_SEGMENT, TILES8=tiles8,
        TILES16=tiles16, SPLITS8=splits8, SPLITS16=splits16, HAS_WIDE=any(outputs.is_wide),
        BAND=WIDE.band_in_turns if takes_turns else WIDE.band, STAGES=WIDE.stages, TAKES_TURNS=takes_turns,
        REGISTERS=WIDE.registers, num_warps=4, enable_fp_fusion=False,
    )


def _operands(weight: Tensor, x: Tensor) -> tuple[Any, Any]:
    return _descriptor(weight, TILE_OUTPUTS), _descriptor(x, TILE_TOKENS)


def _descriptor(matrix: Tensor, rows: int) -> Any:
    """For tiles of `rows` rows and ROW_BYTES of each."""
    bits = 8 * matrix.element_size()
    layout = gl.NVMMASharedLayout(ROW_BYTES, bits, 2)
    descriptor = importlib.import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    return descriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, ROW_BYTES * 8 // bits], layout)
