"""What kernels share: the guarded Triton import, launch checks and tables, and number formats on bits.

Triton is optional. Without it (macOS, Windows) every module still imports, `TORCH` works, and launching a kernel raises
`TritonMissingError`. Op modules take `tl` and `jit` from here and never import triton themselves.

Kernels that promise bits are launched with fp fusion off (`LaunchConfig.options`): a * b + c is then two roundings on
every machine, in the interpreter and in torch alike, and the compiler cannot fuse one kernel differently from another.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from dsv4.formats.e8m0 import FP4_AMAX_FLOOR, FP8_AMAX_FLOOR

HAS_TRITON = importlib.util.find_spec("triton") is not None


class TritonMissingError(ValueError):
    """A kernel was launched where Triton is not installed."""


class KernelInputError(ValueError):
    """A launcher was given a tensor its kernel cannot take."""


class _MissingTriton:
    """Stands where `triton.language` would: constants can be made, nothing else."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


class _MissingKernel:
    """Stands where a compiled kernel would."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> NoReturn:
        raise TritonMissingError(f"{self.name} needs Triton, which is not installed here; use the TORCH op set")


if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = importlib.import_module("triton.language") if HAS_TRITON else _MissingTriton()
IS_INTERPRETED: bool = HAS_TRITON and bool(importlib.import_module("triton").knobs.runtime.interpret)
# for kernels: `if INTERPRET:` around what only a GPU has (inline PTX, libdevice)
INTERPRET = tl.constexpr(IS_INTERPRETED)
# where launches are possible; ops/compile_only.py adds "meta"
LAUNCH_DEVICES = frozenset({"cuda", "cpu"} if IS_INTERPRETED else {"cuda"})


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """`triton.jit`, with or without arguments.

    Name every size that varies from call to call (rows, tokens) in `do_not_specialize`: one compiled kernel then
    serves all batches, which saves compilation and keeps a row's result independent of how many rows there are.
    """
    if function is None:
        return lambda inner: jit(inner, do_not_specialize=do_not_specialize)
    if not HAS_TRITON:
        return _MissingKernel(function.__name__)
    return importlib.import_module("triton").jit(function, do_not_specialize=list(do_not_specialize))


def check_launch(*tensors: Tensor | None) -> None:
    """All given tensors on one device that can run kernels; `KernelInputError` otherwise. None is skipped."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if not HAS_TRITON:
        return  # the launch itself says what is missing
    if len(devices) != 1 or next(iter(devices)).type not in LAUNCH_DEVICES:
        found = ", ".join(sorted(map(str, devices)))
        raise KernelInputError(
            f"expected tensors on one device of {sorted(LAUNCH_DEVICES)}, found {found}; the TORCH op set runs anywhere"
        )
    if IS_INTERPRETED and not _interpreter_is_repaired():
        raise KernelInputError(
            "TRITON_INTERPRET=1 computes wrong bits: call dsv4.testing.interpreter.without_gpu() first"
        )


def _interpreter_is_repaired() -> bool:
    return getattr(importlib.import_module("triton.runtime.interpreter"), "dsv4_repaired", False)


def current_arch() -> int:
    """Of the GPU that kernels are compiled for: 90 is Hopper, 100 Blackwell; 0 in the interpreter."""
    if IS_INTERPRETED:
        return 0
    return int(importlib.import_module("triton.runtime").driver.active.get_current_target().arch)


def blackwell_registers(limit: int) -> dict[str, int]:
    """A launch option where ptxas for Blackwell would otherwise take fewer registers than the kernel needs, and spill a
    few bytes."""
    return {"maxnreg": limit} if current_arch() >= 100 else {}


@dataclass(frozen=True)
class LaunchConfig:
    """One row of an op's launch table: rows of the tile, and what Triton is told.

    `launch_pdl`: the launch may begin while the one before it still runs; its kernel calls `pdl_wait`.
    """

    rows: int
    num_warps: int
    num_stages: int = 1
    launch_pdl: bool = False

    @property
    def options(self) -> dict[str, Any]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options | ({"launch_pdl": True} if self.launch_pdl else {})


def pick_config(table: Mapping[int, LaunchConfig], size: int, what: str) -> tuple[int, LaunchConfig]:
    """The smallest key of the table that holds `size`, with its configuration.

    The key must be a property of the layer (a width), never of the batch: the tile decides the order of a reduction.
    """
    for block in sorted(table):
        if size <= block:
            return block, table[block]
    raise KernelInputError(f"{what} must be at most {max(table)}, found {size}")


