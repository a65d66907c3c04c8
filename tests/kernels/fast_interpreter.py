"""Removes work that Triton's interpreter repeats for every operation, without changing a result.

Used by the interpreter tests, which otherwise spend most of their time on it.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    # Every launch and every call of a jitted function patches all of triton.language again. Patch it once.
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # Overflow checks of integer arithmetic have no effect without debug, and are computed all the same.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # The numpy type of a Triton type, which builds a table of all types on every call.
    pointer, of_scalar = np.dtype(np.uint64), cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: pointer if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
