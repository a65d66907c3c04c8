"""The gates that look inside: routing, selection health, fallbacks, numerics."""

from __future__ import annotations

import math
from collections import Counter

from tercet.report.gates import Case, Gate, Thresholds, skipped_steps
from tercet.report.read import Run, fastest, route_counts, uncounted
from tercet.telemetry.events import DoctorReported, HealthFired, RecordingFailed

PARITY = "kernel parity"


def kinds(run: Run) -> list[str]:
    """Attention of each layer, as configured."""
    asked, layers = run.config.get("model.attention", "nsa"), run.config.get("model.layers")
    if isinstance(asked, list):
        return [str(k) for k in asked]
    return [str(asked)] * layers if isinstance(layers, int) else []


def routing(run: Run, limits: Thresholds) -> Gate:
    """Which kernel each branch of each layer really ran."""
    case = Case("routing", "every branch of every layer on its kernel, in every pass", "routes")
    counts = route_counts(run)
    if not counts:
        case.lacks("no pass was counted", "")
        return case.close("")
    for (branch, route), calls in sorted(_by(counts, 1, 2).items()):
        case.show(str(branch), f"{route}: {calls:,} passes")
    if unknown := uncounted(run):
        case.show("not counted", unknown)
    told = kinds(run)
    seen = {layer for layer, *_ in counts}
    missing = [i for i in range(len(told)) if i not in seen]
    if missing or not told:
        case.lacks(f"layers {missing or 'of an unknown number'} were not counted", "")
    if not run.on_gpu:
        case.lacks("it ran on a CPU, where there are no kernels to run", "run it on the GPU that you mean to use")
        return case.close("")
    slow = [
        (layer, branch, route, reason)
        for (layer, branch, route, reason, _), calls in sorted(counts.items())
        if calls and not fastest(branch, route)
    ]
    for layer, branch, route, reason in slow[:3]:
        case.against(f"layer {layer} ran its {branch} branch on {route} ({reason or 'no reason given'})", _mend(reason))
    if len(slow) > 3:
        case.against(f"and {len(slow) - 3} more", "")
    _enough(run, limits, case)
    return case.close(f"{len(seen)} layers, all branches on their kernels{unknown and f'; {unknown}'}")


def fallbacks(run: Run, limits: Thresholds) -> Gate:
    """Nothing slower was taken in silence."""
    case = Case("fallbacks", "0 passes on a slower backend than the device has, unasked", "routes")
    counts = route_counts(run)
    total = sum(counts.values())
    taken = sum(calls for (*_, fallback), calls in counts.items() if fallback)
    case.show("passes", f"{total:,}")
    if unknown := uncounted(run):
        case.show("not counted", unknown)
    case.show("fallbacks", f"{taken:,}")
    if lost := len(run.of(RecordingFailed)):  # train.cuda_graph=auto allows it
        case.show("recordings that failed", f"{lost:,}")
    if not counts:
        case.lacks("no pass was counted", "")
    if taken:
        reasons = Counter[str]()
        for (_, _, _, reason, fallback), calls in counts.items():
            reasons[reason] += calls if fallback else 0
        for reason, calls in reasons.most_common(3):
            if calls:
                case.against(f"{calls:,} passes fell back: {reason}", _mend(reason))
    if not run.on_gpu:
        case.lacks("on a CPU there is nothing to fall back from", "run it on the GPU that you mean to use")
    _enough(run, limits, case)
    return case.close(f"none in {unknown or f'{total:,} passes'}")


