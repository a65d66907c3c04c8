"""scripts/measure.py: every part runs, saves its rows, and keeps them when it is cut off."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure.py"


@pytest.fixture
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_finished_rows_are_kept_when_a_part_fails(
    measure: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(quick: bool) -> Iterator[dict[str, Any]]:
        yield {"shape": "first"}
        raise RuntimeError("out of memory")

    monkeypatch.setitem(measure.PARTS, "operator", measure.Part(failing, 10))
    with pytest.raises(RuntimeError, match="out of memory"):
        measure.run_part("operator", tmp_path, True, {"device": "CPU"})
    saved = json.loads((tmp_path / "operator.json").read_text())
    assert (saved["results"], saved["complete"]) == ([{"shape": "first"}], False)


def test_a_failing_subprocess_fails_its_part(measure: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr("tercet.bench.train.measured", broken)
    with pytest.raises(RuntimeError, match="no kernels"):
        list(measure.train(True))


def test_every_length_of_the_page_is_measured(measure: ModuleType) -> None:
    cells = measure.train_cells(False)
    assert {(c["kind"], c["length"]) for c in cells} == {
        (kind, 2048 << i) for kind in ("nsa", "dense") for i in range(6)
    }
    assert all(c["packed"] == (c["kind"] == "nsa") for c in cells)


@pytest.mark.slow
def test_a_dry_run_completes_every_part(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("operator", "train", "decode", "growth", "kernels", "batches", "million"):
        assert json.loads((tmp_path / f"{file}.json").read_text())["complete"], file
