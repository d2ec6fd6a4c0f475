"""Operands and arithmetic of PTX for ptx_machine.py: registers of a warp are arrays of 32 lanes, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dsv4.errors import Dsv4Error

BASE = 1024  # where shared memory begins
TYPES: dict[str, Any] = {
    "pred": np.bool_, "s8": np.int8, "b8": np.uint8, "f32": np.float32, "bf16": np.uint16,
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (16, 32, 64)},
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "ub" for bits in (16, 32, 64)},
}  # fmt: skip
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
GARBAGE = np.full(32, 0xDEADBEEFDEADBEEF, np.uint64)  # of a register that nothing was written to
Step = Callable[[Any, Any, Any], None]  # of machine, warp, and which lanes; None for all


class EmulationError(Dsv4Error, ValueError):
    """A kernel did what this machine does not know, or what no kernel may."""


# ---- operands ----


def reader(operand: str, dtype: Any) -> Callable[[Any, Any], Any]:
    """What an operand has in all lanes."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}") if dtype is not np.bool_ else np.dtype(bool)
    if operand.startswith("0f"):
        constant = np.full(32, int(operand[2:], 16), np.uint32).view(dtype)
        return lambda machine, warp: constant
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
        number = int(operand, 0) % (1 << 8 * bits.itemsize)
        constant = np.full(32, number, bits).view(dtype)
        return lambda machine, warp: constant
    special: dict[str, Callable[[Any, Any], Any]] = {
        "%tid.x": lambda machine, warp: warp.thread,
        "%laneid": lambda machine, warp: warp.lane,
        "%ctaid.x": lambda machine, warp: np.full(32, machine.block, np.uint32),
        "%nctaid.x": lambda machine, warp: np.full(32, machine.num_blocks, np.uint32),
        "global_smem": lambda machine, warp: np.full(32, BASE, np.uint32),
    }
    if operand in special:
        return special[operand]
    if dtype is np.bool_:
        return lambda machine, warp: warp.registers[operand]

    def read(machine: Any, warp: Any) -> Any:
        value = warp.registers.get(operand, GARBAGE)
        return value.view(dtype) if value.dtype.itemsize == bits.itemsize else value.astype(bits).view(dtype)

    return read


def write(warp: Any, name: str, value: Any, mask: Any) -> None:
    if name == "_":
        return
    value = value if value.dtype == np.bool_ else value.view(f"u{value.dtype.itemsize}")
    old = warp.registers.get(name)
    if mask is not None and old is not None and not mask.all():
        value = np.where(mask, value, old)
    warp.registers[name] = value


def items(operand: str) -> list[str]:
    return [item.strip() for item in operand.strip("{}").split(",")]


def address(operand: str) -> Callable[[Any, Any], Any]:
    base, _, offset = operand.strip("[] ").partition("+")
    read = reader(base.strip(), np.uint64)
    return lambda machine, warp: read(machine, warp).astype(np.int64) + int(offset or 0)


# ---- arithmetic ----


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: the sum in fp64 is rounded to odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    is_even = total.view(np.int64) % 2 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & is_even, np.nextafter(total, towards), total).astype(np.float32)


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    both = np.stack([a, b], 1).view(np.uint8)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)).astype(np.int64)
    out = np.take_along_axis(both, nibbles & 7, 1)
    if (nibbles > 7).any():
        out = np.where(nibbles < 8, out, (out >> 7) * 255)
    return out.view(np.uint32)[:, 0]


def _bf16(x: Any) -> Any:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _field(value: Any, first: Any, length: Any) -> Any:
    bits = value.dtype.type(8 * value.itemsize)
    left = bits - (first + length).astype(value.dtype)
    return value << left >> (bits - length.astype(value.dtype))


