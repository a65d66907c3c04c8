"""Removes work that Triton's interpreter repeats for every operation, without changing a result.

Used by the interpreter tests, which otherwise spend most of their time on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

SEMANTIC = interpreter.interpreter_semantic


def install() -> None:
    # Overflow checks of integer arithmetic have no effect without debug, and are computed all the same.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # The numpy type of a Triton type, which builds a table of all types on every call.
    pointer, of_scalar = np.dtype(np.uint64), cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    _unwrap_plain_values_at_once()
    _share_shapes()
    _check_operands_once()
    _make_handles_faster()
    # Every launch and every call of a jitted function patches all of triton.language again. Patch it once.
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_attr = _patch_attr
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _patch_attr(owner: Any, name: str, builtin: Callable[..., Any], builder: Any, scope: Any) -> None:
    """As Triton's, but the builtin's wrapper, which checks that there is a semantic, is not called."""
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = SEMANTIC
        return function(*args, **options)

    scope.set_attr(owner, name, call)


def _unwrap_plain_values_at_once() -> None:
    unwrap, plain = tl.core._unwrap_if_constexpr, {int, float, bool, str, type(None), tl.dtype, tl.tensor}

    def fast_unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    tl.core._unwrap_if_constexpr = fast_unwrap


def _share_shapes() -> None:
    """What Triton derives from a shape (sizes, checks, names) is derived once, not for each type and tensor."""
    block_type, tensor = tl.core.block_type, tl.core.tensor
    init_type, init_tensor, broadcast = block_type.__init__, tensor.__init__, SEMANTIC.broadcast_impl_value
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def fast_init_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        key = (element_ty.name, *[tl.core._unwrap_if_constexpr(size) for size in shape])
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(types[key], element_ty=element_ty)

    def fast_init_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]

    def broadcast_unless_equal(lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    block_type.__init__, tensor.__init__ = fast_init_type, fast_init_tensor
    SEMANTIC.broadcast_impl_value = broadcast_unless_equal


def _check_operands_once() -> None:
    """Remember how two operands are cast and broadcast, by their types, or by the value where one is a Python number.

    Later operands are broadcast in type only: numpy broadcasts the values itself, without copies.
    """
    tensor, check, cast = tl.core.tensor, SEMANTIC.binary_op_type_checking_impl, SEMANTIC.cast
    decisions: dict[Any, Any] = {}

    def decide(given: tl.tensor, decided: tl.tensor) -> tuple[Any, Any]:
        """The type to cast to and the type of all elements, each None where it stays."""
        scalar = None if decided.dtype.name == given.dtype.name else decided.dtype
        return scalar, None if decided.shape is given.shape else decided.type

    def apply(x: tl.tensor, scalar: Any, block: Any) -> tl.tensor:
        x = x if scalar is None else cast(x, scalar)
        return x if block is None else tensor(x.handle, block)

    def constant(x: tl.tensor) -> tl.tensor:
        return tensor(interpreter.TensorHandle(x.handle.data.ravel()[:1].copy(), x.handle.dtype), x.type)

    def fast_check(lhs: Any, rhs: Any, *flags: bool) -> tuple[tl.tensor, tl.tensor]:
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            key: Any = (lhs.dtype.name, id(lhs.shape), rhs.dtype.name, id(rhs.shape), flags)
            if key not in decisions:
                checked = check(lhs, rhs, *flags)
                decisions[key] = *decide(lhs, checked[0]), *decide(rhs, checked[1])
                return checked
            scalar_l, block_l, scalar_r, block_r = decisions[key]
            return apply(lhs, scalar_l, block_l), apply(rhs, scalar_r, block_r)
        if left is tensor and right in (int, float, bool):
            key = (lhs.dtype.name, id(lhs.shape), right, rhs, flags)
            if key not in decisions:
                checked = check(lhs, rhs, *flags)
                decisions[key] = *decide(lhs, checked[0]), constant(checked[1])
                return checked
            scalar, block, value = decisions[key]
            return apply(lhs, scalar, block), value
        if right is tensor and left in (int, float, bool):
            key = (left, lhs, rhs.dtype.name, id(rhs.shape), flags)
            if key not in decisions:
                checked = check(lhs, rhs, *flags)
                decisions[key] = constant(checked[0]), *decide(rhs, checked[1])
                return checked
            value, scalar, block = decisions[key]
            return value, apply(rhs, scalar, block)
        return check(lhs, rhs, *flags)

    SEMANTIC.binary_op_type_checking_impl = fast_check


def _make_handles_faster() -> None:
    """Call the check of the element size only where it could fail, and add axes without numpy's argument checks."""
    handle, pointer = interpreter.TensorHandle, tl.pointer_type
    check = handle.__post_init__

    def init(self: Any, data: np.ndarray, dtype: tl.dtype, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and type(dtype) is not pointer and data.itemsize * 8 > dtype.primitive_bitwidth:
            check(self)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        shape = arg.data.shape
        return handle(arg.data.reshape(*shape[:axis], 1, *shape[axis:]), arg.dtype.scalar)

    handle.__init__ = init
    interpreter.InterpreterBuilder.create_expand_dims = expand_dims
