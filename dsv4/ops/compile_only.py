"""Launches that compile and do nothing else: for GPUs that are not there, and ahead of the first real launch.

A launcher called with "meta" tensors runs as it is. Triton's own JIT derives types, alignment and options from its
arguments and compiles what a real launch would run, so nothing is written twice. Whoever calls decides the target: the
current GPU, or the one a driver stands for (tools/compiled/compile_check.py).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from heapq import heappop, heappush
from threading import Lock
from typing import Any

from torch import Tensor

from dsv4.ops.compile_workers import Job, Workers
from dsv4.ops.lib import guard

# those that take seconds, the slowest first: begun last, they would be waited for
SLOWEST = (
    "_compress_pair_kernel", "_compress_kernel", "attend_pairs_kernel", "_attention_inputs_kernel", "_down_kernel",
    "_wide_down_kernel", "expert_tiles_kernel", "_gate_up_kernel", "_attend_kernel", "hyper_many_kernel",
    "topk_long_kernel", "hyper_kernel", "_few_down_kernel", "_combine_kernel",
)  # fmt: skip
_LOG = logging.getLogger("dsv4.engine")
_patching = Lock()


@contextmanager
def launches_only_compile() -> Iterator[list[Any]]:
    """Inside, a launch on "meta" tensors compiles, and appends the compiled kernel (in `compiled_in_parallel`: what
    will become it) to the list. Launches on other tensors, of other threads too, go on as always."""
    if guard.IS_INTERPRETED:
        raise guard.KernelInputError("expected TRITON_INTERPRET not to be set: the interpreter compiles nothing")
    function = importlib.import_module("triton.runtime.jit").JITFunction
    compiled: list[Any] = []
    with _patching:
        run, devices = function.run, guard.LAUNCH_DEVICES

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not any(map(_is_meta, (*args, *kwargs.values()))):
                return run(self, *args, grid=grid, warmup=warmup, **kwargs)
            compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
            return None

        function.run, guard.LAUNCH_DEVICES = compile_only, devices | {"meta"}
        try:
            yield compiled
        finally:
            function.run, guard.LAUNCH_DEVICES = run, devices


def _is_meta(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(map(_is_meta, argument))
    tensor = getattr(argument, "base", argument)  # of a tensor descriptor
    return isinstance(tensor, Tensor) and tensor.device.type == "meta"


def can_compile_in_parallel() -> bool:
    """Whether there is a compiler, and one that can hand kernels to threads (Triton 3.6 can)."""
    if not guard.HAS_TRITON or guard.IS_INTERPRETED:
        return False
    return hasattr(importlib.import_module("triton"), "AsyncCompileMode")


@contextmanager
def compiled_in_parallel(progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[None]:
    """Kernels that are only compiled inside are compiled on all cores until the block is left; `progress` hears how
    many are, of how many. What does not compile is named in the log and left out: a launch of it says why."""
    mode_of = importlib.import_module("triton").AsyncCompileMode
    with closing(_Compilers(len(os.sched_getaffinity(0)))) as compilers, mode_of(compilers, ignore_errors=True) as mode:
        try:
            yield
            for done, _ in enumerate(as_completed(mode.raw_futures)):
                progress(done + 1, len(mode.raw_futures))
        except KeyboardInterrupt:
            compilers.cancel()  # leaving the mode waits for all that are submitted
            raise


class _Compilers:
    """A thread and a worker for each core, the slowest kernels first; with each kernel the host function that launches
    it, for which Triton calls a C compiler."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count)
        self._lock = Lock()
        self._waiting: list[tuple[int, int, Job | None, Callable[[], Any], Future[Any]]] = []
        self._num_submitted = 0
        self._workers: Workers | None = None
        self._building: defaultdict[str, Lock] = defaultdict(Lock)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        job, future = Job.of(compile_kernel), Future[Any]()
        place = len(SLOWEST) if job is None or job.source.name not in SLOWEST else SLOWEST.index(job.source.name)
        with self._lock:
            self._num_submitted += 1
            heappush(self._waiting, (place, self._num_submitted, job, compile_kernel, future))
        self._threads.submit(self._take)
        return future

    def _take(self) -> None:
        with self._lock:
            *_, job, compile_kernel, future = heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._compile(job, compile_kernel))
        except Exception as error:
            name = "a kernel" if job is None else job.source.name
            _LOG.warning("%s does not compile: %s: %s", name, type(error).__name__, error)
            future.set_exception(error)

    def _compile(self, job: Job | None, compile_kernel: Callable[[], Any]) -> Any:
        if self._count > 1 and job is not None:
            with suppress(Exception):  # a help: what fails is compiled here
                self._ask(job)
        kernel = compile_kernel()
        launcher = getattr(importlib.import_module("triton.runtime").driver.active, "launcher_cls", None)
        if launcher is not None:
            with self._building[str(kernel.src.signature)]:  # kernels of one signature share it
                launcher(kernel.src, kernel.metadata)  # into Triton's disk cache, where the first launch finds it
        return kernel

    def _ask(self, job: Job) -> None:
        if not job.is_kept:
            with self._lock:
                self._workers = self._workers or Workers(self._count)
            self._workers.compile(job)

    def cancel(self) -> None:
        """What has not begun."""
        with self._lock:
            for *_, future in self._waiting:
                future.cancel()

    def close(self) -> None:
        self._threads.shutdown()
        if self._workers is not None:
            self._workers.close()
