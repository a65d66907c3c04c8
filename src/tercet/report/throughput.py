"""Gate: throughput, compared with the dense baseline: which run qualifies, and the command that trains one."""

from __future__ import annotations

from tercet import hints
from tercet.model.config import NSA_ONLY, is_all_dense
from tercet.report.gates import ON_CPU, Gate, GateBuilder, Thresholds
from tercet.report.read import Run, with_defaults
from tercet.telemetry.events import HealthFired
from tercet.telemetry.health import FIXES

STATE_A_TARGET = "state a target: --target-tokens-per-s, or --min-dense-ratio with a --baseline"

# A baseline must have the same values for these keys …
_SAME_MODEL = ("model.", "data.seq_len", "train.tokens_per_step", "train.micro_batch", "train.stages",
               "train.precision", "train.compile", "train.activation_checkpointing", "train.selector.only",
               "train.optimizer", "train.cuda_graph", "run.deterministic", "parallel.")  # fmt: skip
# … except for these, which only concern sparse attention.
_ATTENTION_ONLY = ("model.attention", *(f"model.{key}" for key in NSA_ONLY))
# To compare losses, everything that influences learning must be the same too.
_SAME_LEARNING = ("data.", "train.", "run.seed")
_NOT_LEARNING = ("data.prefetch", "train.val_every", "train.sample_", "train.max_skipped")


def baseline_mismatch(run: Run, baseline: Run) -> str:
    """Why `baseline` is not `run` with dense attention; empty if it is."""
    attention = baseline.config.get("model.attention")
    if not is_all_dense(attention):
        return f"its model.attention is {attention}"
    if not run.started or not baseline.started or run.started[-1].device != baseline.started[-1].device:
        return "it ran on another device"
    if run.world_size != baseline.world_size:
        return "it ran on another number of ranks"
    return _config_difference(run, baseline, _SAME_MODEL, _ATTENTION_ONLY)


def loss_mismatch(run: Run, baseline: Run) -> str:
    """Why the losses of a run and its baseline cannot be compared; empty if they can."""
    return baseline_mismatch(run, baseline) or _config_difference(run, baseline, _SAME_LEARNING, _NOT_LEARNING)


def _config_difference(run: Run, baseline: Run, same: tuple[str, ...], except_for: tuple[str, ...]) -> str:
    first, second = with_defaults(run), with_defaults(baseline)
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key), second.get(key)
        if key.startswith(same) and not key.startswith(except_for) and ours != theirs:
            return f"{key} is {theirs} instead of {ours}"
    return ""


def slow_routes(baseline: Run) -> str:
    """The routes of a dense baseline that are not the fastest for dense attention; empty if all are."""
    if not baseline.route_counts:
        return "unknown backends (no pass was counted)"
    return ", ".join(sorted({f"{route} ({reason})" for _, _, route, reason in baseline.slow_routes}))


def dense_baseline_command(run: Run) -> str:
    """How to train the dense baseline of a run and compare the two."""
    preset = next((o.removeprefix("preset ") for o in run.origins.values() if o.startswith("preset ")), None)
    return hints.train_dense_baseline(run.folder, preset)


def throughput_gate(run: Run, baseline: Run | None, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """As fast as the dense baseline on the same device, or as a stated target."""
    target = limits.tokens_per_s
    threshold = f"at least {limits.dense_ratio:g}× dense tokens/s on the same device"
    if target is not None:
        threshold = f"at least {target:,.0f} tokens/s, the stated target"
    gate = GateBuilder("throughput", f"{threshold}, and no lasting drop", "throughput")
    speed, exempt = run.tokens_per_s, _why_dense_may_be_faster(run, limits)
    if speed is None:
        gate.not_tested("fewer than two log intervals, and the first is warm-up", "train longer")
        if exempt:
            gate.not_applicable(exempt, STATE_A_TARGET)
        return gate.build()
    gate.add_evidence("tokens/s", f"{speed:,.0f} (median)")
    compared = "" if target is None else f", target {target:,.0f}"
    drops = [f for f in findings if f.rule == "throughput_drop"]
    if drops and not run.on_gpu and target is None:
        gate.add_evidence("drops", f"{len(drops)}, not judged: other programs share the CPU")
    elif drops:
        worst = min(drops, key=lambda f: f.value / f.threshold)
        count = f" (worst of {len(drops)} drops)" if len(drops) > 1 else ""
        gate.fail(f"throughput dropped: {worst.sentence}{count}", FIXES["throughput_drop"])
    if target is not None:
        if speed < target:
            gate.fail(f"{speed:,.0f} tokens/s, below the target of {target:,.0f}", "profile it: --profile.steps A:B")
    elif exempt and (baseline is None or baseline.tokens_per_s is None):
        gate.not_applicable(exempt, STATE_A_TARGET)
    elif baseline is None:
        gate.not_tested("no dense baseline and no target to compare with", dense_baseline_command(run))
    elif mismatch := baseline_mismatch(run, baseline):
        gate.add_evidence("dense twin", f"none: {mismatch} ({baseline.folder.name})")
        gate.not_tested(f"{baseline.folder.name} is not a dense baseline: {mismatch}", dense_baseline_command(run))
    elif baseline.tokens_per_s is None:
        gate.not_tested("the dense baseline has too few log intervals", "train the baseline longer")
    else:
        compared = _compare_speeds(speed, baseline.tokens_per_s, baseline, exempt, limits, gate)
    gate.require_steps(run, limits)
    return gate.build(f"{speed:,.0f} tokens/s{compared}")


def _compare_speeds(
    speed: float, dense: float, baseline: Run, exempt: str, limits: Thresholds, gate: GateBuilder
) -> str:
    """Judge tokens/s against the dense baseline's. exempt: why they may be fewer. Returns the ratio, for the gate."""
    ratio = speed / dense
    gate.add_evidence("dense twin", f"{dense:,.0f} tokens/s, ratio {ratio:.2f} ({baseline.folder.name})")
    if slow := slow_routes(baseline):
        gate.not_tested(
            f"the dense baseline ran on {slow}, so the comparison is not fair", "fix that and train it again"
        )
    if speed < limits.dense_ratio * dense and exempt:
        gate.not_applicable(f"{ratio:.2f}× dense, but {exempt}", STATE_A_TARGET)
    elif speed < limits.dense_ratio * dense:
        gate.fail(
            f"{ratio:.2f}× dense, below {limits.dense_ratio:g}×",
            "dense may be the better choice at this sequence length (see tercet plan); otherwise profile it",
        )
    return f", {ratio:.2f}× dense"


def _why_dense_may_be_faster(run: Run, limits: Thresholds) -> str:
    """Why nobody expects this run to be as fast as dense; empty if it must be. A stated target or ratio must be met."""
    if limits.tokens_per_s is not None or limits.dense_ratio != Thresholds.dense_ratio:
        return ""
    if set(run.attention) == {"dense"}:
        return "this run is dense itself"
    if not run.on_gpu:
        return ON_CPU
    seq_len = run.stages[-1].seq_len if run.stages else run.config.get("data.seq_len")
    if isinstance(seq_len, int) and seq_len < limits.dense_length:
        return f"at {seq_len:,} tokens dense is usually as fast or faster; compare from {limits.dense_length:,} on"
    return ""
