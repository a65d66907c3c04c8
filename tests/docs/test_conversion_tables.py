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
    for kind in ("perplexity", "needle"):
        shutil.copyfile(tmp_path / f"learned-304-{kind}.txt", tmp_path / f"learned-760-{kind}.txt")
        (tmp_path / f"scratch-{kind}.txt").unlink()
    for name in ("conversion-losses", "conversion-needles"):
        rows = [line.split(" | ")[0].strip("| ") for line in tables[name]().splitlines()[2:]]
        assert rows[0] == "dense, before"
        assert [row for row in rows if row.startswith("learned")] == [
            f"learned selectors, {tokens}M tokens" for tokens in (0, 5, 20, 50)
        ]
        assert "NSA from scratch" not in rows


def test_the_target_compares_with_dense_before_and_trained_on(
    tmp_path: Path, tables: dict[str, Callable[[], str]]
) -> None:
    for kind in ("perplexity", "needle"):
        shutil.copyfile(tmp_path / f"learned-304-{kind}.txt", tmp_path / f"continued-304-{kind}.txt")
    rows = {
        cells[0].strip("| "): cells[1:]
        for line in tables["conversion-target"]().splitlines()
        if (cells := line.split(" | "))
    }
    assert rows["learned selectors vs dense, trained on"] == ["+0.0%"] * 3 + ["+0"] * 3 + ["+0 |"]
    assert rows["learned selectors vs dense, before"][0].startswith("−")
