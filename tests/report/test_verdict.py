"""Verdicts come from the run's own record; a cut or inconsistent record is never GO."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from tercet import hints
from tercet.errors import UsageError
from tercet.report.commands import _summary, report
from tercet.report.gates import Thresholds
from tercet.report.read import baseline_mismatch, read_run
from tercet.report.verdict import judge, record_gaps
from watched import FEW, copy, dense_baseline, each, gate, rules, run, verdict


def verdicts(judged):
    return {g.name: g.verdict for g in judged.gates}


def test_a_healthy_run_passes_the_gates_it_tested(healthy):
    judged = verdict(healthy)
    assert verdicts(judged) == {
        "record": "GO", "stability": "GO", "memory": "GO", "throughput": "NOT APPLICABLE",
        "routing": "NOT APPLICABLE", "selection health": "GO", "fallbacks": "NOT APPLICABLE",
        "checkpoint and resume": "GO", "data": "GO", "numerics": "GO",
    }, "\n".join(f"{g.name}: {g.sentence}" for g in judged.gates)  # fmt: skip
    assert (judged.verdict, judged.exit_code) == ("NOT TESTED", 4)
    assert rules(healthy) == set()
    assert judged.findings == ()
    loss = healthy.validations[-1].loss
    assert (judged.health, judged.headline) == (
        "healthy",
        f"Healthy: 60 steps, validation {loss:.{2 if loss >= 1 else 3}f}",
    )
    assert judged.sentence == "Nothing failed. Not applicable: throughput, routing, fallbacks."
    told = judged.as_dict(healthy)
    assert (told["verdict"], told["exit_code"], told["health"]) == ("NOT TESTED", 4, "healthy")
    assert {g["verdict"] for g in told["gates"]} == {"GO", "NOT TESTED"}
    assert [g["name"] for g in told["gates"] if not g["applicable"]] == ["throughput", "routing", "fallbacks"]


def test_the_headline_says_go_only_for_the_production_gates(healthy, tmp_path):
    def running(lines):
        lines[:] = [line for line in lines if line["step"] < 50 and line["kind"] != "validation"]

    lasting = dataclasses.replace(copy(healthy, tmp_path / "running", running), state="running")
    assert verdict(lasting).headline.startswith("Healthy so far: 48 of 60 steps, training loss ")
    dead = verdict(dataclasses.replace(lasting, state="gone"))
    assert (dead.health, dead.word, dead.exit_code) == ("unhealthy", "NO-GO", 3)
    few = dataclasses.replace(healthy, events={0: [e for e in healthy.events[0] if e.step <= 18]}, state="running")
    assert (verdict(few).health, verdict(few).word, verdict(few).exit_code) == ("unknown", "Too short to judge", 4)


def test_a_run_of_few_steps_is_not_go(healthy):
    judged = judge(healthy)  # 60 steps, 500 are needed
    assert gate(judged, "stability").reasons == [("fewer than 500 steps (60 logged)", "train longer")]
    assert (judged.verdict, verdicts(judged)["stability"]) == ("NOT TESTED", "NOT TESTED")


def test_the_terminal_says_how_to_resume_a_killed_run(healthy):
    killed = dataclasses.replace(healthy, events={0: healthy.events[0][:-1]}, state="gone")
    out = _summary(judge(killed), healthy.folder / "report.html")
    assert f"\nto fix stability: check the system log, then {hints.resume(healthy.folder)}\n" in out
    assert "--resume auto" in out


def last(lines, kind):
    return next(line for line in reversed(lines) if line["kind"] == kind)


def steps_of(lines):
    return [line for line in lines if line["kind"] == "step"]


A_SECOND_RANK = each("run_started", world_size=2)
# what happens to the events, and what the record gate finds; nothing where another gate finds it
DAMAGES = {
    "without its end": ("", lambda lines: lines.pop()),  # the stability gate reports a process that died
    "without a step": ("are missing", lambda lines: lines.remove(steps_of(lines)[7])),
    "without its start": ("does not begin with a run_started event", lambda lines: lines.pop(0)),
    "thirty steps called sixty": (
        "steps 31 to 60 are missing",
        lambda lines: [lines.remove(line) for line in [*lines] if line["step"] > 30 and line["kind"] != "run_ended"],
    ),
    "repeated": ("are logged twice", lambda lines: lines.insert(-1, dict(last(lines, "step")))),
    "a second rank": ("rank 1 of 2 has no events", A_SECOND_RANK),
    "a word for a number": ("", lambda lines: last(lines, "step").update(grad_norm="fine")),
    "a word for a step": ("", lambda lines: last(lines, "step").update(step="60")),
    "a column too short": ("", lambda lines: last(lines, "routes")["calls"].pop()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_is_cut_or_contradicts_itself_is_never_go(healthy, tmp_path, damage):
    # Everything else passes, so only the damage can stop it.
    limits = Thresholds(min_steps=1, tokens_per_s=1.0)
    words, change = DAMAGES[damage]
    found = copy(healthy, tmp_path / "run", change)
    judged = judge(found, limits=limits)
    assert judged.verdict == "NO-GO"
    if damage != "without its end":
        assert gate(judged, "record").verdict == "NO-GO"
        assert "GO" not in verdicts(judged).values()
        assert any(words in sentence for sentence in record_gaps(found)), record_gaps(found)


def test_unreadable_lines_are_counted(healthy, tmp_path):
    found = copy(healthy, tmp_path / "run")
    with (found.folder / "events_rank0.jsonl").open("a") as stream:
        stream.write("{not json}\n[1, 2]\n" + '{"kind": "step"')
    problems = read_run(found.folder).problems
    assert any("2 unreadable lines" in p for p in problems)
    assert any("cut off" in p for p in problems)


def test_a_completed_run_may_be_resumed_from_an_earlier_step(tmp_path, data):
    plain = {"train__val_tokens": 0, "checkpoint__every": 4}
    run(tmp_path / "run", data, train__steps=8, **plain)
    earlier = str(tmp_path / "run" / "checkpoints" / "step-00000004")
    found, code = run(tmp_path / "run", data, train__steps=10, resume=earlier, **plain)
    assert (code, found.started[-1].step, found.step) == (0, 4, 10)
    assert gate(judge(found, limits=Thresholds(10)), "record").verdict == "GO"


def test_a_rank_with_fewer_steps_is_reported(healthy, tmp_path):
    found = copy(healthy, tmp_path / "run", A_SECOND_RANK)
    shutil.copy(found.folder / "events_rank0.jsonl", found.folder / "events_rank1.jsonl")
    whole = gate(verdict(read_run(found.folder)), "record")
    assert whole.verdict == "GO"
    lines = (found.folder / "events_rank1.jsonl").read_text().splitlines(keepends=True)
    (found.folder / "events_rank1.jsonl").write_text("".join(lines[: len(lines) // 2]))
    assert "rank 1 logged up to step" in gate(verdict(read_run(found.folder)), "record").sentence


CHECKPOINT_DAMAGES = {
    "truncated": lambda folder: next(folder.glob("*.safetensors")).write_bytes(b""),
    "without its manifest": lambda folder: (folder / "manifest.json").unlink(),
    "deleted": shutil.rmtree,
}


@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGES)
def test_an_incomplete_checkpoint_is_no_go(healthy, tmp_path, damage):
    found = copy(healthy, tmp_path / "run")
    CHECKPOINT_DAMAGES[damage](max((found.folder / "checkpoints").iterdir()))
    told = gate(verdict(read_run(found.folder)), "checkpoint and resume")
    assert (told.verdict, "newest checkpoint is incomplete" in told.sentence) == ("NO-GO", True)


def test_a_folder_copied_without_its_checkpoints_is_not_tested(healthy, tmp_path):
    found = copy(healthy, tmp_path / "run")
    shutil.rmtree(found.folder / "checkpoints")
    told = gate(verdict(read_run(found.folder)), "checkpoint and resume")
    assert (told.verdict, told.fix) == ("NOT TESTED", "run the report where they are")


def test_a_baseline_must_match_in_everything_but_attention(healthy, tmp_path):
    assert "model.attention" in baseline_mismatch(healthy, healthy)
    dense = dense_baseline(healthy, tmp_path / "dense")
    assert baseline_mismatch(healthy, dense) == ""
    assert gate(judge(healthy, dense, FEW), "throughput").verdict == "GO"  # as fast as itself
    config = dense.folder / "config.toml"
    original = config.read_text()
    for old, new, mismatch in (
        ("deterministic = false\n", "", ""),  # an older version without the key
        ('gate = "sigmoid"', 'gate = "softmax"', ""),  # which a dense model does not use
        ("only = false", "only = true", "train.selector.only is True instead of False"),  # has no backward pass
        ('backend = "auto"', 'backend = "reference"', "model.backend is reference instead of auto"),  # another FFN
        ('optimizer = "adamw"', 'optimizer = "muon"', "train.optimizer is muon instead of adamw"),  # takes longer
        ("seq_len = 128", "seq_len = 64", "data.seq_len is 64 instead of 128"),
    ):
        assert old in original
        config.write_text(original.replace(old, new, 1))
        other = read_run(dense.folder)
        assert baseline_mismatch(healthy, other) == mismatch
    assert gate(judge(healthy, other, FEW), "throughput").verdict == "NOT TESTED"


def test_an_output_folder_that_cannot_be_written_is_refused_before_a_run_is_judged(healthy, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/out cannot be written"):
        report([healthy.folder], out=tmp_path / "file" / "out")
    other = shutil.copytree(healthy.folder, tmp_path / "other")
    shutil.rmtree(other / "report", ignore_errors=True)
    (other / "report").touch()
    with pytest.raises(UsageError, match="other/report cannot be written"):
        report([healthy.folder, other], out=tmp_path / "comparison")
    assert capsys.readouterr().out == ""
