"""Tables of the conversion page."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_losses_of_other_text_are_not_compared(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "conversion_tables.py"))
    losses = script["TABLES"]["conversion-losses"]
    shutil.copytree(script["FOLDER"], tmp_path, dirs_exist_ok=True)
    losses.__globals__["FOLDER"] = tmp_path
    losses()
    file = tmp_path / "learned-76-perplexity.txt"
    record = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    record["by_position"][-1]["tokens"] += 1
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="different text"):
        losses()
