"""docs/nsa.md: its code runs, its pictures are what the script draws, its counts are the operator's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

import tercet
from tercet.config.load import load
from tercet.model.cost import parameters
from tercet.model.transformer import Transformer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nsa.md").read_text()


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    cfg, cache = tercet.NSAConfig(), names["cache"]
    reads = cfg.num_visible(100) + 101 + 101  # both blocks of 101 tokens are selected, all lies in the window
    assert cache.reads[0, -1, 0] == reads  # type: ignore[attr-defined]


def test_the_recommended_layer_is_the_presets() -> None:
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    shown = names["recommended"]
    with torch.device("meta"):
        preset = Transformer(load("m7c").config.model).attention_layers()[0]
    assert isinstance(shown, tercet.NativeSparseAttention)
    assert isinstance(preset, tercet.NativeSparseAttention)
    assert (shown.config, shown.compress_k.kind) == (preset.config, preset.compress_k.kind)
    assert shown.compress_selected_keys == preset.compress_selected_keys
    assert {n: p.shape for n, p in shown.named_parameters()} == {n: p.shape for n, p in preset.named_parameters()}
    assert f"{parameters(load('m7c').config.model).total / 1e6:.1f}M parameters" in PAGE


def test_the_counted_keys_are_the_operators() -> None:
    cfg, t = tercet.NSAConfig(), 65_535
    compressed, selected = cfg.num_visible(t), cfg.num_selected(t) * cfg.select_block
    for number in (compressed, selected, cfg.window, compressed + selected + cfg.window, t + 1):
        assert f"{number:,}" in PAGE


def test_the_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    draw = runpy.run_path(str(ROOT / "scripts" / "nsa_pictures.py"))
    draw["main"]([str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"images/([\w-]+\.svg)", PAGE))
    for name in drawn:
        kept = (ROOT / "docs" / "images" / name).read_text()
        assert (tmp_path / name).read_text().count("<path") == kept.count("<path")
