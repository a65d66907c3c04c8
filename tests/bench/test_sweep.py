"""`tercet sweep`: the grid, results of runs, throughput cliffs."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from runs import step_logged
from tercet.bench import sweep as module
from tercet.bench.settings import Ended
from tercet.bench.sweep import Cell, Point, as_flags, cell_keys, cliffs, judge, render, sweep
from tercet.config.flags import key_options, read_arguments
from tercet.config.load import load
from tercet.errors import UsageError
from tercet.telemetry.events import StepLogged, Validated

POINT = Point("single", 256, 2, "none")


def logged(step: int, seconds: float) -> StepLogged:
    return step_logged(step, step_seconds=seconds, tokens_per_s=512 / seconds, memory_gib=step)


def test_a_cell_turns_the_shuffle_buffer_off():
    """tiny's shuffle buffer holds 8M tokens at its own length, 2G at 65,536."""
    keys = cell_keys(dataclasses.replace(POINT, length=65536), 1, 3)
    assert keys["data.shuffle_sequences"] == 0
    load("tiny", flags=keys)  # a valid configuration


def test_a_cell_has_no_stages_and_no_profile():
    base = {"train.stages": "64:5,128:5", "profile.steps": "8:9"}
    keys = cell_keys(POINT, 1, 3)
    for found in (keys, keys | module.rate_keys(load("tiny", flags=base).config, 1e-3, 3)):
        given = read_arguments(as_flags(found), key_options({}), prog="tercet train")
        config = load("tiny", flags=base | given).config
        assert (config.train.stages, config.profile.steps) == ((), None)


def test_the_first_step_is_ignored_and_memory_is_the_peak():
    cell = judge(POINT, Ended(0, ""), [logged(1, 9.0), logged(2, 0.5), logged(3, 0.5), logged(4, 0.6)])
    assert (cell.outcome, cell.tokens_per_s, cell.step_seconds, cell.memory_gib) == ("ok", 1024.0, 0.5, 4)


@pytest.mark.parametrize(
    ("code", "text", "late", "outcome"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to", None, "out of memory"),
        (-9, "", None, "out of memory"),
        (1, "rank 0\nerror: no data.path\nTraceback of torchrun", None, "error: no data.path"),
        (2, f"error: {'x' * 200}: fix it", None, f"error: {'x' * 200}: fix it"),
        (-15, "", 300.4, "too slow (300 s)"),
        (3, "", None, "exit code 3"),
    ],
)
def test_a_failed_cell_reports_the_reason(code, text, late, outcome):
    cell = judge(POINT, Ended(code, text, late), [])
    assert cell.outcome == outcome
    assert cell.tokens_per_s is None


def test_a_cell_whose_data_ended_early_is_reported():
    assert "data ended after 1 steps" in judge(POINT, Ended(0, ""), [logged(1, 9.0)]).outcome


def test_cliffs_are_found_along_batch_and_length():
    def cell(length: int, batch: int, speed: float | None) -> Cell:
        point = Point("ddp", length, batch, "none")
        return Cell(point, "ok" if speed else "out of memory", speed, 1.0, 1.0, 4)

    cells = [cell(256, 1, 1000), cell(256, 2, 500), cell(256, 4, None), cell(512, 1, 900), cell(512, 2, 880)]
    found = cliffs(cells)
    assert len(found) == 1
    assert "batch 1 → 2 drops from 1000 to 500 tokens/s (50%)" in found[0]
    assert cliffs([cell(256, 1, 1000), cell(512, 1, 100)])[0].startswith("ddp, checkpointing none: length")
    table = "\n".join(render(cells))
    assert "| 256 | 1000 tokens/s, 1.00 GiB | 500 tokens/s, 1.00 GiB | out of memory |" in table
    assert "warning: ddp" in table
    assert "no throughput cliffs" in render([cell(256, 1, 1000)])
    assert "no throughput cliffs" not in render([cell(256, 1, None)])


def losses_of(*losses: float) -> StepLogged:
    return dataclasses.replace(logged(len(losses), 0.5), first_step=1, losses=list(losses))


def validated(loss: float) -> Validated:
    return Validated(step=9, loss=loss, tokens=5, seconds=0.1)


@pytest.mark.parametrize(
    ("run", "outcome", "loss"),
    [
        ((Ended(0, ""), [losses_of(5.0, 4.0, 3.0), validated(2.5)]), "ok", 2.5),
        ((Ended(0, ""), [losses_of(5.0, 4.0, 3.0)]), "ok", 4.0),  # without validation: smoothed
        ((Ended(0, ""), [losses_of(5.0, 6.0, 9.0), validated(9.0)]), "diverged", None),
        ((Ended(1, "error: stopped: 5 of the last 5 steps"), [losses_of(5.0, math.nan)]), "diverged", None),
        ((Ended(1, "CUDA out of memory"), [losses_of(5.0)]), "out of memory", None),
    ],
)
def test_a_learning_rate_is_judged_by_its_last_loss(run, outcome, loss):
    cell = module.judge_rate(1e-3, *run)
    assert (cell.outcome, cell.loss) == (outcome, loss)


