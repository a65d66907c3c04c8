"""`tercet watch`: one frame of a finished run, several ranks, and an empty folder."""

from __future__ import annotations

import json
import shutil

import pytest

from tercet.report.commands import report, watch
from watched import copy, corpus, even_clock, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    data = corpus(tmp_path_factory.mktemp("corpus"))
    with even_clock():
        found, _ = run(tmp_path_factory.mktemp("runs") / "run", data, train__steps=8, run__name="na[bold]me")
    return found


def test_a_frame_shows_step_loss_and_gates(finished, capsys):
    assert watch(finished.folder, once=True) == 0
    out = capsys.readouterr().out
    assert "8/8 steps" in out
    assert "completed" in out
    assert f"{finished.steps[-1].loss:.4f}" in out
    assert "gate shares by layer" in out
    assert "na[bold]me" in out  # markup is printed literally


def test_a_branch_that_the_model_does_not_have_is_not_shown(finished, tmp_path, capsys):
    def two_branches(lines):
        for line in lines:
            if line["kind"] == "layers":
                line["gate_share_compressed"] = [None] * len(line["attention"])
                line["gate_share_window"] = [1 - share for share in line["gate_share_selected"]]

    found = copy(finished, tmp_path / "run", two_branches)
    watch(found.folder, once=True)
    names = [line.split()[1:2] for line in capsys.readouterr().out.splitlines()]
    assert ["compressed"] not in names
    assert ["selected"] in names
    assert ["window"] in names
    report([found.folder])
    page = (found.folder / "report" / "report.html").read_text()
    assert "4 of all 2 layers" in page  # readings
    assert "compressed share" not in page


def test_every_rank_has_a_line(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished.folder, folder)
    for kind in ("events", "heartbeat"):
        text = (folder / f"{kind}_rank0.jsonl").read_text()
        (folder / f"{kind}_rank1.jsonl").write_text(text.replace('"rank": 0', '"rank": 1'))
    beat = json.loads((folder / "heartbeat_rank1.jsonl").read_text().splitlines()[-1]) | {"step": 3, "doing": "waiting"}
    (folder / "heartbeat_rank1.jsonl").write_text(json.dumps(beat) + "\n")
    watch(folder, once=True)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "3", "waiting"] in [row[:3] for row in rows]


def test_control_characters_of_a_run_do_not_reach_the_terminal(finished, tmp_path, capsys):
    def escapes(lines):
        lines[0]["name"] = "\x1b]0;name"
        fired = {"kind": "health", "rule": "\x1b[2Ja|b", "sentence": "\x9bH", "action": "warn"}
        lines.insert(-1, lines[-1] | fired | {"value": 1.0, "threshold": 1.0})

    found = copy(finished, tmp_path / "ru\x1bn", escapes)
    beat = {"time": 1.0, "step": "\x1b[1m", "doing": "\x1b[8m", "for_seconds": 0}
    (found.folder / "heartbeat_rank0.jsonl").write_text(json.dumps(beat) + "\n")
    watch(found.folder, once=True)
    report([found.folder])
    out = capsys.readouterr().out
    page = (found.folder / "report" / "report.md").read_text()
    assert "\\x1b[2Ja|b" in out
    assert "a\\|b: " in page
    assert not {"\x1b", "\x9b"} & set(out + page)
