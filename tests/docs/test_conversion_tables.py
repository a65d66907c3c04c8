"""Tables of the conversion page."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Callable[[], str]]:
    """The tables of files in tmp_path, at first those of the page."""
    script = runpy.run_path(str(ROOT / "scripts" / "conversion_tables.py"))
    found: dict[str, Callable[[], str]] = script["TABLES"]
    shutil.copytree(script["FOLDER"], tmp_path, dirs_exist_ok=True)
    found["conversion-losses"].__globals__["FOLDER"] = tmp_path
    return found


def test_losses_of_other_text_are_not_compared(tmp_path: Path, tables: dict[str, Callable[[], str]]) -> None:
    losses = tables["conversion-losses"]
    losses()
    file = tmp_path / "learned-76-perplexity.txt"
    record = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    record["by_position"][-1]["tokens"] += 1
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="different text"):
        losses()


def test_rows_follow_the_evaluations_that_are_there(tmp_path: Path, tables: dict[str, Callable[[], str]]) -> None:
    for new in ("dense", "scratch", "nsa-0", "nsa-304"):
        for kind in ("perplexity", "needle"):
            shutil.copyfile(tmp_path / f"learned-304-{kind}.txt", tmp_path / f"{new}-{kind}.txt")
    for name in ("conversion-losses", "conversion-needles"):
        rows = [line.split(" | ")[0].strip("| ") for line in tables[name]().splitlines()[2:]]
        assert rows[6:] == ["three branches, 0M tokens", "three branches, 20M tokens", "NSA from scratch", "dense"]
    head = tables["conversion-target"]().splitlines()[0]
    assert head == "| 20M tokens vs dense | by means | learned selectors | three branches |"
