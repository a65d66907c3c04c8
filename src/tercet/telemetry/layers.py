"""What the attention layers of a model do: gates, selection and routes, of all layers, under every wrapper."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from tercet.model.attention import DenseAttention, NativeSparseAttention
from tercet.telemetry.events import LayersObserved, RoutesCounted
from tercet.telemetry.tables import STATISTICS


class LayerProbe:
    """Finds the attention layers by their class, so that no wrapper can hide them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, (NativeSparseAttention, DenseAttention))]
        self._sparse = [m for m in self.layers if isinstance(m, NativeSparseAttention)]
        self._calls: Counter[tuple[int, str, str, str, bool]] = Counter()

    def sample(self, on: bool) -> None:
        """Whether the coming passes are added up. One step in each log interval is enough, and costs little."""
        for layer in self._sparse:
            layer.stats.enabled = on

    def count_routes(self) -> None:
        """Call after each forward pass. Reads what is on the host already."""
        for i, layer in enumerate(self.layers):
            on_gpu = layer.q_proj.weight.is_cuda
            for branch, route in layer.routes.items():
                reason = getattr(route, "reason", None) or ""
                fallback = on_gpu and route == "reference" and reason != "asked for"
                self._calls[i, branch, str(route), reason, fallback] += 1

    def routes(self, step: int) -> RoutesCounted:
        """Passes so far."""
        rows = sorted(self._calls.items())
        columns: list[list[Any]] = [list(c) for c in zip(*((*key, n) for key, n in rows), strict=True)] or [[]] * 6
        layer, branch, route, reason, fallback, calls = columns
        return RoutesCounted(
            step=step, layer=layer, branch=branch, route=route, reason=reason, fallback=fallback, calls=calls
        )

    def read(self, step: int) -> LayersObserved | None:
        """What was sampled since the last read, None if nothing was. Waits for the device."""
        read = [m.stats.read() if isinstance(m, NativeSparseAttention) else {} for m in self.layers]
        if not any(read):
            return None
        distances = [m.stats.read_distances() if isinstance(m, NativeSparseAttention) else [] for m in self.layers]
        for layer in self._sparse:
            layer.stats.reset()
        columns: dict[str, Any] = {name: [values.get(name) for values in read] for name in STATISTICS}
        return LayersObserved(
            step=step,
            attention=["nsa" if isinstance(m, NativeSparseAttention) else "dense" for m in self.layers],
            distances=distances,
            **columns,
        )
