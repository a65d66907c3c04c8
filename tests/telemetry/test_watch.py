"""`tercet watch`: the newest events of a run and the heartbeats of its ranks."""

from __future__ import annotations

import json

import pytest

from tercet.report.commands import watch
from watched import copy, corpus, even_clock, run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    data = corpus(tmp_path_factory.mktemp("corpus"))
    with even_clock():
        found, _ = run(tmp_path_factory.mktemp("runs") / "run", data, train__steps=8)
    return found


def test_a_run_that_has_ended_is_shown_to_its_end(finished, capsys):
    assert watch(finished.folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"step 8  loss {finished.steps[-1].loss:.4f}") for line in lines)
    assert lines[-1].startswith("completed: ")


def test_every_rank_of_a_running_run_has_a_line_and_control_characters_do_not_reach_the_terminal(
    finished, tmp_path, capsys
):
    def escapes(lines):
        fired = {"kind": "health", "rule": "\x1b[2Ja|b", "sentence": "\x9bH", "action": "warn"}
        lines[-1] |= fired | {"value": 1.0, "threshold": 1.0}

    found = copy(finished, tmp_path / "ru\x1bn", escapes)
    beats = [("\x1b[1m", "\x1b[8m"), (3, "waiting")]
    for rank, (step, doing) in enumerate(beats):
        beat = {"time": 1.0, "step": step, "doing": doing, "for_seconds": 0}
        (found.folder / f"heartbeat_rank{rank}.jsonl").write_text(json.dumps(beat) + "\n")
    watch(found.folder, once=True)
    out = capsys.readouterr().out
    assert "\\x1b[2Ja|b" in out
    assert "rank 1: step 3, waiting for" in out
    assert not {"\x1b", "\x9b"} & set(out)
