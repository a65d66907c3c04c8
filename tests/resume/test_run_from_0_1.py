"""A run folder written by version 0.1 (tests/fixtures/run-0.1) still resumes, reports, generates and exports.

The run has 60 steps and was stopped by SIGTERM after step 40. The losses below are those of the uninterrupted run.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from tercet.cli import main

LOSSES = {45: 3.403044, 50: 3.374702, 55: 3.381217, 60: 3.388939}
VALIDATION = 3.374347
NOT_TESTED = 4  # the exit code of a report on a run too short to judge


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "run-0.1", folder, symlinks=True)
    return folder


def column(file: Path, name: str) -> dict[int, float]:
    with file.open(newline="") as lines:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(lines)}


def test_it_resumes_to_the_losses_of_the_uninterrupted_run(old_run):
    assert main(["train", "--resume", "auto", "--run.dir", str(old_run)]) == 0
    losses = column(old_run / "training.csv", "loss")
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=2e-4)
    assert column(old_run / "val.csv", "loss")[60] == pytest.approx(VALIDATION, abs=2e-4)


def test_it_is_reported(old_run, capsys):
    assert main(["report", str(old_run), "--require-go"]) == NOT_TESTED
    verdict = json.loads((old_run / "report" / "verdict.json").read_text())
    assert verdict["verdict"] == "NOT TESTED"
    assert next(g for g in verdict["gates"] if g["name"] == "record")["verdict"] == "GO"
    assert (old_run / "report" / "report.html").stat().st_size > 10_000


def test_it_generates(old_run, capsys):
    assert main(["generate", str(old_run), "--prompt", "def ", "--max_new_tokens", "4"]) == 0


def test_it_is_exported_and_loads_in_transformers(old_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert main(["export", "hf", str(old_run), str(tmp_path / "hf")]) == 0
    import tercet.interop.huggingface  # noqa: F401  registers the model

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert sum(p.numel() for p in model.parameters()) > 10_000
