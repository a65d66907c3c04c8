"""Which backend runs a call, and why not a faster one. Follows from the call's own inputs, never from history."""

from __future__ import annotations

import warnings
from functools import lru_cache

from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.hardware import TRITON_INSTALLED, interpreting

BACKENDS = ("auto", "reference", "triton")


class Route(str):
    """The backend that a branch ran on. Compares as its name; `reason` says why it was not a faster one."""

    reason: str | None

    def __new__(cls, name: str, reason: str | None = None) -> Route:
        route = super().__new__(cls, name)
        route.reason = reason
        return route

    def __repr__(self) -> str:
        return f"'{self}'" if self.reason is None else f"'{self}' ({self.reason})"


def choose(
    backend: str, tensors: dict[str, Tensor], config: NSAConfig, obstacle: str | None = None
) -> tuple[str, str | None]:
    """(backend, why not a faster one). `tensors` holds q, keys and values by the names of nsa_attention's arguments;
    `obstacle` is what stands in the kernels' way besides them.

    Plain strings rather than a Route: torch.compile traces this, and knows no subclasses of str.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: pick one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return "reference", "asked for"
    reason = obstacle or why_not_triton(tensors, config)
    if reason is None:
        return "triton", None
    if backend == "triton":
        raise RuntimeError(f'backend="triton" cannot run here: {reason}; backend="auto" takes the reference instead')
    if tensors["q"].is_cuda:
        _warn_once(reason)
    return "reference", reason


def why_not_triton(tensors: dict[str, Tensor], config: NSAConfig) -> str | None:
    q = tensors["q"]
    if not TRITON_INSTALLED:
        return "Triton is not installed (pip install 'tercet[kernels]')"
    if not q.is_cuda and not interpreting():
        return f"q is on {q.device} and the kernels need a CUDA device"
    from tercet.attention import kernels

    return kernels.unsupported(**tensors, config=config)


@lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Native Sparse Attention runs on the reference backend, which is slow on a GPU: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
