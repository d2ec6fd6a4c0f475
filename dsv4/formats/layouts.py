"""`ShuffledTensor`: a quantised weight in the order in which a tensor core's registers take it. Made once, at load.

A matrix [N, K] is cut into tiles of 64 rows and 128 columns, rows of tiles first; one tile is one contiguous piece.
Sizes that are not multiples are filled with zero weights.

| format | words of a row of a tile | what word j holds |
|---|---|---|
| nvfp4, mxfp4 | 16 int32 | columns i * 16 + j, i = 0 .. 7: "plane" i is 16 neighbouring columns, one step of the MMA |
| fp8 | 32 int32 | columns i * 32 + j in byte i, i = 0 .. 3 |

**Bits of an FP4 word.** A nibble is s e e m. Put at bits 15, 8, 7, 6 of a bf16 it is the value times 2^-126. Plane
i < 7 reads the 16 bits (byte 3, byte L) shifted left by i, L = 2, 1, 0, 2, 1, 0, 2: s at bit 31 - i of the word, e e m
at bits 8 - i, 7 - i, 6 - i of byte L (bit 8 is bit 0 of byte 3). Plane 7 takes what is left: s and the first e at bits
7 and 0 of byte 0, e m at bits 1 and 0 of byte 1.

**Scales.** int32; of a tile [64, 2] (nvfp4), [64, 1] (mxfp4), one (fp8).

| format | place | meaning |
|---|---|---|
| nvfp4 | byte q of word h: plane 4 h + q | 0, or (floor(log2 s) + 20) * 8 + mantissa: (code << 4) + 0x7000 is 2^117 s |
| mxfp4 | byte q: planes 2 q and 2 q + 1 | E8M0 code + `shift` of the matrix, modulo 256: code << 7 as bf16 |
| fp8 | both halves: all of the tile | bf16 of 2^(120 + e - `shift`), for a block scale 2^e |

What the decoded value lacks (2^9 and the global scale; 2^(126 - shift); 2^shift) is `out_scale`, one fp32 a matrix.

`unshuffle(shuffle(w))` is w bit for bit, with one exception: nibbles under an NVFP4 scale of zero come back as +0;
every weight there is zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.errors import Dsv4Error
from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.fp4 import pack_nibbles, unpack_nibbles
from dsv4.formats.rows import MXFP4_GROUP, NVFP4_GROUP
from dsv4.formats.tensors import QuantFormat, QuantTensor

TILE_ROWS = 64
TILE_COLS = 128
_LOW_BYTE = (2, 1, 0, 2, 1, 0, 2)  # byte L of planes 0 to 6
_MX_TOP, _MX_LOW = 253, 128  # exponents of bf16 that keep every product with a nibble normal and finite
_NO_SHIFT = -1000
_PIECE_WEIGHTS = 2**26  # of a stack at once: what is made on the way takes some five bytes a weight


class LayoutError(Dsv4Error, ValueError):
    """A weight that has no shuffled form."""


@dataclass(frozen=True)
class ShuffledTensor:
    """A weight [N, K] or a stack [E, N, K] of them. R = ceil(N / 64), C = ceil(K / 128).

    data int32 [..., R, C, 64, 16 or 32]; scale int32 [..., R, C, 64, 2 or 1] (FP4) or [..., R, C] (fp8); out_scale fp32
    [...]; shift int32 [...] (0 for NVFP4); global_scale as in `QuantTensor`. `shape` is the logical shape.
    """

    data: Tensor
    scale: Tensor
    out_scale: Tensor
    shift: Tensor
    format: QuantFormat
    shape: torch.Size
    block: tuple[int, int]
    scale_dtype: torch.dtype
    global_scale: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        parts = [self.data, self.scale, self.out_scale, self.shift]
        parts += [] if self.global_scale is None else [self.global_scale]
        return sum(part.numel() * part.element_size() for part in parts)


def shuffle(weight: QuantTensor) -> ShuffledTensor:
    """A weight [N, K] or a stack of them into the kernels' order. `LayoutError` where that is not possible exactly."""
    make = _shuffle_fp8 if weight.format is QuantFormat.FP8_BLOCK else _shuffle_fp4
    if weight.device.type == "meta":
        data, scale, out_scale, shift = _shapes_of(weight)
    elif len(weight.shape) == 3:
        size = max(1, _PIECE_WEIGHTS // max(1, weight.shape[1] * weight.shape[2]))
        made: list[Tensor] = []
        for start in range(0, weight.shape[0], size):
            parts = make(weight.map(lambda part, start=start: part[start : start + size]))  # type: ignore[misc]
            made = made or [part.new_empty((weight.shape[0], *part.shape[1:])) for part in parts]
            for whole, part in zip(made, parts, strict=True):
                whole[start : start + size] = part
        data, scale, out_scale, shift = made
    else:
        data, scale, out_scale, shift = (part[0] for part in make(weight.map(lambda part: part.unsqueeze(0))))
    return ShuffledTensor(
        data, scale, out_scale, shift, weight.format, weight.shape, weight.block, weight.scale.dtype,
        weight.global_scale,
    )  # fmt: skip


def check_values(weight: QuantTensor) -> None:
    """`LayoutError` for a matrix, or a stack, that `shuffle` would refuse. Codes are read only where scales leave it
    open."""
    one = weight if len(weight.shape) == 3 else weight.map(lambda part: part.unsqueeze(0))
    if one.format is QuantFormat.FP8_BLOCK:
        _check_codes(one)
        _fp8_exponents(one)
    elif one.format is QuantFormat.NVFP4:
        _nvfp4_codes(one)
    else:
        _mxfp4_shift(one.scale, lambda: _has_weights(unpack_nibbles(one.data)))


def unshuffle(weight: ShuffledTensor) -> QuantTensor:
    """The exact inverse of `shuffle`."""
    rows, cols = weight.shape[-2:]
    if weight.format is QuantFormat.FP8_BLOCK:
        tiles = weight.data.unsqueeze(-1).contiguous().view(torch.uint8)  # [..., R, C, 64, 32 (j), 4 (i)]
        codes = tiles.transpose(-1, -2).movedim(-4, -3).flatten(-3).flatten(-3, -2)  # [..., R * 64, C * 128]
        data = codes[..., :rows, :cols].contiguous().view(torch.float8_e4m3fn)
        return QuantTensor(data, _fp8_blocks(weight), weight.format, None, weight.block)
    nibbles = _from_words(weight.data).movedim(-4, -3).flatten(-3).flatten(-3, -2)[..., :rows, :cols]
    group = 16 if weight.format is QuantFormat.NVFP4 else 32
    codes = weight.scale.contiguous().view(torch.uint8)  # [..., R, C, 64, 8 or 4]
    codes = codes.movedim(-3, -2).flatten(-2).flatten(-3, -2)[..., :rows, : cols // group].contiguous()
    if weight.format is QuantFormat.NVFP4:
        codes = _nvfp4_scale_codes(weight.device)[1][codes.long()].view(torch.float8_e4m3fn)
    else:
        codes = (codes.int() - weight.shift[..., None, None]).to(torch.uint8)  # wraps
    return QuantTensor(pack_nibbles(nibbles), codes, weight.format, weight.global_scale, weight.block)


def _shuffle_fp4(weight: QuantTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """data, scale, out_scale and shift of a stack [E, N, K]."""
    nibbles = unpack_nibbles(weight.data)
    if weight.format is QuantFormat.NVFP4:
        assert weight.global_scale is not None
        codes = _nvfp4_codes(weight)
        # code 0 stands for a small scale; the zeros must come from the nibbles
        nibbles = nibbles * (codes != 0).to(torch.uint8).repeat_interleave(NVFP4_GROUP, -1)
        codes, shift = codes.to(torch.uint8), torch.zeros(len(codes), dtype=torch.int32, device=weight.device)
        out_scale = weight.global_scale.float() * 2.0**9
    else:
        shift = _mxfp4_shift(weight.scale, lambda: _has_weights(nibbles))
        codes = (weight.scale.int() + shift[:, None, None]).to(torch.uint8)  # wraps where there are only zeros
        out_scale = torch.exp2(126.0 - shift.double()).float()
    per_tile = TILE_COLS * weight.scale.shape[-1] // nibbles.shape[-1]
    data = _to_words(_tiles(nibbles, TILE_COLS).unflatten(-1, (8, 16)))
    scale = _tiles(codes, per_tile).contiguous().view(torch.int32)
    return data, scale, out_scale, shift


def _shapes_of(weight: QuantTensor) -> tuple[Tensor, ...]:
    """What `shuffle` gives, as shapes alone: a tile of zeros, shuffled, for each tile of the weight."""
    *stacked, rows, cols = weight.shape
    is_fp8, like = weight.format is QuantFormat.FP8_BLOCK, weight.scale
    group = 1 if is_fp8 else TILE_COLS * like.shape[-1] // cols
    tile = QuantTensor(
        torch.zeros(TILE_ROWS, TILE_COLS if is_fp8 else TILE_COLS // 2, dtype=weight.data.dtype),
        torch.ones(1 if is_fp8 else TILE_ROWS, group).to(like.dtype), weight.format,
        None if weight.global_scale is None else torch.ones(()), weight.block,
    )  # fmt: skip
    tiles = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    made = shuffle(tile)
    return tuple(
        torch.empty((*stacked, *tiles[: part.dim()], *part.shape[2:]), dtype=part.dtype, device="meta")
        for part in (made.data, made.scale, made.out_scale, made.shift)
    )


def _tiles(x: Tensor, cols: int) -> Tensor:
    """[E, N, k] -> [E, R, C, 64, cols], zeros added."""
    padded = pad(x, (0, -x.shape[2] % cols, 0, -x.shape[1] % TILE_ROWS))
    return padded.unflatten(1, (-1, TILE_ROWS)).unflatten(3, (-1, cols)).transpose(2, 3)


def _to_words(planes: Tensor) -> Tensor:
    """Nibbles uint8 [..., 8 (i), 16 (j)] -> int32 [..., 16 (j)]."""
    words = torch.zeros(*planes.shape[:-2], 16, dtype=torch.int32, device=planes.device)
    for plane in range(8):
        nibble = planes[..., plane, :].int()
        for bit, place in zip((3, 2, 1, 0), _places(plane), strict=True):
            words |= ((nibble >> bit) & 1) << place
    return words


def _from_words(words: Tensor) -> Tensor:
    """int32 [..., 16 (j)] -> nibbles uint8 [..., 8 (i), 16 (j)]."""
    planes = []
    for plane in range(8):
        nibble = torch.zeros_like(words)
        for bit, place in zip((3, 2, 1, 0), _places(plane), strict=True):
            nibble |= ((words >> place) & 1) << bit
        planes.append(nibble.to(torch.uint8))
    return torch.stack(planes, -2)


def _places(plane: int) -> tuple[int, ...]:
    """Bits of the word that hold s, e, e, m of a plane."""
    if plane == 7:
        return 7, 0, 9, 8
    base = 8 * _LOW_BYTE[plane]
    low = tuple(24 if bit == 8 else base + bit for bit in (8 - plane, 7 - plane, 6 - plane))
    return 31 - plane, *low


def _nvfp4_codes(weight: QuantTensor) -> Tensor:
    codes = _nvfp4_scale_codes(weight.device)[0][weight.scale.view(torch.uint8).long()]
    if (codes < 0).any():
        raise LayoutError("expected NVFP4 scales that are zero or positive numbers, found a negative one or NaN")
    return codes


def _nvfp4_scale_codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each E4M3 byte its code, -1 where there is none; for each code its E4M3 byte, 0 where there is none."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(values)  # in [0.5, 1)
    codes = (exponent - 1 + 20) * 8 + ((mantissa * 16).int() - 8)
    codes = torch.where(values == 0, 0, codes)
    is_valid = (values >= 0) & ~torch.signbit(values)  # NaN fails the first
    codes = torch.where(is_valid, codes, -1).int()
    inverse = torch.zeros(256, dtype=torch.uint8, device=device)
    inverse[codes[is_valid].long()] = torch.arange(256, dtype=torch.uint8, device=device)[is_valid]
    return codes, inverse


def _has_weights(nibbles: Tensor) -> Tensor:
    """[..., K] -> whether a group of 32 holds more than zeros."""
    return (nibbles & 7).unflatten(-1, (-1, MXFP4_GROUP)).amax(-1) > 0


def _mxfp4_shift(scale: Tensor, has_weights: Callable[[], Tensor]) -> Tensor:
    """E8M0 codes [E, N, k] -> int32 [E]: what to add to those of a matrix so that the largest in use becomes at most
    253.

    Groups of zeros may have any code but, once shifted, 255: 0 times infinity is not 0.
    """
    codes = scale.flatten(1).int()
    if (codes == 255).any():
        raise LayoutError("expected MXFP4 scales that are numbers, found NaN (code 255)")
    is_used = has_weights().flatten(1)
    none = ~is_used.any(1)
    low = torch.where(none, 127, torch.where(is_used, codes, 255).amin(1))  # [E]
    high = torch.where(none, 127, torch.where(is_used, codes, 0).amax(1))
    present = torch.zeros(len(codes), 256, dtype=torch.bool, device=codes.device).scatter_(1, codes.long(), True)
    shifts = torch.arange(_MX_LOW, _MX_TOP + 1, device=codes.device) - high[:, None]  # [E, 126]
    is_good = (low[:, None] + shifts >= _MX_LOW) & ~present.gather(1, (255 - shifts).long() % 256)
    chosen = torch.where(is_good, shifts, _NO_SHIFT).amax(1)
    bad = chosen == _NO_SHIFT
    if bad.any():
        first = int(bad.nonzero()[0])
        raise LayoutError(
            f"expected MXFP4 scales of one matrix within a factor of 2^{_MX_TOP - _MX_LOW}, found codes from "
            f"{int(low[first])} to {int(high[first])}"
        )
    return chosen.to(torch.int32)


def _check_codes(weight: QuantTensor) -> None:
    if weight.block[0] % TILE_ROWS or weight.block[1] % TILE_COLS:
        raise LayoutError(f"expected scale blocks of multiples of (64, 128), found {weight.block}")
    if ((weight.data.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise LayoutError("expected FP8 weights that are numbers, found NaN")


def _fp8_exponents(weight: QuantTensor) -> tuple[Tensor, Tensor]:
    """Exponents of the block scales [E, n, k], and the largest of each matrix [E]."""
    factor = weight.scale if weight.scale.dtype == torch.float32 else e8m0_to_float(weight.scale)
    mantissa, exponent = torch.frexp(factor)
    if not (mantissa == 0.5).all():
        raise LayoutError("expected FP8 block scales that are powers of two: others are not exact in bf16")
    exponent = exponent - 1
    shift = exponent.amax((1, 2))
    if (exponent - shift[:, None, None]).min() < -200:  # bf16 reaches from 2^-126; codes are decoded at 2^-120
        raise LayoutError(f"expected FP8 block scales within a factor of 2^200, found {factor.min()} to {factor.max()}")
    return exponent, shift


def _shuffle_fp8(weight: QuantTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """data, scale, out_scale and shift of a stack [E, N, K]."""
    _check_codes(weight)
    tiles = _tiles(weight.data.view(torch.uint8), TILE_COLS).unflatten(-1, (4, 32))  # [E, R, C, 64, 4 (i), 32 (j)]
    data = tiles.transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1)
    exponent, shift = _fp8_exponents(weight)
    bits = (127 + 120 + exponent - shift[:, None, None]).int() << 7
    rows, cols = weight.block[0] // TILE_ROWS, weight.block[1] // TILE_COLS
    scale = (bits | (bits << 16)).repeat_interleave(rows, 1).repeat_interleave(cols, 2)
    scale = scale[:, : data.shape[1], : data.shape[2]].contiguous()
    return data, scale, torch.exp2(shift.double()).float(), shift.to(torch.int32)


def _fp8_blocks(weight: ShuffledTensor) -> Tensor:
    """Block scales [..., ceil(N / bn), ceil(K / bk)] in their first dtype."""
    bits = weight.scale[..., :: weight.block[0] // TILE_ROWS, :: weight.block[1] // TILE_COLS]
    exponent = ((bits & 0xFFFF) >> 7) - 127 - 120 + weight.shift[..., None, None]
    if weight.scale_dtype == torch.float32:
        return torch.exp2(exponent.double()).float()
    return (exponent + 127).to(torch.uint8).view(weight.scale_dtype)
