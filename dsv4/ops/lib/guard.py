"""The guarded Triton import, and what every launch checks.

Triton is optional. Without it (macOS, Windows) every module still imports, `TORCH` works, and launching a kernel raises
`TritonMissingError`. Op modules take `tl` and `jit` from here and never import triton themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from dsv4.errors import Dsv4Error

HAS_TRITON = importlib.util.find_spec("triton") is not None


class TritonMissingError(Dsv4Error, ValueError):
    """A kernel was launched where Triton is not installed."""


class KernelInputError(Dsv4Error, ValueError):
    """A launcher was given a tensor its kernel cannot take."""


class _MissingTriton:
    """Stands where `triton.language` would: constants can be made, nothing else."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


class _MissingKernel:
    """Stands where a compiled kernel would."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> NoReturn:
        raise TritonMissingError(f"{self.name} needs Triton, which is not installed here; use the TORCH backend")


_GLUON = "triton.experimental.gluon"
if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = importlib.import_module("triton.language") if HAS_TRITON else _MissingTriton()
# Gluon, Triton with its layouts and its warps in the open, and what Hopper has of it; never interpreted
gl: Any = importlib.import_module(f"{_GLUON}.language") if HAS_TRITON else _MissingTriton()
hopper: Any = importlib.import_module(f"{_GLUON}.language.nvidia.hopper") if HAS_TRITON else None
IS_INTERPRETED: bool = HAS_TRITON and bool(importlib.import_module("triton").knobs.runtime.interpret)
# for kernels: `if INTERPRET:` around what only a GPU has (inline PTX, libdevice)
INTERPRET = tl.constexpr(IS_INTERPRETED)
# where launches are possible; ops/compile_only.py adds "meta"
LAUNCH_DEVICES = frozenset({"cuda", "cpu"} if IS_INTERPRETED else {"cuda"})


def _newest_names() -> None:
    """Kernels use the names of Triton 3.9's Gluon. Earlier ones had others for the same functions."""
    core = importlib.import_module(f"{_GLUON}.language._core")
    for owner, name, earlier in (
        (gl, "barrier", "thread_barrier"),
        (core.shared_memory_descriptor, "reinterpret", "_reinterpret"),
        (hopper.async_copy, "async_load", "async_copy_global_to_shared"),
        (hopper.tma, "async_load", "async_copy_global_to_shared"),
    ):
        if not hasattr(owner, name):
            setattr(owner, name, getattr(owner, earlier))


def _settle_keys() -> None:
    """Triton 3.6 names a compiled kernel by its own constants and, of functions it calls, only by those that some other
    kernel led to before. So the name depends on what was launched first, and the cache on disk is missed by a process
    with another order. Asked for first, a function's constants are always there. A Triton that has no such thing is
    left as it is."""
    finder = getattr(importlib.import_module("triton.runtime.jit"), "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if finder is None or update is None:
        return

    def update_hash(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    finder._update_hash = update_hash


if HAS_TRITON:
    _newest_names()
    _settle_keys()


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """`triton.jit`, with or without arguments.

    Name every size that varies from call to call (rows, tokens) in `do_not_specialize`: one compiled kernel then
    serves all batches, which saves compilation and keeps a row's result independent of how many rows there are.
    """
    if function is None:
        return lambda inner: jit(inner, do_not_specialize=do_not_specialize)
    if not HAS_TRITON:
        return _MissingKernel(function.__name__)
    return importlib.import_module("triton").jit(function, do_not_specialize=list(do_not_specialize))


def gluon_jit(function: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """As `jit`, for kernels in Gluon. They may call functions of `jit`."""
    if function is None:
        return lambda inner: gluon_jit(inner, do_not_specialize=do_not_specialize)
    if not HAS_TRITON:
        return _MissingKernel(function.__name__)
    return importlib.import_module(_GLUON).jit(function, do_not_specialize=list(do_not_specialize))


def check_launch(*tensors: Tensor | None) -> None:
    """All given tensors on one device that can run kernels; `KernelInputError` otherwise. None is skipped."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if not HAS_TRITON:
        return  # the launch itself says what is missing
    if len(devices) != 1 or next(iter(devices)).type not in LAUNCH_DEVICES:
        found = ", ".join(sorted(map(str, devices)))
        raise KernelInputError(
            f"expected tensors on one device of {sorted(LAUNCH_DEVICES)}, found {found}; the TORCH backend runs "
            "anywhere"
        )
    if IS_INTERPRETED and not _interpreter_is_repaired():
        raise KernelInputError(
            "TRITON_INTERPRET=1 computes wrong bits: call dsv4.testing.interpreter.without_gpu() first"
        )


def _interpreter_is_repaired() -> bool:
    return getattr(importlib.import_module("triton.runtime.interpreter"), "dsv4_repaired", False)
