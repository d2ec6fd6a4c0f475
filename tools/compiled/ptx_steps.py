"""What loads, stores, copies, barriers and products of PTX do to a warp of ptx_machine.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tools.compiled.ptx_arithmetic import (
    BASE,
    GARBAGE,
    TYPES,
    EmulationError,
    Step,
    address,
    arithmetic,
    items,
    packed,
    reader,
    write,
)
from tools.fp8.study import SMALLEST_NORMAL, plus_products

UNDER_WAY = np.full(32, np.nan, np.float32).view(np.uint32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


class Barrier:
    """An mbarrier: arrivals and bytes that are still missing in this phase."""

    def __init__(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def change(self, arrivals: int, num_bytes: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += num_bytes
        if self.missing < 0:
            raise EmulationError(f"more arrivals at a barrier than the {self.count} of a phase")
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase ^ 1


class Warp:
    def __init__(self, number: int) -> None:
        self.lane = np.arange(32, dtype=np.uint32)
        self.thread = self.lane + np.uint32(32 * number)
        self.at, self.is_done = 0, False
        self.registers: dict[str, Any] = {}
        self.waits: Callable[[], bool] | None = None  # whether it may go on
        self.copies: list[Callable[[], None]] = []  # issued, of no barrier yet
        self.products: dict[str, Any] = {}  # sums under way


def _move(operation: str, operands: list[str]) -> Step:
    """Loads and stores."""
    name, space, *_, kind = operation.split(".")
    dtype = np.dtype(TYPES[kind])
    is_shared, is_load = space.startswith("shared"), name == "ld"
    registers = items(operands[0] if is_load else operands[1])
    place = address(operands[1] if is_load else operands[0])
    reads = [] if is_load else [reader(name, dtype.type) for name in registers]
    size = dtype.itemsize

    def load(machine: Any, warp: Any, mask: Any) -> None:
        active = slice(None) if mask is None else mask
        data = np.zeros((32, size * len(registers)), np.uint8)
        data[active] = machine.read(place(machine, warp)[active], data.shape[1], is_shared)
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(dtype)[:, 0]
            write(warp, register, value.astype(np.int32) if kind == "s8" else value.astype(f"u{max(size, 2)}"), mask)

    def store(machine: Any, warp: Any, mask: Any) -> None:
        active = slice(None) if mask is None else mask
        data = np.stack([read(machine, warp) for read in reads], 1).view(np.uint8)
        machine.write(place(machine, warp)[active], data[active], is_shared)

    return load if is_load else store


def _store_matrices(operation: str, operands: list[str]) -> Step:
    first, registers = address(operands[0]), items(operands[1])
    row, pair = np.arange(32) // 4, np.arange(32) % 4 * 2

    def store(machine: Any, warp: Any, mask: Any) -> None:
        rows = first(machine, warp)
        for i, register in enumerate(registers):
            halves = warp.registers[register].view(np.uint16).reshape(32, 2)
            matrix = np.zeros((8, 8), np.uint16)
            for half in range(2):
                place = (pair + half, row) if ".trans" in operation else (row, pair + half)
                matrix[place] = halves[:, half]
            machine.write(rows[8 * i : 8 * i + 8], matrix.view(np.uint8), is_shared=True)

    return store


def _copy(operation: str, operands: list[str]) -> Step:
    """Asynchronous copies: of lanes, and in bulk."""
    if "mbarrier.arrive" in operation:
        barrier = address(operands[0])

        def arrive(machine: Any, warp: Any, mask: Any) -> None:
            place, copies = int(barrier(machine, warp)[0]), warp.copies
            warp.copies = []

            def end() -> None:
                for copy in copies:
                    copy()
                machine.barriers[place].change(32)

            machine.later(warp, end)

        return arrive
    is_bulk = "bulk" in operation
    target, source = address(operands[0].replace("+ 0", "")), address(operands[1].replace("+ 0", ""))
    size = reader(operands[2], np.uint32)
    given = reader(operands[3], np.uint32) if len(operands) > 3 and not is_bulk else size
    barrier = address(operands[3]) if is_bulk else target

    def issue(machine: Any, warp: Any, mask: Any) -> None:
        lanes = np.arange(32) if mask is None else np.flatnonzero(mask)
        to, of, sizes, nums = (read(machine, warp) for read in (target, source, size, given))
        bar = barrier(machine, warp)

        def copy(lane: int) -> None:
            data = np.zeros((1, int(sizes[lane])), np.uint8)
            if nums[lane]:
                data[:, : nums[lane]] = machine.read(of[lane : lane + 1], int(nums[lane]), is_shared=False)
            machine.write(to[lane : lane + 1], data, is_shared=True)
            if is_bulk:
                machine.barriers[int(bar[lane])].change(0, -data.size)

        for lane in lanes:
            if is_bulk:
                machine.later((warp, int(lane)), lambda lane=lane: copy(lane))
            else:
                warp.copies.append(lambda lane=lane: copy(lane))

    return issue


def _barrier(operation: str, operands: list[str]) -> Step:
    def first(machine: Any, warp: Any, mask: Any, read: Any) -> int:
        return int(read(machine, warp)[0 if mask is None else np.flatnonzero(mask)[0]])

    if operation.startswith("mbarrier.try_wait"):
        place, phase = address(operands[1]), reader(operands[2], np.uint32)

        def wait(machine: Any, warp: Any, mask: Any) -> None:
            barrier, parity = machine.barriers[first(machine, warp, mask, place)], first(machine, warp, mask, phase)
            is_over = barrier.phase != parity
            warp.registers[operands[0]] = np.full(32, is_over)
            if not is_over:
                warp.waits = lambda: barrier.phase != parity

        return wait
    place = address(operands[-1] if operation.startswith("mbarrier.arrive.shared") else operands[-2])
    count = reader(operands[-1], np.uint32) if not operation.startswith("mbarrier.arrive.shared") else None

    def act(machine: Any, warp: Any, mask: Any) -> None:
        at = first(machine, warp, mask, place)
        number = first(machine, warp, mask, count) if count else 0
        if ".init" in operation:
            machine.barriers[at] = Barrier(number)
        elif int(mask.sum() if mask is not None else 32) != 1:
            raise EmulationError("more than one lane arrives")
        else:
            machine.barriers[at].change(1, number)

    return act


def _meet(operation: str, operands: list[str]) -> Step:
    number = int(operands[0])

    def meet(machine: Any, warp: Any, mask: Any) -> None:
        wanted = int(operands[1]) // 32 if len(operands) > 1 else machine.program.num_warps
        meeting = machine.meetings.setdefault(number, [])
        meeting.append(warp)
        if len(meeting) == wanted:
            machine.meetings[number] = []
            for other in meeting:
                other.waits = None
        else:
            warp.waits = lambda: warp not in meeting or len(meeting) == wanted

    return meet


def _product(operation: str, operands: list[str]) -> Step:
    """A warp's 16 rows of a wgmma with weights from registers. Sums are NaN until they are waited for."""
    match = re.search(r"m64n(\d+)k32\.f32\.e4m3\.e4m3", operation)
    if match is None:
        raise EmulationError(f"unknown product {operation}")
    num_cols, outs, rows = int(match[1]), items(operands[0]), items(operands[1])
    descriptor, adds = reader(operands[2], np.uint64), operands[3]
    column, byte = np.arange(num_cols)[:, None], np.arange(32)[None, :]
    g, t = np.arange(32) // 4, np.arange(32) % 4
    number = np.arange(4)[:, None, None]  # of a register: row and first byte of its four
    weight_place = (g + 8 * (number[:, :, 0] % 2))[..., None], (16 * (number // 2) + 4 * t[:, None]) + np.arange(4)
    number = np.arange(len(outs))[:, None]
    sum_place = g + 8 * (number // 2 % 2), number // 4 * 8 + 2 * t + number % 2

    def multiply(machine: Any, warp: Any, mask: Any) -> None:
        weights, sums = np.zeros((16, 32), np.uint8), np.zeros((16, num_cols), np.float32)
        weights[weight_place] = np.stack([warp.registers[name] for name in rows]).view(np.uint8).reshape(4, 32, 4)
        word = int(descriptor(machine, warp)[0])
        if word >> 32 != 0x40000040:
            raise EmulationError(f"rows in another order: {word:#x}")
        places = ((word & 0x3FFF) << 4) + column // 8 * 1024 + column % 8 * 128 + byte
        places ^= (places >> 7 & 7) << 4
        tokens = machine.memory[places - BASE]  # [N, 32]
        if adds == "1" or (adds != "0" and bool(warp.registers[adds][0])):
            values = [warp.products.get(name, warp.registers.get(name, GARBAGE)) for name in outs]
            sums[sum_place] = np.stack([value.astype(np.uint32) for value in values]).view(np.float32)
        left, right = E4M3[torch.from_numpy(weights).long()], E4M3[torch.from_numpy(tokens).long()]
        found = plus_products(torch.from_numpy(sums).double(), left, right, SMALLEST_NORMAL).float().numpy()
        for name, value in zip(outs, found[sum_place].view(np.uint32), strict=True):
            warp.products[name], warp.registers[name] = value, UNDER_WAY

    return multiply


def _wait_for_products(machine: Any, warp: Any, mask: Any) -> None:
    warp.registers |= warp.products
    warp.products = {}


def _shuffle(operation: str, operands: list[str]) -> Step:
    source, number = reader(operands[1], np.uint32), reader(operands[2], np.uint32)

    def shuffle(machine: Any, warp: Any, mask: Any) -> None:
        other = number(machine, warp)
        lanes = warp.lane ^ other if ".bfly" in operation else other
        write(warp, operands[0], source(machine, warp)[lanes], mask)

    return shuffle


def _reduce(operation: str, operands: list[str]) -> Step:
    if ".add" not in operation:
        raise EmulationError(f"unknown instruction {operation}")
    source = reader(operands[1], np.uint32)
    return lambda machine, warp, mask: write(
        warp, operands[0], np.full(32, source(machine, warp).sum(dtype=np.uint32)), mask
    )


def _parameter(operation: str, operands: list[str]) -> Step:
    name, dtype = operands[1].strip("[]"), TYPES[operation.split(".")[-1]]

    def load(machine: Any, warp: Any, mask: Any) -> None:
        value = machine.values[name]
        one = np.float32(value).view(np.uint32) if isinstance(value, float) else np.array(value).astype(dtype)
        write(warp, operands[0], np.full(32, one), mask)

    return load


def _end(machine: Any, warp: Any, mask: Any) -> None:
    warp.is_done = True


def _trap(machine: Any, warp: Any, mask: Any) -> None:
    raise EmulationError("trap")


def _nothing(machine: Any, warp: Any, mask: Any) -> None:
    pass


KINDS: tuple[tuple[str, Callable[[str, list[str]], Step]], ...] = (
    ("ld.param", _parameter), ("ld.", _move), ("st.", _move), ("stmatrix", _store_matrices), ("cp.async", _copy),
    ("mbarrier", _barrier), ("bar.warp", lambda *_: _nothing), ("bar", _meet), ("shfl", _shuffle), ("redux", _reduce),
    ("wgmma.mma_async", _product), ("wgmma.wait_group", lambda *_: _wait_for_products),
    ("wgmma", lambda *_: _nothing), ("setmaxnreg", lambda *_: _nothing), ("ret", lambda *_: _end),
    ("trap", lambda *_: _trap), ("fence", lambda *_: _nothing),
)  # fmt: skip


def step_of(operation: str, operands: list[str]) -> Step:
    for start, make in KINDS:
        if operation.startswith(start):
            return make(operation, operands)
    if operation.startswith("mov") and "{" in operands[0] + operands[1]:
        return packed(operation, operands)
    return arithmetic(operation, operands)
