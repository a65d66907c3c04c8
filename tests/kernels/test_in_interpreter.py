"""Runs the kernels' laws in Triton's interpreter, on any machine: one process per file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.conftest import NEED_INTERPRETER

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.parametrize("file", [f for f in NEED_INTERPRETER if (HERE / f).exists()])
def test_laws_hold_in_the_interpreter(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    print(done.stdout[-200:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
