"""The gates of sparse attention: throughput against dense attention, routing, fallbacks, selection health."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter

from tercet import hints
from tercet.attention.config import NoChoice, NSAConfig, nothing_to_choose
from tercet.report.gates import Gate, Thresholds
from tercet.report.read import Run, baseline_mismatch, with_defaults
from tercet.telemetry.events import GraphCaptureFailed, HealthFired, SelectorsObserved
from tercet.telemetry.health import FIXES
from tercet.terminal import plural

ON_CPU, NOT_ON_CPU = "ran on a CPU, where no GPU kernels run", "train on a GPU"
STATE_A_TARGET = "state a target: --target-tokens-per-s"
_REQUESTED = "asked for"  # as in attention.dispatch, which imports torch
# Share of what can be gained over a random choice that counts as learned.
_LEARNED = 0.05
# If the best choice captures hardly more attention than a random one, (nearly) all blocks are read: nothing to learn.
_NO_CHOICE = 1e-3


def throughput_gate(run: Run, baseline: Run | None, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """As fast as the dense baseline on the same device, or as a stated target."""
    target = limits.tokens_per_s
    threshold = "at least dense attention's tokens/s on the same device"
    if target is not None:
        threshold = f"at least {target:,.0f} tokens/s, the stated target"
    gate = Gate("throughput", f"{threshold}, and no lasting drop", "throughput")
    speed = run.tokens_per_s
    if speed is None:
        gate.not_tested("fewer than two log intervals, and the first is warm-up", "train longer")
    else:
        gate.add_evidence("tokens/s", f"{speed:,.0f} (median)")
    drops = [f for f in findings if f.rule == "throughput_drop"]
    if drops and not run.on_gpu and target is None:
        gate.add_evidence("drops", f"{len(drops)}, not judged: other programs share the CPU")
    else:
        gate.fail_on(drops, "throughput_drop")
    compared = ""
    if target is None:
        compared = _compare_with_dense(run, baseline, limits, gate)
    elif speed is not None:
        compared = f", target {target:,.0f}"
        if speed < target:
            gate.fail(f"{speed:,.0f} tokens/s, below the target of {target:,.0f}", "profile it: --profile.steps A:B")
    gate.passed = f"{speed or 0:,.0f} tokens/s{compared}"
    return gate


def _compare_with_dense(run: Run, baseline: Run | None, limits: Thresholds, gate: Gate) -> str:
    """Judge the speed by that of the dense baseline; returns what the gate's sentence says about it."""
    exempt = _why_dense_may_be_faster(run, limits)
    if exempt and (run.tokens_per_s is None or baseline is None or baseline.tokens_per_s is None):
        gate.not_applicable(exempt, STATE_A_TARGET)
    elif run.tokens_per_s is None:
        pass
    elif baseline is None:
        gate.not_tested("no dense baseline and no target to compare with", dense_baseline_command(run))
    elif mismatch := baseline_mismatch(run, baseline):
        gate.not_tested(f"{baseline.folder.name} is not a dense baseline: {mismatch}", dense_baseline_command(run))
    elif baseline.tokens_per_s is None:
        gate.not_tested("the dense baseline has too few log intervals", "train the baseline longer")
    else:
        ratio = run.tokens_per_s / baseline.tokens_per_s
        told = f"{baseline.tokens_per_s:,.0f} tokens/s, ratio {ratio:.2f} ({baseline.folder.name})"
        gate.add_evidence("dense baseline", told)
        if slow := _slow_routes(baseline):
            unfair = f"the dense baseline ran on {slow}, so the comparison is not fair"
            gate.not_tested(unfair, "fix that and train it again")
        if ratio < 1 and exempt:
            gate.not_applicable(f"{ratio:.2f}× dense, but {exempt}", STATE_A_TARGET)
        elif ratio < 1:
            fix = "dense may be the better choice at this sequence length (see tercet plan); otherwise profile it"
            gate.fail(f"{ratio:.2f}× dense", fix)
        return f", {ratio:.2f}× dense"
    return ""