def next_power_of_2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


# ---- launches that overlap, and data fetched ahead into L2 ----
#
# A launch with `launch_pdl` begins as soon as every program of the launch before it has called `pdl_trigger` or ended.
# `pdl_wait` returns when that launch has ended and all it wrote can be read. The rule: every program of such a launch
# waits, and before its wait it writes nothing and reads only what no launch of a step writes: weights, and the batch's
# positions and slots. So the end of a launch is the end of all launches before it, and it does not matter whether a
# kernel calls `pdl_trigger` before or after its own wait. A kernel that is launched without `launch_pdl` needs no wait;
# its `pdl_trigger` is for the launch behind it. In the interpreter all of this is nothing.

if not IS_INTERPRETED and HAS_TRITON:
    _gdc = importlib.import_module("triton.language.extra.cuda")
    _gdc_wait, _gdc_launch_dependents = _gdc.gdc_wait, _gdc.gdc_launch_dependents
else:
    _gdc_wait = _gdc_launch_dependents = None
_PREFETCH_PTX = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@jit
def pdl_wait():
    """Until the launch before this one has ended."""
    if not INTERPRET:
        _gdc_wait()


@jit
def pdl_trigger():
    """The next launch may begin, as far as this program is concerned."""
    if not INTERPRET:
        _gdc_launch_dependents()


@jit
def prefetch_l2(ptr):
    """The lines at `ptr` (a tensor of pointers, one a line of 128 bytes) into L2. Every one must be a valid address."""
    if not INTERPRET:
        tl.inline_asm_elementwise(_PREFETCH_PTX, "=r,l", [ptr], dtype=tl.int32, is_pure=False, pack=1)


# ---- E8M0 scales, from the bits of fp32 ----


def _fp32_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


_FP8_FLOOR_BITS = tl.constexpr(_fp32_bits(FP8_AMAX_FLOOR))
_FP4_FLOOR_BITS = tl.constexpr(_fp32_bits(FP4_AMAX_FLOOR))


@jit
def abs_bits(x):
    """fp32 -> int32 bits of |x|. Their order is the values' order, with NaN above infinity: an integer max keeps
    NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _ceil_e8m0(amax_bits, MAX_EXPONENT: tl.constexpr, MAX_MANTISSA: tl.constexpr):
    """int32 code of the smallest power of two s with amax / max <= s, max = 2^MAX_EXPONENT (1 + MAX_MANTISSA / 2^23).

    The same as `ceil_e8m0` of formats/e8m0.py for amax at or above its floor, without a division.
    """
    exponent = amax_bits >> 23
    code = exponent - MAX_EXPONENT + ((amax_bits & 0x7FFFFF) > MAX_MANTISSA).to(tl.int32)
    return tl.where(exponent == 255, 255, code)


@jit
def e4m3_scale(amax_bits):
    """int32 bits of amax -> E8M0 code (int32) of its E4M3 scale, amax floored at 1e-4. 448 = 1.75 * 2^8."""
    return _ceil_e8m0(tl.maximum(amax_bits, _FP8_FLOOR_BITS), 8, 0x600000)


@jit
def e2m1_scale(amax_bits):
    """int32 bits of amax -> E8M0 code (int32) of its E2M1 scale, amax floored at 6 * 2^-126. 6 = 1.5 * 2^2."""
    return _ceil_e8m0(tl.maximum(amax_bits, _FP4_FLOOR_BITS), 2, 0x400000)


@jit
def e8m0_to_float(code):
    """int32 or uint8 code -> 2^(code - 127) in fp32; 255 is NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 0x400000, code << 23)  # 2^-127 is a subnormal
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def e8m0_reciprocal(code):
    """int32 code from 1 to 253 -> 2^(127 - code) in fp32; 255 is NaN. Multiplying by it is dividing by the scale."""
    return tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)


# ---- E4M3 and E2M1 groups ----


@jit
def quantize_e4m3(x):
    """fp32 [R, group] -> E4M3 codes [R, group] and E8M0 scale codes uint8 [R], as `fp8_quantize`.

    Nothing needs clamping: the scale is chosen so that amax / s <= 448 exactly.
    """
    scale = e4m3_scale(tl.max(abs_bits(x), axis=1))
    return (x * e8m0_reciprocal(scale)[:, None]).to(tl.float8e4nv), scale.to(tl.uint8)


