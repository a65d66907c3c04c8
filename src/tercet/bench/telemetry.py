"""Measure the cost of telemetry: `python -m tercet.bench.telemetry --preset m7c`.

Alternates log intervals with and without telemetry (timers, layer statistics, routes, memory, health rules, event log,
CSV, TensorBoard, heartbeat, watchdog) on one model in one process, so that clock drift affects both. The result is the
median difference between neighbours. Batches are drawn once and stay on the device, to keep loader noise out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.config.load import load
from tercet.config.schema import RunConfig
from tercet.parallel.strategy import Single
from tercet.telemetry.event_log import EventLog
from tercet.telemetry.events import StepLogged
from tercet.telemetry.observer import Observer
from tercet.telemetry.sinks import BackgroundSink, csv_sinks, slow_sinks
from tercet.telemetry.watchdog import Heartbeat, Watchdog
from tercet.train.console import precision_of
from tercet.train.device import device_name, peak_memory_gib, pick_device
from tercet.train.optim import learning_rate
from tercet.train.state import TrainState, build_state
from tercet.train.step import MicroBatch, train_step, untimed


class _DrawnOnDevice(Single):
    """Draws the initial weights on the device, which is faster than on the host."""

    def build_model(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        with device:
            return build()


class Bench:
    """One model and its batches, trained with or without telemetry (`watched`)."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.device = pick_device(config.run.device)
        self.strategy = _DrawnOnDevice()
        self.state: TrainState = build_state(config, self.device, self.strategy, None)
        rows, length = config.train.micro_batch, config.data.seq_len
        drawn = torch.Generator().manual_seed(config.run.seed)

        def batch() -> MicroBatch:
            tokens = torch.randint(config.model.vocab_size, (1, rows * length + 1), generator=drawn).to(self.device)
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=self.device)
            return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), bounds, length)

        self.batches = [batch() for _ in range(config.accumulation)]
        self.log = EventLog(folder)
        slow = slow_sinks(folder, [], config.log.tensorboard, 0)
        self.behind = [BackgroundSink(name, sink, print) for name, sink in slow.items()]
        self.log.readers += [*csv_sinks(folder, []), *self.behind]
        self.observer = Observer(
            config, folder, 0, self.device, self.state.model, self.state.optimizer, self.log,
            precision_of(config, self.device), self.strategy.all_sum, held_bytes=lambda: self.state.held_bytes,
        )  # fmt: skip

    def interval(self, *, watched: bool, steps: int | None = None) -> float:
        """Seconds per step over one log interval (or `steps`), device synchronised before and after."""
        steps = steps or self.config.log.every
        with ExitStack() as stack:
            beat = None
            if watched:
                # A run starts these threads once, so starting and stopping them is not timed.
                beat = stack.enter_context(closing(Heartbeat(self.folder, 0, self.config.log.heartbeat_seconds)))
                stack.enter_context(Watchdog(self.folder, 0, self.config.health, beat, self.log))
            self._wait()
            started = time.perf_counter()
            for _ in range(steps):
                step = self.state.step + 1
                if beat:
                    beat.at(step, "training")
                    self.observer.before_step(step)
                result = train_step(
                    self.state.model, self.state.optimizer, self.batches, step=step,
                    lr=learning_rate(self.config.train, min(step, self.config.train.steps)),
                    clip=self.config.train.clip, precision=self.config.train.precision, guard=self.state.guard,
                    strategy=self.strategy, phase=self.observer.phase if watched else untimed,
                    executor=self.state.graph,
                )  # fmt: skip
                if watched:
                    self.observer.after_step(step)
                self.state.step = step
                self.state.interval.add(step, result)
            measured = self.state.interval.read()
            self.state.interval.clear()
            if watched:
                self._emit(measured, (time.perf_counter() - started) / steps)
            self._wait()
            seconds = time.perf_counter() - started
        return seconds / steps

    def close(self) -> None:
        self.log.close()
        for sink in self.behind:
            sink.close()

    def _emit(self, measured: list[Any], seconds: float) -> None:
        per_step = self.config.train.tokens_per_step
        logged = StepLogged(
            step=self.state.step, loss=measured[-1].loss, lr=0.0, grad_norm=measured[-1].grad_norm,
            tokens=self.state.step * per_step, tokens_per_s=per_step / seconds, step_seconds=seconds, data_seconds=0.0,
            mfu=None, memory_gib=peak_memory_gib(self.device, self.state.held_bytes), skipped=0, epoch=0,
            first_step=measured[0].step, losses=[m.loss for m in measured], grad_norms=[m.grad_norm for m in measured],
        )  # fmt: skip
        self.log.emit(logged)
        self.observer.after_log(logged)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(config: RunConfig, pairs: int, seconds: float = math.inf) -> dict[str, Any]:
    """Medians over `pairs` of neighbouring intervals, after warming up and compiling both kinds.

    Once there are two pairs, starts no further pair after `seconds`.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder))
        _progress("model built; the first intervals compile", started)
        for i, watched in enumerate((False, True, False, True)):
            if i < 2 or time.perf_counter() - started < seconds / 2:
                took = bench.interval(watched=watched)
                kind = "with" if watched else "without"
                _progress(f"warm-up {kind} telemetry: {1e3 * took:.1f} ms per step", started)
        without: list[float] = []
        with_: list[float] = []
        for i in range(pairs):
            if i >= 2 and time.perf_counter() - started > seconds:
                break
            for watched in (False, True) if i % 2 else (True, False):  # alternate which goes first
                (with_ if watched else without).append(bench.interval(watched=watched))
            _progress(f"pair {i + 1}: {1e3 * without[-1]:.2f} ms without, {1e3 * with_[-1]:.2f} ms with", started)
        bench.close()
    plain = statistics.median(without)
    extra = statistics.median(b - a for a, b in zip(without, with_, strict=True))
    return {
        "bench": "telemetry",
        "device": device_name(bench.device),
        "inputs": "uniform random tokens, drawn once",
        "seq_len": config.data.seq_len,
        "tokens_per_step": config.train.tokens_per_step,
        "log_every": config.log.every,
        "pairs": len(with_),
        "step_ms_without": 1e3 * plain,
        "step_ms_with": 1e3 * statistics.median(with_),
        "extra_ms": 1e3 * extra,
        "extra_percent": 100 * extra / plain,
        "spread_percent": 100 * (statistics.quantiles(without, n=4)[2] - statistics.quantiles(without, n=4)[0]) / plain,
        "under_one_percent": extra / plain < 0.01,
    }


def _progress(text: str, started: float) -> None:
    """Print as we go, so that an interrupted run still shows its figures."""
    print(f"{time.perf_counter() - started:6.1f} s  {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tercet.bench.telemetry", description=__doc__)
    parser.add_argument("--preset", default="m7c")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further pair after this long")
    parser.add_argument("--micro-batch", type=int, help="sequences per pass (default: the preset's)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence; tokens per pass stay the preset's")
    asked = parser.parse_args(arguments)
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs} is too small: give at least 2")
    flags: dict[str, Any] = {"checkpoint.every": 0}
    if asked.seq_len:
        one_pass = load(preset=asked.preset).config.tokens_per_pass
        flags |= {"data.seq_len": asked.seq_len, "train.micro_batch": max(1, one_pass // asked.seq_len)}
    if asked.micro_batch:
        flags["train.micro_batch"] = asked.micro_batch
    result = measure(load(preset=asked.preset, flags=flags).config, asked.pairs, asked.seconds)
    without, with_ = result["step_ms_without"], result["step_ms_with"]
    extra = f"{result['extra_ms']:+.3f} ms, {result['extra_percent']:+.2f}%"
    spread = f"interquartile range {result['spread_percent']:.2f}%"
    print(f"{without:.2f} ms per step without telemetry, {with_:.2f} ms with: {extra} ({spread})")
    print(json.dumps(result))
    return 0 if result["under_one_percent"] else 1


if __name__ == "__main__":
    sys.exit(main())
