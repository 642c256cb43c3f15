"""Triton's interpreter without work that has no effect: kernels run in a quarter to half of its time.

Each call of a device function goes through all names of `triton.language` for what to patch, and
finds that its launch did so. Each sum of int32 numbers is computed again as int64, for an assertion
that the interpreter's options (`debug`) leave out.

Each tensor makes two tuples and their types anew, and each operation compares shapes by making more.
Here a block's type is made once, a tuple's when it is asked for. Values come of the same operations.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

LEAVES = (int, core.constexpr, core.dtype, core.pointer_type, core.tensor)
WITH_THESE_TYPES = ("3.6.",)
"""Versions of Triton that have the types which are remembered here; others keep their own way."""


def hasten() -> None:
    """Replace in this process what computes what nobody asks for."""
    _launches()
    if triton.__version__.startswith(WITH_THESE_TYPES):
        _tuples()
        _types()
        _operations()
        _calls()


def _launches() -> None:
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", options.debug)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    complete: set[str] = set()

    @cache
    def languages(function: Any) -> frozenset[str]:
        modules = {"tl": tl, "core": tl.core}
        globals_ = function.__globals__.values()
        return frozenset(
            name for name, m in modules.items() if any(m is value for value in globals_)
        )

    def patch_once(function: Any) -> Any:
        names = languages(function)
        if names and names <= complete:
            return None  # a device function, which restores nothing
        scope = patch(function)
        complete.update(names)
        return scope

    def launch_alone(self: Any, *args: Any, **options: Any) -> Any:
        complete.clear()
        return launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_alone


def _tuples() -> None:
    unwrap, attribute = core._unwrap_if_constexpr, core.tuple.__getattr__
    equal, item = core.tuple.__eq__, core.tuple.__getitem__

    def unwrap_once(o: Any) -> Any:
        if type(o) is core.constexpr:
            return o.value
        return o if type(o) in LEAVES else unwrap(o)

    def init(self: Any, args: Any, type: Any = None) -> None:
        self.values = [*args]
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get(self: Any, name: str) -> Any:
        if name != "type":
            return attribute(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    def same(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if type(values) is list and all(type(value) is int for value in values):
            return core.constexpr(self.values == values)
        return equal(self, other)

    core._unwrap_if_constexpr = unwrap_once
    core.tuple.__init__, core.tuple.__getattr__, core.tuple.__eq__ = init, get, same
    core.tuple.__getitem__ = lambda self, at: self.values[at] if type(at) is int else item(self, at)


def _types() -> None:
    blocks: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
    numpy: dict[str, Any] = {}
    block, equal = core.block_type.__init__, core.dtype.__eq__
    numpy_type = interpreter._get_np_dtype

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else shape
        place = id(element_ty), tuple(map(core._unwrap_if_constexpr, values))
        if place not in blocks:
            block(self, element_ty, shape)
            # This keeps `element_ty`, and so its id.
            blocks[place] = vars(self) | {"_seen": _seen(self), "_others": {}}
        self.__dict__ = blocks[place]

    def same(self: Any, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, core.block_type):
            return False
        return bool(self.shape.values == other.shape.values and self.element_ty == other.element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if "_seen" not in vars(type):
            type._seen = _seen(type)
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = type._seen

    def numpy_of(type: Any) -> Any:
        if type.name not in numpy:
            numpy[type.name] = numpy_type(type)
        return numpy[type.name]

    def with_element(self: Any, scalar: Any) -> Any:
        if id(scalar) not in self._others:
            self._others[id(scalar)] = core.block_type(scalar, self.shape)
        return self._others[id(scalar)]

    core.block_type.__init__, core.block_type.__eq__ = init, same
    core.block_type.with_element_ty = with_element
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.tensor.__init__, interpreter._get_np_dtype = tensor, numpy_of


def _seen(type: Any) -> tuple[Any, ...]:
    """Return what each tensor of a type has: shape, number of elements, their type."""
    shape = type.shape if type.is_block() else ()
    return core.tuple(map(core.constexpr, shape)), core.constexpr(math.prod(shape)), type.scalar


def _operations() -> None:
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    promoted, tensor = TritonSemantic.computation_type_impl, TritonSemantic.to_tensor
    checked = TritonSemantic.binary_op_type_checking_impl
    types: dict[tuple[Any, ...], Any] = {}

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (filled(self, lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, filled(self, rhs, left)
        if left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def filled(self: Any, scalar: Any, of: Any) -> Any:
        to = of.with_element_ty(scalar.type)
        return self.tensor(self.builder.create_splat(to, scalar.handle), to)

    def checked_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        lhs_ptr: bool = False,
        rhs_ptr: bool = False,
        arithmetic: bool = True,
        div: bool = False,
    ) -> Any:
        if (
            type(lhs) is type(rhs) is core.tensor
            and lhs.dtype is rhs.dtype
            and not div
            and not lhs.dtype.is_ptr()
        ):
            return self.broadcast_impl_value(lhs, rhs)
        return checked(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, div)

    def tensor_once(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is core.tensor else tensor(self, x, check_type)

    def cast_once(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.dtype is dst_ty and fp_downcast_rounding is None:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def promoted_once(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, div: bool) -> Any:
        place = a.name, a_scalar, b.name, b_scalar, div
        if place not in types:
            types[place] = promoted(self, a, a_scalar, b, b_scalar, div)
        return types[place]

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_once, cast_once
    TritonSemantic.computation_type_impl, TritonSemantic.to_tensor = promoted_once, tensor_once
    TritonSemantic.binary_op_type_checking_impl = checked_once


def _calls() -> None:
    validated = interpreter.TensorHandle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        size = data.itemsize
        if (
            size > 1
            and not isinstance(dtype, core.pointer_type)
            and size * 8 > dtype.primitive_bitwidth
        ):
            validated(self)  # which says what is wrong

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)
        if member.__code__ is core.load.__code__:  # of `builtin`, which looks for `_semantic`
            member = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    def splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        number = arg.data[0] if isinstance(arg.dtype, core.block_type) else arg.data
        data = np.full(tuple(ret_ty.shape.values), number, interpreter._get_np_dtype(arg.dtype))
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    def expand(self: Any, arg: Any, axis: int) -> Any:
        sizes = [*arg.data.shape]
        sizes.insert(axis, 1)
        return interpreter.TensorHandle(arg.data.reshape(sizes), arg.dtype.scalar)

    interpreter.TensorHandle.__init__, interpreter._patch_attr = init, patch
    interpreter.InterpreterBuilder.create_splat = splat
    interpreter.InterpreterBuilder.create_expand_dims = expand
