"""Requirements of the Triton kernels on the machine and on tensors. Importable without Triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import lru_cache

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
NO_TRITON = "Triton is not installed (pip install 'tercet[kernels]')"


def kernels_run_on(x: Tensor) -> bool:
    """Whether the kernels support x's device and dtype."""
    if not TRITON_INSTALLED or x.dtype not in KERNEL_DTYPES:
        return False
    return capability(x.device) >= OLDEST_CAPABILITY if x.is_cuda else interpreting()


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    if torch.compiler.is_compiling():  # torch 2.11 traces neither a cached function nor a tuple marked constant
        return torch.cuda.get_device_capability(device)
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)  # 25 µs


def interpreting() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU (slow; used by tests)."""
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False  # do not import Triton just to ask: a broken install must not affect CPU runs
    import triton

    return bool(triton.knobs.runtime.interpret)


# What torch.compiler.assume_constant_result sets; calling it would import torch._dynamo, a second at every start.
interpreting._dynamo_marked_constant = True  # type: ignore[attr-defined]
