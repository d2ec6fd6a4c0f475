"""Triton's CPU interpreter, made bit-faithful, so that a machine without a GPU can run the kernels.

Unrepaired, Triton 3.6 computes bf16 on raw bit patterns, truncates casts to bf16, and loses carries, subnormals, NaN
and saturation in casts to E4M3, all without a word. `repair()` replaces those parts by torch's conversions and by fp32
arithmetic that is rounded once per operation, which is what the GPU does. It also

* rounds `tl.fma` once, and gives `tl.maximum`, `tl.minimum` and `tl.clamp` the GPU's treatment of NaN;
* lets `range` and indexing take a tensor again with numpy 2.4 and newer, and masks be of any type with Triton 3.9;
* patches the language once per launch, instead of at every call of a helper;
* spends less Python on each operation (`quick_interpreter.py`).

What it cannot give: the GPU's order of summation, its approximate exp, sin, cos and rsqrt, and the tf32 rounding of
fp32 `tl.dot` operands. Kernels avoid the last two where bits matter.

`TRITON_INTERPRET=1` must stand in the environment before triton is imported, because decorators read it;
`without_gpu()` sets it when there is no CUDA device, and is called once, by `tests/conftest.py`. On a GPU nothing is
touched.
"""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dsv4.errors import Dsv4Error
from dsv4.testing.quick_interpreter import quicken

REPAIRED = "dsv4_repaired"  # attribute of triton's interpreter module that ops/lib/guard.py looks for


class InterpreterError(Dsv4Error, ValueError):
    """The interpreter was asked for too late, or for something it cannot do faithfully."""


def without_gpu() -> bool:
    """Switch to the repaired interpreter if there is no CUDA device and Triton is installed; say whether it is in
    use.
    """
    if torch.cuda.is_available():
        return False
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise InterpreterError("expected triton not to be imported before TRITON_INTERPRET=1 is set, found it imported")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.runtime.interpreter as interpreter
    except ImportError:
        return False
    repair(interpreter)
    return True


def repair(interpreter: Any) -> None:
    """Repair `triton.runtime.interpreter` in place; a second call changes nothing."""
    if getattr(interpreter, REPAIRED, False):
        return
    _repair_casts(interpreter)
    _repair_arithmetic(interpreter)
    _repair_dot(interpreter)
    _repair_masks(interpreter)
    _repair_language(interpreter)
    _refuse_narrow_sums(interpreter)
    quicken(interpreter)
    setattr(interpreter, REPAIRED, True)


def _torch_types(tl: Any) -> dict[Any, torch.dtype]:
    return {
        tl.float64: torch.float64,
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }


def _repair_casts(interpreter: Any) -> None:
    """Every conversion between float formats goes through torch; 8-bit formats saturate, as `cvt.rn.satfinite` does."""
    tl = interpreter.tl
    torch_types = _torch_types(tl)
    by_bits = {tl.bfloat16, tl.float8e4nv, tl.float8e5}  # the formats numpy holds as integers
    signed = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    truncate = interpreter._convert_float

    def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        source, target = source.scalar, target.scalar
        if {source, target} - torch_types.keys() or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return truncate(data, source, target, rounding_mode)
        if source == tl.bfloat16 and target == tl.float32:  # the most frequent, and a shift
            return data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        integers = np.array(data, copy=True, order="C").view(f"int{source.primitive_bitwidth}")
        values = torch.from_numpy(integers).view(torch_types[source])
        if target.primitive_bitwidth == 8:
            largest = torch.finfo(torch_types[target]).max
            values = values.float().clamp(-largest, largest)  # NaN stays
        bits = values.to(torch_types[target]).view(signed[target.primitive_bitwidth])
        return bits.numpy().view(f"uint{target.primitive_bitwidth}").reshape(np.shape(data))

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        before, after = source.dtype.scalar, target_type.scalar
        data = source.data
        if before in by_bits:
            data = convert_float(data, before, tl.float32, None).view(np.float32)
            before = tl.float32
        if after not in by_bits:
            return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(after)), after)
        if before not in torch_types:  # an integer
            data, before = data.astype(np.float32), tl.float32
        return interpreter.TensorHandle(convert_float(data, before, after, None), after)

    def get_bf16(self: Any, value: float) -> Any:
        data = convert_float(np.array([value], dtype=np.float32), tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(data, tl.bfloat16)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.get_bf16 = get_bf16


def _widen(interpreter: Any, handle: Any) -> np.ndarray:
    """A handle's values; bf16 and 8-bit floats as fp32."""
    scalar, tl = handle.dtype.scalar, interpreter.tl
    if scalar in (tl.bfloat16, tl.float8e4nv, tl.float8e5):
        return interpreter._convert_float(handle.data, scalar, tl.float32, None).view(np.float32)
    return handle.data


def _narrow(interpreter: Any, data: np.ndarray, scalar: Any) -> Any:
    """A handle of `scalar` values from fp32 results; comparisons stay boolean."""
    tl = interpreter.tl
    if scalar == tl.bfloat16 and data.dtype != np.bool_:
        data = interpreter._convert_float(data.astype(np.float32), tl.float32, scalar, None)
    return interpreter.TensorHandle(data, scalar)


def _repair_arithmetic(interpreter: Any) -> None:
    """bf16: widen, compute, round. fma: one rounding. min, max and clamp: NaN as on the GPU."""
    tl, builder = interpreter.tl, interpreter.InterpreterBuilder
    plain_binary, plain_unary = builder.binary_op, builder.unary_op

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        scalar = left.dtype.scalar
        if scalar != tl.bfloat16:
            return plain_binary(self, left, right, op)
        return _narrow(interpreter, op(_widen(interpreter, left), _widen(interpreter, right)), scalar)

    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        scalar = arg.dtype.scalar
        if scalar != tl.bfloat16:
            return plain_unary(self, arg, op)
        return _narrow(interpreter, op(_widen(interpreter, arg)), scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        x_data, y_data, z_data = (_widen(interpreter, handle) for handle in (x, y, z))
        if x_data.dtype == np.float64:
            return interpreter.TensorHandle(x_data * y_data + z_data, z.dtype.scalar)
        exact = _odd_sum(x_data.astype(np.float64) * y_data.astype(np.float64), z_data.astype(np.float64))
        return _narrow(interpreter, exact.astype(x_data.dtype), z.dtype.scalar)

    def create_clampf(self: Any, arg: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        keeps_nan = propagate_nan == interpreter._ir.PROPAGATE_NAN.ALL
        larger, smaller = (np.maximum, np.minimum) if keeps_nan else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, larger), high, smaller)

    builder.binary_op, builder.unary_op, builder.create_fma = binary_op, unary_op, create_fma
    builder.create_clampf = create_clampf
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)


def _odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in fp64, rounded to odd: rounding that to fp32 or narrower is then the same as rounding the exact sum."""
    total = a + b
    shadow = total - a
    error = (a - (total - shadow)) + (b - shadow)
    bits = np.atleast_1d(total).view(np.int64)
    is_inexact = np.isfinite(total) & (error != 0) & ((bits.reshape(np.shape(total)) & 1) == 0)
    step = np.where(np.signbit(error) == np.signbit(total), 1, -1)  # away from zero, or towards it
    odd = bits.reshape(np.shape(total)) + np.where(is_inexact, step, 0)
    return np.ascontiguousarray(odd).view(np.float64)


def _repair_dot(interpreter: Any) -> None:
    """Float operands are widened and accumulated in fp32, or in the accumulator's own wider dtype.

    Products of operands below fp32 are summed in fp64 and rounded once: so, as on tensor cores, where the order inside
    a set of columns does not matter, the order of columns within one `tl.dot` changes no bit.
    """
    tl, builder = interpreter.tl, interpreter.InterpreterBuilder
    integer_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *precision: Any) -> Any:
        if not a.dtype.scalar.is_floating():
            return integer_dot(self, a, b, accumulator, *precision)
        left, right, start = (_widen(interpreter, handle) for handle in (a, b, accumulator))
        is_narrow = a.dtype.scalar.primitive_bitwidth < 32 and b.dtype.scalar.primitive_bitwidth < 32
        wide = np.float64 if is_narrow or np.float64 in (left.dtype, start.dtype) else np.float32
        product = np.matmul(left.astype(wide), right.astype(wide)) + start.astype(wide)
        if accumulator.dtype.scalar == tl.bfloat16:
            return _narrow(interpreter, product, tl.bfloat16)
        return interpreter.TensorHandle(product.astype(start.dtype), accumulator.dtype.scalar)

    builder.create_dot = create_dot


def _repair_masks(interpreter: Any) -> None:
    """A comparison leaves its truth in the type of what it compared. Triton 3.9 loads and stores by bool alone."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_mask(handle: Any) -> Any:
        # up to Triton 3.8 a load by a descriptor gives an array, of bool, in place of a handle
        if isinstance(handle, np.ndarray) or handle.data.dtype == np.bool_:
            return handle
        return interpreter.TensorHandle(handle.data.astype(np.bool_), handle.dtype.scalar)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, ptrs, as_mask(mask), *rest, **named)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return store(self, ptrs, value, as_mask(mask), *rest, **named)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store


def _repair_language(interpreter: Any) -> None:
    """Indices from one-element tensors, and one patch of `triton.language` per launch."""
    tl = interpreter.tl
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patches: list[tuple[Any, str, Any, Any]] = []  # where, the name, what was there, what is there in a launch
    silence: list[Any] = []  # of the launch under way

    def restore() -> None:
        for where, name, old, _ in reversed(patches):
            if old is interpreter._MISSING:
                delattr(where, name)
            else:
                setattr(where, name, old)
        silence.pop().__exit__(None, None, None)

    def patch_lang(function: Any) -> Any:
        if silence:
            return interpreter._LangPatchScope()  # of a helper: nothing to undo
        silence.append(np.errstate(all="ignore"))  # overflow to infinity and NaN operands are ordinary values here
        silence[0].__enter__()
        if not patches:
            patches.extend((*change, getattr(*change[:2])) for change in patch_language(both)._changes)
        for where, name, _, new in patches:
            setattr(where, name, new)
        return SimpleNamespace(restore=restore)

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_lang_tensor, patch_lang


def _refuse_narrow_sums(interpreter: Any) -> None:
    """`tl.sum` of bf16 or narrower accumulates in that format, in an order of the GPU's choosing: never what a
    kernel wants.

    The interpreter cannot reproduce it, so it refuses. `tl.max`, `tl.min` and `tl.cumsum` widen by themselves.
    """
    plain_sum = interpreter.ReduceOps.sum

    def checked_sum(self: Any, tensor: Any) -> Any:
        if tensor.dtype.is_floating() and tensor.dtype.primitive_bitwidth < 32:
            raise InterpreterError(f"expected a sum of fp32 or wider, found {tensor.dtype}: convert before tl.sum")
        return plain_sum(self, tensor)

    interpreter.ReduceOps.sum = checked_sum
