"""The plots of one run, drawn from its events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tercet.report.dense_baseline import learnt_otherwise, not_a_twin
from tercet.report.figure import INK, MUTED, SERIES, Plot, draw, thinned
from tercet.report.gates import speed
from tercet.report.read import Run
from tercet.telemetry.events import CheckpointSaved, HealthFired, LayersObserved, StepsSkipped
from tercet.telemetry.units import quantity

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = SERIES
PHASES = (
    ("data", ORANGE),
    ("forward", BLUE),
    ("backward", VIOLET),
    ("passes", BLUE),  # forward and backward in one, from a CUDA graph
    ("optimizer", GREEN),
    ("communication", RED),
    ("other", GREY),
)
BRANCHES = ("compressed", "selected", "window")
# Columns of a map over time: more would be finer than a screen shows.
MAP_COLUMNS = 120


def all_plots(run: Run, findings: Sequence[HealthFired], twin: Run | None = None) -> list[Plot]:
    """Those for which the run has something to draw."""
    made = [
        loss(run, findings, twin),
        throughput(run, twin),
        breakdown(run),
        grad_norm(run),
        memory(run),
        learning_rate(run),
        gates(run),
        gate_health(run),
        selection(run),
    ]
    return [plot for plot in made if plot is not None]


def series(run: Run, name: str) -> list[tuple[float, float, float, float]]:
    """(step, mean, least, greatest) of every step's value, thinned out."""
    steps = [s for e in run.steps for s in range(e.first_step, e.step + 1)]
    values = [v for e in run.steps for v in getattr(e, name)]
    return [(steps[i], mean, low, high) for i, mean, low, high in thinned(values) if i < len(steps)]


def loss(run: Run, findings: Sequence[HealthFired], twin: Run | None = None) -> Plot | None:
    rows = series(run, "losses")
    if not rows:
        return None
    beside = series(twin, "losses") if twin is not None else []
    held_out = validated(run)
    theirs = validated(twin) if twin is not None else []
    frame = below_the_descent([rows, *([beside] if beside else [])], [held_out, theirs])

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        x, mean, low, high = zip(*rows, strict=True)
        if twin is not None and beside:
            label = f"baseline {twin.folder.name}" if learnt_otherwise(run, twin) else "dense twin"
            axes.plot(*list(zip(*beside, strict=True))[:2], color=GREY, linewidth=1, label=label)
        if theirs:
            axes.plot(*zip(*theirs, strict=True), "s--", color=GREY, markersize=3, linewidth=0.8)
        axes.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0)
        axes.plot(x, mean, color=BLUE, label="training")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o-", color=ORANGE, markersize=3.5, label="validation")
        _marks(axes, run, findings)
        if frame is not None:
            axes.set_ylim(*frame)
        label_steps(axes, "nats per token")
        axes.legend(loc="upper right", ncols=2)

    skipped = sum(len(e.steps) for e in run.of(StepsSkipped))
    caption = "Every step; the band is the range within a stretch of steps."
    if frame is not None:
        caption += f" The descent from {run.steps[0].losses[0]:.2f} lies above the frame."
    if skipped:
        caption += f" {skipped} non-finite steps are left out."
    return Plot("loss", "Loss", caption, draw(paint))


Row = tuple[float, float, float, float]


def validated(run: Run) -> list[tuple[int, float]]:
    """(step, loss) of every validation."""
    return [(e.step, e.loss) for e in run.validations if math.isfinite(e.loss)]


