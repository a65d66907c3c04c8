"""Tercet: train language models with Native Sparse Attention (arXiv 2502.11089).

Names are resolved on first use, so that `import tercet` and the command line start without loading torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from tercet.version import __version__

# Threads on a CPU sleep while they wait for each other. By default they spin, and training beside a program that uses
# the cores too takes twice as long or more. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# public name -> module that defines it
_HOME = {
    "NSAConfig": "tercet.attention.config",
    "nsa_attention": "tercet.attention.operator",
    "compress_mean": "tercet.attention.stages",
    "compressed_attention": "tercet.attention.stages",
    "select_blocks": "tercet.attention.stages",
    "selected_attention": "tercet.attention.stages",
    "window_attention": "tercet.attention.stages",
    "combine": "tercet.attention.stages",
    "AttentionAux": "tercet.attention.operator",
    "block_sparse_attention": "tercet.attention.operator",
    "BlockSparseAttention": "tercet.model.layers",
    "NativeSparseAttention": "tercet.model.layers",
    "DenseAttention": "tercet.model.layers",
    "WindowAttention": "tercet.model.layers",
    "load_model": "tercet.inference.load",
    "generate": "tercet.inference.generate",
}

__all__ = ["__version__", *sorted(_HOME)]

# The names of _HOME for type checkers.
# ruff: noqa: F401
if TYPE_CHECKING:
    from tercet.attention.config import NSAConfig
    from tercet.attention.operator import AttentionAux, block_sparse_attention, nsa_attention
    from tercet.attention.stages import (
        combine,
        compress_mean,
        compressed_attention,
        select_blocks,
        selected_attention,
        window_attention,
    )
    from tercet.inference.generate import generate
    from tercet.inference.load import load_model
    from tercet.model.layers import BlockSparseAttention, DenseAttention, NativeSparseAttention, WindowAttention


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tercet' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
