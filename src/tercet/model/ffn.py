"""SwiGLU, the feed-forward layer of a block (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.attention.hardware import kernels_run_on


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)); gate and up are one matrix, for one larger matmul instead of two.

    backend: "reference" uses PyTorch only, as in attention; otherwise the gradient kernel runs wherever it can.
    """

    def __init__(self, dim: int, ffn_dim: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(x)
        if self.backend != "reference" and torch.is_grad_enabled() and kernels_run_on(y):
            from tercet.model.swiglu import SiluMul

            return self.down(SiluMul.apply(y))
        gate, up = y.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
