"""docs/own-data.md: its commands run in order, with fewer steps."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercet import cli

PAGE = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
SMALLER = {"400": "3", "600": "4"}  # steps
FASTER = ["--train.val_tokens=256", "--train.sample_tokens=2", "--data.shuffle_sequences=0", "--log.tensorboard=false"]


def commands() -> Iterator[list[str]]:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    pending = ""
    for line in block.replace("\\\n", "").splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # inside quotes
            continue
        pending = ""
        if words:
            yield words


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for program, *arguments in commands():
        if program == "python":
            exec(arguments[1], {})
            continue
        assert program == "tercet"
        words = [SMALLER.get(word, word) for word in arguments]
        words += FASTER if words[:2] == ["train", "--preset"] else []
        assert cli.main(words) == 0, capsys.readouterr().err
    assert json.loads(Path("runs/mine/metrics.json").read_text())["step"] == 4
    assert Path("runs/mine/report/report.html").is_file()
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in Path("hf-model").iterdir()}
