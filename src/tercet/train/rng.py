"""The state of every random generator, as JSON: Python's, numpy's, torch's, and this rank's device's."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_rng(device: torch.device) -> dict[str, Any]:
    """All generator states, JSON-able."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back. A state saved on a CPU has none for a GPU, which then keeps its seed."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def seed_all(seed: int) -> None:
    """Seed every generator, on every rank alike: they draw the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
