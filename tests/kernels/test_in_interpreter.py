"""Runs the kernels' laws in Triton's interpreter, on any machine: one process per file, two at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.conftest import NEED_INTERPRETER

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(file: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file)],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {file: pool.submit(run, file) for file in NEED_INTERPRETER}


@pytest.mark.parametrize("file", NEED_INTERPRETER)
def test_laws_hold_in_the_interpreter(file: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = runs[file].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout or "." in done.stdout.splitlines()[0]
