"""Runs compiled kernels on a CPU: the PTX that Triton makes for a Hopper, warp by warp, in numpy.

Triton's interpreter knows neither Gluon nor inline assembly. Here a launch compiles as for a GPU, and its PTX runs on
CPU tensors: warps in a random order, asynchronous copies as late as chance has it, barriers and phases as in the
hardware. Products are FP8 wgmma, whose sums tools/fp8/study.py models bit by bit. What is not known raises.

    with emulated(seed) as machine: ...     launches inside run here; `machine.edit` may change their PTX first

It knows the instructions of tools/fp8 and no others; warps whose lanes part at a branch are refused. What it cannot
show: speed, and what depends on memory ordering.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.errors import Dsv4Error
from tools.compiled.compile_check import OfflineDriver
from tools.fp8.study import SMALLEST_NORMAL, plus_products

BASE = 1024  # where shared memory begins
TYPES: dict[str, Any] = {
    "pred": np.bool_, "s8": np.int8, "b8": np.uint8, "f32": np.float32, "bf16": np.uint16,
    **{f"{kind}{bits}": getattr(np, f"{'int' if kind == 's' else 'uint'}{bits}") for kind in "sub" for bits in (16, 32, 64)},
}  # fmt: skip
STATEMENT = re.compile(r"\s*(?:(\{)|(\})|([\w$]+):(?!:)|((?:[^;{}]|\{[^}]*\})*);)")
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
GARBAGE = np.full(32, 0xDEADBEEFDEADBEEF, np.uint64)  # of a register that nothing was written to
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


class EmulationError(Dsv4Error, ValueError):
    """A kernel did what this machine does not know, or what no kernel may."""


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


class Program:
    """Instructions of a kernel: what each does to a warp."""

    def __init__(self, ptx: str) -> None:
        text = re.sub(r"//.*|^\s*\.(loc|file|pragma)\b.*$", "", ptx, flags=re.MULTILINE)
        entry = re.search(r"\.entry \w+\((.*?)\)\s*\.reqntid (\d+)[^{]*\{", text, re.DOTALL)
        assert entry is not None, "PTX without an entry"
        self.parameters = re.findall(r"(\w+_param_\d+)", entry[1])
        self.num_warps = int(entry[2]) // 32
        self.lines: list[tuple[str, list[str], str, int]] = []  # operation, operands, predicate, scope
        self.labels: dict[str, int] = {}
        self.targets: dict[str, list[str]] = {}
        position, scopes, num_scopes = entry.end(), [0], 0
        while scopes:
            match = STATEMENT.match(text, position)
            if match is None:
                raise EmulationError(f"cannot read {text[position : position + 80]!r}")
            position = match.end()
            if match[1]:
                num_scopes += 1
                scopes.append(num_scopes)
            elif match[2]:
                scopes.pop()
            elif match[3]:
                self.labels[f"{scopes[-1]} {match[3]}"] = len(self.lines)
                label = match[3]
            else:
                self._add(match[4].strip(), scopes[-1], label if self.labels else "")
        self.steps: list[Any] = [None] * len(self.lines)

    def _add(self, statement: str, scope: int, label: str) -> None:
        match = re.fullmatch(r"(?:@(!?[%\w]+)\s+)?([\w.:]+)\s*(.*)", statement, re.DOTALL)
        if match is None:
            raise EmulationError(f"cannot read {statement!r}")
        operands = [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", match[3]) if part.strip()]
        if match[2] == ".branchtargets":
            self.targets[label] = operands
        elif not match[2].startswith("."):
            self.lines.append((match[2], operands, match[1] or "", scope))

    def place(self, label: str, scope: int) -> int:
        return self.labels.get(f"{scope} {label}", self.labels.get(f"0 {label}", -1))


class Machine:
    """A CTA. `regions`: memory of the tensors that the launch was given, by address."""

    def __init__(self, program: Program, values: list[Any], regions: list[tuple[int, Any]], shared: int) -> None:
        self.program, self.regions = program, regions
        self.values = dict(zip(program.parameters, values, strict=True))
        self.memory = np.zeros(shared + 1024, dtype=np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.meetings: dict[int, list[Warp]] = {}
        self.events: dict[Any, deque[Callable[[], None]]] = {}
        self.block = self.num_blocks = 0

    def run(self, block: int, num_blocks: int, chance: random.Random) -> None:
        self.block, self.num_blocks = block, num_blocks
        warps = [Warp(number) for number in range(self.program.num_warps)]
        while not all(warp.is_done for warp in warps):
            ready = [warp for warp in warps if not warp.is_done and (warp.waits is None or warp.waits())]
            queues = [queue for queue in self.events.values() if queue]
            if not ready and not queues:
                raise EmulationError(f"all warps wait: {[warp.at for warp in warps if not warp.is_done]}")
            if queues and (not ready or chance.random() < 0.5):
                chance.choice(queues).popleft()()
            else:
                self._go_on(chance.choice(ready), chance.randrange(50, 2000))

    def _go_on(self, warp: Warp, limit: int) -> None:
        warp.waits = None
        program = self.program
        for _ in range(limit):
            at = warp.at
            operation, operands, predicate, scope = program.lines[at]
            warp.at += 1
            mask = None
            if predicate:
                mask = warp.registers[predicate.lstrip("!")] ^ predicate.startswith("!")
            if operation.startswith(("bra", "brx")):
                self._branch(warp, operation, operands, mask, scope)
                continue
            if mask is not None and not mask.any():
                continue
            step = program.steps[at]
            if step is None:
                step = program.steps[at] = _step_of(operation, operands)
            step(self, warp, mask)
            if warp.is_done or warp.waits is not None:
                return

    def _branch(self, warp: Warp, operation: str, operands: list[str], mask: Any, scope: int) -> None:
        if mask is not None and mask.any() != mask.all():
            raise EmulationError("lanes of a warp part at a branch")
        if mask is None or mask[0]:
            target = operands[0]
            if operation.startswith("brx"):
                target = self.program.targets[operands[1]][int(warp.registers[target][0])]
            warp.at = self.program.place(target, scope)

    # ---- memory ----

    def read(self, address: Any, size: int, is_shared: bool) -> Any:
        """uint8 [lanes, size]."""
        view, first = self._view(address, size, is_shared)
        return view[(address.astype(np.int64) - first)[:, None] + np.arange(size)]

    def write(self, address: Any, data: Any, is_shared: bool) -> None:
        view, first = self._view(address, data.shape[1], is_shared)
        view[(address.astype(np.int64) - first)[:, None] + np.arange(data.shape[1])] = data

    def _view(self, address: Any, size: int, is_shared: bool) -> tuple[Any, int]:
        low, high = int(address.min()), int(address.max()) + size
        for first, view in [(BASE, self.memory)] if is_shared else self.regions:
            if first <= low and high <= first + len(view):
                return view, first
        raise EmulationError(f"an access outside of all tensors: {'shared' if is_shared else 'global'} {low:#x}")

    def later(self, queue: Any, event: Callable[[], None]) -> None:
        self.events.setdefault(queue, deque()).append(event)


# ---- operands ----


def _reader(operand: str, dtype: Any) -> Callable[[Machine, Warp], Any]:
    """What an operand has in all lanes."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}") if dtype is not np.bool_ else np.dtype(bool)
    if operand.startswith("0f"):
        constant = np.full(32, int(operand[2:], 16), np.uint32).view(dtype)
        return lambda machine, warp: constant
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand):
        number = int(operand, 0) % (1 << 8 * bits.itemsize)
        constant = np.full(32, number, bits).view(dtype)
        return lambda machine, warp: constant
    special: dict[str, Callable[[Machine, Warp], Any]] = {
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

    def read(machine: Machine, warp: Warp) -> Any:
        value = warp.registers.get(operand, GARBAGE)
        return value.view(dtype) if value.dtype.itemsize == bits.itemsize else value.astype(bits).view(dtype)

    return read


def _write(warp: Warp, name: str, value: Any, mask: Any) -> None:
    if name == "_":
        return
    value = value if value.dtype == np.bool_ else value.view(f"u{value.dtype.itemsize}")
    old = warp.registers.get(name)
    if mask is not None and old is not None and not mask.all():
        value = np.where(mask, value, old)
    warp.registers[name] = value


def _items(operand: str) -> list[str]:
    return [item.strip() for item in operand.strip("{}").split(",")]


def _address(operand: str) -> Callable[[Machine, Warp], Any]:
    base, _, offset = operand.strip("[] ").partition("+")
    read = _reader(base.strip(), np.uint64)
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
    both = np.stack([a, b], 1).astype("<u4").view(np.uint8)
    out = np.zeros((32, 4), np.uint8)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i) & np.uint32(15)).astype(np.int64)
        byte = both[np.arange(32), nibble & 7]
        out[:, i] = np.where(nibble < 8, byte, (byte >> 7) * 255)
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
    "mad": lambda a, b, c: a * b + c, "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
}  # fmt: skip


