"""Folders written by versions 0.1 and 0.2 (tests/fixtures) still resume, report, generate, export and load.

The run of 0.1 has 60 steps and was stopped by SIGTERM after step 40; those of 0.2 have 12 and were killed after the
checkpoint of step 6. The losses below are those of the uninterrupted runs.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from tercet.cli import main

FIXTURES = Path(__file__).parents[1] / "fixtures"
LOSSES = {45: 3.403044, 50: 3.374702, 55: 3.381217, 60: 3.388939}
VALIDATION = 3.374347
NSA_LOSSES = (5.492136, 5.494350, 5.492146, 5.469444, 5.461667, 5.459696)
# Two stages of 4 and 8 steps; the learned selectors change their teacher at step 9.
BLOCK_SPARSE_LOSSES = (5.516610, 5.460600, 5.476514, 5.435403, 5.491184, 5.452919)
USAGE = 2
NOT_TESTED = 4  # the exit code of a report on a run too short to judge


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(FIXTURES / "run-0.1", folder, symlinks=True)
    return folder


def column(file: Path, name: str) -> dict[int, float]:
    with file.open(newline="") as lines:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(lines)}


def test_it_resumes_to_the_losses_of_the_uninterrupted_run(old_run):
    assert main(["train", "--resume", "auto", "--run.dir", str(old_run)]) == 0
    losses = column(old_run / "training.csv", "loss")
    assert {step: losses[step] for step in LOSSES} == pytest.approx(LOSSES, abs=2e-4)
    assert column(old_run / "val.csv", "loss")[60] == pytest.approx(VALIDATION, abs=2e-4)
    assert main(["generate", str(old_run), "--prompt", "def ", "--max_new_tokens", "4"]) == 0


def test_it_is_reported(old_run, capsys):
    assert main(["report", str(old_run), "--require-go"]) == NOT_TESTED
    verdict = json.loads((old_run / "report" / "verdict.json").read_text())
    assert verdict["verdict"] == "NOT TESTED"
    assert next(g for g in verdict["gates"] if g["name"] == "record")["verdict"] == "GO"
    assert (old_run / "report" / "report.html").stat().st_size > 10_000


def test_it_is_exported_and_loads_in_transformers(old_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert main(["export", "hf", str(old_run), str(tmp_path / "hf")]) == 0
    import tercet.interop.huggingface  # noqa: F401  registers the model

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert sum(p.numel() for p in model.parameters()) > 10_000


@pytest.mark.parametrize(
    ("name", "expected", "flags"),
    [
        ("interrupted", NSA_LOSSES, ()),
        ("block-sparse", BLOCK_SPARSE_LOSSES, ()),
        ("two-ranks", NSA_LOSSES, ("--parallel.strategy", "single", "--checkpoint.allow_config_change")),
    ],
)
def test_runs_of_0_2_resume_to_the_losses_of_the_uninterrupted_run(name, expected, flags, tmp_path, capsys):
    run = shutil.copytree(FIXTURES / "0.2" / name, tmp_path / name, symlinks=True)
    assert main(["train", "--resume", "auto", "--run.dir", str(run), *flags]) == 0
    assert capsys.readouterr().err.count("settings of an earlier version") == 1
    losses = column(run / "training.csv", "loss")
    assert [losses[step] for step in range(7, 13)] == pytest.approx(expected, abs=2e-4)
    assert main(["report", str(run), "--require-go"]) == NOT_TESTED
    assert main(["generate", str(run), "--prompt", "def ", "--max_new_tokens", "4"]) == 0


def test_an_export_of_0_2_loads_in_transformers():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    import tercet.interop.huggingface  # noqa: F401  registers the model

    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / "0.2" / "hf")
    logits = model(torch.arange(64)[None]).logits[0, -1, :4].tolist()
    assert logits == pytest.approx([-0.001028, -0.068413, -0.141705, -0.06726], abs=1e-5)


@pytest.mark.parametrize(
    ("key", "stored", "error"),
    [
        ("parallel.context_fetch", '"blocks"', "all keys of a document are fetched"),
        ("train.muon.nesterov", "false", "Muon always has Nesterov momentum"),
        ("health.loss_spike", '"halt"', 'set health.halt = ["loss_spike"]'),
        ("model.selector", '"random"', "use compressed, own or learned"),
    ],
)
def test_a_stored_value_that_mattered_is_refused(key, stored, error, tmp_path, capsys):
    run = shutil.copytree(FIXTURES / "0.2" / "interrupted", tmp_path / "run", symlinks=True)
    leaf = key.rpartition(".")[2]
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(re.sub(rf"^{leaf} = \S+", f"{leaf} = {stored}", text, count=1, flags=re.M))
    assert main(["train", "--resume", "auto", "--run.dir", str(run)]) == USAGE
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{key}={stored.strip(chr(34))} is not supported since 0.3" in line
    assert error in line


def test_a_checkpoint_with_a_retired_value_that_mattered_resumes_only_on_request(tmp_path, capsys):
    run = shutil.copytree(FIXTURES / "0.2" / "interrupted", tmp_path / "run", symlinks=True)
    checkpoint = run / "checkpoints" / "step-00000006"
    state = json.loads((checkpoint / "run.json").read_text())
    state["config"]["train"]["eps"] = 1e-6
    (checkpoint / "run.json").write_text(json.dumps(state))
    command = ["train", "--resume", "auto", "--run.dir", str(run), "--checkpoint.no_verify"]
    assert main(command) == USAGE
    assert "train.eps=1e-06 is not supported since 0.3" in capsys.readouterr().err
    assert main([*command, "--checkpoint.allow_config_change"]) == 0


def test_a_retired_flag_says_what_it_means_now(capsys):
    assert main(["train", "--preset", "tiny", "--health.patience", "5"]) == USAGE
    assert "--health.patience is not an option since 0.3: the thresholds" in capsys.readouterr().err
