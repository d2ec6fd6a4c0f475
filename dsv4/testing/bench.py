"""Timing of single ops on a GPU, with the bytes and operations each case must move.

A case is captured in a CUDA graph; before every replay the L2 cache is overwritten; the time is that between two events
around the replay. Nothing waits for the host in between, since the flush gives it time to run ahead. What remains of
the launch itself is measured on an empty graph (`launch_us`) and recorded, not subtracted.
"""

import importlib
import pkgutil
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4.errors import Dsv4Error
from dsv4.testing import cases
from dsv4.testing.op_call import OpCall

ROOT = Path(__file__).parents[2]


class BenchError(Dsv4Error, ValueError):
    """A benchmark that cannot run, or records that cannot be compared."""


@dataclass(frozen=True)
class Work:
    """One call of an op, and what it cannot avoid: bytes in, bytes out, multiply-adds counted as two operations.

    Inputs that fit the cache and are used by every row (a weight vector) count once. The call returns every tensor it
    wrote, those written in place too, and gives the same bits when it is repeated: the graph test compares them.
    `op`: the same as data, where it is an op as the model calls it; `call` itself, if that is one. `defined`: of what
    the call returns, without what it leaves unwritten.
    """

    call: Callable[[], Any]
    bytes_read: int
    bytes_written: int
    flops: int = 0
    flops_format: str = "bf16"
    op: OpCall | None = None
    defined: Callable[[Any], Any] = lambda result: result

    @property
    def op_call(self) -> OpCall | None:
        return self.call if isinstance(self.call, OpCall) else self.op


@dataclass(frozen=True)
class BenchCase:
    """`build(device)` makes inputs and the call. It must also work on the device "meta", where the compile check
    runs it: random and constant tensors only, nothing that reads a value."""

    op: str
    name: str
    shape: dict[str, int | str]
    build: Callable[[torch.device], Work] = field(repr=False)

    @property
    def key(self) -> str:
        return f"{self.op}/{self.name}"


def load_cases(modules: Iterable[str]) -> list[BenchCase]:
    """The `CASES` of every module, checked for duplicate names."""
    return _load(modules, "CASES")


def load_small_cases(modules: Iterable[str]) -> list[BenchCase]:
    """The `SMALL` cases of every module."""
    return _load(modules, "SMALL")


def _load(modules: Iterable[str], name: str) -> list[BenchCase]:
    found = [case for module in modules for case in getattr(importlib.import_module(module), name)]
    keys = [case.key for case in found]
    duplicates = sorted({key for key in keys if keys.count(key) > 1})
    if duplicates:
        raise BenchError(f"expected every case once, found twice: {', '.join(duplicates)}")
    return found


def case_modules() -> list[str]:
    """The modules of `dsv4/testing/cases`, in order."""
    return [f"{cases.__name__}.{info.name}" for info in pkgutil.iter_modules(cases.__path__)]


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- timing ----


class Timer:
    """Replays graphs on the current CUDA device with a cold cache: full of something else that was only read. After a
    flush that writes, the timed call would also pay for writing those lines back, a byte for every byte it reads.
    """

    def __init__(self, samples: int = 100) -> None:
        if not torch.cuda.is_available():
            raise BenchError("benchmarks need a CUDA GPU, found none")
        self.samples = samples
        cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.zeros(cache_bytes, dtype=torch.float32, device="cuda")
        self._word = torch.zeros(1, device="cuda")
        self.launch_us = statistics.median(self.times_us(lambda: self._word.zero_()))

    def times_us(self, call: Callable[[], Any]) -> list[float]:
        graph = self._capture(call)
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.samples)
        ]
        for start, end in pairs:
            self._flush.sum()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def _capture(self, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets the allocator settle
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph
