"""Less Python for each operation of Triton's CPU interpreter. No result changes.

An operation on a block took 40 microseconds, of which numpy needs one or two. The rest went into objects that say what
a block is, into constants made anew at each use, and into a check of overflow whose result is not read.
The tests of the experts' kernels take 11 seconds of a CPU instead of 41.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

LARGEST_CONSTANT = 4096  # elements of a block that is kept
MOST_CONSTANTS = 1024


def quicken(interpreter: Any) -> None:
    """Replace what costs most in `triton.runtime.interpreter` and in the language beneath it."""
    _share_types(interpreter)
    _share_dimensions(interpreter)
    _share_constants(interpreter)
    _call_directly(interpreter)
    # each integer sum was made again in int64 and compared, for an assertion that only `debug` makes
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


def _share_types(interpreter: Any) -> None:
    """Types of tuples (every tensor's shape is one) when they are asked for; a table of dtypes; plain comparisons."""
    core, dtype_of, handle = interpreter.tl.core, interpreter._get_np_dtype, interpreter.TensorHandle
    known: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(kind: Any) -> np.dtype[Any]:
        if kind.name not in known:
            known[kind.name] = dtype_of(kind)
        return known[kind.name]

    def begin_tuple(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def type_of(self: Any) -> Any:
        if "_type" not in vars(self):
            vars(self)["_type"] = core._type_for_tuple_values(self.values)
        return vars(self)["_type"]

    def begin_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        if type(dtype) is core.dtype and data.itemsize > 1 and data.itemsize > dtype.itemsize:
            self.__post_init__()  # says what is wrong

    compare = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or compare(self, other)
    core.dtype.__ne__ = lambda self, other: self is not other and not self.__eq__(other)
    handle.__init__ = begin_handle
    interpreter._get_np_dtype = get_np_dtype
    if hasattr(core, "_type_for_tuple_values"):  # of this Triton
        core.tuple.__init__ = begin_tuple
        core.tuple.type = property(type_of, lambda self, given: vars(self).update(_type=given))


class _Dimensions(NamedTuple):
    """What all blocks of one shape share."""

    ints: Any  # a `tl.tuple`
    constants: Any  # the same of `tl.constexpr`
    numel: int
    constant_numel: Any


def _share_dimensions(interpreter: Any) -> None:
    """A shape is checked once, and has one tuple: equal shapes are mostly the same object."""
    core = interpreter.tl.core
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    unwrap, to_ir = core._unwrap_if_constexpr, core.block_type.to_ir
    known: dict[tuple[int, ...], _Dimensions] = {}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def dimensions(shape: Any) -> _Dimensions:
        found: _Dimensions | None = getattr(shape, "__dict__", {}).get("dimensions")
        if found is None:
            sizes = tuple([unwrap_if_constexpr(size) for size in unwrap_if_constexpr(shape)])
            found = known.get(sizes)
            if found is None:
                numel = core.validate_block_shape(sizes)
                constants = core.tuple([core.constexpr(size) for size in sizes])
                found = known[sizes] = _Dimensions(core.tuple(sizes), constants, numel, core.constexpr(numel))
                vars(found.ints)["dimensions"] = vars(found.constants)["dimensions"] = found
        return found

    def begin_shared_block(self: Any, element_ty: Any, shape: Any) -> None:
        found = dimensions(shape)
        if not found.ints.values:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.dimensions, self.shape, self.numel = element_ty, found, found.ints, found.numel

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.dimensions.constants, type.dimensions.constant_numel

    def block_to_ir(self: Any, builder: Any) -> Any:
        return self if isinstance(builder, interpreter.InterpreterBuilder) else to_ir(self, builder)

    def create_splat(self: Any, kind: Any, arg: Any) -> Any:
        data = np.full(kind.shape.values, arg.data, dtype=interpreter._get_np_dtype(arg.dtype))
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    core.dtype.dimensions = dimensions(())  # of all that are no block
    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.block_type.__init__, core.block_type.to_ir = begin_shared_block, block_to_ir
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = begin_tensor
    interpreter.InterpreterBuilder.create_splat = create_splat


def _share_constants(interpreter: Any) -> None:
    """Operands of one type and shape are taken as they are. A number beside a block is made into a block once."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    check, promote, broadcast = (
        semantic.binary_op_type_checking_impl, semantic.computation_type_impl, semantic.broadcast_impl_value,
    )  # fmt: skip
    constants: dict[Any, Any] = {}
    promoted: dict[Any, Any] = {}

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if div_or_mod or type(lhs) is not core.tensor:
            return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left_type, right_kind = lhs.dtype, type(rhs)
        is_plain = type(left_type) is core.dtype  # no pointer
        if right_kind is core.tensor:
            is_offset = not is_plain and allow_lhs_ptr and type(rhs.dtype) is core.dtype and rhs.dtype.is_int()
            if is_offset or (is_plain and left_type is rhs.dtype):
                return self.broadcast_impl_value(lhs, rhs)
        if not is_plain or (right_kind is not int and right_kind is not float) or not arithmetic_check:
            return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        key = (right_kind, rhs, left_type.name, *lhs.type.dimensions.ints.values)
        if key in constants:
            data, kind = constants[key]
            return lhs, self.tensor(interpreter.TensorHandle(data, kind.scalar), kind)
        left, right = check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if left is lhs and right.handle.data.size <= LARGEST_CONSTANT:
            if len(constants) >= MOST_CONSTANTS:
                constants.clear()
            right.handle.data.flags.writeable = False
            constants[key] = right.handle.data, right.type
        return left, right

    def computation_type(self: Any, *kinds: Any) -> Any:  # two types, each with whether it is a number's
        key = tuple([kind if isinstance(kind, bool) else kind.name for kind in kinds])
        if key not in promoted:
            promoted[key] = promote(self, *kinds)
        return promoted[key]

    def broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.computation_type_impl = operands, computation_type
    semantic.broadcast_impl_value = broadcast_value


def _call_directly(interpreter: Any) -> None:
    """A function of the language is called without the wrapper that asks whether it may be called here."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(target, name, call)

    interpreter._patch_attr = patch_attr
