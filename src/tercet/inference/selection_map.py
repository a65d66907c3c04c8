"""Selection maps: the blocks each layer selected for a prompt, as a self-contained HTML page over the text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment  # torch depends on it
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.transformer import Transformer


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
def record_selections(
    model: Transformer, tokens: list[int], progress: Callable[[int], None] = lambda tokens: None
) -> list[LayerSelection]:
    """Run one forward pass and record every layer that selects blocks.

    progress: called with the number of tokens after each layer.
    """
    layers = [(i, layer) for i, layer in enumerate(model.attention_layers()) if layer.spec.selects]
    if not layers:
        raise UsageError(
            "no layer of this model selects blocks: selection maps need NSA layers with the selected branch"
        )
    original = [layer.stats for _, layer in layers]
    recorders = [_Recorder() for _ in layers]
    hooks = [block.register_forward_hook(lambda *_: progress(len(tokens))) for block in model.blocks]
    try:
        for (_, layer), recorder in zip(layers, recorders, strict=True):
            layer.stats = recorder  # type: ignore[assignment]
        model.hidden(torch.tensor([tokens], device=model.embedding.weight.device))
    finally:
        for (_, layer), stats in zip(layers, original, strict=True):
            layer.stats = stats
        for hook in hooks:
            hook.remove()
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
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
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


# ticks are HTML: text in a stretched SVG would be stretched too
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Selection map, token {{ query }}</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #1a1d21; --muted: #5b646e; --line: #c9ced3; --ground: #eef0f2;
  --chosen: 224 132 40; --forced: #aab2ba }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1215; --ink: #e7eaed; --muted: #9ba5af; --line: #414a53; --ground: #22282e; --chosen: 196 98 20;
    --forced: #59636d }
}
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 0 auto; padding: 16px; color: var(--ink);
  background: var(--page) }
h1 { font-size: 24px; line-height: 1.2; margin: 8px 0 12px }
h2 { font-size: 19px; margin: 28px 0 6px }
p { margin: 0 0 12px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; padding: 12px;
  border: 1px solid var(--line); border-radius: 8px; margin: 0 }
pre span { border-left: 1px solid var(--line) }
pre .chosen { background: rgb(var(--chosen) / calc(var(--share) * .8)) }
pre .forced { background: color-mix(in srgb, var(--forced) 55%, transparent) }
.key { display: inline-block; width: 14px; height: 14px; border-radius: 3px; vertical-align: -2px; margin-right: 4px;
  border: 1px solid var(--line) }
.scroll { overflow-x: auto }
.chart { min-width: {{ width }}px }
.label { font-size: 13px; color: var(--muted); margin-top: 8px; position: sticky; left: 0; width: fit-content }
.label b { color: var(--ink) }
svg { display: block; width: 100%; background: var(--ground); border-radius: 3px }
.strip { height: 16px } .bars { height: 96px }
rect.chosen { fill: rgb(var(--chosen)) } rect.forced { fill: var(--forced) }
.axis { position: relative; height: 24px; border-top: 1px solid var(--line); margin-top: 2px; font-size: 12px;
  color: var(--muted); font-variant-numeric: tabular-nums }
.axis i { position: absolute; top: 0; padding: 3px 0 0 3px; border-left: 1px solid var(--line); font-style: normal }
.axis + div { font-size: 12px; color: var(--muted); text-align: center; position: sticky; left: 0 }
</style></head>
{% macro rect(block, height, kind, opacity, title) %}
<rect x="{{ block + 0.05 }}" y="{{ (1 - height) | round(4) }}" width="0.9" height="{{ height | round(4) }}"
class="{{ kind }}" opacity="{{ opacity | round(3) }}"><title>block {{ block }}{{ title }}</title></rect>
{% endmacro %}
{% macro axis() %}
<div class="axis">
{% for n, place in ticks %}<i style="left:{{ place | round(2) }}%">{{ "{:,}".format(n) }}</i>{% endfor %}
</div><div>token</div>
{% endmacro %}
<body>
<h1>Blocks selected for token {{ query }}</h1>
<p>{{ query + 1 }} tokens in {{ count }} blocks of {{ size }}.<br>
<b class="key" style="background: rgb(var(--chosen))"></b>chosen by score: {{ chosen }} blocks, darker if more layers
and KV heads chose them.<br>
<b class="key" style="background: var(--forced)"></b>always selected: the first blocks and the nearest.<br>
<b class="key"></b>not selected.</p>
<pre>
{%- for b in blocks -%}
<span class="{{ b.kind }}" style="--share:{{ "%.3f" % b.share }}" title="{{ b.title }}">{{ b.text }}</span>
{%- endfor -%}
</pre>
<h2>By layer</h2>
<p>Gates: of this token, averaged over heads.</p>
<div class="scroll"><div class="chart">
{% for layer in layers %}
{% set heads = layer.blocks.shape[1] %}
<div class="label"><b>Layer {{ layer.layer }}</b>
{% if layer.gates is not none %}
gates: compressed {{ "%.2f, selected %.2f, window %.2f" | format(*layer.gates[query].mean(0).tolist()) }}
{% endif %}
</div>
<svg class="strip" viewBox="0 0 {{ count }} 1" preserveAspectRatio="none" role="img">
{% for block, n in layer.selected_by(query) | dictsort %}
{{ rect(block, 1, "forced" if block in forced else "chosen", n / heads, ": %d of %d KV heads" % (n, heads)) }}
{% endfor %}
</svg>
{% endfor %}
{{ axis() }}
</div></div>
<h2>Blocks chosen by all tokens so far</h2>
<p>Without the blocks that are always selected.</p>
<div class="scroll"><div class="chart">
<div class="label">times chosen, up to <b>{{ "{:,}".format(times | max) }}</b></div>
<svg class="bars" viewBox="0 0 {{ count }} 1" preserveAspectRatio="none" role="img">
{% for n in times %}
{% set tokens = ", tokens %d to %d" % (loop.index0 * size, loop.index * size - 1) %}
{{ rect(loop.index0, n / ([1, times | max] | max), "chosen", 1, tokens ~ ": chosen %d times" % n) }}
{% endfor %}
</svg>
{{ axis() }}
</div></div>
</body></html>
"""
