"""The event log, CSV files, summary and terminal output."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runs import step_logged
from tercet.telemetry import events
from tercet.telemetry.event_log import EventLog, read_events, rewind
from tercet.telemetry.events import Noted, StepLogged, Validated, decode, encode
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import TRAINING_COLUMNS, csv_sinks, summarise
from tercet.terminal import duration, quantity


def logged(step: int, loss: float = 0.1 + 0.2, rank: int = 0) -> StepLogged:
    return step_logged(step, loss=loss, losses=[loss], rank=rank)


def test_events_round_trip_exactly() -> None:
    for loss in (0.1 + 0.2, math.pi, 5e-324, float("inf"), float("-inf")):
        event = logged(3, loss)
        assert decode(encode(event)) == event
    back = decode(encode(logged(3, float("nan"))))
    assert isinstance(back, StepLogged)
    assert math.isnan(back.loss)
    assert math.isnan(back.losses[0])


def test_a_doctors_fix_is_read_under_its_name_in_earlier_versions() -> None:
    event = events.DoctorReported(step=0, check=["disk"], verdict=["warning"], finding=["full"], fix=["free some"])
    assert decode(encode(event).replace('"fix"', '"mend"')) == event


def test_a_choice_of_cuda_graphs_by_0_2_is_read_as_a_note() -> None:
    line = (
        '{"kind": "graph_choice", "step": 8, "rank": 0, "time": 1.5, "graph": true, "shape": "1 × 2048 tokens", '
        '"host_seconds": 0.06, "behind_seconds": 0.0}'
    )
    text = "train.cuda_graph=auto: steps of 1 × 2048 tokens replay a CUDA graph"
    assert decode(line) == Noted(step=8, time=1.5, text=text)


def test_every_line_is_standard_json() -> None:
    assert "NaN" not in encode(logged(1, float("nan")))
    assert encode(Noted(step=1, text="two\nlines\u2028")).count("\n") == 1


@pytest.mark.parametrize("damage", [b"rubbish", b"\0" * 512, b"\xff", b"", b"5", b'{"kind": "step"}', b'{"step": 1}'])
def test_damaged_lines_and_an_incomplete_last_line_are_ignored(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events_rank0.jsonl"
    path.write_text(encode(logged(1)) + encode(logged(2))[:-9])
    assert [e.step for e in read_events(path)] == [1]
    path.write_bytes(encode(logged(1)).encode() + damage + b"\n" + encode(logged(2)).encode())
    assert [e.step for e in read_events(path)] == [1, 2]
    content = path.read_bytes()
    assert rewind(tmp_path, 0, 2) == (0, [2])
    assert path.read_bytes() == content


def test_rewinding_moves_measurements_and_keeps_other_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in (logged(1), logged(2), Validated(step=2, loss=1.0, tokens=5, seconds=0.1), logged(3)):
        log.emit(event)
    log.emit(Noted(step=3, text="a sentence\u2028 with \x85 odd line ends"))
    log.close()
    with log.path.open("a") as stream:
        stream.write('{"kind": "step", "st')
    assert rewind(tmp_path, 0, 1) == (3, [])
    assert [(e.kind, e.step) for e in read_events(log.path)] == [("step", 1), ("note", 3)]
    assert [e.step for e in read_events(tmp_path / "superseded_rank0.jsonl")] == [2, 2, 3]
    assert rewind(tmp_path, 0, 1) == (0, [])


def test_a_csv_is_rebuilt_from_past_events_and_then_appended_to(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("old content\n")
    training, validation, *_ = csv_sinks(tmp_path, [logged(1), Validated(step=1, loss=1.0, tokens=5, seconds=0.1)])
    for sink in (training, validation):
        sink(logged(2, float("nan")))
        sink(Validated(step=2, loss=0.5, tokens=5, seconds=0.1))
    lines = (tmp_path / "training.csv").read_text().splitlines()
    assert lines[0] == ",".join(TRAINING_COLUMNS)
    assert lines[0].startswith("step,loss,lr,tokens_per_s,grad_norm,")
    assert [line.split(",")[:2] for line in lines[1:]] == [["1", "0.30000000000000004"], ["2", "nan"]]
    assert [line.split(",")[:2] for line in (tmp_path / "val.csv").read_text().splitlines()[1:]] == [
        ["1", "1.0"],
        ["2", "0.5"],
    ]


def test_events_and_rows_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, write, said = [10**6], os.write, []

    def limited(handle: int, data: bytes) -> int:
        if not free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(handle, data[: free[0]])
        free[0] -= taken
        return taken

    monkeypatch.setattr("tercet.telemetry.event_log.os.write", limited)
    log = EventLog(tmp_path)
    log.readers += [*csv_sinks(tmp_path, []), lambda e: said.append(e.text) if isinstance(e, Noted) else None]
    log.emit(logged(1))
    free[0] = 9  # the disk takes the start of the line
    log.emit(logged(2))
    log.emit(logged(3))
    log.sync()
    assert [e.step for e in read_events(log.path)] == [1]
    assert log.waiting == 3
    free[0] = 10**6
    log.emit(Validated(step=3, loss=1.0, tokens=5, seconds=0.1))
    assert log.waiting == 0
    assert [e.step for e in read_events(log.path) if isinstance(e, StepLogged)] == [1, 2, 3]
    assert (tmp_path / "training.csv").read_text().count("\n") == 4
    assert ["no space left" in said[0], "3 events were written late" in said[1], len(said)] == [True, True, 2]


def test_a_run_continues_when_the_disk_of_its_output_is_full() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    screen = Screen(stream=full)
    screen.say("one")
    screen.say("two")
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_the_summary_of_a_crashed_run_has_an_unknown_outcome() -> None:
    figures = summarise([logged(1, 3.0), logged(2, 2.0)])
    assert (figures["outcome"], figures["step"], figures["loss"], figures["first_loss"]) == ("unknown", 2, 2.0, 3.0)
    assert summarise([])["step"] == 0
    assert summarise([logged(1, 3.0), logged(2, math.nan)])["smoothed_loss"] == 3.0


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    screen = Screen(stream=out)
    screen.begin(0, 10)
    screen(logged(1))
    screen(Validated(step=1, loss=1.25, tokens=5, seconds=0.1))
    screen.end()
    assert out.getvalue().splitlines() == [
        "first step …",
        "step  1/10  loss 0.3000  lr 1.00e-03  grad 1.500  1k tok/s  mem 0.50 GiB  eta 1s",
        "validation after step 1: loss 1.2500 over 5 tokens",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """All lines ever shown, without colours and cursor movements."""
        return [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())) if line]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_keeps_the_history_and_fits_its_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    screen = Screen(stream=out)
    screen.header([("model", "484k parameters: 2 layers of nsa, dim 128, 2 query heads, 1 KV head"), ("run", "in x")])
    screen.begin(0, 1000)
    for step in range(1, 1001):
        screen.advance(step)
        screen(logged(step))
    screen(events.CheckpointSaved(step=9, path="runs/x/checkpoints/step-9", bytes=9, seconds=1.0, blocked_seconds=1.0))
    screen(events.Sampled(step=9, prompt="x", text="y" * 300 + "\n\nz"))
    screen.doing("validating 3/8 …")
    screen.end()
    assert max(map(len, out.lines())) <= columns
    assert "".join(line[4:] for line in out.lines() if line.startswith("  | ")) == "x" + "y" * 300 + "z"
    history = [line for line in out.lines() if line.startswith("step ")]
    assert len(history) == 100
    assert all("loss 0.3" in line and "eta" in line for line in history)
    assert ("mem 0.50 GiB" in history[0]) == (columns == 200)
    assert any("1000/1000 validating 3/8" in line for line in out.lines())


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, True), (100.0, False)])
def test_long_steps_count_their_micro_batches(monkeypatch: pytest.MonkeyPatch, seconds: float, shown: bool) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tercet.telemetry.progress.MICRO_BATCHES_AFTER", seconds)
    screen = Screen(stream=(out := Terminal()))
    screen.begin(0, 10)
    screen.advance(1)
    screen.micro_batch(2, 8)
    screen.end()
    assert any("1/10 micro-batch 3/8" in line for line in out.lines()) == shown


def test_control_characters_are_escaped() -> None:
    out = io.StringIO()
    Screen(stream=out)(events.Sampled(step=1, prompt="[bold]", text="\x1b[2Jx\x00"))
    Screen(stream=out)(
        events.HealthFired(step=1, rule="\x1b[31m", sentence="\x9bH", action="warn", value=1.0, threshold=1.0)
    )
    assert "[bold]\\x1b[2Jx\\x00" in out.getvalue()
    assert "\\x1b[31m: \\x9bH" in out.getvalue()


def test_a_run_continues_when_its_output_is_closed() -> None:
    code = "from tercet.telemetry.progress import Screen\ns = Screen()\ninput()\n[s.say('x' * 9999) for _ in range(99)]"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, errors = child.communicate(b"go\n")
    assert child.returncode == 0, errors
    assert errors.count(b"\n") == 1
    assert b"continues without it" in errors


def test_human_readable_numbers() -> None:
    assert [duration(s) for s in (5, 65, 3725, 200000)] == ["5s", "1m05s", "1h02m", "2d07h"]
    quantities = {
        0: "0", 999: "999", 999.4: "999", 999.7: "1k", 4096: "4.1k", 12_345: "12.3k", 999_400: "999k", 999_700: "1M",
        -999_700: "-1M", -12_345: "-12.3k", 999_999_999: "1G", 1e21: "1000E", 1.2345e22: "12345E", math.nan: "nan",
    }  # fmt: skip
    assert {value: quantity(value) for value in quantities} == quantities
    assert quantity(999_700, "FLOP") == "1 MFLOP"
    assert quantity(7, "FLOP") == "7 FLOP"
