"""Does a step of a run fit in a device's memory and, if not, which settings would make it fit? Estimates; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic import ValidationError

from tercet.config.keys import flatten, nest
from tercet.config.schema import RunConfig
from tercet.config.sections import ParallelConfig, resolved_precision
from tercet.doctor.machine import NOT_TESTED, OK, WARNING, Finding
from tercet.model import cost
from tercet.telemetry.hardware import GIB, host_memory
from tercet.terminal import size

_MODES = ("none", "selective", "full")
_MAX_RANKS = 64
_STAGE_KEYS = ("train.micro_batch", "train.tokens_per_step", "data.seq_len")  # of a stage's own, if it has them
Flags = dict[str, Any]


@dataclass(frozen=True)
class Fix:
    """Settings (dotted key -> value) with which a step fits, and its memory with them."""

    flags: Flags
    memory: int

    def text(self, run: RunConfig, stage: int) -> str:
        """The settings as flags, or as fields of the stage, from 0, if the run has stages."""
        words = [
            f"{key.partition('.')[2]}={value} in stage {stage + 1}"
            if run.train.stages and key in _STAGE_KEYS
            else f"--{key} {value}"
            for key, value in self.flags.items()
            if key != "parallel.world_size"
        ]
        ranks = self.flags.get("parallel.world_size")
        return " ".join([*([f"torchrun --nproc-per-node={ranks} …"] if ranks else []), *words])


def step_memory(config: RunConfig, precision: str) -> cost.Memory:
    """Estimated bytes on one device at the peak of a step. precision: bf16 or fp32."""
    parallel = config.parallel
    shards = _shards(parallel)
    return cost.memory(
        config.model,
        config.train.micro_batch * config.data.seq_len // parallel.context,
        config.data.seq_len,
        compute_bytes=2 if precision == "bf16" else 4,
        activation_checkpointing=config.train.activation_checkpointing,
        weight_shards=shards if parallel.sharding == "full" else 1,
        optimizer_shards=shards,
        optimizer=config.train.optimizer,
        selectors_only=config.train.selector.only,
    )


def largest_stage(run: RunConfig, precision: str) -> tuple[int, RunConfig]:
    """The stage of train.stages whose steps need the most memory: its index and configuration."""
    return max(enumerate(run.stages), key=lambda stage: step_memory(stage[1], precision).total)


def usable(available: int) -> int:
    """What a step may take of a device's memory: the rest is for the CUDA context, workspaces and fragmentation."""
    return max(0, round(0.95 * available - 0.75 * GIB))


def device_memory(device: Any) -> int | None:
    """Bytes of memory on a GPU, or of the machine for a run on its CPU; None if unknown."""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()


def fits(needed: int, available: int) -> bool:
    return needed <= usable(available)


def find_fixes(config: RunConfig, precision: str, available: int, *, on_gpu: bool) -> list[Fix]:
    """Up to three different ways to make a step fit, those that change the least first."""
    batch, mode, parallel = config.train.micro_batch, config.train.activation_checkpointing, config.parallel
    sequences, length, layers = config.accumulation * batch, config.data.seq_len, config.model.layers  # per rank
    batches: list[Flags] = [{"train.micro_batch": n} for n in range(batch - 1, 0, -1) if sequences % n == 0]
    modes: list[Flags] = [{"train.activation_checkpointing": m} for m in _MODES[_MODES.index(mode) + 1 :]]

    def first(candidates: Iterable[Flags]) -> list[Fix]:
        changed = (with_flags(config, flags, precision) for flags in candidates)
        return [*islice((fix for fix in changed if fix is not None and fits(fix.memory, available)), 1)]

    smallest: Flags = {**(batches[-1] if batches else {}), **(modes[-1] if modes else {})}
    fixes = first(batches) + first(modes) or first(m | b for m in modes for b in batches)
    sharded = "fsdp" if parallel.strategy in ("single", "ddp") else parallel.strategy
    for group in (
        _more_ranks(parallel, sharded) if on_gpu else [],  # ranks on a CPU share its memory
        _more_ranks(parallel, "cp") if on_gpu and parallel.strategy != "cp" else [],
        [{"data.seq_len": length >> n} for n in range(1, length.bit_length()) if length >> n >= 256],
        [{"model.layers": n} for n in range(layers - 1, 0, -1)],
    ):
        if len(fixes) < 3:
            fixes += first(flags | more for more in ({}, *batches, smallest) for flags in group)
    return fixes[:3]


