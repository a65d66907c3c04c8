"""Choice of backend for a call, with the reason. Depends only on the call's inputs, never on earlier calls."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from tercet.attention.config import NSAConfig
from tercet.attention.hardware import NO_TRITON, TRITON_INSTALLED, interpreting
from tercet.errors import UsageError

BACKENDS = ("auto", "reference", "triton")
REQUESTED = "asked for"
"""Reason recorded when the user requested the reference. Event logs store it and the report compares it: keep it."""


class Route(str):
    """The backend that a branch ran on. Compares equal to its name; `reason` says why no faster one ran."""

    reason: str | None

    def __new__(cls, name: str, reason: str | None = None) -> Route:
        route = super().__new__(cls, name)
        route.reason = reason
        return route

    def __repr__(self) -> str:
        return f"'{self}'" if self.reason is None else f"'{self}' ({self.reason})"


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: pick one of {', '.join(BACKENDS)}")


class BackendError(UsageError, RuntimeError):
    """The requested backend cannot run."""


def cannot_run(reason: str) -> BackendError:
    """The error for backend="triton" where the kernels cannot run."""
    return BackendError(f'backend="triton" cannot run here: {reason}; backend="auto" falls back to the reference')


def choose_backend(
    backend: str, tensors: dict[str, Any], config: NSAConfig, obstacle: str | None = None
) -> tuple[str, str | None]:
    """Return (backend, why not a faster one).

    `tensors` holds q, and those keys and values that the call has, by their nsa_attention argument names. `obstacle` is
    any further reason why the kernels cannot run. Returns plain strings, not a Route: torch.compile cannot trace str
    subclasses.
    """
    check_backend(backend)
    if backend == "reference":
        return "reference", REQUESTED
    reason = obstacle or why_not_triton(tensors, config)
    if reason is None:
        return "triton", None
    if backend == "triton":
        raise cannot_run(reason)
    if tensors["q"].is_cuda:
        _warn_once(reason)
    return "reference", reason


def why_not_triton(tensors: dict[str, Any], config: NSAConfig) -> str | None:
    """Why the kernels cannot run on these tensors; None if they can."""
    q = tensors["q"]
    if not TRITON_INSTALLED:
        return NO_TRITON
    if not q.is_cuda and not interpreting():
        return f"q is on {q.device} and the kernels need a CUDA device"
    from tercet.attention import kernels

    return kernels.unsupported(**tensors, config=config)


def without_autocast(device: str) -> AbstractContextManager[None]:
    """Autocast off. Does nothing if it is off already: entering the context takes as long as two launches."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@lru_cache(maxsize=64)
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"Native Sparse Attention runs on the reference backend, which is slow on a GPU: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
