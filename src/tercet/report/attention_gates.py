"""The gates of sparse attention: routing, fallbacks, selection health."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter

from tercet.attention.config import BRANCHES, NoChoice, NSAConfig, nothing_to_choose
from tercet.report.gates import NOT_ON_CPU, ON_CPU, Gate, GateBuilder, Thresholds
from tercet.report.read import Run, with_defaults
from tercet.telemetry.events import GraphCaptureFailed, HealthFired, LayersObserved, SelectorsObserved
from tercet.telemetry.health import FIXES
from tercet.telemetry.units import plural

_REQUESTED = "asked for"  # as in attention.dispatch, which imports torch
# Share of what can be gained over a random choice that counts as learned.
_LEARNED = 0.05
# If the best choice captures hardly more attention than a random one, (nearly) all blocks are read: nothing to learn.
_NO_CHOICE = 1e-3


def routing_gate(run: Run, limits: Thresholds) -> Gate:
    """Every branch of every layer ran on its kernel."""
    gate = GateBuilder("routing", "every branch of every layer on its kernel, in every pass", "routes")
    counts = run.route_counts
    if not counts:
        gate.not_tested("no pass was counted", "train longer")
        return gate.build()
    passes: Counter[tuple[str, str]] = Counter()
    for (_, branch, route, _, _), calls in counts.items():
        passes[branch, route] += calls
    for (branch, route), calls in sorted(passes.items()):
        gate.add_evidence(branch, f"{route}: {calls:,} passes")
    seen = {layer for layer, *_ in counts}
    missing = [i for i in range(len(run.attention)) if i not in seen]
    if not run.attention:
        gate.not_tested("the number of layers is unknown", "")
    elif missing:
        gate.not_tested(f"no pass was counted for layers {', '.join(map(str, missing))}", "")
    if not run.on_gpu:
        gate.not_applicable(ON_CPU, NOT_ON_CPU)
        return gate.build()
    slow = run.slow_routes
    for layer, branch, route, reason in slow[:3]:
        gate.fail(f"layer {layer} ran its {branch} branch on {route} ({reason})", _route_fix(reason))
    if len(slow) > 3:
        gate.fail(f"and {len(slow) - 3} more", "")
    gate.require_steps(run, limits)
    return gate.build(f"{plural(len(seen), 'layer')}, all branches on their kernels")


def fallback_gate(run: Run, limits: Thresholds) -> Gate:
    """No pass silently ran on a slower backend."""
    gate = GateBuilder("fallbacks", "no unrequested pass on a slower backend than the device supports", "routes")
    counts = run.route_counts
    total = sum(counts.values())
    reasons: Counter[str] = Counter()
    for (_, _, _, reason, fallback), calls in counts.items():
        if fallback and calls:
            reasons[reason] += calls
    gate.add_evidence("passes", f"{total:,}")
    gate.add_evidence("fallbacks", f"{sum(reasons.values()):,}")
    if failed := len(run.of(GraphCaptureFailed)):  # allowed by train.cuda_graph=auto
        gate.add_evidence("recordings that failed", f"{failed:,}")
    if not counts:
        gate.not_tested("no pass was counted", "train longer")
    for reason, calls in reasons.most_common(3):
        gate.fail(f"{calls:,} passes fell back: {reason}", _route_fix(reason))
    if not run.on_gpu:
        gate.not_applicable(ON_CPU, NOT_ON_CPU)
    gate.require_steps(run, limits)
    return gate.build(f"none in {total:,} passes")


def _route_fix(reason: str) -> str:
    return "remove model.backend=reference" if reason == _REQUESTED else "fix the stated reason; see tercet doctor"


def selection_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Layers use their branches, and their selection of blocks is not stuck.

    Layers specialise: in a well-trained model the first layer may read only its window. So a share of the layers may
    have a collapsed gate or a dead branch. A stuck selection always fails.
    """
    gate = GateBuilder(
        "selection health",
        f"a collapsed gate or dead branch in at most {limits.lone_branch_layers:.0%} of the layers, no stuck "
        f"selection; statistics of all layers in at least {limits.readings} steps",
        "gates",
    )
    sparse = [i for i, kind in enumerate(run.attention) if kind == "nsa"]
    if run.attention and not sparse:
        gate.not_applicable("no layer selects blocks", "train a model whose layers do: model.attention=nsa")
        return gate.build()
    gated = run.config.get("model.gate") != "none"
    no_choice = _no_choice(run)
    if no_choice and not gated:
        gate.not_applicable(f"nothing to choose: {no_choice.reason}", no_choice.fix)
    samples = [e for e in run.layers if sparse and all(_has_layer(e, i, gated) for i in sparse)]
    gate.add_evidence("readings", f"{len(samples)} of all {plural(len(sparse), 'layer')}")
    if samples:
        _add_layer_evidence(samples[-1], sparse, gate, gated)
    affected = {f.layer for f in findings if f.rule in ("gate_collapse", "dead_branch")}
    tolerated = None not in affected and len(affected) <= limits.lone_branch_layers * len(sparse)
    for rule in ("gate_collapse", "dead_branch", "selection_stuck"):
        fired = [f for f in findings if f.rule == rule]
        if not fired or (rule == "selection_stuck" and no_choice and no_choice.reads_all):
            continue
        more = f" (and {len(fired) - 1} more)" if len(fired) > 1 else ""
        sentence = f"{fired[0].sentence} from step {fired[0].step} on{more}"
        if tolerated and rule != "selection_stuck":
            layers = len({f.layer for f in fired})
            gate.add_evidence(rule.replace("_", " "), f"{sentence}: {layers} of {len(sparse)} layers")
        else:
            gate.fail(sentence, FIXES[rule])
    _judge_selectors(run, gate, limits)
    if any(not math.isfinite(v) for e in run.layers for v in e.gate_entropy if v is not None):
        gate.fail("the gates are not finite", "see the numerics gate")
    if len(samples) < limits.readings:
        sampled = f"statistics of all layers in {plural(len(samples), 'step')}, at least {limits.readings} needed"
        gate.not_tested(sampled, "train longer")
    gate.require_steps(run, limits)
    if not gated:
        return gate.build(f"no stuck selection in {plural(len(sparse), 'layer')}")
    named = sorted(i for i in affected if i is not None)
    healthy = _healthy_layers(named, len(sparse), no_choice is None, limits)
    return gate.build(f"{healthy}; nothing to choose: {no_choice.reason}" if no_choice else healthy)


