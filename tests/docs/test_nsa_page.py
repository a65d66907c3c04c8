"""docs/nsa.md: its code runs, its pictures are what the script draws, its counts are the operator's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import tercet

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nsa.md").read_text()


def test_the_code_of_the_page_runs() -> None:
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    cfg, cache = tercet.NSAConfig(), names["cache"]
    reads = cfg.num_visible(100) + 101 + 101  # both blocks of 101 tokens are selected, all lies in the window
    assert cache.reads[0, -1, 0] == reads  # type: ignore[attr-defined]


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