def _shift(value: Any, amount: Any, is_left: bool) -> Any:
    bits = 8 * value.itemsize
    small = np.minimum(amount, bits - 1).astype(value.dtype)
    if is_left:
        return np.where(amount < bits, value << small, 0).astype(value.dtype)
    is_signed = np.issubdtype(value.dtype, np.signedinteger)
    return np.where((amount < bits) | is_signed, value >> small, 0).astype(value.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "div": lambda a, b: a / b,
    "min": np.fmin, "max": np.fmax, "fma": _fused, "prmt": _permuted, "bfe": _field,
    "mad": lambda a, b, c: a * b + c, "ex2": lambda a: torch.exp2(torch.from_numpy(a)).numpy(),
}  # fmt: skip


def arithmetic(operation: str, operands: list[str]) -> Step:
    name, *middle, kind = operation.split(".")
    dtype, target, sources = TYPES[kind], operands[0], operands[1:]
    function = FUNCTIONS.get(name)
    dtypes = [dtype] * len(sources)
    if name == "setp":
        function = COMPARE[middle[0]]
    elif name == "selp":
        function, dtypes[2] = lambda a, b, which: np.where(which, a, b), np.bool_
    elif name in ("shl", "shr"):
        function, dtypes[1] = lambda a, amount: _shift(a, amount, name == "shl"), np.uint32
    elif name == "lop3":
        if sources[3] != "0xEA":
            raise EmulationError(f"lop3 of {sources[3]}")
        function, sources = lambda a, b, c: a & b | c, sources[:3]
    elif name == "cvt":
        return _conversion(operation, operands)
    elif name == "bfe":
        dtypes[1:] = [np.uint32] * 2
    elif "wide" in middle or "hi" in middle:
        wide = np.dtype(f"{np.dtype(dtype).kind}{2 * np.dtype(dtype).itemsize}")
        shift = 8 * np.dtype(dtype).itemsize if "hi" in middle else 0
        dtypes[2:] = [wide] * len(dtypes[2:])
        product = FUNCTIONS[name]

        def function(a: Any, b: Any, *rest: Any) -> Any:
            found = product(a.astype(wide), b.astype(wide), *rest)
            return (found >> shift).astype(dtype) if shift else found

    if function is None:
        raise EmulationError(f"unknown instruction {operation}")
    reads = [reader(source, one) for source, one in zip(sources, dtypes, strict=False)]
    return lambda machine, warp, mask: write(warp, target, function(*(read(machine, warp) for read in reads)), mask)


def _conversion(operation: str, operands: list[str]) -> Step:
    *_, to, kind = operation.split(".")
    reads = [reader(source, TYPES[kind]) for source in operands[1:]]

    def convert(*values: Any) -> Any:
        if to in ("bf16", "bf16x2"):
            first, *second = map(_bf16, values)
            return first.astype(np.uint32) << np.uint32(16) | second[0] if second else first
        if to == "e4m3x2":
            codes = torch.from_numpy(np.stack(values[::-1], 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8).numpy().view(np.uint16)[:, 0]
        if kind == "bf16":
            return (values[0].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values[0].astype(TYPES[to])

    return lambda machine, warp, mask: write(warp, operands[0], convert(*(read(machine, warp) for read in reads)), mask)


def packed(operation: str, operands: list[str]) -> Step:
    """A register of the halves of another, or the halves of one."""
    dtype = np.dtype(TYPES[operation.split(".")[-1]])
    half = np.dtype(f"u{dtype.itemsize // 2}").type
    reads = [reader(item, half) for item in items(operands[1])] if operands[1].startswith("{") else []

    def unpack(machine: Any, warp: Any, mask: Any) -> None:
        halves = np.ascontiguousarray(whole(machine, warp)).view(half).reshape(32, 2)
        for i, name in enumerate(items(operands[0])):
            write(warp, name, np.ascontiguousarray(halves[:, i]), mask)

    def pack(machine: Any, warp: Any, mask: Any) -> None:
        value = np.stack([read(machine, warp) for read in reads], 1).view(dtype)[:, 0]
        write(warp, operands[0], value, mask)

    if reads:
        return pack
    whole = reader(operands[1], dtype.type)
    return unpack
