"""Tiles of shuffled weights (formats/layouts.py) as bf16 in the registers that feed an MMA. Exact.

On a GPU the FP4 decode is PTX on pairs of words that lie side by side in a row: 4 byte permutes, 7 shifts, 9 masks and
8 multiplications for 16 weights, all of it element by element, so that any register layout is right. The planes are
joined in an order that costs nothing: the words of a row in the layout of an MMA operand with K = 16 are, plane by
plane, the operand with K = 128. The plain form computes the same bits.
"""

from __future__ import annotations

from dsv4.formats.layouts import TILE_ROWS
from dsv4.ops.lib.arch import known_at_compile_time
from dsv4.ops.lib.guard import INTERPRET, jit, tl

NVFP4 = tl.constexpr(0)
MXFP4 = tl.constexpr(1)
FP8 = tl.constexpr(2)
ROWS = tl.constexpr(TILE_ROWS)
_MASK = "0x81C081C0"
# two bf16 of -0: added to a product they change nothing, not even a zero's sign. As fma the product exists on every
# architecture, and is the instruction that mul becomes
MINUS_ZEROS = "0x80008000"
# byte permutes of two words: (byte 3, byte L) of both, L = 2, 1, 0, and (byte 0, byte 1)
_PERMUTES = ("0x7632", "0x7531", "0x7430", "0x4501")


def _decode_ptx(scale_of_plane: tuple[str, ...], num_scales: int, first_plane: int = 0) -> tuple[str, str]:
    """PTX and constraints: an output for each plane (two weights), the two words, then every scale twice.

    `scale_of_plane`: for each plane from `first_plane` on the register with its scale in both halves: "s0l" is the low
    half of scale 0.
    """
    count = len(scale_of_plane)
    lines = ["{ .reg .b32 c0, c1, c2, c3, t, z;", f"mov.b32 z, {MINUS_ZEROS};"]
    for index in range(num_scales):
        lines += [f".reg .b32 s{index}l, s{index}h;", "{ .reg .b16 l, h;"]
        lines += [f"mov.b32 {{l, h}}, ${count + 2 + 2 * index};"]
        lines += [f"mov.b32 s{index}l, {{l, l}};", f"mov.b32 s{index}h, {{h, h}}; }}"]
    lines += [f"prmt.b32 c{index}, ${count}, ${count + 1}, {select};" for index, select in enumerate(_PERMUTES)]
    for place, scale in enumerate(scale_of_plane):
        plane = first_plane + place
        if plane < 7:
            lines += [f"shl.b32 t, c{plane % 3}, {plane};"] if plane else ["mov.b32 t, c0;"]
            lines += [f"and.b32 t, t, {_MASK};", f"fma.rn.bf16x2 ${place}, t, {scale}, z;"]
        else:
            lines += ["shl.b32 t, c3, 6;", "and.b32 t, t, 0x00C000C0;"]
            lines += ["lop3.b32 t, c3, 0x81008100, t, 0xEA;", f"fma.rn.bf16x2 ${place}, t, {scale}, z;"]  # a & b | c
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * count + ["r"] * (2 + 2 * num_scales))


_NV_PLANES = ("s0l", "s1l", "s0h", "s1h", "s2l", "s3l", "s2h", "s3h")
_MX_PLANES = ("s0l", "s0l", "s1l", "s1l", "s0h", "s0h", "s1h", "s1h")
_NV_PTX, _NV_CONSTRAINTS = (tl.constexpr(text) for text in _decode_ptx(_NV_PLANES, 4))
_MX_PTX, _MX_CONSTRAINTS = (tl.constexpr(text) for text in _decode_ptx(_MX_PLANES, 2))
# some planes, by format, the first and their number, with the scales that `fp4_scales` makes
_SOME_PLANES = {
    (number_format, first, count): _decode_ptx(planes[first : first + count], 2, first)
    for number_format, planes in enumerate((("s0l", "s1l", "s0h", "s1h") * 2, _MX_PLANES))
    for count in (2, 4) for first in range(0, 8, count)
}


@known_at_compile_time
def _planes_ptx(number_format: int, first: int, count: int) -> tuple[str, str]:
    return _SOME_PLANES[number_format, first, count]


# a permute and a multiply-add for two scales; masks with two constants would be three instructions
_SCALE_PTX = tl.constexpr(
    "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x4240; mad.lo.u32 $0, t, 16, 0x70007000;"
    " prmt.b32 t, $2, 0, 0x4341; mad.lo.u32 $1, t, 16, 0x70007000; }"
)