def savings(run: RunConfig, stage: int, precision: str, *, on_gpu: bool) -> list[str]:
    """Up to three settings with which a step of this stage needs less memory, and how much less."""
    config = run.stages[stage]
    batch, needed = config.train.micro_batch, step_memory(config, precision).total
    # The ones that change the least first; accumulation follows a smaller micro-batch.
    changes: list[Flags] = [{"train.micro_batch": n} for n in range(batch // 2, 0, -1) if batch % n == 0][:1]
    changes += [{"train.activation_checkpointing": "full"}, {"data.seq_len": config.data.seq_len // 2}]
    changes += _more_ranks(config.parallel, "fsdp")[:1] if on_gpu else []
    changes += [{"model.layers": config.model.layers // 2}]
    fixes = [with_flags(config, change, precision) for change in changes]
    found = [(needed - fix.memory, fix.text(run, stage)) for fix in fixes if fix is not None and fix.memory < needed]
    return [f"{text} saves about {size(saved)}" for saved, text in sorted(found[:3], reverse=True)]


def shortage(run: RunConfig, precision: str, available: int, *, on_gpu: bool) -> str | None:
    """One sentence for a step that does not fit, with the settings that would make it fit; None if it fits."""
    index, config = largest_stage(run, precision)
    needed = step_memory(config, precision).total
    if fits(needed, available):
        return None
    fixes = " or ".join(fix.text(run, index) for fix in find_fixes(config, precision, available, on_gpu=on_gpu))
    fix = f"{fixes} would make it fit" if fixes else "use a smaller model, or a device with more memory"
    step = f"a step of stage {index + 1}" if run.train.stages else "a step"
    return f"{step} needs about {size(needed)}, and {size(usable(available))} of {size(available)} are usable: {fix}"


def memory(config: RunConfig) -> Finding:
    """A step of the run on this machine's device."""
    import torch

    cuda = torch.cuda.is_available() and config.run.device != "cpu"
    total = device_memory("cuda:0" if cuda else "cpu")
    if total is None:
        return Finding("memory", NOT_TESTED, "the memory of this machine is unknown")
    precision = resolved_precision(config.train.precision, "cuda" if cuda else "cpu")
    if (problem := shortage(config, precision, total, on_gpu=cuda)) is not None:
        finding, _, fix = problem.partition(": ")
        return Finding("memory", WARNING, finding, fix)
    needed = step_memory(largest_stage(config, precision)[1], precision).total
    return Finding("memory", OK, f"a step needs about {size(needed)} of {size(total)}")


def with_flags(config: RunConfig, flags: Flags, precision: str) -> Fix | None:
    """These settings and the memory of a step with them; None if they are not valid, e.g. a batch size that does not
    divide the step."""
    try:
        changed = RunConfig.model_validate(nest(flatten(config) | flags))
    except ValidationError:
        return None
    return Fix(flags, step_memory(changed, precision).total)


def _more_ranks(parallel: ParallelConfig, strategy: str) -> list[Flags]:
    ranks = [2**n for n in range(1, _MAX_RANKS.bit_length()) if 2**n > parallel.world_size]
    return [{"parallel.strategy": strategy, "parallel.world_size": n} for n in ranks]


def _shards(parallel: ParallelConfig) -> int:
    """Number of devices that share one copy of the weights."""
    if parallel.strategy == "hsdp":
        return parallel.shard_ranks or parallel.world_size
    return parallel.world_size if parallel.strategy in ("fsdp", "cp") else 1
