"""The plots of one run: loss, throughput, step time, gradient norm, memory, learning rate, and sparse attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from tercet.report.figure import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    RED,
    VIOLET,
    Plot,
    Row,
    abbreviate_y_ticks,
    draw,
    label_step_axis,
    layer_series,
    log_y_axis,
    paint_series,
    series,
)
from tercet.report.read import Run
from tercet.report.throughput import baseline_mismatch, loss_mismatch
from tercet.telemetry.events import CheckpointSaved, HealthFired, LayersObserved, SelectorsObserved, StepsSkipped
from tercet.telemetry.sinks import smoothing_window
from tercet.telemetry.units import plural

PHASES = (
    ("data", ORANGE),
    ("forward", BLUE),
    ("backward", VIOLET),
    ("passes", BLUE),  # forward and backward together, in a CUDA graph
    ("optimizer", GREEN),
    ("communication", RED),
    ("other", GREY),
)

# Plots of sparse attention: (event, anchor, title, caption, (field, colour, label) of each line)
_LAYER_PLOTS: tuple[tuple[Any, ...], ...] = (
    (
        LayersObserved, "gates", "Gates", "Each branch's share of the gates, and the share of collapsed gates",
        (
            ("gate_share_compressed", BLUE, "compressed"), ("gate_share_selected", VIOLET, "selected"),
            ("gate_share_window", GREEN, "window"), ("gate_collapse", RED, "collapsed"),
        ),
    ),
    (
        LayersObserved, "selection", "Selection", "Shares of the selected blocks",
        (("selected_forced", ORANGE, "forced"), ("selected_overlap", GREEN, "overlap with last token")),
    ),
    (
        SelectorsObserved, "choice", "How well blocks are chosen",
        "Share of sampled queries' attention to free (not forced) blocks that the chosen blocks capture",
        (("mass", BLUE, "chosen"), ("best", GREEN, "best possible"), ("random", ORANGE, "random")),
    ),
)  # fmt: skip


def all_plots(run: Run, findings: Sequence[HealthFired], baseline: Run | None = None) -> list[Plot]:
    """All plots the run has data for."""
    plots = [
        loss_plot(run, findings, baseline),
        throughput_plot(run, baseline),
        step_time_plot(run),
        grad_norm_plot(run),
        memory_plot(run),
        learning_rate_plot(run),
        *(_layer_plot(run, *spec) for spec in _LAYER_PLOTS),
    ]
    return [plot for plot in plots if plot is not None]


def step_series(run: Run, name: str) -> list[Row]:
    """A list of per-step values of the log."""
    values = array("d", (v for e in run.steps for v in getattr(e, name)))
    steps = array("q", (s for e in run.steps for s in range(e.first_step, e.first_step + len(getattr(e, name)))))
    return series(steps, values)


def logged_series(logged: Sequence[Any], name: str) -> list[Row]:
    """A value that is logged once per interval."""
    values = [math.nan if (v := getattr(e, name)) is None else v for e in logged]
    return series([e.step for e in logged], values)


def smoothed_losses(run: Run, limit: int = 500) -> list[tuple[int, float]]:
    """(step, mean of the last losses) at up to `limit` steps, ending with the last: smoothed as `mean_of_last` does."""
    steps, sums = array("q"), array("d", [0.0])
    for event in run.steps:
        for step, loss in enumerate(event.losses, event.first_step):
            if math.isfinite(loss):
                steps.append(step)
                sums.append(sums[-1] + loss)
    counts = range(len(steps), 0, -max(1, -(-len(steps) // limit)))
    windows = [(n, smoothing_window(n)) for n in reversed(counts)]
    return [(steps[n - 1], (sums[n] - sums[n - w]) / w) for n, w in windows]


def paint_losses(axes: Any, run: Run, colour: str, label: str) -> None:
    """The smoothed loss as a line, with every step faint behind it."""
    if rows := step_series(run, "losses"):
        paint_series(axes, rows, colour, linewidth=0.6, alpha=0.4)
        axes.plot(*zip(*smoothed_losses(run), strict=True), color=colour, linewidth=1.7, label=label)


def validation_points(run: Run) -> list[tuple[int, float]]:
    """(step, loss) of every finite validation."""
    return [(e.step, e.loss) for e in run.validations if math.isfinite(e.loss)]


def loss_plot(run: Run, findings: Sequence[HealthFired], baseline: Run | None = None) -> Plot | None:
    rows = step_series(run, "losses")
    if not rows:
        return None
    validation = validation_points(run)
    dense_rows = step_series(baseline, "losses") if baseline is not None else []
    dense_validation = validation_points(baseline) if baseline is not None else []
    limits = loss_axis_limits([rows, dense_rows], [validation, dense_validation])

    def paint(axes: Any) -> None:
        if baseline is not None and dense_rows:
            label = _baseline_label(baseline, loss_mismatch(run, baseline))
            axes.plot(*zip(*smoothed_losses(baseline), strict=True), color=GREY, linewidth=1.3, label=label)
        if dense_validation:
            axes.plot(*zip(*dense_validation, strict=True), "s--", color=GREY, markersize=3, linewidth=0.8)
        paint_losses(axes, run, BLUE, "training, smoothed")
        if validation:
            axes.plot(*zip(*validation, strict=True), "o-", color=ORANGE, markersize=3.5, label="validation")
        _mark_events(axes, run, findings)
        if limits is not None:
            axes.set_ylim(*limits)
        label_step_axis(axes, "nats per token")
        axes.legend(loc="upper right", ncols=2)

    skipped = sum(len(e.steps) for e in run.of(StepsSkipped))
    caption = "Line: mean of the last 5% of the steps so far. Behind it: every step."
    if limits is not None:
        caption += f" The initial descent from {run.steps[0].losses[0]:.2f} is cut off."
    if run.stages:
        lengths = " → ".join(f"{stage.seq_len:,}" for stage in run.stages)
        caption += f" Stages of {lengths} tokens; each validates at its own length."
    if skipped:
        caption += f" {skipped} non-finite steps are omitted."
    return Plot("loss", "Loss", caption, draw(paint))


def _baseline_label(baseline: Run, mismatch: str) -> str:
    return f"baseline {baseline.folder.name}" if mismatch else "dense baseline"


def loss_axis_limits(
    lines: Sequence[Sequence[Row]], points: Sequence[Sequence[tuple[int, float]]] = ()
) -> tuple[float, float] | None:
    """Limits that cut off the steep start of training, so that the rest is readable; None: autoscale.

    Only the first twentieth of the lines is ever cut off. Later spikes and points stay visible.
    """
    lines = [rows for rows in lines if rows]
    if min(map(len, lines), default=0) < 100:
        return None
    start = min(rows[len(rows) // 20][0] for rows in lines)
    drawn = [value for rows in lines for _, _, low, high in rows for value in (low, high)]
    kept = [high for rows in lines for _, _, _, high in rows[len(rows) // 20 :]]
    all_points = [point for group in points for point in group]
    drawn += [value for _, value in all_points]
    kept += [value for step, value in all_points if step >= start]
    lowest, highest = min(drawn), max(drawn)
    top = lowest + 1.08 * (max(kept) - lowest)
    if not 0 < top - lowest < 0.75 * (highest - lowest):
        return None
    return lowest - 0.05 * (top - lowest), top


def _mark_events(axes: Any, run: Run, findings: Sequence[HealthFired]) -> None:
    spikes = [f.step for f in findings if f.rule == "loss_spike"]
    marks = (
        ("next stage", INK, "-", [stage.step for stage in run.stages[1:]]),
        ("resumed", MUTED, ":", [e.step for e in run.started if e.resumed_from is not None]),
        # One line where several would be drawn on the same spot.
        ("spike", RED, "--", {round(400 * step / max(1, run.step)): step for step in spikes}.values()),
    )
    for label, colour, style, steps in marks:
        for i, step in enumerate(steps):
            axes.axvline(step, color=colour, linewidth=0.9, linestyle=style, label=None if i else label)


def grad_norm_plot(run: Run) -> Plot | None:
    rows = step_series(run, "grad_norms")
    if not rows:
        return None

    def paint(axes: Any) -> None:
        paint_series(axes, rows, VIOLET, label="gradient norm")
        if min(low for _, _, low, _ in rows) > 0:
            log_y_axis(axes)
        clip = run.config.get("train.clip")
        if isinstance(clip, (int, float)) and clip > 0:
            axes.axhline(clip, color=MUTED, linewidth=0.9, linestyle="--", label=f"clipped to {clip:g}")
        label_step_axis(axes, "global 2-norm")
        axes.legend(loc="upper right", ncols=2)

    return Plot("grad_norm", "Gradient norm", "Over all parameters and ranks, before clipping.", draw(paint))


def throughput_plot(run: Run, baseline: Run | None) -> Plot | None:
    if len(run.steps) < 2:
        return None
    speed = run.tokens_per_s

    def paint(axes: Any) -> None:
        paint_series(axes, logged_series(run.steps, "tokens_per_s"), GREEN)
        if speed is not None:
            axes.axhline(speed, color=INK, linewidth=0.9, linestyle="--", label=f"median {speed:,.0f}")
        if baseline is not None and baseline.tokens_per_s is not None and speed is not None:
            label = f"{_baseline_label(baseline, baseline_mismatch(run, baseline))} {baseline.tokens_per_s:,.0f}"
            axes.axhline(baseline.tokens_per_s, color=ORANGE, linewidth=1.2, linestyle="--", label=label)
        axes.set_ylim(bottom=0)
        abbreviate_y_ticks(axes)
        label_step_axis(axes, "tokens per second")
        if speed is not None:
            axes.legend(loc="lower right")

    known = [e.mfu for e in run.steps if e.mfu is not None]
    mfu = f"MFU {100 * known[-1]:.1f}% at the end." if known else "MFU unknown: no peak FLOP/s for this device."
    return Plot("throughput", "Throughput", f"All ranks; saves and validations excluded. {mfu}", draw(paint))


def learning_rate_plot(run: Run) -> Plot | None:
    if len(run.steps) < 2:
        return None

    def paint(axes: Any) -> None:
        paint_series(axes, logged_series(run.steps, "lr"), ORANGE, label="AdamW")
        if any(e.muon_lr is not None for e in run.steps):
            paint_series(axes, logged_series(run.steps, "muon_lr"), BLUE, label="Muon")
            axes.legend(loc="best")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        label_step_axis(axes, "learning rate")

    schedule, warmup = run.config.get("train.schedule", "unknown"), run.config.get("train.warmup_steps", "unknown")
    return Plot("lr", "Learning rate", f"Schedule {schedule}, {warmup} warm-up steps.", draw(paint))


def step_time_plot(run: Run) -> Plot | None:
    samples = run.resources
    if len(samples) < 2:
        return None

    def paint(axes: Any) -> None:
        columns, steps = {}, [e.step for e in samples]
        for name, _ in PHASES:
            rows = series(steps, [1e3 * (getattr(e, f"{name}_seconds") or 0.0) for e in samples], 200)
            columns[name] = [mean for _, mean, *_ in rows]
            x = [step for step, *_ in rows]
        used = [(name, colour) for name, colour in PHASES if any(v > 0 for v in columns[name])]
        axes.stackplot(
            x, [columns[n] for n, _ in used], labels=[n for n, _ in used], colors=[c for _, c in used], linewidth=0
        )
        totals = sorted(sum(parts) for parts in zip(*(columns[n] for n, _ in used), strict=True))
        # The first interval includes warm-up and may be cut off.
        axes.set_ylim(0, min(totals[-1] * 1.05, 1.6 * totals[len(totals) // 2] + 1e-9))
        label_step_axis(axes, "ms per step")
        axes.legend(loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0), handlelength=1.0, columnspacing=1.2)

    saves = run.of(CheckpointSaved)
    blocked = sum(e.blocked_seconds for e in saves)
    validating = sum(e.seconds for e in run.validations)
    clock = "the device" if run.on_gpu else "the host"
    caption = (
        f"Timed on {clock}. Not included: {blocked:.1f} s blocked on {plural(len(saves), 'save')}, "
        f"{validating:.1f} s of validation."
    )
    return Plot("breakdown", "Step time", caption, draw(paint))


def memory_plot(run: Run) -> Plot | None:
    samples = run.resources
    if len(samples) < 2:
        return None
    capacity = run.device_total_gib

    def paint(axes: Any) -> None:
        if run.on_gpu:
            paint_series(axes, logged_series(samples, "reserved_gib"), GREY, label="reserved")
            paint_series(axes, logged_series(samples, "peak_gib"), ORANGE, label="peak")
        label = "allocated between steps" if run.on_gpu else "resident"
        paint_series(axes, logged_series(samples, "allocated_gib"), BLUE, label=label)
        axes.set_ylim(bottom=0)
        top = axes.get_ylim()[1]
        if capacity is not None and capacity < 3 * top:
            axes.axhline(capacity, color=RED, linewidth=1.0, linestyle="--", label=f"capacity {capacity:.0f}")
        label_step_axis(axes, "GiB")
        axes.legend(loc="lower right")

    where = "Device memory of rank 0." if run.on_gpu else "Resident memory of the process (CPU run)."
    return Plot("memory", "Memory", where, draw(paint))


def _layer_plot(run: Run, kind: Any, anchor: str, title: str, caption: str, lines: Any) -> Plot | None:
    """Statistics of the sparse layers over time, those that any layer has."""
    used = [line for line in lines if any(v is not None for e in run.of(kind) for v in getattr(e, line[0]))]
    samples = [e for e in run.of(kind) if any(v is not None for name, *_ in used for v in getattr(e, name))]
    if not samples:
        return None

    def paint(axes: Any) -> None:
        marker = "o" if len(samples) == 1 else None  # a single sample has no line to draw
        for name, colour, label in used:
            rows = layer_series([e.step for e in samples], (getattr(e, name) for e in samples))
            paint_series(axes, rows, colour, label=label, marker=marker)
        label_step_axis(axes, "share")
        axes.set_ylim(0, 1.05)
        axes.legend(loc="lower center", ncols=2, bbox_to_anchor=(0.5, 1.0))

    return Plot(anchor, title, f"{caption}: mean and range over layers.", draw(paint))