def _fp8_ptx(planes: tuple[int, ...]) -> tuple[str, str]:
    """An output for each of the planes, two words, the multiplier (twice). E4M3 at bf16's bits 15 and 10 .. 4 is the
    value times 2^-120.
    """
    count = len(planes)
    lines = ["{ .reg .b32 t, u, z;", f"mov.b32 z, {MINUS_ZEROS};"]
    for place, plane in enumerate(planes):
        high = 4 + plane
        lines += [f"prmt.b32 t, ${count}, ${count + 1}, 0x{high}{high}{plane}{plane};"]
        lines += ["shr.u32 u, t, 4;", "and.b32 u, u, 0x07F007F0;", "lop3.b32 t, t, 0x80008000, u, 0xEA;"]
        lines += [f"fma.rn.bf16x2 ${place}, t, ${count + 2}, z;"]
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * count + ["r"] * 4)


_FP8_PTX, _FP8_CONSTRAINTS = (tl.constexpr(text) for text in _fp8_ptx((0, 1, 2, 3)))


_FP8_PLANES = tuple(_fp8_ptx((plane,)) for plane in range(4))


@known_at_compile_time
def _fp8_plane_ptx(plane: int) -> tuple[str, str]:
    return _FP8_PLANES[plane]


@jit
def _plain_plane(words, scales, PLANE: tl.constexpr):
    """One plane of words, scaled: int32 [R, 16] and bf16 bits in the low half of int32 -> bf16."""
    if PLANE == 7:
        half = ((words & 0xFF) << 8) | ((words >> 8) & 0xFF)
        bits = (half & 0x8100) | ((half << 6) & 0x00C0)
    else:
        half = ((words >> 16) & 0xFF00) | ((words >> (8 * (2 - PLANE % 3))) & 0xFF)
        bits = (half << PLANE) & 0x81C0
    return _bf16(bits) * _bf16(scales & 0xFFFF)


@jit
def _bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)


@jit
def _join8(p0, p1, p2, p3, p4, p5, p6, p7):
    """Eight planes [R, 16] -> [R, 128]."""
    even = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    odd = tl.join(tl.join(p1, p5), tl.join(p3, p7))  # the last two dimensions: bits 2 and 1 of the plane
    return tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 3, 4, 1]), [p0.shape[0], 128])


@jit
def nvfp4_tile(words, low, high):
    """words int32 [R, 16]; low, high int32 [R]: scales of planes 0 to 3 and 4 to 7 -> bf16 [R, 128], times 2^-9."""
    s0, s1 = _nv_scales(low, words)
    s2, s3 = _nv_scales(high, words)
    if INTERPRET:
        return _join8(
            _plain_plane(words, s0, 0), _plain_plane(words, s1, 1),
            _plain_plane(words, s0 >> 16, 2), _plain_plane(words, s1 >> 16, 3),
            _plain_plane(words, s2, 4), _plain_plane(words, s3, 5),
            _plain_plane(words, s2 >> 16, 6), _plain_plane(words, s3 >> 16, 7),
        )
    else:
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _NV_PTX, _NV_CONSTRAINTS, [words, s0, s1, s2, s3], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
        return _join8(p0, p1, p2, p3, p4, p5, p6, p7)


@jit
def _nv_scales(codes, words):
    """Four codes [R] -> bf16 bits of 0 and 2, of 1 and 3 (low half first), broadcast to the words' shape."""
    if INTERPRET:
        even = ((codes << 4) & 0x0FF00FF0) | 0x70007000
        odd = ((codes >> 4) & 0x0FF00FF0) | 0x70007000
    else:
        even, odd = fp4_scales(codes, NVFP4)
    return tl.broadcast_to(even[:, None], words.shape), tl.broadcast_to(odd[:, None], words.shape)


@jit
def mxfp4_tile(words, codes):
    """words int32 [R, 16]; codes int32 [R]: scales of planes 0-1, 2-3, 4-5, 6-7 -> bf16 [R, 128]."""
    s0 = tl.broadcast_to(((codes << 7) & 0x7F807F80)[:, None], words.shape)
    s1 = tl.broadcast_to(((codes >> 1) & 0x7F807F80)[:, None], words.shape)
    if INTERPRET:
        return _join8(
            _plain_plane(words, s0, 0), _plain_plane(words, s0, 1),
            _plain_plane(words, s1, 2), _plain_plane(words, s1, 3),
            _plain_plane(words, s0 >> 16, 4), _plain_plane(words, s0 >> 16, 5),
            _plain_plane(words, s1 >> 16, 6), _plain_plane(words, s1 >> 16, 7),
        )
    else:
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _MX_PTX, _MX_CONSTRAINTS, [words, s0, s1], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
        return _join8(p0, p1, p2, p3, p4, p5, p6, p7)


