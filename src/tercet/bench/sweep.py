"""`tercet sweep`: train once with each of several learning rates, and compare the losses. Without torch.

Each rate is a `tercet train` in a process of its own. One that diverges, fails or takes too long is reported in the
table, and the sweep continues.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.bench.settings import Ended, parse_settings
from tercet.config.load import load
from tercet.errors import UsageError
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import Event, StepLogged, Validated
from tercet.telemetry.sinks import mean_of_last
from tercet.terminal import Columns, table

if TYPE_CHECKING:
    from tercet.config.schema import RunConfig

# Keys that a run of the sweep sets, and what chooses their values.
OWN_KEYS = {
    "train.lr": "--lrs", "train.steps": "--steps", "train.stages": "tercet train", "run.device": "--device",
    "run.dir": "tercet train", "profile.steps": "tercet train", "train.sample_tokens": "tercet train",
    "checkpoint.every": "tercet train", "log.every": "--steps", "parallel.strategy": "tercet train",
}  # fmt: skip
# Tokens of the validation after the last step: enough to rank learning rates that differ by a factor.
VALIDATION_TOKENS = 65536


@dataclass(frozen=True)
class Rate:
    """Result of one learning rate. outcome: "ok", "diverged", "too slow (…)", or the reason of a failure."""

    lr: float
    outcome: str
    loss: float | None = None  # of the validation after the last step; without validation, the smoothed training loss
    validated: bool = False
    tokens_per_s: float | None = None

    def __str__(self) -> str:
        if self.loss is None:
            return self.outcome
        return f"{'validation' if self.validated else 'training'} loss {self.loss:.4f}"


def sweep(
    preset: str = "tiny",
    config: str = "",
    settings: str = "",
    lrs: tuple[float, ...] = (),
    steps: int = 100,
    seconds: float = 300.0,
    device: str = "auto",
) -> int:
    """Train once with each learning rate, on one device, and compare the losses.

    Args:
        preset: Base configuration.
        config: TOML file with more of it, as for `tercet train`.
        settings: More keys, e.g. data.source=text,data.path=my-texts,model.selector=learned.
        lrs: Learning rates to compare.
        steps: Optimizer steps with each.
        seconds: Time limit for each, start-up included.
        device: auto, cpu or cuda.
    """
    if steps < 1:
        raise UsageError(f"--steps {steps} is too small: give at least 1")
    given = parse_settings(settings, OWN_KEYS)
    whole = load(preset=preset, file=config or None, flags=given).config
    base = whole.stages[0]
    check_rates(lrs, base)
    if whole.train.stages:
        print(f"note: train.stages has no effect: all steps are like those of its first, {whole.train.stages[0]}")
    words = [sys.executable, "-m", "tercet", "train", "--preset", preset, *(["--config", config] if config else [])]
    words += ["--run.device", device, "--log.no_tensorboard", "--parallel.allow_single_rank"]
    rates = sorted(set(lrs))
    print(f"{len(rates)} learning rates, {steps} steps each, at most {seconds:g} s")
    found: list[Rate] = []
    for lr in rates:
        found.append(judge(lr, *run(words, {**given, **rate_keys(base, lr, steps)}, seconds)))
        print(f"{len(found)}/{len(rates)}  lr {lr:g}: {found[-1]}", flush=True)
    columns: Columns = {"lr": ("learning rate", str), "": ("loss", str), "tokens_per_s": ("tokens/s", "{:,.0f}".format)}
    winner = best(found)
    rows = [{**asdict(rate), "lr": f"{rate.lr:g}{' (best)' if rate is winner else ''}", "": rate} for rate in found]
    print(f"\n{table(rows, columns)}\n\n{advice(found)}")
    print(json.dumps({"rates": [asdict(rate) for rate in found], "best": winner and winner.lr}))
    return 0 if winner else 1


def check_rates(rates: Sequence[float], base: RunConfig) -> None:
    """Raise if the learning rates cannot be compared."""
    if not rates or min(rates) <= 0:
        given = f"{min(rates):g} must be above 0" if rates else "is empty"
        raise UsageError(f"--lrs {given}: give learning rates such as 0.0003 0.001")
    if base.train.optimizer == "muon" and base.train.muon.lr is not None:
        raise UsageError(
            f"--lrs varies train.lr, but train.muon.lr={base.train.muon.lr:g} is set, and Muon's matrices would keep "
            "it: leave it out, then they learn at the rates of --lrs too"
        )


def rate_keys(base: RunConfig, lr: float, steps: int) -> dict[str, Any]:
    """The settings of a run: warm-up takes at most a tenth of it, and it validates at the end only."""
    return {
        "train.lr": lr, "train.steps": steps, "log.every": max(1, steps // 20), "train.stages": (),
        "data.seq_len": base.data.seq_len, "train.micro_batch": base.train.micro_batch,
        "train.tokens_per_step": base.train.tokens_per_step, "parallel.strategy": "single",
        "train.warmup_steps": min(base.train.warmup_steps, max(1, steps // 10)),
        "train.val_every": 0, "train.val_tokens": min(base.train.val_tokens, VALIDATION_TOKENS),
        "train.sample_tokens": 0, "profile.steps": None, "checkpoint.every": 0,
    }  # fmt: skip


def run(words: Sequence[str], keys: Mapping[str, Any], seconds: float) -> tuple[Ended, list[Event]]:
    """Run `tercet train` with these keys in a temporary run folder, for at most `seconds`."""
    with tempfile.TemporaryDirectory(prefix="tercet-sweep-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        command = [*words, *as_flags({**keys, "run.dir": folder})]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds
            )
            ended = Ended(done.returncode, done.stdout)
        except subprocess.TimeoutExpired:
            ended = Ended(1, "", late=seconds)
        return ended, list(read_events(events_file(folder))) if events_file(folder).exists() else []


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Configuration keys as words of a command line."""
    texts = {
        key: (",".join(map(str, v)) or "none") if isinstance(v, list | tuple) else str(v) for key, v in keys.items()
    }
    return [word for key, text in texts.items() for word in (f"--{key}", text)]


