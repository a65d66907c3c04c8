"""Where Triton is not installed (macOS), everything but the kernels works, and asking for them says what to do."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed: importing it raises ImportError
import torch, tercet
from tercet.attention.dispatch import TRITON_INSTALLED

assert not TRITON_INSTALLED
layer = tercet.NativeSparseAttention(32, 4, 2, 8)
x = torch.randn(1, 70, 32)
layer(x).sum().backward()
assert "Triton is not installed" in layer.routes["compressed"].reason
layer.backend = "triton"
try:
    layer(x)
except RuntimeError as error:
    print(error)
"""


def test_the_layer_trains_and_the_missing_kernels_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('backend="triton" cannot run here: Triton is not installed')
    assert len(done.stdout.splitlines()) == 1