def _arithmetic(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
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
    reads = [_reader(source, one) for source, one in zip(sources, dtypes, strict=False)]
    return lambda machine, warp, mask: _write(warp, target, function(*(read(machine, warp) for read in reads)), mask)


def _conversion(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    *_, to, kind = operation.split(".")
    reads = [_reader(source, TYPES[kind]) for source in operands[1:]]

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

    return lambda machine, warp, mask: _write(
        warp, operands[0], convert(*(read(machine, warp) for read in reads)), mask
    )


# ---- memory, barriers, products ----


def _move(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    """Loads and stores."""
    name, space, *_, kind = operation.split(".")
    dtype = np.dtype(TYPES[kind])
    is_shared, is_load = space.startswith("shared"), name == "ld"
    registers = _items(operands[0] if is_load else operands[1])
    address = _address(operands[1] if is_load else operands[0])
    reads = [] if is_load else [_reader(name, dtype.type) for name in registers]
    size = dtype.itemsize

    def load(machine: Machine, warp: Warp, mask: Any) -> None:
        active = slice(None) if mask is None else mask
        data = np.zeros((32, size * len(registers)), np.uint8)
        data[active] = machine.read(address(machine, warp)[active], data.shape[1], is_shared)
        for i, register in enumerate(registers):
            value = np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(dtype)[:, 0]
            _write(warp, register, value.astype(np.int32) if kind == "s8" else value.astype(f"u{max(size, 2)}"), mask)

    def store(machine: Machine, warp: Warp, mask: Any) -> None:
        active = slice(None) if mask is None else mask
        data = np.stack([read(machine, warp) for read in reads], 1).view(np.uint8)
        machine.write(address(machine, warp)[active], data[active], is_shared)

    return load if is_load else store


def _store_matrices(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    address, registers = _address(operands[0]), _items(operands[1])
    row, pair = np.arange(32) // 4, np.arange(32) % 4 * 2

    def store(machine: Machine, warp: Warp, mask: Any) -> None:
        rows = address(machine, warp)
        for i, register in enumerate(registers):
            halves = warp.registers[register].view(np.uint16).reshape(32, 2)
            matrix = np.zeros((8, 8), np.uint16)
            for half in range(2):
                place = (pair + half, row) if ".trans" in operation else (row, pair + half)
                matrix[place] = halves[:, half]
            machine.write(rows[8 * i : 8 * i + 8], matrix.view(np.uint8), is_shared=True)

    return store


def _copy(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    """Asynchronous copies: of lanes, and in bulk."""
    if "mbarrier.arrive" in operation:
        barrier = _address(operands[0])

        def arrive(machine: Machine, warp: Warp, mask: Any) -> None:
            place, copies = int(barrier(machine, warp)[0]), warp.copies
            warp.copies = []

            def end() -> None:
                for copy in copies:
                    copy()
                machine.barriers[place].change(32)

            machine.later(warp, end)

        return arrive
    is_bulk = "bulk" in operation
    target, source = _address(operands[0].replace("+ 0", "")), _address(operands[1].replace("+ 0", ""))
    size = _reader(operands[2], np.uint32)
    given = _reader(operands[3], np.uint32) if len(operands) > 3 and not is_bulk else size
    barrier = _address(operands[3]) if is_bulk else target

    def issue(machine: Machine, warp: Warp, mask: Any) -> None:
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


def _barrier(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    def first(machine: Machine, warp: Warp, mask: Any, read: Any) -> int:
        return int(read(machine, warp)[0 if mask is None else np.flatnonzero(mask)[0]])

    if operation.startswith("mbarrier.try_wait"):
        place, phase = _address(operands[1]), _reader(operands[2], np.uint32)

        def wait(machine: Machine, warp: Warp, mask: Any) -> None:
            barrier, parity = machine.barriers[first(machine, warp, mask, place)], first(machine, warp, mask, phase)
            is_over = barrier.phase != parity
            warp.registers[operands[0]] = np.full(32, is_over)
            if not is_over:
                warp.waits = lambda: barrier.phase != parity

        return wait
    place = _address(operands[-1] if operation.startswith("mbarrier.arrive.shared") else operands[-2])
    count = _reader(operands[-1], np.uint32) if not operation.startswith("mbarrier.arrive.shared") else None

    def act(machine: Machine, warp: Warp, mask: Any) -> None:
        at = first(machine, warp, mask, place)
        number = first(machine, warp, mask, count) if count else 0
        if ".init" in operation:
            machine.barriers[at] = Barrier(number)
        elif int(mask.sum() if mask is not None else 32) != 1:
            raise EmulationError("more than one lane arrives")
        else:
            machine.barriers[at].change(1, number)

    return act


def _meet(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    number = int(operands[0])

    def meet(machine: Machine, warp: Warp, mask: Any) -> None:
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


def _product(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    """A warp's 16 rows of a wgmma with weights from registers. Sums are NaN until they are waited for."""
    match = re.search(r"m64n(\d+)k32\.f32\.e4m3\.e4m3", operation)
    if match is None:
        raise EmulationError(f"unknown product {operation}")
    num_cols, outs, rows = int(match[1]), _items(operands[0]), _items(operands[1])
    descriptor, adds = _reader(operands[2], np.uint64), operands[3]
    column, byte = np.arange(num_cols)[:, None], np.arange(32)[None, :]
    g, t = np.arange(32) // 4, np.arange(32) % 4

    def multiply(machine: Machine, warp: Warp, mask: Any) -> None:
        weights = np.zeros((16, 32), np.uint8)
        for i, register in enumerate(rows):
            quads = warp.registers[register].view(np.uint8).reshape(32, 4)
            for j in range(4):
                weights[g + 8 * (i % 2), 16 * (i // 2) + 4 * t + j] = quads[:, j]
        word = int(descriptor(machine, warp)[0])
        if word >> 32 != 0x40000040:
            raise EmulationError(f"rows in another order: {word:#x}")
        places = ((word & 0x3FFF) << 4) + column // 8 * 1024 + column % 8 * 128 + byte
        places ^= (places >> 7 & 7) << 4
        tokens = machine.memory[places - BASE]  # [N, 32]
        is_sum = adds == "1" or (adds != "0" and bool(warp.registers[adds][0]))
        sums = np.zeros((16, num_cols), np.float32)
        if is_sum:
            values = [warp.products.get(name, warp.registers[name]) for name in outs]
            for i, value in enumerate(values):
                sums[g + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2] = value.view(np.float32)
        left, right = E4M3[torch.from_numpy(weights).long()], E4M3[torch.from_numpy(tokens).long()]
        found = plus_products(torch.from_numpy(sums).double(), left, right, SMALLEST_NORMAL).float().numpy()
        for i, name in enumerate(outs):
            value = found[g + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2]
            warp.products[name] = np.ascontiguousarray(value).view(np.uint32)
            warp.registers[name] = np.full(32, np.nan, np.float32).view(np.uint32)

    return multiply


def _wait_for_products(machine: Machine, warp: Warp, mask: Any) -> None:
    warp.registers |= warp.products
    warp.products = {}


def _shuffle(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    source, number = _reader(operands[1], np.uint32), _reader(operands[2], np.uint32)

    def shuffle(machine: Machine, warp: Warp, mask: Any) -> None:
        other = number(machine, warp)
        lanes = warp.lane ^ other if ".bfly" in operation else other
        _write(warp, operands[0], source(machine, warp)[lanes], mask)

    return shuffle


def _reduce(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    if ".add" not in operation:
        raise EmulationError(f"unknown instruction {operation}")
    source = _reader(operands[1], np.uint32)
    return lambda machine, warp, mask: _write(
        warp, operands[0], np.full(32, source(machine, warp).sum(dtype=np.uint32)), mask
    )


def _parameter(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    name, dtype = operands[1].strip("[]"), TYPES[operation.split(".")[-1]]

    def load(machine: Machine, warp: Warp, mask: Any) -> None:
        value = machine.values[name]
        one = np.float32(value).view(np.uint32) if isinstance(value, float) else np.array(value).astype(dtype)
        _write(warp, operands[0], np.full(32, one), mask)

    return load


def _packed(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    """A register of the halves of another, or the halves of one."""
    dtype = np.dtype(TYPES[operation.split(".")[-1]])
    half = np.dtype(f"u{dtype.itemsize // 2}").type
    reads = [_reader(item, half) for item in _items(operands[1])] if operands[1].startswith("{") else []
    whole = _reader(operands[1], dtype.type) if not reads else None

    def unpack(machine: Machine, warp: Warp, mask: Any) -> None:
        halves = np.ascontiguousarray(whole(machine, warp)).view(half).reshape(32, 2)
        for i, name in enumerate(_items(operands[0])):
            _write(warp, name, np.ascontiguousarray(halves[:, i]), mask)

    def pack(machine: Machine, warp: Warp, mask: Any) -> None:
        value = np.stack([read(machine, warp) for read in reads], 1).view(dtype)[:, 0]
        _write(warp, operands[0], value, mask)

    return pack if reads else unpack


def _end(machine: Machine, warp: Warp, mask: Any) -> None:
    warp.is_done = True


def _trap(machine: Machine, warp: Warp, mask: Any) -> None:
    raise EmulationError("trap")


def _nothing(machine: Machine, warp: Warp, mask: Any) -> None:
    pass


KINDS: tuple[tuple[str, Callable[[str, list[str]], Callable[[Machine, Warp, Any], None]]], ...] = (
    ("ld.param", _parameter), ("ld.", _move), ("st.", _move), ("stmatrix", _store_matrices), ("cp.async", _copy),
    ("mbarrier", _barrier), ("bar.warp", lambda *_: _nothing), ("bar", _meet), ("shfl", _shuffle), ("redux", _reduce),
    ("wgmma.mma_async", _product), ("wgmma.wait_group", lambda *_: _wait_for_products),
    ("wgmma", lambda *_: _nothing), ("setmaxnreg", lambda *_: _nothing), ("ret", lambda *_: _end),
    ("trap", lambda *_: _trap),
)  # fmt: skip


def _step_of(operation: str, operands: list[str]) -> Callable[[Machine, Warp, Any], None]:
    for start, make in KINDS:
        if operation.startswith(start):
            return make(operation, operands)
    if operation.startswith("mov") and "{" in operands[0] + operands[1]:
        return _packed(operation, operands)
    return _arithmetic(operation, operands)


# ---- launches ----


class Emulation:
    """`edit`: of a kernel's PTX before it runs; `blocks`: which CTAs run, and of how many; None for all."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.edit: Callable[[str], str] = lambda ptx: ptx
        self.blocks: tuple[list[int], int] | None = None
        self._programs: dict[str, Program] = {}

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
        ptx = self.edit(kernel.asm["ptx"])
        program = self._programs.setdefault(ptx, Program(ptx))
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        regions = [(one.data_ptr(), one.view(torch.uint8).flatten().numpy()) for one in tensors]
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        values += [0] * (len(program.parameters) - len(values))
        blocks, num_blocks = self.blocks or (range(grid[0]), grid[0])
        for block in blocks:
            with np.errstate(all="ignore"):
                Machine(program, values, regions, kernel.metadata.shared).run(block, num_blocks, self.chance)


@contextmanager
def emulated(seed: int = 0) -> Iterator[Emulation]:
    """Inside, launches on CPU tensors are compiled for a Hopper and run here."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    emulation, run = Emulation(seed), JITFunction.run

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, tuple):
            for item in value:
                yield from leaves(item)
        else:
            yield value

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        emulation.launch(kernel, grid, list(leaves(args)))

    driver.set_active(OfflineDriver(90))
    JITFunction.run = launch
    try:
        yield emulation
    finally:
        JITFunction.run = run
