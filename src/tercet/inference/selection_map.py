"""Selection maps: the blocks each layer selected for a prompt, as a self-contained HTML page over the text."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment  # torch depends on it
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.transformer import Transformer

TEMPLATE = Path(__file__).with_name("selection_map.html")


@dataclass(frozen=True)
class LayerSelection:
    """Selection and gates of one layer. blocks: int32 [T, G, n], padded with -1; gates: [T, H, 3], None in a
    block-sparse layer."""

    layer: int
    config: NSAConfig
    blocks: Tensor
    gates: Tensor | None

    def selected_by(self, t: int) -> dict[int, int]:
        """Block -> number of KV heads that selected it for query t."""
        return Counter(block for block in self.blocks[t].flatten().tolist() if block >= 0)

    def forced(self, t: int) -> set[int]:
        """Blocks that query t always reads, whatever their score."""
        current = t // self.config.select_block
        initial = range(min(self.config.select_initial, current + 1))
        return {*initial, *range(max(0, current - self.config.select_local + 1), current + 1)}


class _Recorder:
    """Replaces a layer's statistics object and keeps the last update."""

    enabled = True

    def __init__(self) -> None:
        self.gates: Tensor | None = None
        self.blocks: Tensor | None = None

    def update(
        self, gates: Tensor | None, block_indices: Tensor | None, packing: Packing | None = None, **_: Any
    ) -> None:
        self.gates, self.blocks = gates, block_indices


@torch.no_grad()
def record_selections(model: Transformer, tokens: list[int]) -> list[LayerSelection]:
    """Run one forward pass and record every layer that selects blocks."""
    layers = [(i, layer) for i, layer in enumerate(model.attention_layers()) if layer.spec.selects]
    if not layers:
        raise UsageError(
            "no layer of this model selects blocks: selection maps need NSA layers with the selected branch"
        )
    original = [layer.stats for _, layer in layers]
    recorders = [_Recorder() for _ in layers]
    try:
        for (_, layer), recorder in zip(layers, recorders, strict=True):
            layer.stats = recorder  # type: ignore[assignment]
        model.hidden(torch.tensor([tokens], device=model.embedding.weight.device))
    finally:
        for (_, layer), stats in zip(layers, original, strict=True):
            layer.stats = stats
    found = []
    for (i, layer), recorder in zip(layers, recorders, strict=True):
        assert recorder.blocks is not None
        gates = None if recorder.gates is None else recorder.gates[0].float().cpu()
        found.append(LayerSelection(i, layer.config, recorder.blocks[0].cpu(), gates))
    return found


def selection_page(tokens: list[int], tokenizer: Tokenizer, layers: list[LayerSelection], *, query: int = -1) -> str:
    """The HTML page for one query of the prompt (-1: the last token)."""
    t = query if query >= 0 else len(tokens) + query
    if not 0 <= t < len(tokens):
        raise UsageError(f"query={query} is outside the prompt of {len(tokens)} tokens: 0 to {len(tokens) - 1}, or -1")
    size = layers[0].config.select_block
    count = t // size + 1
    selected = {layer.layer: layer.selected_by(t) for layer in layers}
    forced = layers[0].forced(t)
    kv_heads = sum(layer.blocks.shape[1] for layer in layers)
    blocks = []
    for block in range(count):
        first, end = block * size, min((block + 1) * size, t + 1)
        share = sum(by.get(block, 0) for by in selected.values()) / kv_heads
        names = ", ".join(str(layer) for layer, by in selected.items() if block in by) or "none"
        by = "forced" if block in forced else f"{share:.0%} of KV heads"
        title = f"block {block}, tokens {first} to {end - 1}: {by}; layers {names}"
        kind = "forced" if block in forced else "chosen"
        blocks.append({"kind": kind, "share": share, "title": title, "text": tokenizer.decode(tokens[first:end])})
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text("utf-8"))
    return page.render(
        query=t, size=size, count=count, blocks=blocks, layers=layers, forced=forced, times=_times_chosen(layers, t),
        ticks=_token_ticks(count * size),
        chosen=len({block for by in selected.values() for block in by} - forced),
        width=round(1.5 * count),  # below this a block would be too thin to see: the chart scrolls instead
    )  # fmt: skip


def _token_ticks(tokens: int) -> list[tuple[int, float]]:
    """About five round token numbers, and their places in percent."""
    step = 10 ** math.floor(math.log10(max(tokens / 5, 1)))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if tokens / s <= 6)
    return [(n, 100 * n / tokens) for n in range(0, tokens, step) if n <= 0.94 * tokens]  # the last label must fit


def _times_chosen(layers: list[LayerSelection], t: int) -> list[int]:
    """How often the queries up to t chose each block, forced blocks excluded."""
    size = layers[0].config.select_block
    current = (torch.arange(t + 1) // size)[:, None, None]
    chosen = torch.zeros(t // size + 1, dtype=torch.int64)
    for layer in layers:
        blocks = layer.blocks[: t + 1]
        free = (blocks >= layer.config.select_initial) & (blocks <= current - layer.config.select_local)
        chosen += torch.bincount(blocks[free].long(), minlength=len(chosen))[: len(chosen)]
    return chosen.tolist()
