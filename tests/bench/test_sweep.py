"""`tercet sweep`: learning rates are compared on the same steps, and a run that fails is a result too."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest

from runs import step_logged
from tercet.bench import sweep as module
from tercet.bench.settings import Ended
from tercet.bench.sweep import as_flags, judge, rate_keys, sweep
from tercet.config.flags import key_options, read_arguments
from tercet.config.load import load
from tercet.errors import UsageError
from tercet.telemetry.events import StepLogged, Validated


def losses_of(*losses: float) -> StepLogged:
    logged = step_logged(len(losses), step_seconds=0.5, tokens_per_s=1024.0)
    return dataclasses.replace(logged, first_step=1, losses=list(losses))


def validated(loss: float) -> Validated:
    return Validated(step=9, loss=loss, tokens=5, seconds=0.1)


def test_a_run_has_no_stages_and_no_profile():
    base = {"train.stages": "64:5,128:5", "profile.steps": "8:9"}
    found = rate_keys(load("tiny", flags=base).config.stages[0], 1e-3, 3)
    given = read_arguments(as_flags(found), key_options({}), prog="tercet train")
    config = load("tiny", flags=base | given).config
    assert (config.train.stages, config.profile.steps, config.data.seq_len) == ((), None, 64)


@pytest.mark.parametrize(
    ("run", "outcome", "loss"),
    [
        ((Ended(0, ""), [losses_of(5.0, 4.0, 3.0), validated(2.5)]), "ok", 2.5),
        ((Ended(0, ""), [losses_of(5.0, 4.0, 3.0)]), "ok", 4.0),  # without validation: smoothed
        ((Ended(0, ""), [losses_of(5.0, 6.0, 9.0), validated(9.0)]), "diverged", None),
        ((Ended(1, "error: stopped: 5 of the last 5 steps"), [losses_of(5.0, math.nan)]), "diverged", None),
        ((Ended(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to"), []), "out of memory", None),
        ((Ended(-9, ""), []), "out of memory", None),
        ((Ended(1, "rank 0\nerror: no data.path\nTraceback of torchrun"), []), "error: no data.path", None),
        ((Ended(2, f"error: {'x' * 200}: fix it"), []), f"error: {'x' * 200}: fix it", None),
        ((Ended(-15, "", 300.4), []), "too slow (300 s)", None),
        ((Ended(3, ""), []), "exit code 3", None),
    ],
)
def test_a_learning_rate_is_judged_by_its_last_loss(run, outcome, loss):
    found = judge(1e-3, *run)
    assert (found.outcome, found.loss) == (outcome, loss)


def test_learning_rates_are_compared(monkeypatch, capsys):
    runs = {1e-4: (Ended(0, ""), [losses_of(5.0, 4.0), validated(4.0)]),
            1e-3: (Ended(0, ""), [losses_of(5.0, 3.0), validated(3.0)]),
            1e-1: (Ended(0, ""), [losses_of(5.0, math.inf)])}  # fmt: skip
    started = []

    def run(words, keys, seconds):
        started.append(load("tiny", flags=keys).config)
        return runs[keys["train.lr"]]

    monkeypatch.setattr(module, "run", run)
    assert sweep("tiny", lrs=(1e-1, 1e-4, 1e-3), device="cpu") == 0
    assert [config.train.lr for config in started] == sorted(runs)
    assert {(c.train.steps, c.train.warmup_steps, c.train.sample_tokens) for c in started} == {(100, 10, 0)}
    out = capsys.readouterr().out
    assert "| 0.001 (best) | validation loss 3.0000 |" in out
    assert "| 0.1 | diverged |" in out
    assert "train with --train.lr 0.001" in out
    record = json.loads(out.splitlines()[-1])
    assert record["best"] == 1e-3
    assert [rate["outcome"] for rate in record["rates"]] == ["ok", "ok", "diverged"]


def test_a_sweep_reads_a_file_and_settings(tmp_path, monkeypatch):
    file = tmp_path / "mine.toml"
    stages = 'stages = ["128:10", "256:10"]'
    file.write_text(f'[data]\nsource = "text"\npath = "texts"\nseq_len = 512\n[train]\n{stages}\n')
    started = []

    def run(words, keys, seconds):
        started.append(load("tiny", file=words[words.index("--config") + 1], flags=keys).config)
        return (Ended(0, ""), [losses_of(5.0, 4.0)])

    monkeypatch.setattr(module, "run", run)
    own = "model.selector=learned,model.branches=selected,window"
    sweep("tiny", config=str(file), settings=own, lrs=(1e-3,), device="cpu")
    (config,) = started
    assert (config.data.path, config.data.seq_len, config.model.branches) == (("texts",), 128, ("selected", "window"))
    assert config.train.stages == ()  # all steps are like those of the first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lrs": ()}, "--lrs is empty"),
        ({"lrs": (0.0,)}, "--lrs 0 must be above 0"),
        ({"lrs": (1e-3,), "settings": "train.steps=9"}, "sets train.steps itself; use --steps"),
        ({"lrs": (1e-3,), "settings": "train.optimizer=muon,train.muon.lr=0.01"}, "train.muon.lr=0.01 is set"),
    ],
)
def test_wrong_sweeps_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        sweep("tiny", **options)


def test_the_best_learning_rate_at_the_edge_asks_for_more():
    rates = [module.Rate(lr, "ok", loss) for lr, loss in ((1e-4, 4.0), (1e-3, 3.0))]
    assert "try larger learning rates" in module.advice(rates)
    assert "try smaller learning rates" in module.advice(rates[::-1])


def test_a_run_that_takes_too_long_is_stopped():
    ended, events = module.run([sys.executable, "-c", "import time; time.sleep(60)"], {}, 0.5)
    assert (ended.reason, events) == ("too slow (0 s)", [])


@pytest.mark.slow
def test_a_sweep_trains_with_each_learning_rate(capsys):
    assert sweep("tiny", lrs=(1e-3, 3e-3), steps=3, seconds=200, device="cpu", settings="data.seq_len=64") == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [rate["validated"] for rate in record["rates"]] == [True, True]
