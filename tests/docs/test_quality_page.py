"""docs/results/quality.md: its tables say what the files beside it say."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results" / "quality.md").read_text(encoding="utf-8")
RECORDS = ROOT / "docs" / "results" / "quality"
SCRIPT = ROOT / "scripts" / "eval_tables.py"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert runpy.run_path(str(SCRIPT))["main"](list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_needles_of_the_page_are_what_the_evaluations_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"{name}={RECORDS / f'needle-{name.lower()}.txt'}" for name in ("NSA", "dense"))
    assert "\n".join(printed(capsys, *files)) in PAGE


def test_losses_by_context_of_the_page_are_what_the_evaluations_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = (f"{name}={RECORDS / f'perplexity-{name.lower()}.txt'}" for name in ("NSA", "dense"))
    head, _, *rows = printed(capsys, *files)
    first = cells(head).index("8–15")  # the page leaves out the first eight tokens
    for line in (head, *rows):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in PAGE


def test_validation_losses_of_the_page_are_the_runs() -> None:
    for label, name in (("**NSA**", "nsa"), ("dense", "dense")):
        with (RECORDS / f"{name}-validation.csv").open() as stream:
            losses = [f"{float(line['loss']):.3f}" for line in csv.DictReader(stream)]
        assert f"| {' | '.join([label, *losses])} |" in PAGE


CHOICE = RECORDS / "choice"


def test_losses_of_the_small_models_are_the_runs() -> None:
    for name in ("base", "tie", "l16", "tie+l16", "tie+l16+free", "shared+l16", "dense"):
        with (CHOICE / f"{name}-validation.csv").open() as stream:
            *before, end = (float(line["loss"]) for line in csv.DictReader(stream))
        found = [*(f"{loss:.3f}" for loss in before), f"{end:.4f}"]
        assert f"| {' | '.join([name, *found])} |" in PAGE.replace("**", "")


def test_contexts_and_needles_of_the_small_models_are_what_the_evaluations_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("tie", "l16", "tie+l16", "tie+l16+free", "shared+l16", "base")
    head, _, *rows = printed(capsys, *(f"{name}={CHOICE / f'{name}-perplexity.txt'}" for name in names))
    first = cells(head).index("512–1,023")
    for line in (head, *rows):
        label, *values = cells(line)
        assert f"| {' | '.join([label, *values[first - 1 :]])} |" in PAGE
    names = ("base", "tie", "l16", "tie+l16")
    needles = printed(capsys, *(f"{name}={CHOICE / f'{name}-needle.txt'}" for name in names))
    assert "\n".join(line for line in needles if "8,192 tokens" not in line) in PAGE


def test_rows_of_the_toy_are_the_recorded_ones() -> None:
    labels = {
        "dense": "dense", "every block is read: nothing to choose": "base+all", "**NSA as it is** (base)": "base",
        "tie: compressed keys are summaries of the selected keys": "tie", "l halved": "base+half",
        "tie, l halved": "tie+half", "φ = mean": "base+mean", "φ learns ten times slower than the rest": "base+slow",
        "tie, φ = mean": "tie+mean", "tie, φ = mean for keys only": "tie+keymean",
        "tie, φ learns ten times slower": "tie+slow",
        "tie, φ = mean, l halved": "tie+half+mean", "ten blocks of 8 instead of five of 16": "base+small",
        "tie, φ = mean, ten blocks of 8": "tie+mean+small",
        "tie, φ = mean, l halved, ten blocks of 8": "tie+half+mean+small",
        "no forced first block, one local block": "base+free", "one K/V set": "shared",
    }  # fmt: skip
    with (CHOICE / "toy.csv").open() as stream:
        rows = [row for row in csv.DictReader(stream) if row["layers"] == "1"]
    assert {row["variant"] for row in rows} == set(labels.values())
    with (CHOICE / "toy-option.csv").open() as stream:
        again = [row for row in csv.DictReader(stream) if row["variant"] != "base"]
    for label, variant in labels.items():
        seeds = [row for row in rows if row["variant"] == variant]
        columns = ("copied", "hit_far", "chance_far", "gate_compressed")
        found = [" / ".join(row[column] for row in seeds if row[column]) for column in columns]
        found.insert(1, " / ".join(row["copied"] for row in again if row["variant"] == variant))
        assert f"| {' | '.join([label, *found])} |" in PAGE


def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stretch = {"first": 0, "last": 0, "tokens": 5, "nats": 5.0, "loss": 1.0}
    for name, tokens in (("a", 5), ("b", 6)):
        one = stretch | {"tokens": tokens}
        (tmp_path / name).write_text(json.dumps({"eval": "perplexity", "by_position": [one], "all": one}))
    (tmp_path / "text").write_text("no evaluation\n")
    for other, words in (("b", "a was measured on other tokens than b"), ("text", "does not end with the JSON line")):
        assert runpy.run_path(str(SCRIPT))["main"]([f"a={tmp_path / 'a'}", f"b={tmp_path / other}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert words in said
        assert said.count("\n") == 1


def test_the_noise_is_measured_with_the_block_of_its_table_whatever_the_preset_has_now() -> None:
    told = PAGE[PAGE.index("for preset in tiny tiny-dense") :].split("\ndone", 1)[0]
    script = (ROOT / "scripts" / "quality.sh").read_text(encoding="utf-8").split("\nseeds)", 1)[1]
    for command in (told, script):
        assert "--data.shuffle_sequences 4096 --train.steps 800" in command
