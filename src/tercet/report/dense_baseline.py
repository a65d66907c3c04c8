"""The dense twin of a run: what makes another run one, and how to train it."""

from __future__ import annotations

from shlex import quote

from tercet.config.keys import flatten
from tercet.config.schema import RunConfig
from tercet.model.config import NSA_ONLY
from tercet.report.read import Run, fastest, route_counts
from tercet.typed import typed


def twin_command(run: Run) -> str:
    preset = next((o.removeprefix("preset ") for o in run.origins.values() if o.startswith("preset ")), None)
    what = f"--preset {preset}" if preset else f"--config {quote(f'{run.folder}/config.toml')}"
    dense = quote(f"{run.folder}-dense")
    return (
        f"{typed()} train {what} --model.attention dense --run.dir {dense}, then "
        f"{typed()} report {quote(str(run.folder))} --baseline {dense}"
    )


# What may differ between a model and its dense twin.
_ATTENTION_ONLY = ("model.attention", *(f"model.{key}" for key in NSA_ONLY))
_THE_SAME = ("model.", "data.seq_len", "train.tokens_per_step", "train.micro_batch", "train.precision",
             "train.compile", "train.activation_checkpointing", "parallel.")  # fmt: skip


def not_a_twin(run: Run, twin: Run) -> str:
    """Why `twin` is not `run` with dense attention; empty if it is."""
    kinds = twin.config.get("model.attention")
    if not (kinds == "dense" or (isinstance(kinds, list) and set(kinds) == {"dense"})):
        return f"its model.attention is {kinds}"
    if not run.started or not twin.started or run.started[-1].device != twin.started[-1].device:
        return "it ran on another device"
    if run.world_size != twin.world_size:
        return "it ran on another number of ranks"
    return _differing(run, twin, _THE_SAME, _ATTENTION_ONLY)


# What else decides what a run has learnt after a step.
_LEARNING = ("data.", "train.", "run.seed")
_NOT_LEARNING = ("data.prefetch", "train.val_every", "train.sample_", "train.max_skipped")


def learnt_otherwise(run: Run, twin: Run) -> str:
    """Why the losses of a run and its twin cannot be held against each other; empty if they can."""
    return not_a_twin(run, twin) or _differing(run, twin, _LEARNING, _NOT_LEARNING)


def _differing(run: Run, twin: Run, the_same: tuple[str, ...], but: tuple[str, ...]) -> str:
    defaults = flatten(RunConfig())  # a key that came to be between the two runs had its default before
    for key in sorted(set(run.config) | set(twin.config)):
        here, there = (r.config.get(key, defaults.get(key)) for r in (run, twin))
        if key.startswith(the_same) and not key.startswith(but) and here != there:
            return f"{key} is {there} there and {here} here"
    return ""


def slow_routes(twin: Run) -> str:
    """What a dense twin ran on although dense attention has something quicker; empty if nothing."""
    counts = route_counts(twin)
    if not counts:
        return "nobody knows what (no pass was counted)"
    slow = {
        f"{route} ({reason or 'no reason given'})"
        for (_, branch, route, reason, _), calls in counts.items()
        if calls and not fastest(branch, route)
    }
    return ", ".join(sorted(slow))
