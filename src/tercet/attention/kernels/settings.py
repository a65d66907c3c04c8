"""Launch parameters: one table, keyed by compute capability, kernel and head size, found by `tercet bench tune`.

Nothing is searched at run time: the first call of a kernel compiles one variant, and Triton's cache keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    rows: int = 64  # M: queries of a tile
    keys: int = 64  # N: keys of a key tile
    warps: int = 4
    stages: int = 2
    tma: bool = False  # the copy engine loads whole key tiles, where strides allow it
    parts: int = 16  # at most so many query ranges, for gradients of keys that every query sees
    registers: int = 0  # at most so many per thread, for more blocks on a multiprocessor; 0: as the compiler likes
    held: int = 2  # at most so many tiles of rows for the heads of a group, for scores

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options

    @property
    def overlapped(self) -> dict[str, int]:
        """For the Gluon kernels, which lay out their stages themselves."""
        options = {"num_warps": self.warps}
        return options | {"maxnreg": self.registers} if self.registers else options


# (kernel, padded head size) -> Launch. Head size is the larger of Dk and Dv, next power of two.
_HOPPER: dict[tuple[str, int], Launch] = {
    ("compressed_forward", 64): Launch(stages=2, tma=True),
    ("compressed_forward", 128): Launch(rows=64, stages=3, tma=True),
    ("compressed_forward", 256): Launch(rows=64),
    ("score", 64): Launch(stages=2, tma=True, held=6, registers=168),
    ("score", 128): Launch(rows=64, stages=2, tma=True),
    ("score", 256): Launch(rows=64, stages=2),
    ("query_gradient", 64): Launch(stages=2, tma=True, registers=128),
    ("query_gradient", 128): Launch(rows=64, stages=2, tma=True),
    ("query_gradient", 256): Launch(rows=64, warps=8, stages=1),
    ("compressed_key_gradients", 64): Launch(stages=3, tma=True, parts=48),
    ("compressed_key_gradients", 128): Launch(rows=32, stages=3, tma=True),
    ("compressed_key_gradients", 256): Launch(rows=32, warps=8, stages=1),
    ("window_forward", 64): Launch(stages=2, tma=True),
    ("window_forward", 128): Launch(rows=64, stages=3, tma=True),
    ("window_forward", 256): Launch(rows=64),
    ("window_key_gradients", 64): Launch(rows=32, stages=3, tma=True),
    ("window_key_gradients", 128): Launch(rows=32, stages=3, tma=True),
    ("window_key_gradients", 256): Launch(rows=32, warps=8, stages=1),
}

# Ampere and the rest: no copy engine, less shared memory. Conservative; never measured by us.
_GENERIC: dict[tuple[str, int], Launch] = {
    key: Launch(
        rows=64, keys=32 if key[1] == 256 else 64, warps=8 if key[1] == 256 else 4, stages=2 if key[1] < 256 else 1
    )
    for key in _HOPPER
}

TABLE: dict[int, dict[tuple[str, int], Launch]] = {9: _HOPPER, 10: _HOPPER}


@lru_cache(maxsize=1024)
def lookup(major: int, kernel: str, head: int, wide: bool) -> Launch:
    launch = TABLE.get(major, _GENERIC)[kernel, max(64, head)]
    if wide:  # fp32 is right, not fast: four times the bytes of a bf16 tile pair must still fit
        return Launch(rows=32, keys=32, stages=1)
    return launch


def generation(x: Tensor) -> int:
    """Major compute capability; 0 in Triton's interpreter."""
    return _major(x.device.index) if x.is_cuda else 0


@lru_cache(maxsize=64)
def _major(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def shared_memory(device: torch.device) -> int:
    """Bytes that one program may take; Hopper's in Triton's interpreter, so that it refuses what Hopper would."""
    if device.type != "cuda":
        return 227 * 1024
    return _shared_memory(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _shared_memory(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def unfit_blocks(config: NSAConfig) -> str | None:
    """Why the kernels cannot run with blocks of these sizes; None if they can."""
    for name in ("compress_block", "compress_stride", "select_block"):
        size = getattr(config, name)
        if size & (size - 1):
            return f"{name}={size} is not a power of two"
    if not 16 <= config.select_block <= 128:
        return f"select_block={config.select_block} is not within 16 … 128"
    return None


def settings(kernel: str, q: Tensor, v: Tensor) -> Launch:
    head = padded(max(q.shape[-1], v.shape[-1]))
    return lookup(generation(q), kernel, head, q.dtype == torch.float32)


def power_of_2(size: int) -> int:
    """The next power of two. Triton's own function takes five microseconds: twenty calls of it were a tenth of a
    backward pass's host time on short sequences."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """A vector of this size in registers: the next power of two, and no less than a matrix product takes."""
    return max(16, power_of_2(size))
