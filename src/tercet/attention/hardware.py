"""What the kernels ask of a machine and of a tensor, before anything of theirs is imported."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def kernels_run_on(x: Tensor) -> bool:
    """Whether a kernel can read x at all: where it is, and of which type."""
    if not TRITON_INSTALLED or x.dtype not in KERNEL_DTYPES:
        return False
    return torch.cuda.get_device_capability(x.device) >= OLDEST_CAPABILITY if x.is_cuda else interpreting()


@torch.compiler.assume_constant_result  # the compiler cannot look into Triton's switches
def interpreting() -> bool:
    """Triton's own switch for running kernels on the CPU: slow, for tests of the kernels."""
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False  # off, and Triton is not asked: one that cannot be imported must not stop what needs no kernel
    import triton

    return bool(triton.knobs.runtime.interpret)
