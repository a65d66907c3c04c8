"""Environment variables: numbers that torchrun sets, and warnings about `NSA_*`.

NSA_* variables configured the M7C scripts, the predecessor of Tercet. None of them is read. Each one that is set gets
a warning that names its replacement; docs/from-m7c.md has the details.
"""

from __future__ import annotations

from collections.abc import Mapping

from tercet.errors import UsageError

PREFIX = "NSA_"

# variable -> (the configuration key that replaced it, or None; an explanation)
REPLACEMENTS: dict[str, tuple[str | None, str]] = {
    "NSA_PREFILL_BATCHED": (None, "prefill is always batched"),
    "NSA_DISABLE_AUX_STATS": (
        None,
        "statistics stay on the device and are read at each log interval, set by log.every",
    ),
    "NSA_SEL_RANGES_V2": (None, "there is only one selection algorithm"),
    "NSA_USE_FA2": ("model.backend", "auto picks the fastest backend that runs here, and the log names it"),
    "NSA_DDP_STATIC_GRAPH": (None, "DDP always assumes a static graph"),
    "NSA_DDP_FIND_UNUSED": (None, "every parameter is used in every step"),
    "NSA_DDP_BUCKET_MB": (None, "DDP reduces 25 MB of gradients at a time"),
    "NSA_DDP_COMPRESS": ("parallel.gradient_compression", "none or bf16"),
    "NSA_FSDP_SHARDING": ("parallel.sharding", "full or grad_op, as before"),
    "NSA_FSDP_FORWARD_PREFETCH": (None, "FSDP gathers the weights of one block ahead"),
    "NSA_FSDP_LIMIT_ALL_GATHERS": (None, "FSDP2 frees memory in stream order and needs no limiter"),
    "NSA_ALLOW_SINGLE_RANK": ("parallel.allow_single_rank", "to use one GPU on purpose"),
    "NSA_MEM_DUMP_EVERY": (None, "memory is reported at startup and after the first step"),
    "NSA_TB_DISABLE": ("log.tensorboard", "--log.no_tensorboard turns it off"),
    "NSA_NVTX": ("profile.steps", "traces the given steps"),
    "NSA_ACCUM": ("train.tokens_per_step", "accumulation is derived from it"),
}


def launch_number(name: str, value: str, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value of a variable that torchrun sets, such as RANK."""
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 12 else -1
    if not least <= number <= most:
        raise UsageError(f"{name}={value!r} must be an integer from {least} to {most}: unset it, or use torchrun")
    return number


def environment_warnings(environment: Mapping[str, str]) -> list[str]:
    """One warning for each `NSA_*` variable that is set: its replacement, or why it needs none."""
    lines = []
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        key, why = REPLACEMENTS.get(name, (None, ""))
        instead = f"it has no replacement: {why}" if why else "Tercet takes no settings from the environment"
        instead = f"use {key} instead ({why})" if key else instead
        lines.append(f"{name}={environment[name]} is set but not read: {instead}")
    return lines
