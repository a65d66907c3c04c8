"""The dense baseline of a run: which run qualifies, and the command that trains one."""

from __future__ import annotations

from tercet import hints
from tercet.model.config import NSA_ONLY, is_all_dense
from tercet.report.read import Run, with_defaults

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