@jit
def fp4_scales(codes, FORMAT: tl.constexpr):
    """Scales of four codes, as `fp4_planes` takes them: of a row's first or last four planes (NVFP4), or of all
    eight (MXFP4). Not in the interpreter."""
    if FORMAT == NVFP4:
        return tl.inline_asm_elementwise(
            _SCALE_PTX, "=&r,=&r,r", [codes], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        return (codes << 7) & 0x7F807F80, (codes >> 1) & 0x7F807F80


@jit
def fp4_planes(words, even, odd, FORMAT: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Two or four planes from plane FIRST on of words as `load_words` has them, which `nvfp4_tile` and `mxfp4_tile`
    join: a tuple of bf16 in the words' shape, which is that of the scales too. Not in the interpreter."""
    PTX: tl.constexpr = _planes_ptx(FORMAT, FIRST, COUNT)
    return tl.inline_asm_elementwise(
        PTX[0], PTX[1], [words, even, odd], dtype=(tl.bfloat16,) * COUNT, is_pure=True, pack=2
    )


@jit
def _join4(p0, p1, p2, p3):
    """Four planes [R, W] -> [R, 4 W]."""
    joined = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # [R, W, bit 1, bit 0]
    return tl.reshape(tl.permute(joined, [0, 2, 3, 1]), [p0.shape[0], 4 * p0.shape[1]])


@jit
def _plain_fp8_plane(words, factor, PLANE: tl.constexpr):
    byte = words >> (8 * PLANE)
    return _bf16(((byte << 8) & 0x8000) | ((byte << 4) & 0x07F0)) * factor


@jit
def fp8_tile(words, multipliers):
    """words int32 [R, 32]; multipliers int32 [R], a bf16 in both halves -> bf16 [R, 128]."""
    scales = tl.broadcast_to(multipliers[:, None], words.shape)
    if INTERPRET:
        factor = _bf16(scales & 0xFFFF)
        return _join4(
            _plain_fp8_plane(words, factor, 0), _plain_fp8_plane(words, factor, 1),
            _plain_fp8_plane(words, factor, 2), _plain_fp8_plane(words, factor, 3),
        )
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _FP8_PTX, _FP8_CONSTRAINTS, [words, scales], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
        return _join4(p0, p1, p2, p3)


@jit
def fp8_plane(words, multipliers, PLANE: tl.constexpr):
    """One of the planes that `fp8_tile` joins: bf16 in the words' shape, which is that of the multipliers too. Not in
    the interpreter."""
    PTX: tl.constexpr = _fp8_plane_ptx(PLANE)
    return tl.inline_asm_elementwise(PTX[0], PTX[1], [words, multipliers], dtype=tl.bfloat16, is_pure=True, pack=2)


@jit
def load_words(data_ptr, scale_ptr, first_row, k_tile, num_k_tiles, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """BLOCK rows of one shuffled matrix from `first_row` (a multiple of BLOCK) on, columns of tile `k_tile`, as stored:
    words, and two entries of scales (equal where one has all of them).

    What varies from step to step is one number for all threads.
    """
    WORDS: tl.constexpr = 32 if FORMAT == FP8 else 16
    tile = first_row // ROWS * num_k_tiles + k_tile
    block = tl.arange(0, BLOCK)
    row = block // ROWS * (num_k_tiles * ROWS) + (first_row % ROWS + block % ROWS)
    words = tl.load(data_ptr + tile * (ROWS * WORDS) + (row[:, None] * WORDS + tl.arange(0, WORDS)[None, :]))
    if FORMAT == FP8:
        low = tl.load(scale_ptr + tile + block // ROWS * num_k_tiles)
        high = low
    elif FORMAT == NVFP4:
        low, high = tl.split(tl.load(scale_ptr + tile * (ROWS * 2) + (row[:, None] * 2 + tl.arange(0, 2)[None, :])))
    else:
        low = tl.load(scale_ptr + tile * ROWS + row)
        high = low
    return words, low, high


@jit
def decode_tile(words, low, high, FORMAT: tl.constexpr):
    """What `load_words` returned -> bf16 [R, 128]."""
    if FORMAT == FP8:
        return fp8_tile(words, low)
    elif FORMAT == NVFP4:
        return nvfp4_tile(words, low, high)
    else:
        return mxfp4_tile(words, low)