@jit
def e2m1_encode(x):
    """fp32 -> nibbles in int32: round to nearest, ties to even, saturating at 6; NaN gives 0.

    Below 2 the spacing is 0.5: adding 2^22, whose last bit is worth 0.5, rounds. From 2 on one mantissa bit is kept.
    """
    bits = abs_bits(x)
    low = (bits.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) & 7
    high = tl.minimum(((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252, 7)
    code = tl.where(bits < 0x40000000, low, high)  # |x| < 2
    code = tl.where(bits > 0x7F800000, 0, code)  # NaN
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def e2m1_decode(nibble):
    """Nibbles in any integer type -> fp32. Sign, exponent and mantissa put at fp32's places are the value * 2^-126."""
    code = nibble.to(tl.int32)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@jit
def quantize_e2m1(x):
    """fp32 [R, group] -> packed bytes uint8 [R, group / 2] (even element low) and E8M0 codes uint8 [R], as
    `mxfp4_quantize`.
    """
    scale = e2m1_scale(tl.max(abs_bits(x), axis=1))
    nibbles = e2m1_encode(x * e8m0_reciprocal(scale)[:, None])
    even, odd = tl.split(tl.reshape(nibbles, [x.shape[0], x.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8), scale.to(tl.uint8)


# ---- cosine and sine ----

_TWO_OVER_PI = tl.constexpr(2 / math.pi)
# pi / 2 in two parts; the first has 33 bits, so that its product with a quadrant number below 2^20 is exact
_HALF_PI_HIGH = tl.constexpr(1.57079632673412561417)
_HALF_PI_LOW = tl.constexpr(6.07710050650619224932e-11)


@jit
def cos_sin(angle):
    """fp32 angle -> cos and sin, exact to fp32 for |angle| up to 1.6 million (graceful beyond).

    Cody-Waite reduction and Taylor series in fp64: no slow path, no library, and the same bits in the interpreter
    and on a GPU. The series ends where the next term, at pi / 4, is below 2^-52.
    """
    wide = angle.to(tl.float64)
    quadrant = tl.floor(wide * _TWO_OVER_PI + 0.5)
    r = (wide - quadrant * _HALF_PI_HIGH) - quadrant * _HALF_PI_LOW
    r2 = r * r
    tail = r2 * (-1.0 / 1307674368000.0) + 1.0 / 6227020800.0
    tail = tail * r2 - 1.0 / 39916800.0
    tail = tail * r2 + 1.0 / 362880.0
    tail = tail * r2 - 1.0 / 5040.0
    tail = tail * r2 + 1.0 / 120.0
    tail = tail * r2 - 1.0 / 6.0
    sine = r + r * (r2 * tail)
    tail = r2 * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0
    tail = tail * r2 + 1.0 / 479001600.0
    tail = tail * r2 - 1.0 / 3628800.0
    tail = tail * r2 + 1.0 / 40320.0
    tail = tail * r2 - 1.0 / 720.0
    tail = tail * r2 + 1.0 / 24.0
    cosine = 1.0 + r2 * (tail * r2 - 0.5)
    turns = quadrant.to(tl.int64) & 3
    is_swapped = (turns & 1) == 1
    cos_value = tl.where(is_swapped, sine, cosine)
    sin_value = tl.where(is_swapped, cosine, sine)
    cos_value = tl.where((turns == 1) | (turns == 2), -cos_value, cos_value)
    sin_value = tl.where(turns >= 2, -sin_value, sin_value)
    return cos_value.to(tl.float32), sin_value.to(tl.float32)


@jit
def in_product_order(x):
    """[R, C] -> the same columns, of which 16 neighbours are what mma.sync takes at once from an operand behind a join:
    of a column's number inside 32, bit 1 moves to the top.

    The compiler gives a thread four neighbours of such an operand where it gives two of others, and an MMA then takes
    of 32 columns first those with bit 1 clear, then those with it set. The order inside the 16 does not matter to a
    sum: products without a join, or of wgmma, over columns in this order give the same bits.
    """
    split = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 4, 2, 2])
    return tl.reshape(tl.permute(split, [0, 1, 4, 2, 3, 5]), [x.shape[0], x.shape[1]])
