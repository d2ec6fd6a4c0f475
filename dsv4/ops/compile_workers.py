"""Processes that compile Triton's kernels into its cache on disk. Threads of one process wait for one another there: a
fifth of the work holds the interpreter's lock, and 16 threads then get no further than that fifth.

Whoever wants a kernel asks a worker first, then compiles as always, and finds it in the cache. So a worker decides
nothing: where it fails, dies or never comes up, the kernel is compiled in the process that wants it.

`serve` runs in a process of its own, which imports the kernels once and becomes a worker for every pipe. It is
started and not forked: the process that wants kernels has threads, and a GPU. Workers end when their pipes do.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

_COMMAND = "from dsv4.ops.compile_workers import serve; serve()"
_DONE = b"."
_LOG = logging.getLogger("dsv4.engine")
# no GPU, and no threads of libraries, which a fork would lose
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Job(NamedTuple):
    """What Triton's `compile` is called with."""

    source: Any
    target: Any
    options: Any
    env_vars: Any

    @classmethod
    def of(cls, compile_kernel: Callable[[], Any]) -> Job | None:
        """That of a function that Triton hands to an executor; None where it has other variables (as of Triton 3.6)."""
        found = inspect.getclosurevars(compile_kernel).nonlocals
        with suppress(KeyError):
            return cls(found["src"], found["target"], found["options"], found["env_vars"])
        return None

    @property
    def is_kept(self) -> bool:
        """Whether it is in the cache on disk."""
        cache = importlib.import_module("triton.runtime.cache")
        backend = importlib.import_module("triton.compiler").make_backend(self.target)
        key = cache.get_cache_key(self.source, backend, self.options, self.env_vars)
        kept = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(kept.get_group(f"{self.source.name[:150]}.json"))


class Workers:
    """`count` of them, started at once; `close` ends them."""

    def __init__(self, count: int) -> None:
        pairs = [Pipe() for _ in range(count)]
        theirs = [end.fileno() for _, end in pairs]
        folder = importlib.import_module("triton").knobs.cache.dir
        self._ends = [end for end, _ in pairs]
        self._free: SimpleQueue[Connection | None] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, folder, *map(str, theirs)],
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},  # the same kernels
            pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end, other in pairs:
            other.close()
            self._free.put(end)

    def compile(self, job: Job) -> None:
        """Let a worker try; at most as many threads ask as there are workers."""
        data, end = _pickled(job), self._free.get()
        is_alive = False
        if end is not None:
            with suppress(OSError, EOFError):
                end.send_bytes(data)
                is_alive = end.recv_bytes() == _DONE
        self._free.put(end if is_alive else None)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        if status := self._process.wait():
            _LOG.warning("the processes that compile kernels ended with status %d: this one compiled alone", status)


class _Pickler(pickle.Pickler):
    """Kernels by their names: the other process has imported the same source."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, importlib.import_module("triton.runtime.jit").JITCallable):
            return _kernel, (value.fn.__module__, value.fn.__qualname__)
        return NotImplemented


def _pickled(job: Job) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(tuple(job))
    return buffer.getvalue()


def _kernel(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def serve() -> None:
    """The process of workers: arguments are the cache's folder and a descriptor for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever asks them
    importlib.import_module("dsv4.ops")  # before the workers part
    importlib.import_module("triton").knobs.cache.dir = sys.argv[1]
    ends = [Connection(int(descriptor)) for descriptor in sys.argv[2:]]
    for end in ends:
        if os.fork() == 0:
            for other in ends:
                if other is not end:
                    other.close()  # its end could not be seen
            try:
                _work(end)
            finally:
                os._exit(0)
    for end in ends:
        end.close()
    for _ in ends:
        os.wait()


class _Driver:
    """In place of a GPU's, as far as compiling asks it."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0


def _work(end: Connection) -> None:
    compile_kernel = importlib.import_module("triton.compiler").compile
    driver = importlib.import_module("triton.runtime").driver
    while True:
        data = end.recv_bytes()
        with suppress(Exception):  # whoever wants it compiles it again, and sees why
            job = Job(*pickle.loads(data))
            driver.set_active(_Driver(job.target))
            compile_kernel(job.source, target=job.target, options=job.options.__dict__, _env_vars=job.env_vars)
        end.send_bytes(_DONE)