def selection(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Gates and selection of every layer do their work."""
    case = Case(
        "selection health",
        f"a collapsed gate or a dead branch in at most {limits.lone_branch_layers:.0%} of the layers, no selection "
        f"that is stuck in any; at least {limits.readings} readings of all layers",
        "gates",
    )
    told = kinds(run)
    sparse = [i for i, k in enumerate(told) if k == "nsa"]
    if told and not sparse:
        case.lacks("no layer has sparse attention", "")
        return case.close("")
    whole = [e for e in run.layers if sparse and all(_told(e, i) for i in sparse)]
    case.show("readings", f"{len(whole)} of all {len(sparse)} layers")
    if whole:
        last = whole[-1]
        for branch in ("compressed", "selected", "window"):
            shares = [getattr(last, f"gate_share_{branch}")[i] for i in sparse]
            case.show(f"{branch} share", f"{100 * min(shares):.1f}% to {100 * max(shares):.1f}% over layers")
        case.show(
            "collapsed", f"at most {100 * max(last.gate_collapse[i] or 0 for i in sparse):.1f}% of tokens and heads"
        )
        forced = [last.selected_forced[i] for i in sparse if last.selected_forced[i] is not None]
        if forced:
            case.show("forced blocks", f"{100 * max(f for f in forced if f is not None):.1f}% of selected ones")
    mends = {
        "gate_collapse": "lower train.lr, or try model.gate=softmax",
        "dead_branch": "leave that branch out on purpose, or see whether its keys get gradients",
        "selection_stuck": "raise model.nsa.select_count above the forced blocks, or data.seq_len",
    }
    # Layers share the work out: in the best model that we have trained the first one reads its window alone. What
    # counts is how many have something, whichever of the two it is.
    ill = {f.layer for f in findings if f.rule in ("gate_collapse", "dead_branch")}
    few = None not in ill and len(ill) <= limits.lone_branch_layers * len(sparse)
    for rule, mend in mends.items():
        found = [f for f in findings if f.rule == rule]
        if not found:
            continue
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        told_of = f"{found[0].sentence} from step {found[0].step} on{more}"
        if few and rule != "selection_stuck":
            layers = len({f.layer for f in found})
            case.show(rule.replace("_", " "), f"{told_of}: {layers} of {len(sparse)} layers")
        else:
            case.against(told_of, mend)
    if any(not math.isfinite(v) for e in run.layers for v in e.gate_entropy if v is not None):
        case.against("the gates were not finite", "see the numerics gate")
    if len(whole) < limits.readings:
        case.lacks(f"all layers were read {len(whole)} times, {limits.readings} are needed", "train for longer")
    _enough(run, limits, case)
    return case.close(_healthy(sorted(i for i in ill if i is not None), len(sparse), limits))


def _healthy(ill: list[int], layers: int, limits: Thresholds) -> str:
    do = "use their branches and choose their blocks"
    if not ill:
        return f"{layers} layers {do}"
    names = f"layer {ill[0]} does" if len(ill) == 1 else f"layers {', '.join(map(str, ill))} do"
    return f"{layers - len(ill)} of {layers} layers {do}; {names} not (up to {limits.lone_branch_layers:.0%} may)"


def numerics(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """The numbers are numbers, and those that the kernels should give."""
    case = Case(
        "numerics",
        "0 non-finite steps, no zero gradients, weights kept in fp32, kernels agree with the reference on this device",
        "grad_norm",
    )
    skipped = skipped_steps(run)
    case.show("non-finite steps", skipped)
    if skipped:
        case.against(f"{skipped} steps were not finite", "look into nonfinite/ in the run folder; lower train.lr")
    for finding in (f for f in findings if f.rule == "zero_grad"):
        case.against(finding.sentence, "see that the loss depends on the weights")
    norms = [n for e in run.steps for n in e.grad_norms]
    if norms:
        finite = [n for n in norms if math.isfinite(n)]
        case.show("gradient norm", f"{min(finite, default=0):.3g} to {max(finite, default=0):.3g}")
        if len(finite) < len(norms) and not skipped:
            case.against(f"{len(norms) - len(finite)} gradient norms were not finite", "lower train.lr")
    else:
        case.lacks("no gradient norm was logged", "train for longer")
    weights = run.dtypes.get("parameters")
    if weights is None:
        case.lacks("dtypes_report.txt is missing", "")
    else:
        case.show("weights", weights)
        case.show("compute", run.dtypes.get("compute", "unknown"))
        if any(not part.strip().startswith("float32") for part in weights.split(",")):
            case.against(f"weights are kept as {weights}", "keep them in fp32: small updates vanish otherwise")
    if run.validations and not math.isfinite(run.validations[-1].loss):
        case.against("the validation loss is not finite", "")
    _parity(run, case)
    _enough(run, limits, case)
    return case.close("all finite, gradients alive, weights in fp32")


def _parity(run: Run, case: Case) -> None:
    if not run.on_gpu or "nsa" not in kinds(run):
        case.show(PARITY, "no kernels ran")
        return
    told = [dict(zip(e.check, zip(e.verdict, e.finding, strict=True), strict=True)) for e in run.of(DoctorReported)]
    found = [t[PARITY] for t in told if PARITY in t]
    if not found:
        case.lacks("kernels were not compared with the reference on this device", "leave health.doctor on")
        return
    verdict, finding = found[-1]
    case.show(PARITY, f"{verdict}: {finding}")
    if verdict == "failed":
        case.against(f"kernels disagree with the reference: {finding}", "tercet doctor; use model.backend=reference")
    elif verdict != "ok":
        case.lacks(f"kernel parity: {finding}", "tercet doctor")


def _told(event: object, layer: int) -> bool:
    return all(
        len(getattr(event, name)) > layer and getattr(event, name)[layer] is not None
        for name in ("gate_share_compressed", "gate_share_selected", "gate_share_window", "gate_collapse")
    )


def _enough(run: Run, limits: Thresholds, case: Case) -> None:
    if run.step < limits.min_steps:
        case.lacks(f"only {run.step} steps were made, {limits.min_steps} are needed", "train for longer")


def _by(counts: Counter[tuple[int, str, str, str, bool]], *fields: int) -> Counter[tuple[object, ...]]:
    grouped: Counter[tuple[object, ...]] = Counter()
    for key, calls in counts.items():
        grouped[tuple(key[f] for f in fields)] += calls
    return grouped


def _mend(reason: str) -> str:
    return "drop model.backend=reference" if reason == "asked for" else "mend what the reason names; tercet doctor"
