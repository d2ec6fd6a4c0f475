"""Launches that compile and do nothing else: for GPUs that are not there, and ahead of the first real launch.

A launcher called with "meta" tensors runs as it is. Triton's own JIT derives types, alignment and options from its
arguments and compiles what a real launch would run, so nothing is written twice. Whoever calls decides the target: the
current GPU, or the one a driver stands for (tools/compiled/compile_check.py).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import Tensor

from dsv4.ops.lib import guard

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
    """Kernels that are only compiled inside are compiled by threads, one a core, until the block is left; `progress`
    hears how many are, of how many. What does not compile is left out: a launch of it says why."""
    mode_of = importlib.import_module("triton").AsyncCompileMode
    threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    with threads, mode_of(_WithLaunchers(threads), ignore_errors=True) as mode:
        try:
            yield
            for done, _ in enumerate(as_completed(mode.raw_futures)):
                progress(done + 1, len(mode.raw_futures))
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)  # leaving the mode waits for all that are submitted
            raise


class _WithLaunchers:
    """Compiles in threads; with each kernel the host function that launches it, for which Triton calls a C compiler."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(self._compile, compile_kernel)

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        launcher = getattr(importlib.import_module("triton.runtime").driver.active, "launcher_cls", None)
        if launcher is not None:
            launcher(kernel.src, kernel.metadata)  # into Triton's disk cache, where the first launch finds it
        return kernel
