"""docs/nsa.md: its code runs, and its counts are the operator's."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import tercet
from tercet.config.load import load
from tercet.model.transformer import Transformer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nsa.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    assert len(CODE) == 5
    for block in CODE:
        exec(block, names)
    cfg, cache = tercet.NSAConfig(), names["cache"]
    reads = cfg.num_visible(100) + 101 + 101  # both blocks of 101 tokens are selected, and the window holds them all
    assert cache.reads[0, -1, 0] == reads  # type: ignore[attr-defined]


def test_the_recommended_layer_is_the_presets() -> None:
    names: dict[str, object] = {}
    exec(CODE[0], names)
    shown = names["recommended"]
    with torch.device("meta"):
        preset = Transformer(load("m7c").config.model).attention_layers()[0]
    assert isinstance(shown, tercet.NativeSparseAttention)
    assert isinstance(preset, tercet.NativeSparseAttention)
    assert (shown.config, shown.compress_k.kind) == (preset.config, preset.compress_k.kind)
    assert shown.spec == preset.spec
    assert {n: p.shape for n, p in shown.named_parameters()} == {n: p.shape for n, p in preset.named_parameters()}


def test_counted_keys_are_the_operators() -> None:
    made = re.findall(r"^\| [\d,]+ \|.*×? \|$", PAGE.split("| keys read |")[1].split("\n\n")[0], re.MULTILINE)
    assert made
    cfg = tercet.NSAConfig()
    for line in made:
        tokens, *counts = (int(cell.replace(",", "")) for cell in line.strip("| ").split(" | ")[:5])
        parts = [cfg.num_visible(tokens - 1), min(cfg.selected_tokens, tokens), cfg.window]
        assert counts == [*parts, sum(parts)]