def judge(lr: float, ended: Ended, events: Sequence[Event]) -> Rate:
    """Turn a run into a result."""
    logged = [event for event in events if isinstance(event, StepLogged)]
    losses = [loss for event in logged for loss in event.losses]
    speed = statistics.median(event.tokens_per_s for event in logged) if logged else None
    diverged = any(not math.isfinite(loss) for loss in losses)
    if ended.failed and not diverged:
        return Rate(lr, ended.reason, tokens_per_s=speed)
    final, _ = mean_of_last(losses)
    if diverged or final is None or (len(losses) > 1 and final > losses[0]):
        return Rate(lr, "diverged", tokens_per_s=speed)
    validated = [event.loss for event in events if isinstance(event, Validated)]
    return Rate(lr, "ok", validated[-1] if validated else final, bool(validated), speed)


def best(rates: Sequence[Rate]) -> Rate | None:
    return min((rate for rate in rates if rate.loss is not None), key=lambda rate: rate.loss or 0.0, default=None)


def advice(rates: Sequence[Rate]) -> str:
    """What to do next."""
    found = best(rates)
    if found is None:
        diverged = any(rate.outcome == "diverged" for rate in rates)
        return "no learning rate worked: try smaller ones" if diverged else "no run ended; see the table"
    text = f"train with --train.lr {found.lr:g}"
    if len(rates) > 1 and found is rates[0]:
        text += f", or try smaller learning rates: the best is the smallest one, add --lrs {found.lr / 3:.2g}"
    elif len(rates) > 1 and found is rates[-1]:
        text += f", or try larger learning rates: the best is the largest one, add --lrs {found.lr * 3:.2g}"
    return f"{text}\nLonger runs usually need a slightly smaller learning rate."
