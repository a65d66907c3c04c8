"""Tables of the docs are what scripts/results_tables.py generates from the committed result files."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "results_tables.py"))


@pytest.mark.parametrize("page", SCRIPT["pages"](), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_tables_equal_the_committed_ones(page: Path) -> None:
    committed = page.read_text(encoding="utf-8")
    assert SCRIPT["fill"](committed, SCRIPT["TABLES"]) == committed, "run python scripts/results_tables.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in SCRIPT["pages"]())
    assert set(re.findall(r"<!-- table:([\w-]+) -->", text)) == SCRIPT["TABLES"].keys()


def test_table_lines_fit_the_line_length() -> None:
    long = [name for name, make in SCRIPT["TABLES"].items() if max(map(len, make().splitlines())) > 120]
    assert long == []


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="table:nothing is unknown"):
        SCRIPT["fill"]("<!-- table:nothing -->\n<!-- /table -->", SCRIPT["TABLES"])


def test_files_that_cannot_be_compared_are_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tokens in (("a", 5), ("b", 6)):
        one = {"first": 0, "last": 0, "tokens": tokens, "nats": 5.0, "loss": 1.0}
        (tmp_path / name).write_text(json.dumps({"eval": "perplexity", "by_position": [one], "all": one}))
    (tmp_path / "text").write_text("no evaluation\n")
    for other, words in (("b", "measured on other tokens"), ("text", "does not end with the JSON line")):
        assert SCRIPT["main"]([f"a={tmp_path / 'a'}", f"b={tmp_path / other}"]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.startswith("error: ")
        assert said.count("\n") == 1


def test_a_table_of_your_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        f"{name}={ROOT / 'docs' / 'results' / 'block-settings' / f'{name}-validation.csv'}" for name in ("nsa", "dense")
    ]
    assert SCRIPT["main"](files) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| step | nsa | dense | nsa vs dense |"
    assert rows[-1].startswith("| 3,052 | ")
