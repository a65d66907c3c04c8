"""Selection maps: the blocks each layer selected for a prompt, as a self-contained HTML page over the text."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.attention import NativeSparseAttention
from tercet.model.transformer import Transformer


@dataclass(frozen=True)
class LayerSelection:
    """Selection and gates of one layer. blocks: int32 [T, G, n], padded with -1; gates: [T, H, 3]."""

    layer: int
    config: NSAConfig
    blocks: Tensor
    gates: Tensor

    def selected_by(self, t: int) -> dict[int, int]:
        """Block -> number of KV heads that selected it for query t."""
        counts: dict[int, int] = {}
        for block in self.blocks[t].flatten().tolist():
            if block >= 0:
                counts[block] = counts.get(block, 0) + 1
        return counts

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

    def update(self, gates: Tensor, block_indices: Tensor | None, packing: Packing | None = None, **_: Any) -> None:
        self.gates, self.blocks = gates.detach(), block_indices


@torch.no_grad()
def record_selections(model: Transformer, tokens: list[int]) -> list[LayerSelection]:
    """Run one forward pass and record every NSA layer that has the selected branch."""
    layers = [
        (i, layer)
        for i, layer in enumerate(model.attention_layers())
        if isinstance(layer, NativeSparseAttention) and "selected" in layer.branches
    ]
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
        assert recorder.gates is not None
        found.append(LayerSelection(i, layer.config, recorder.blocks[0].cpu(), recorder.gates[0].float().cpu()))
    return found


def selection_page(tokens: list[int], tokenizer: Tokenizer, layers: list[LayerSelection], *, query: int = -1) -> str:
    """The HTML page for one query of the prompt (-1: the last token)."""
    t = query if query >= 0 else len(tokens) + query
    if not 0 <= t < len(tokens):
        raise UsageError(f"query={query} is outside the prompt of {len(tokens)} tokens: 0 to {len(tokens) - 1}, or -1")
    size = layers[0].config.select_block
    count = t // size + 1
    selected = [layer.selected_by(t) for layer in layers]
    forced = layers[0].forced(t)
    kv_heads = sum(layer.blocks.shape[1] for layer in layers)
    totals = [sum(s.get(block, 0) for s in selected) for block in range(count)]
    spans = []
    for block in range(count):
        first, end = block * size, min((block + 1) * size, t + 1)
        text = html.escape(tokenizer.decode(tokens[first:end]))
        share = totals[block] / kv_heads
        kind, chosen_by = ("forced", "forced") if block in forced else ("chosen", f"{share:.0%} of KV heads")
        names = ", ".join(str(layer.layer) for layer, s in zip(layers, selected, strict=True) if block in s) or "none"
        title = f"block {block}, tokens {first} to {end - 1}: {chosen_by}; layers {names}"
        spans.append(f'<span class="{kind}" style="--share:{share:.3f}" title="{title}">{text}</span>')
    return _PAGE.format(
        query=t,
        tokens=t + 1,
        count=count,
        size=size,
        chosen=sum(1 for block, n in enumerate(totals) if n and block not in forced),
        text="".join(spans),
        rows="\n".join(_layer_row(layer, s, t, count) for layer, s in zip(layers, selected, strict=True)),
        histogram=_histogram(layers, t),
    )


def _layer_row(layer: LayerSelection, selected: dict[int, int], t: int, count: int) -> str:
    groups, forced = layer.blocks.shape[1], layer.forced(t)
    width = 720 / count
    marks = "".join(
        f'<rect x="{block * width:.2f}" width="{max(width - 0.4, 0.6):.2f}" height="12" '
        f'class="{"forced" if block in forced else "chosen"}" opacity="{n / groups:.3f}"><title>block {block}: {n} of '
        f"{groups} KV heads</title></rect>"
        for block, n in sorted(selected.items())
    )
    gates = layer.gates[t].mean(0).tolist()
    shares = " ".join(f"<td>{gate:.2f}</td>" for gate in gates)
    return (
        f'<tr><td>{layer.layer}</td><td><svg viewBox="0 0 720 12" width="720" height="12">'
        f'<rect width="720" height="12" class="ground"/>{marks}</svg></td>{shares}</tr>'
    )


def _histogram(layers: list[LayerSelection], t: int) -> str:
    """How often the queries up to t chose each block, forced blocks excluded."""
    size = layers[0].config.select_block
    count = t // size + 1
    chosen = [0] * count
    for layer in layers:
        blocks = layer.blocks[: t + 1]
        current = (torch.arange(t + 1) // size)[:, None, None]
        free = (blocks >= layer.config.select_initial) & (blocks <= current - layer.config.select_local)
        for block, n in enumerate(torch.bincount(blocks[free].long(), minlength=count)[:count].tolist()):
            chosen[block] += n
    top = max(chosen) or 1
    width = 720 / count
    bars = "".join(
        f'<rect x="{b * width:.2f}" y="{40 - 40 * n / top:.2f}" width="{max(width - 0.4, 0.6):.2f}" '
        f'height="{40 * n / top:.2f}" class="chosen"><title>block {b}: chosen {n} times</title></rect>'
        for b, n in enumerate(chosen)
    )
    return f'<svg viewBox="0 0 720 40" width="720" height="40">{bars}</svg>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Selection map, token {query}</title>
<style>
:root {{ color-scheme: light dark; --chosen: 209 120 44; --ground: #8881 }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; border: 1px solid #8884; padding: 1em }}
pre span {{ border-left: 1px solid #8886 }}
pre .chosen {{ background: rgb(var(--chosen) / calc(var(--share) * .8)) }}
pre .forced {{ background: #8885 }}
rect.chosen {{ fill: rgb(var(--chosen)) }} rect.forced {{ fill: #888 }} rect.ground {{ fill: var(--ground) }}
td, th {{ padding: 2px 8px; text-align: right; font-variant-numeric: tabular-nums }}
</style>
<h1>Blocks selected for token {query}</h1>
<p>{tokens} tokens in {count} blocks of {size}. Orange: chosen by score ({chosen} blocks; darker if more layers and KV
heads chose them). Grey: always selected (the first blocks and the nearest). No colour: not selected.</p>
<pre>{text}</pre>
<h2>By layer</h2>
<table><tr><th>layer</th><th style="text-align:left">blocks from the start to token {query}</th>
<th>compressed</th><th>selected</th><th>window</th></tr>
{rows}
</table>
<p>The three numbers are the gates of this token, averaged over heads.</p>
<h2>Blocks chosen by all tokens so far</h2>
{histogram}
</html>
"""