def _why_dense_may_be_faster(run: Run, limits: Thresholds) -> str:
    """Why nobody expects this run to be as fast as dense; empty if it must be."""
    if set(run.attention) == {"dense"}:
        return "this run is dense itself"
    if not run.on_gpu:
        return ON_CPU
    seq_len = run.stages[-1].seq_len if run.stages else run.config.get("data.seq_len")
    if isinstance(seq_len, int) and seq_len < limits.dense_length:
        return f"at {seq_len:,} tokens dense is usually as fast or faster; compare from {limits.dense_length:,} on"
    return ""


def _slow_routes(baseline: Run) -> str:
    """The routes of a dense baseline that are not the fastest for dense attention; empty if all are."""
    if not baseline.route_counts:
        return "unknown backends (no pass was counted)"
    return ", ".join(sorted({f"{route} ({reason})" for _, _, route, reason in baseline.slow_routes}))


def dense_baseline_command(run: Run) -> str:
    """How to train the dense baseline of a run and compare the two."""
    preset = next((o.removeprefix("preset ") for o in run.origins.values() if o.startswith("preset ")), None)
    return hints.train_dense_baseline(run.folder, preset)


def routing_gate(run: Run) -> Gate:
    """Every branch of every layer ran on its kernel."""
    gate = Gate("routing", "every branch of every layer on its kernel, in every pass", "routes")
    counts = run.route_counts
    gate.add_evidence("passes", f"{sum(counts.values()):,}")
    seen = {layer for layer, *_ in counts}
    if missing := [i for i in range(len(run.attention)) if i not in seen]:
        gate.not_tested(f"no pass was counted for layers {', '.join(map(str, missing))}", "train longer")
    elif not run.attention:
        gate.not_tested("the number of layers is unknown")
    if not run.on_gpu:
        gate.not_applicable(ON_CPU, NOT_ON_CPU)
        return gate
    slow = run.slow_routes
    for layer, branch, route, reason in slow[:3]:
        gate.fail(f"layer {layer} ran its {branch} branch on {route} ({reason})", _route_fix(reason))
    if len(slow) > 3:
        gate.fail(f"and {len(slow) - 3} more")
    gate.passed = f"{plural(len(seen), 'layer')}, all branches on their kernels"
    return gate


def fallback_gate(run: Run) -> Gate:
    """No pass silently ran on a slower backend."""
    gate = Gate("fallbacks", "no unrequested pass on a slower backend than the device supports", "routes")
    total = sum(run.route_counts.values())
    reasons: Counter[str] = Counter()
    for (_, _, _, reason, fallback), calls in run.route_counts.items():
        reasons[reason] += calls * fallback
    gate.add_evidence("fallbacks", f"{sum(reasons.values()):,} of {total:,} passes")
    if failed := len(run.of(GraphCaptureFailed)):  # allowed by train.cuda_graph=auto
        gate.add_evidence("failed CUDA graph captures", f"{failed:,}")
    if not total:
        gate.not_tested("no pass was counted", "train longer")
    for reason, calls in reasons.most_common(3):
        if calls:
            gate.fail(f"{calls:,} passes fell back: {reason}", _route_fix(reason))
    if not run.on_gpu:
        gate.not_applicable(ON_CPU, NOT_ON_CPU)
    gate.passed = f"none in {total:,} passes"
    return gate


def _route_fix(reason: str) -> str:
    return "remove model.backend=reference" if reason == _REQUESTED else "fix the stated reason; see tercet doctor"