def below_the_descent(
    lines: Sequence[Sequence[Row]], points: Sequence[Sequence[tuple[int, float]]] = ()
) -> tuple[float, float] | None:
    """A frame in which the first steps, which fall steeply, do not flatten all the others; None: as it comes.

    Nothing but the beginning of a line is ever cut: a spike later on and the points of that time stay in the frame.
    """
    if min((len(rows) for rows in lines), default=0) < 100:
        return None
    begun = min(rows[len(rows) // 20][0] for rows in lines)
    drawn = [value for rows in lines for _, _, low, high in rows for value in (low, high)]
    kept = [high for rows in lines for _, _, _, high in rows[len(rows) // 20 :]]
    of_points = [(step, value) for some in points for step, value in some]
    drawn += [value for _, value in of_points]
    kept += [value for step, value in of_points if step >= begun]
    least, greatest = min(drawn), max(drawn)
    top = least + 1.08 * (max(kept) - least)
    if not 0 < top - least < 0.75 * (greatest - least):
        return None
    return least - 0.05 * (top - least), top


def _marks(axes: Any, run: Run, findings: Sequence[HealthFired]) -> None:
    for i, started in enumerate(e for e in run.started if e.resumed_from is not None):
        axes.axvline(started.step, color=MUTED, linewidth=0.9, linestyle=":", label=None if i else "resumed")
    for i, finding in enumerate(f for f in findings if f.rule == "loss_spike"):
        axes.axvline(finding.step, color=RED, linewidth=0.9, linestyle="--", label=None if i else "spike")


def grad_norm(run: Run) -> Plot | None:
    rows = series(run, "grad_norms")
    if not rows:
        return None

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        x, mean, low, high = zip(*rows, strict=True)
        axes.fill_between(x, low, high, color=VIOLET, alpha=0.18, linewidth=0)
        axes.plot(x, mean, color=VIOLET, label="gradient norm")
        if min(low) > 0:
            axes.set_yscale("log")
            _plain_log(axes)
        clip = run.config.get("train.clip")
        if isinstance(clip, (int, float)) and clip > 0:
            axes.axhline(clip, color=MUTED, linewidth=0.9, linestyle="--", label=f"clipped to {clip:g}")
        label_steps(axes, "global 2-norm")
        axes.legend(loc="upper right", ncols=2)

    return Plot("grad_norm", "Gradient norm", "Over all parameters and ranks, before clipping.", draw(paint))


def short_numbers(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))


def _plain_log(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    low, high = axes.get_ylim()
    if high / low < 120:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else ""))
    else:
        axes.yaxis.set_minor_formatter(NullFormatter())


def throughput(run: Run, twin: Run | None) -> Plot | None:
    if len(run.steps) < 2:
        return None

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        rows = thinned([e.tokens_per_s for e in run.steps])
        axes.plot([run.steps[i].step for i, *_ in rows], [mean for _, mean, *_ in rows], color=GREEN)
        own = speed(run)
        if own is not None:
            axes.axhline(own, color=INK, linewidth=0.9, linestyle="--", label=f"median {own:,.0f}")
        other = speed(twin) if twin is not None else None
        if twin is not None and other is not None and own is not None:
            name = f"baseline {twin.folder.name}" if not_a_twin(run, twin) else "dense twin"
            axes.axhline(other, color=ORANGE, linewidth=1.2, linestyle="--", label=f"{name} {other:,.0f}")
        axes.set_ylim(bottom=0)
        short_numbers(axes)
        label_steps(axes, "tokens per second")
        if own is not None:
            axes.legend(loc="lower right")

    shown = [e.mfu for e in run.steps if e.mfu is not None]
    mfu = f" Model FLOP utilisation {100 * shown[-1]:.1f}% at the end." if shown else " The device's peak is not known."
    return Plot(
        "throughput", "Throughput", "All ranks together; saves and validations left out." + mfu, draw(paint)
    )  # fmt: skip


def learning_rate(run: Run) -> Plot | None:
    if len(run.steps) < 2:
        return None

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([e.step for e in run.steps], [e.lr for e in run.steps], color=ORANGE)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        label_steps(axes, "learning rate")

    schedule, warmup = run.config.get("train.schedule", "unknown"), run.config.get("train.warmup_steps", "unknown")
    return Plot("lr", "Learning rate", f"Schedule {schedule}, {warmup} steps of warm-up.", draw(paint))


def breakdown(run: Run) -> Plot | None:
    seen = run.resources
    if len(seen) < 2:
        return None

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        columns = {}
        for name, _ in PHASES:
            rows = thinned([1e3 * (getattr(e, f"{name}_seconds") or 0.0) for e in seen], 200)
            columns[name] = [mean for _, mean, *_ in rows]
            x = [seen[i].step for i, *_ in rows]
        used = [(name, colour) for name, colour in PHASES if any(v > 0 for v in columns[name])]
        axes.stackplot(
            x, [columns[n] for n, _ in used], labels=[n for n, _ in used], colors=[c for _, c in used], linewidth=0
        )
        totals = sorted(sum(parts) for parts in zip(*(columns[n] for n, _ in used), strict=True))
        # The first interval holds the warming up; it may leave the picture, so that the others can be read.
        axes.set_ylim(0, min(totals[-1] * 1.05, 1.6 * totals[len(totals) // 2] + 1e-9))
        label_steps(axes, "ms per step")
        axes.legend(
            loc="upper center", ncols=len(used), bbox_to_anchor=(0.5, 1.16), handlelength=1.0, columnspacing=1.2
        )

    saves = run.of(CheckpointSaved)
    blocked = sum(e.blocked_seconds for e in saves)
    validating = sum(e.seconds for e in run.validations)
    clock = "the device's clock" if run.on_gpu else "the host's clock"
    caption = (
        f"By {clock}. Beside the steps: {blocked:.1f} s standing still for {len(saves)} saves, "
        f"{validating:.1f} s of validation."
    )
    return Plot("breakdown", "Step time", caption, draw(paint))


def memory(run: Run) -> Plot | None:
    seen = run.resources
    if len(seen) < 2:
        return None
    capacity = next((m["device_total_gib"] for m in run.memory.values() if "device_total_gib" in m), None)

    def paint(figure: Any) -> None:
        axes = figure.subplots()
        x = [e.step for e in seen]
        if run.on_gpu:
            axes.plot(x, [e.reserved_gib for e in seen], color=GREY, label="reserved")
            axes.plot(x, [e.peak_gib for e in seen], color=ORANGE, label="peak")
            axes.plot(x, [e.allocated_gib for e in seen], color=BLUE, label="allocated between steps")
        else:
            axes.plot(x, [e.allocated_gib for e in seen], color=BLUE, label="resident")
        axes.set_ylim(bottom=0)
        top = axes.get_ylim()[1]
        if capacity is not None and capacity < 3 * top:
            axes.axhline(capacity, color=RED, linewidth=1.0, linestyle="--", label=f"device has {capacity:.0f}")
        label_steps(axes, "GiB")
        axes.legend(loc="lower right")

    where = "Device memory of rank 0." if run.on_gpu else "Resident memory of the process: it ran on a CPU."
    return Plot("memory", "Memory", where, draw(paint))


def gates(run: Run) -> Plot | None:
    seen = _sparse(run)
    if not seen:
        return None
    columns = seen[:: max(1, -(-len(seen) // MAP_COLUMNS))]
    shares = [v for e in columns for b in BRANCHES for v in getattr(e, f"gate_share_{b}") if v is not None and v == v]
    top = max([2 / 3, *shares])

    def paint(figure: Any) -> None:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, branch in zip(panels, BRANCHES, strict=True):
            table = [[_or_nan(getattr(e, f"gate_share_{branch}")[i]) for e in columns] for i in _layers(seen)]
            image = _map(axes, table, columns, top)
            axes.set_title(branch)
        panels[0].set_ylabel("layer")
        bar = figure.colorbar(image, ax=panels, fraction=0.03, pad=0.02)
        bar.outline.set_visible(False)
        marks = [(v, t) for v, t in ((0, "0"), (1 / 3, "⅓"), (2 / 3, "⅔"), (1, "1")) if v <= top + 1e-9]
        bar.set_ticks([v for v, _ in marks], labels=[t for _, t in marks])

    layers = len(list(_layers(seen)))
    caption = "Share of the three gates that each branch gets, by layer over time. At the start all are a third."
    return Plot("gates", "Gate shares", caption, draw(paint, width=11.4, height=1.5 + 0.1 * min(layers, 20)), wide=True)


def _map(axes: Any, table: list[list[float]], columns: list[LayersObserved], top: float) -> Any:
    steps = [e.step for e in columns]
    image = axes.imshow(
        table,
        aspect="auto",
        interpolation="nearest",
        vmin=0,
        vmax=top,
        cmap="viridis",
        origin="lower",
        extent=(steps[0] - 0.5, max(steps[-1], steps[0] + 1) + 0.5, -0.5, len(table) - 0.5),
    )
    axes.grid(False)
    axes.set_xlabel("step")
    _whole_ticks(axes.yaxis)
    return image


def gate_health(run: Run) -> Plot | None:
    seen = _sparse(run)
    if len(seen) < 2:
        return None

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        x = [e.step for e in seen]
        for axes, rows in (
            (left, (("gate_entropy", BLUE, "entropy (nats)"), ("gate_collapse", RED, "collapsed"))),
            (right, (("selected_forced", ORANGE, "forced"), ("selected_overlap", GREEN, "kept from last token"))),
        ):  # fmt: skip
            for name, colour, label in rows:
                bands = [[v for v in getattr(e, name) if v is not None] or [math.nan] for e in seen]
                axes.fill_between(
                    x, [min(b) for b in bands], [max(b) for b in bands], color=colour, alpha=0.22, linewidth=0
                )
                axes.plot(x, [sum(b) / len(b) for b in bands], color=colour, label=label)
            label_steps(axes, "")
            axes.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.5, 1.2))
        left.set_ylim(0, math.log(3) * 1.05)
        right.set_ylim(0, 1.05)

    caption = "Mean and range over layers. Entropy is 1.10 when the gates are equal; collapsed and forced are shares."
    return Plot(
        "selection_health", "Gates and selection over time", caption, draw(paint, width=11.4, height=2.4), wide=True
    )


def selection(run: Run) -> Plot | None:
    seen = [e for e in _sparse(run) if any(any(d) for d in e.distances)]
    if not seen:
        return None
    last = seen[-5:]
    layers = [i for i in _layers(seen) if any(sum(e.distances[i]) for e in last)]
    totals = [[sum(column) for column in zip(*(e.distances[i] for e in last), strict=True)] for i in layers]
    used = max(k for row in totals for k, v in enumerate(row) if v) + 1
    shares = [[v / max(1, sum(row)) for v in row[:used]] for row in totals]
    labels = ["0", "1", *(f"{2 ** (k - 1)}–{2**k - 1}" for k in range(2, used))][:used]

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        image = left.imshow(
            shares, aspect="auto", interpolation="nearest", cmap="viridis", origin="lower", vmin=0,
            extent=(-0.5, used - 0.5, -0.5, len(layers) - 0.5),
        )  # fmt: skip
        left.grid(False)
        left.set_ylabel("layer")
        _whole_ticks(left.yaxis)
        bar = figure.colorbar(image, ax=left, fraction=0.05, pad=0.02)
        bar.outline.set_visible(False)
        everything = [sum(column) for column in zip(*(row[:used] for row in totals), strict=True)]
        right.bar(range(used), [v / sum(everything) for v in everything], color=BLUE, width=0.8)
        right.grid(axis="x", visible=False)
        right.set_ylabel("share of selected blocks")
        for axes in (left, right):
            axes.set_xticks(range(used), labels, rotation=40 if used > 6 else 0, ha="right" if used > 6 else "center")
            axes.set_xlabel("blocks back from the query's own")

    where = f"up to step {seen[-1].step}"
    caption = f"Where selected blocks lie, by layer and over all layers, in the last {len(last)} readings {where}."
    height = 1.9 + 0.08 * min(len(layers), 20)
    return Plot("selection", "Selection map and distances", caption, draw(paint, width=11.4, height=height), wide=True)


def _sparse(run: Run) -> list[LayersObserved]:
    return [e for e in run.layers if any(v is not None for v in e.gate_share_compressed)]


def _layers(seen: list[LayersObserved]) -> range:
    return range(min(len(e.attention) for e in seen))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def label_steps(axes: Any, what: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    axes.margins(x=0.01)
    _whole_ticks(axes.xaxis)


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=7, integer=True))
