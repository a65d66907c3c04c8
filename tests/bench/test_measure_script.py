"""scripts/measure.py: its calls are valid, and what one of them measured is kept when the next one fails."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import pytest

from tercet import cli
from tercet.bench import attention, decode, train


def test_every_call_is_a_valid_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for module in (attention, decode, train):
        monkeypatch.setattr(module, "main", lambda *given, **options: seen.append((given, options)) or 0)
    calls = [call for part in measure.PARTS.values() for call in part]
    for call in calls:
        warm = [] if "1048576" in call else [measure.WARM_UP[call.split()[0]]]
        for line in (call, " ".join([call, *warm])):
            assert cli.main(["bench", *shlex.split(line)]) == 0
    assert len(seen) == 2 * len(calls)
    cells = [cell for given, _ in seen if given and isinstance(given[0], list) for cell in given[0]]
    assert {cell["kind"] for cell in cells} == {"nsa", "two-branch", "block-sparse", "dense"}
    m7c = [c for c in cells if c["preset"].startswith("m7c") and c["length"] in measure.LENGTHS and c["batch"] > 1]
    assert {c["batch"] * c["length"] for c in m7c} == {65536, 16384}


def test_finished_calls_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        if "bench" not in command:
            about = {"device": "a GPU", "torch": "2", "triton": "3", "tercet": "0"}
            return SimpleNamespace(returncode=0, stdout=json.dumps(about), stderr="")
        if "off" in command:
            line = json.dumps({"results": [{"kind": "nsa", "flags": {"train.cuda_graph": "off"}}]})
            return SimpleNamespace(returncode=0, stdout=f"text\n{line}\n", stderr="")
        return SimpleNamespace(returncode=1, stdout="", stderr="error: out of memory\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path), "--parts", "batches", "--at-once", "0"])
    assert measure.main() == 1
    saved = json.loads((tmp_path / "batches.json").read_text())
    assert saved["results"] == [{"kind": "nsa", "cuda_graph": "off"}] * 2
    assert (saved["part"], saved["device"], len(saved["calls"])) == ("batches", "a GPU", 4)
