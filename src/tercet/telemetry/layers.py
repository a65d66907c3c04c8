"""What the attention layers of a model do: gates, selection and routes, of all layers, under every wrapper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tercet.model.attention import DenseAttention, NativeSparseAttention
from tercet.telemetry.events import LayersObserved, RoutesCounted
from tercet.telemetry.tables import STATISTICS


class LayerProbe:
    """Finds the attention layers by their class, so that no wrapper can hide them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, (NativeSparseAttention, DenseAttention))]
        self._sparse = [m for m in self.layers if isinstance(m, NativeSparseAttention)]
        self._calls: Counter[tuple[int, str, str, str, bool]] = Counter()  # of the steps that were made
        self._open: Counter[tuple[int, str, str, str, bool]] = Counter()  # of the step that is being made
        self._sampled = False

    def sample(self, on: bool) -> None:
        """Whether the coming passes are added up. One step in each log interval is enough, and costs little."""
        self._sampled = self._sampled or on
        for layer in self._sparse:
            layer.stats.enabled = on

    def count_routes(self) -> None:
        """Call after each forward pass, and `step_made` after those of a step. Reads what is on the host already."""
        for i, layer in enumerate(self.layers):
            on_gpu = self.on_gpu(layer)
            for branch, route in layer.routes.items():
                reason = getattr(route, "reason", None) or ""
                fallback = on_gpu and route == "reference" and reason != "asked for"
                self._open[i, branch, str(route), reason, fallback] += 1

    def step_made(self) -> None:
        """Passes count from here on. Those of a step that fails never do: a resumed run makes that step again."""
        self._calls.update(self._open)
        self._open.clear()

    @staticmethod
    def on_gpu(layer: NativeSparseAttention | DenseAttention) -> bool:
        """Whether its kernels could run: elsewhere the reference is not a fallback but all there is."""
        return layer.q_proj.weight.is_cuda

    def routes(self, step: int) -> RoutesCounted:
        """Passes of all steps so far."""
        rows = sorted(self._calls.items())
        columns: list[list[Any]] = [list(c) for c in zip(*((*key, n) for key, n in rows), strict=True)] or [[]] * 6
        layer, branch, route, reason, fallback, calls = columns
        return RoutesCounted(
            step=step, layer=layer, branch=branch, route=route, reason=reason, fallback=fallback, calls=calls
        )

    def read(self, step: int, all_sum: Callable[[Tensor], Tensor]) -> LayersObserved | None:
        """What all ranks sampled since the last read, None if nothing was. One sum over ranks, one wait."""
        if not self._sampled or not self._sparse:
            return None
        self._sampled = False
        device = self._sparse[0].q_proj.weight.device
        rows = all_sum(torch.stack([layer.stats.sums(device) for layer in self._sparse])).tolist()
        means = {id(m): m.stats.means(row) for m, row in zip(self._sparse, rows, strict=True)}
        far = {id(m): m.stats.distances(row) for m, row in zip(self._sparse, rows, strict=True)}
        for layer in self._sparse:
            layer.stats.reset()
        columns: dict[str, Any] = {n: [means.get(id(m), {}).get(n) for m in self.layers] for n in STATISTICS}
        return LayersObserved(
            step=step,
            attention=["nsa" if isinstance(m, NativeSparseAttention) else "dense" for m in self.layers],
            distances=[far.get(id(m), []) for m in self.layers],
            **columns,
        )