def test_learning_rates_are_compared(tmp_path, monkeypatch, capsys):
    runs = {1e-4: (Ended(0, ""), [losses_of(5.0, 4.0), validated(4.0)]),
            1e-3: (Ended(0, ""), [losses_of(5.0, 3.0), validated(3.0)]),
            1e-1: (Ended(0, ""), [losses_of(5.0, math.inf)])}  # fmt: skip
    started = []

    def run_cell(words, keys, seconds):
        started.append(load("tiny", flags=keys).config)
        return runs[keys["train.lr"]]

    monkeypatch.setattr("tercet.bench.sweep.run_cell", run_cell)
    assert sweep("tiny", lrs=(1e-1, 1e-4, 1e-3), out=str(tmp_path), device="cpu") == 0
    assert [config.train.lr for config in started] == sorted(runs)
    assert {(c.train.steps, c.train.warmup_steps, c.train.sample_tokens) for c in started} == {(100, 10, 0)}
    out = capsys.readouterr().out
    assert "| 0.001 (best) | validation loss 3.0000 |" in out
    assert "| 0.1 | diverged |" in out
    assert "train with --train.lr 0.001" in out
    assert json.loads(out.splitlines()[-1])["best"]["lr"] == 1e-3
    rows = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["ok", "ok", "diverged"]


@pytest.mark.parametrize("lrs", [(), (1e-3,)])
def test_a_sweep_reads_a_file_and_settings(tmp_path, monkeypatch, lrs):
    file = tmp_path / "mine.toml"
    stages = 'stages = ["128:10", "256:10"]'
    file.write_text(f'[data]\nsource = "text"\npath = "texts"\nseq_len = 512\n[train]\n{stages}\n')
    started = []

    def run_cell(words, keys, seconds):
        started.append(load("tiny", file=words[words.index("--config") + 1], flags=keys).config)
        return (Ended(0, ""), [losses_of(5.0, 4.0)])

    monkeypatch.setattr("tercet.bench.sweep.run_cell", run_cell)
    own = "model.selector=learned,model.branches=selected,window,train.lr=1"
    sweep("tiny", config=str(file), settings=own, lrs=lrs, out=str(tmp_path / "out"), device="cpu")
    (config,) = started
    assert (config.data.path, config.data.seq_len, config.model.branches) == (("texts",), 128, ("selected", "window"))
    assert config.train.stages == ()  # a cell has the length of the first
    assert config.train.lr == (lrs[0] if lrs else 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lrs": (0.0,)}, "--lrs 0 must be above 0"),
        ({"lrs": (1e-3,), "batches": (1, 2)}, "2 combinations"),
        ({"settings": "train.steps=9"}, "sets train.steps itself; use --steps"),
        ({"lrs": (1e-3,), "settings": "train.optimizer=muon,train.muon.lr=0.01"}, "train.muon.lr=0.01 is set"),
    ],
)
def test_wrong_sweeps_are_refused(tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        sweep("tiny", out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lrs", [(), (1e-3,)])
@pytest.mark.parametrize("name", ["sweep.jsonl", "sweep.md"])
def test_results_of_an_earlier_sweep_are_kept(tmp_path, name, lrs):
    (tmp_path / name).write_text("earlier")
    with pytest.raises(UsageError, match=f"holds {name} of an earlier sweep: choose another folder"):
        sweep("tiny", lrs=lrs, out=str(tmp_path))
    assert (tmp_path / name).read_text() == "earlier"


def test_the_best_learning_rate_at_the_edge_asks_for_more():
    cells = [module.LRCell(lr, "ok", loss) for lr, loss in ((1e-4, 4.0), (1e-3, 3.0))]
    assert "try larger learning rates" in "\n".join(module.render_rates(cells))
    assert "try smaller learning rates" in "\n".join(module.render_rates(cells[::-1]))


@pytest.mark.slow
def test_a_sweep_continues_after_a_cell_that_cannot_run(tmp_path, capsys):
    code = sweep(
        "tiny",
        lengths=(64, 96),
        batches=(1,),
        steps=3,
        seconds=200,
        out=str(tmp_path),
        device="cpu",
        strategies=("single", "cp"),
        ranks=5,
    )  # five ranks cannot share sequences of these lengths
    assert code == 0
    cells = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [c["outcome"] == "ok" for c in cells] == [True, True, False, False]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] == 2
