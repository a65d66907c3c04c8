"""Settings that earlier versions had: what a stored value of one means now.

A value that only changed what a run printed or how long it waited is ignored, with a note. One that changed the numbers
of a run is refused: in a file, and in the checkpoint that a run resumes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from tercet.config.sections import HealthRule
from tercet.errors import first_few


class Retired(NamedTuple):
    """A key of an earlier version."""

    since: str
    value: Any
    """What is in force now."""
    meaning: str
    """What took its place, as the end of a sentence."""
    refused: tuple[Any, ...] | None = ()
    """Values that mattered; None: all but `value`."""

    def matters(self, value: Any) -> bool:
        return value in self.refused if self.refused is not None else value not in (self.value, _stored(self.value))


_THRESHOLD = "the thresholds of the health rules are fixed"
RETIRED: dict[str, Retired] = {
    **{
        f"health.{rule}": Retired("0.3", "warn", f'it warns; to stop the run, set health.halt = ["{rule}"]', ("halt",))
        for rule in get_args(HealthRule)
    },
    **{
        f"health.{key}": Retired("0.3", value, _THRESHOLD)
        for key, value in {
            "gate_collapse_share": 0.5, "dead_branch_share": 0.01, "selection_forced_share": 0.98,
            "selection_overlap": 0.9995, "patience": 3, "loss_spike_nats": 0.5, "loss_spike_deviations": 8.0,
            "loss_window": 50, "zero_grad_norm": 1e-12, "throughput_share": 0.6, "data_wait_share": 0.2,
        }.items()
    },
    "health.memory_every": Retired("0.3", 0, "memory is reported at startup and after the first step"),
    "health.stall_factor": Retired("0.3", 5.0, "five times the median interval counts as a stall"),
    "health.stall_start_seconds": Retired("0.3", 900.0, "the first step has 15 minutes, or health.stall_seconds"),
    "log.progress": Retired("0.3", "auto", "a live line on a terminal, plain lines elsewhere"),
    "profile.memory": Retired("0.3", True, "allocations are always recorded"),
    "profile.stacks": Retired("0.3", False, "Python stacks are not recorded"),
    "profile.rows": Retired("0.3", 40, "the kernel table has 40 rows"),
    "parallel.static_graph": Retired("0.3", True, "DDP always assumes a static graph"),
    "parallel.bucket_mb": Retired("0.3", 25.0, "DDP reduces 25 MB of gradients at a time"),
    "parallel.context_fetch": Retired("0.3", "documents", "all keys of a document are fetched; drop it", ("blocks",)),
    "parallel.prefetch": Retired("0.3", 1, "FSDP gathers the weights of one block ahead"),
    "parallel.context_weights": Retired("0.3", "sharded", "weights are sharded over all ranks"),
    "parallel.backend": Retired("0.3", "auto", "NCCL between GPUs, gloo between CPUs and ranks that share a GPU"),
    "parallel.reduce_dtype": Retired(
        "0.3", "fp32", "use parallel.gradient_compression, which now applies to sharded weights too", None
    ),
    "parallel.arrival_seconds": Retired("0.3", 300.0, "parallel.timeout_seconds also holds at startup"),
    "parallel.first_step_seconds": Retired("0.3", 1800.0, "30 minutes, or parallel.timeout_seconds if longer"),
    "train.eps": Retired("0.3", 1e-8, "AdamW's epsilon is fixed", None),
    "train.sample_temperature": Retired("0.3", 0.7, "samples have temperature 0.7; `tercet generate` has an option"),
    "train.max_skipped_in_row": Retired("0.3", 5, "at most 5 in a row; train.max_skipped sets how many in all"),
    "train.selector.weight": Retired("0.3", 1.0, "the selectors' loss has the weight 1; set train.selector.lr", None),
    "train.muon.momentum": Retired("0.3", 0.95, "Muon's momentum is fixed", None),
    "train.muon.nesterov": Retired("0.3", True, "Muon always has Nesterov momentum", None),
    "train.muon.weight_decay": Retired("0.3", None, "Muon uses train.weight_decay", None),
    "train.muon.adjust_lr_fn": Retired("0.3", "match_rms_adamw", "updates have the size of AdamW's", None),
    "train.selector.weight_decay": Retired("0.3", 0.01, "the selectors' weight decay is fixed", None),
    "train.selector.clip": Retired("0.3", 1.0, "the selectors' clipping norm is fixed", None),
}  # fmt: skip

# Values that are gone, of keys that are not.
RETIRED_VALUES: dict[tuple[str, Any], str] = {
    ("model.selector", "random"): "use compressed, own or learned",
    ("parallel.gradient_compression", "fp16"): "use bf16 or none",
}


def without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Stored settings (dotted key -> value) without the retired ones."""
    return {key: value for key, value in values.items() if key not in RETIRED}


def refused(values: Mapping[str, Any]) -> list[str]:
    """Stored settings with a retired value that mattered, one sentence each."""
    keys = [(key, values[key], RETIRED[key]) for key in values if key in RETIRED]
    found = [f"{key}={_shown(v)} is not supported since {r.since}: {r.meaning}" for key, v, r in keys if r.matters(v)]
    gone = [(key, value) for key, value in RETIRED_VALUES if values.get(key) == value]
    return found + [f"{key}={value} is not supported since 0.3: {RETIRED_VALUES[key, value]}" for key, value in gone]


def ignored(values: Mapping[str, Any]) -> str | None:
    """One line about the retired settings among these, with those that differ from what is in force now."""
    keys = [key for key in values if key in RETIRED]
    if not keys:
        return None
    changed = [key for key in keys if values[key] not in (RETIRED[key].value, _stored(RETIRED[key].value))]
    what = [f"{key}={_shown(values[key])} ({RETIRED[key].meaning})" for key in changed]
    return f"ignored {len(keys)} settings of an earlier version" + (f": {first_few(what)}" if what else "")


def _stored(value: Any) -> Any:
    """TOML has no null."""
    return "none" if value is None else value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