def selection_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Layers use their branches, and their selection of blocks is not stuck.

    Layers specialise: in a well-trained model the first layer may read only its window. So a share of the layers may
    have a collapsed gate or a dead branch. A stuck selection always fails.
    """
    allowed = f"{limits.lone_branch_layers:.0%} of the layers"
    gate = Gate(
        "selection health",
        f"a collapsed gate or dead branch in at most {allowed}, no stuck selection; statistics of all layers in at "
        f"least {limits.readings} steps",
        "gates",
    )
    sparse = [i for i, kind in enumerate(run.attention) if kind == "nsa"]
    if run.attention and not sparse:
        gate.not_applicable("no layer selects blocks", "train a model whose layers do: model.attention=nsa")
        return gate
    gated = run.config.get("model.gate") != "none"
    no_choice = _no_choice(run)
    if no_choice and not gated:
        gate.not_applicable(f"nothing to choose: {no_choice.reason}", no_choice.fix)
    _count_samples(run, sparse, gate, limits, gated)
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
    if not gated:
        gate.passed = f"no stuck selection in {plural(len(sparse), 'layer')}"
        return gate
    passed = f"all {plural(len(sparse), 'layer')} use all branches"
    if affected:
        named = ", ".join(str(i) for i in sorted(affected, key=str))
        using = f"{len(sparse) - len(affected)} of {len(sparse)} layers use all branches"
        passed = f"{using}, not: layer {named} (allowed in {allowed})"
    passed += f"; nothing to choose: {no_choice.reason}" if no_choice else "; no stuck selection"
    gate.passed = passed
    return gate


def _no_choice(run: Run) -> NoChoice | None:
    """Why the layers had no choice of blocks; None if they had one."""
    config = with_defaults(run)
    try:
        nsa = NSAConfig(**{f.name: config[f"model.nsa.{f.name}"] for f in dataclasses.fields(NSAConfig)})
        longest = max((stage.seq_len for stage in run.stages), default=config["data.seq_len"])
        return nothing_to_choose(nsa, longest, config["model.dense_below"])
    except (KeyError, TypeError, ValueError):  # config.toml is unreadable, which the record gate reports
        return None


def _judge_selectors(run: Run, gate: Gate, limits: Thresholds) -> None:
    """Learned selectors must capture more attention than a random choice would, in the mean of the last readings; they
    start at random, so a short run is not judged by it. The compressed branch's choice is shown only: it has no loss of
    its own that would make it better than random."""
    samples = [e for e in run.of(SelectorsObserved) if e.layer][-5:]
    samples = [e for e in samples if e.layer == samples[-1].layer]
    if not samples:
        return
    mass, best, random = (
        [statistics.fmean(values) for values in zip(*(getattr(e, name) for e in samples), strict=True)]
        for name in ("mass", "best", "random")
    )
    of_layers = [f"{min(shares):.0%} to {max(shares):.0%}" for shares in (mass, random, best)]
    gate.add_evidence("attention captured", "{} across layers; at random {}, at best {}".format(*of_layers))
    lost = [
        str(layer)
        for layer, m, b, r in zip(samples[-1].layer, mass, best, random, strict=True)
        if b - r > _NO_CHOICE and m - r <= _LEARNED * (b - r)
    ]
    if lost and None not in samples[-1].kl and run.step >= limits.min_steps:
        gate.fail(
            f"the learned selectors of layers {', '.join(lost)} are no better than a random choice",
            "raise train.selector.lr, or lower train.selector.every",
        )


def _count_samples(run: Run, sparse: list[int], gate: Gate, limits: Thresholds, gated: bool) -> None:
    """Samples of all sparse layers: of their gates, or of their selection if they have no gates."""
    columns = [e.gate_collapse if gated else e.selected_forced for e in run.layers] if sparse else []
    count = sum(all(len(column) > i and column[i] is not None for i in sparse) for column in columns)
    gate.add_evidence("samples", f"{count} of all {plural(len(sparse), 'layer')}")
    if count < limits.readings:
        sampled = f"statistics of all layers in {plural(count, 'step')}, at least {limits.readings} needed"
        gate.not_tested(sampled, "train longer")
