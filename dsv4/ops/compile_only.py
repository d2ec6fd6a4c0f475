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
from contextlib import contextmanager, suppress
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
    """Kernels that are only compiled inside are compiled on all cores when the block is left; `progress` hears how many
    are, of how many. What does not compile is named in the log and left out: a launch of it says why."""
    compilers = _Compilers()
    with importlib.import_module("triton").AsyncCompileMode(compilers, ignore_errors=True):
        try:
            yield
            compilers.run(progress)
        finally:
            compilers.close()


class _Compilers:
    """A thread and a worker for each core, the slowest kernels first; with each kernel the host function that launches
    it, for which Triton calls a C compiler."""

    def __init__(self) -> None:
        self._count = len(os.sched_getaffinity(0))
        self._waiting: list[tuple[Job | None, Callable[[], Any], Future[Any]]] = []
        self._workers: Workers | None = None
        self._building: defaultdict[str, Lock] = defaultdict(Lock)

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        job, future = Job.of(compile_kernel), Future[Any]()
        self._waiting.append((job, compile_kernel, future))
        with suppress(Exception):  # a help, which is asked again for each kernel
            if self._workers is None and self._count > 1 and job is not None and not job.is_kept:
                self._workers = Workers(self._count)  # they come up while others are submitted
        return future

    def run(self, progress: Callable[[int, int], None]) -> None:
        with ThreadPoolExecutor(self._count) as threads:
            try:
                work = [threads.submit(self._finish, *one) for one in sorted(self._waiting, key=_place)]
                for done, _ in enumerate(as_completed(work)):
                    progress(done + 1, len(work))
            except KeyboardInterrupt:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def close(self) -> None:
        """What has not been compiled is cancelled: leaving Triton's mode waits for all that is submitted."""
        for _, _, future in self._waiting:
            if future.cancel():
                future.set_running_or_notify_cancel()  # the mode takes it for finished only then
        if self._workers is not None:
            self._workers.close()

    def _finish(self, job: Job | None, compile_kernel: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(self._compile(job, compile_kernel))
        except Exception as error:
            name = "a kernel" if job is None else job.source.name
            _LOG.warning("%s does not compile: %s: %s", name, type(error).__name__, error)
            future.set_exception(error)

    def _compile(self, job: Job | None, compile_kernel: Callable[[], Any]) -> Any:
        if self._workers is not None and job is not None:
            with suppress(Exception):  # what fails there is compiled here
                self._workers.compile(job)
        kernel = compile_kernel()
        launcher = getattr(importlib.import_module("triton.runtime").driver.active, "launcher_cls", None)
        if launcher is not None:
            with self._building[str(kernel.src.signature)]:  # kernels of one signature share it
                launcher(kernel.src, kernel.metadata)  # into Triton's disk cache, where the first launch finds it
        return kernel


def _place(one: tuple[Job | None, Any, Any]) -> int:
    job = one[0]
    return len(SLOWEST) if job is None or job.source.name not in SLOWEST else SLOWEST.index(job.source.name)