def _no_choice(run: Run) -> NoChoice | None:
    """Why the layers had no choice of blocks; None if they had one."""
    config = with_defaults(run)
    try:
        nsa = NSAConfig(**{f.name: config[f"model.nsa.{f.name}"] for f in dataclasses.fields(NSAConfig)})
        longest = max((stage.seq_len for stage in run.stages), default=config["data.seq_len"])
        return nothing_to_choose(nsa, longest, config["model.dense_below"])
    except (KeyError, TypeError, ValueError):  # config.toml is unreadable, which the record gate reports
        return None


def _judge_selectors(run: Run, gate: GateBuilder, limits: Thresholds) -> None:
    """Learned selectors must capture more attention than a random choice would, in the mean of the last readings; they
    start at random, so a short run is not judged by it. The compressed branch's choice is shown only: it has no loss of
    its own that would make it better than random."""
    samples = [e for e in run.of(SelectorsObserved) if e.layer][-5:]
    if not samples:
        return
    layers = samples[-1].layer
    samples = [e for e in samples if e.layer == layers]
    mass, best, random = (
        [statistics.fmean(values) for values in zip(*(getattr(e, name) for e in samples), strict=True)]
        for name in ("mass", "best", "random")
    )
    learned = None not in samples[-1].kl
    gate.add_evidence(
        "attention captured",
        f"{min(mass):.0%} to {max(mass):.0%} across layers; at random {min(random):.0%} to {max(random):.0%}, at best "
        f"{min(best):.0%} to {max(best):.0%}",
    )
    lost = [
        layer
        for layer, m, b, r in zip(layers, mass, best, random, strict=True)
        if b - r > _NO_CHOICE and m - r <= _LEARNED * (b - r)
    ]
    if lost and learned and run.step >= limits.min_steps:
        gate.fail(
            f"the learned selectors of layers {', '.join(map(str, lost))} are no better than a random choice",
            "raise train.selector.lr, or lower train.selector.every",
        )


def _has_layer(event: LayersObserved, layer: int, gated: bool) -> bool:
    """Whether a sample has the statistics of this layer: of its gates, or of its selection if it has no gates."""
    values = event.gate_collapse if gated else event.selected_forced
    return len(values) > layer and values[layer] is not None


def _add_layer_evidence(event: LayersObserved, sparse: list[int], gate: GateBuilder, gated: bool) -> None:
    if gated:
        for branch in BRANCHES:
            values = getattr(event, f"gate_share_{branch}")
            if shares := [values[i] for i in sparse if i < len(values) and values[i] is not None]:
                low, high = 100 * min(shares), 100 * max(shares)
                gate.add_evidence(f"{branch} share", f"{low:.1f}% to {high:.1f}% across layers")
        collapsed = max(event.gate_collapse[i] or 0 for i in sparse)
        gate.add_evidence("collapsed", f"at most {100 * collapsed:.1f}% of tokens and heads")
    forced = [f for i in sparse if (f := event.selected_forced[i]) is not None]
    if forced:
        gate.add_evidence("forced blocks", f"{100 * max(forced):.1f}% of the selected blocks")


def _healthy_layers(affected: list[int], layers: int, choose: bool, limits: Thresholds) -> str:
    no_stuck = "; no stuck selection" * choose
    if not affected:
        return f"all {plural(layers, 'layer')} use all branches{no_stuck}"
    names = f"layer {affected[0]} does" if len(affected) == 1 else f"layers {', '.join(map(str, affected))} do"
    allowed = f"allowed in {limits.lone_branch_layers:.0%} of the layers"
    return f"{layers - len(affected)} of {layers} layers use all branches, {names} not ({allowed}){no_stuck}"
