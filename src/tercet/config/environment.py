"""Switches of the scripts that came before, which lived in the environment: none of them is read, each is answered.

An `NSA_*` variable that is set gets one line that names what replaced it. docs/from-m7c.md tells the same at length.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "NSA_"

# variable -> (config key or flag that replaced it, or None; what to know)
ANSWERS: dict[str, tuple[str | None, str]] = {
    "NSA_PREFILL_BATCHED": (None, "prefill is always batched; there is no slow path to choose"),
    "NSA_DISABLE_AUX_STATS": (
        None,
        "statistics stay on the device and are read at each log interval; log.every says how often",
    ),
    "NSA_SEL_RANGES_V2": (None, "there is one selection, the one of the specification"),
    "NSA_USE_FA2": ("model.backend", "auto takes the fastest that can run here; the log says which one ran"),
    "NSA_DDP_STATIC_GRAPH": (
        "parallel.static_graph",
        "it is safe here: activation checkpointing recomputes the block that it belongs to",
    ),
    "NSA_DDP_FIND_UNUSED": (None, "every parameter takes part in every step, so there are none to find"),
    "NSA_DDP_BUCKET_MB": ("parallel.bucket_mb", "megabytes of gradients per all-reduce"),
    "NSA_DDP_COMPRESS": ("parallel.gradient_compression", "none, bf16 or fp16"),
    "NSA_FSDP_SHARDING": ("parallel.sharding", "full or grad_op, as before"),
    "NSA_FSDP_FORWARD_PREFETCH": ("parallel.prefetch", "how many blocks ahead; 0 is off"),
    "NSA_FSDP_LIMIT_ALL_GATHERS": (None, "FSDP2 frees memory in stream order and needs no limiter"),
    "NSA_ALLOW_SINGLE_RANK": ("parallel.allow_single_rank", "for those who mean it"),
    "NSA_MEM_DUMP_EVERY": ("health.memory_every", "steps between mem_stepN.json files"),
    "NSA_TB_DISABLE": ("log.tensorboard", "--log.no_tensorboard turns it off"),
    "NSA_NVTX": ("profile.steps", "a trace with balanced ranges, which ends by itself"),
    "NSA_ACCUM": ("train.tokens_per_step", "accumulation is derived from it"),
}


def environment_warnings(environment: Mapping[str, str]) -> list[str]:
    """One line for each `NSA_*` variable that is set."""
    return [answer(name, environment[name]) for name in sorted(environment) if name.startswith(PREFIX)]


def answer(name: str, value: str) -> str:
    """What became of one variable."""
    if name not in ANSWERS:
        return f"{name}={value} is set but not read: Tercet takes no settings from the environment"
    key, why = ANSWERS[name]
    instead = f"use {key} instead ({why})" if key else f"it has no successor: {why}"
    return f"{name}={value} is set but not read: {instead}"
