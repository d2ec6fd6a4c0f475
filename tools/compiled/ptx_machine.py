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

from tools.compiled.compile_check import OfflineDriver
from tools.compiled.ptx_arithmetic import BASE, EmulationError
from tools.compiled.ptx_steps import Barrier, Warp, step_of

STATEMENT = re.compile(r"\s*(?:(\{)|(\})|([\w$]+):(?!:)|((?:[^;{}]|\{[^}]*\})*);)")


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
                step = program.steps[at] = step_of(operation, operands)
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
