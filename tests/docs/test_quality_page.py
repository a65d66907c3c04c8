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


def test_evaluations_of_different_tokens_are_not_put_side_by_side(tmp_path: Path) -> None:
    stretch = {"first": 0, "last": 0, "tokens": 5, "nats": 5.0, "loss": 1.0}
    for name, tokens in (("a", 5), ("b", 6)):
        one = stretch | {"tokens": tokens}
        (tmp_path / name).write_text(json.dumps({"eval": "perplexity", "by_position": [one], "all": one}))
    with pytest.raises(ValueError, match="a was measured on other tokens than b"):
        runpy.run_path(str(SCRIPT))["main"]([f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"])
