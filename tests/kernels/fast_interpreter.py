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
