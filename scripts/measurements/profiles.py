"""Which kernels the time goes to: training steps of m7c and its dense baseline, and the operator at P 64k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from measurements.part import CORRELATION, free
from measurements.train import mode_cells
from tercet.attention.config import NSAConfig
from tercet.attention.functional import nsa_attention
from tercet.bench import attention
from tercet.bench.timing import profile
from tercet.bench.train_cell import kernel_times


def kernels(_: bool) -> Iterator[dict[str, Any]]:
    wanted = {(cell["length"], cell["mode"]): cell for cell in mode_cells(False)}
    for length in (8192, 2048, 65536):
        for kind in ("nsa", "dense"):
            yield {"of": "step", "kind": kind, "length": length, "kernels": kernel_times(wanted[length, kind])}
            free()
    for kind in ("random", "smooth"):
        x = attention.make_inputs(attention.SHAPES["P64k"], NSAConfig(), kind, CORRELATION)
        leaves = [t.requires_grad_() for t in x]
        dout = torch.randn_like(x.q)

        def both(leaves: list[torch.Tensor] = leaves, dout: torch.Tensor = dout) -> Any:
            return torch.autograd.grad(nsa_attention(*leaves, config=NSAConfig()), leaves, dout)

        found = [{"kernel": name, "ms": ms, "launches": n} for ms, n, name in profile(both)]
        yield {"of": "operator", "shape": "P64k", "inputs": kind, "kernels": found}
        free()
