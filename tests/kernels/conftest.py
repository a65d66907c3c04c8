"""Triton decides when it is imported whether kernels are compiled or interpreted, and the process then keeps to it. The
files named here need the interpreter: test_in_interpreter.py runs each in a process of its own."""

from __future__ import annotations

import os

NEED_INTERPRETER = [
    "test_decode.py",
    "test_empty_documents.py",
    "test_heads.py",
    "test_output.py",
    "test_selected.py",
    "test_selection.py",
    "test_swiglu.py",
    "test_laws.py",
    "test_longest.py",
    "test_operators.py",
    "test_stretch.py",
]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = ["test_in_interpreter.py", "test_compiles.py"] if INTERPRETING else NEED_INTERPRETER
