"""`tercet plan`: estimate memory, time and FLOPs of a run from its configuration. No torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from tercet.config.schema import RunConfig
from tercet.config.sections import ParallelConfig, resolved_precision
from tercet.errors import TercetError, UsageError
from tercet.model import cost
from tercet.telemetry.hardware import (
    CPU_UTILISATION,
    GIB,
    GPU_UTILISATION,
    KNOWN,
    host_total_gib,
    measured_cpu_flops,
    peak_flops,
)
from tercet.telemetry.units import duration, quantity, size


@dataclass(frozen=True)
class Device:
    """The device to plan for. `flops`: peak FLOP/s, None if unknown."""

    name: str
    flops: float | None
    memory: int | None
    utilisation: float

    @property
    def is_gpu(self) -> bool:
        return self.utilisation == GPU_UTILISATION and self.name != "CPU"


@dataclass(frozen=True)
class CostPlan:
    """The estimated cost of a run."""

    parameters: cost.Parameters
    tokens_per_step: int
    accumulation: int
    tokens: int
    flops_per_token: float
    pairs: int
    dense_pairs: int
    memory: cost.Memory
    device: Device
    seconds: float | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        totals = {"parameters_total": self.parameters.total, "memory_total": self.memory.total}
        return {**asdict(self), **totals}


def find_device(wanted: str, gpu: str | None = None) -> Device:
    """The device that `run.device` selects on this machine, or the named GPU for a run elsewhere."""
    if gpu is not None:
        flops = peak_flops(gpu)
        if flops is None:
            raise UsageError(f"--gpu {gpu} is unknown: pick one of {', '.join(KNOWN)}")
        return Device(gpu.upper(), flops, None, GPU_UTILISATION)
    found = None if wanted == "cpu" else _nvidia_smi()
    if wanted == "cuda" and found is None:
        raise TercetError("run.device=cuda, but this machine has no GPU: name one with --gpu, e.g. --gpu H200")
    if found is not None:
        return found
    total = host_total_gib()
    return Device("CPU", measured_cpu_flops(), None if total is None else round(total * GIB), CPU_UTILISATION)


def make_plan(config: RunConfig, device: Device) -> CostPlan:
    """Estimate the cost of a run on this device."""
    model, parallel, length = config.model, config.parallel, config.data.seq_len
    low_precision = resolved_precision(config.train.precision, "cuda" if device.is_gpu else "cpu") == "bf16"
    shards = _shards(parallel)
    flops = cost.flops_per_token(model, length)
    tokens = config.train.steps * config.train.tokens_per_step
    # The known peak is bf16 on a GPU and fp32 on a CPU; it says nothing about the other precision.
    peak = device.flops if low_precision == device.is_gpu else None
    rate = None if peak is None else peak * device.utilisation * parallel.world_size
    kinds = model.attention_kinds
    memory = cost.memory(
        model,
        config.train.micro_batch * length // parallel.context,
        compute_bytes=2 if low_precision else 4,
        activation_checkpointing=config.train.activation_checkpointing,
        weight_shards=shards if parallel.sharding == "full" else 1,
        optimizer_shards=shards,
    )
    return CostPlan(
        parameters=cost.parameters(model),
        tokens_per_step=config.train.tokens_per_step,
        accumulation=config.accumulation,
        tokens=tokens,
        flops_per_token=flops,
        pairs=sum(cost.attention_pairs(model, kind, length).total for kind in kinds),
        dense_pairs=len(kinds) * cost.attention_pairs(model, "dense", length).total,
        memory=memory,
        device=device,
        seconds=None if rate is None else tokens * flops / rate,
        warnings=_warnings(config, memory, device),
    )


def render(config: RunConfig, plan: CostPlan) -> list[str]:
    """The plan as lines of text."""
    model, p, m = config.model, plan.parameters, plan.memory
    kinds = model.attention_kinds
    mix = kinds[0] if len(set(kinds)) == 1 else f"{kinds.count('nsa')} nsa + {kinds.count('dense')} dense"
    head = "tied head" if model.tie_embeddings else f"head {quantity(p.head)}"
    rows = {
        "model": f"{model.layers} layers ({mix}), dim {model.dim}, {model.heads} heads over {model.kv_heads} KV heads"
        f" of {model.head_dim}, ffn {model.ffn_dim}, vocabulary {model.vocab_size:,}",
        "parameters": f"{quantity(p.total)}: embedding {quantity(p.embedding)}, attention {quantity(p.attention)}, "
        f"ffn {quantity(p.ffn)}, norms {quantity(p.norms)}, {head}",
        "step": _step_line(config, plan),
        "run": f"{config.train.steps:,} steps, {quantity(plan.tokens)} tokens",
        "arithmetic": f"{quantity(plan.flops_per_token, 'FLOP')} per token, "
        f"{quantity(plan.flops_per_token * plan.tokens_per_step, 'FLOP')} per step, "
        f"{quantity(plan.flops_per_token * plan.tokens, 'FLOP')} in total (forward and backward)",
        "attention": _attention_line(plan),
        "memory": f"about {size(m.total)} per device at the peak of a step",
        "  weights": f"{size(m.weights)}, gradients {size(m.gradients)}, optimizer {size(m.optimizer)}, "
        f"compute copies {size(m.compute_copies)}",
        "  transient": f"activations {size(m.activations)} (activation_checkpointing="
        f"{config.train.activation_checkpointing}), logits and their gradients {size(m.loss)}",
        "device": _device_line(plan),
        "time": _time_line(plan),
    }
    notes = [("warning", text) for text in plan.warnings]
    if config.run.device == "auto" and not plan.device.is_gpu:
        notes.append(("hint", "no GPU found: plan for one with --gpu H200"))
    return [f"{name:<11} {text}" for name, text in (*rows.items(), *notes)]


def _warnings(config: RunConfig, memory: cost.Memory, device: Device) -> tuple[str, ...]:
    warnings = []
    if device.memory is not None and memory.total > device.memory:
        where = "" if device.is_gpu else " of this machine"
        warnings.append(
            f"{size(memory.total)} may not fit in the {size(device.memory)}{where}: lower train.micro_batch "
            "(accumulation follows), or set train.activation_checkpointing to selective or full"
        )
    if (warning := config.data.shuffle_warning(config.data.max_vocab(config.model.vocab_size))) is not None:
        warnings.append(warning)
    return tuple(warnings)


def _shards(parallel: ParallelConfig) -> int:
    """Number of devices that share one copy of the weights."""
    if parallel.strategy == "hsdp":
        return parallel.shard_ranks or parallel.world_size
    sharded = parallel.strategy == "fsdp" or (parallel.strategy == "cp" and parallel.context_weights == "sharded")
    return parallel.world_size if sharded else 1


def _step_line(config: RunConfig, plan: CostPlan) -> str:
    ranks, sequences, passes = config.parallel.data_ranks, config.train.micro_batch, plan.accumulation
    parts = [
        *([f"{ranks} ranks"] if ranks > 1 else []),
        f"{sequences} sequence{'s' * (sequences > 1)}",
        f"{config.data.seq_len:,} tokens",
        *([f"{passes} passes"] if passes > 1 else []),
    ]
    shared = f", each sequence over {config.parallel.context} ranks" if config.parallel.context > 1 else ""
    return f"{plan.tokens_per_step:,} tokens = {' × '.join(parts)}{shared}"


def _attention_line(plan: CostPlan) -> str:
    if plan.pairs == plan.dense_pairs:
        return "dense: every query reads all earlier tokens"
    ratio = plan.dense_pairs / plan.pairs
    compared = f"{ratio:.1f}× fewer" if ratio >= 1 else f"{1 / ratio:.2f}× more"
    return f"{compared} query-key pairs than dense attention at this length"


def _device_line(plan: CostPlan) -> str:
    device = plan.device
    speed = "peak unknown" if device.flops is None else f"{quantity(device.flops, 'FLOP/s')}"
    basis = "" if device.flops is None else (" (bf16 peak)" if device.is_gpu else " (measured, fp32 matmul)")
    memory = "" if device.memory is None else f", {size(device.memory)}"
    return f"{device.name}: {speed}{basis}{memory}"


def _time_line(plan: CostPlan) -> str:
    if plan.seconds is None and plan.device.flops is not None:
        known, used = ("bf16", "fp32") if plan.device.is_gpu else ("fp32", "bf16")
        return f"not estimated: only the {known} peak of this device is known, not {used}; measure with a short run"
    if plan.seconds is None:
        return "not estimated: the peak of this device is unknown; measure with a short run"
    rate = plan.tokens / plan.seconds
    share = f"{plan.device.utilisation:.0%} of the device's peak"
    return f"about {duration(plan.seconds)} at {rate:,.0f} tokens/s, if steps reach {share}"


def _nvidia_smi() -> Device | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode or not answer.stdout.strip():
        return None
    name, mib = (part.strip() for part in answer.stdout.splitlines()[0].rsplit(",", 1))
    return Device(name, peak_flops(name), int(mib) * 2**20 if mib.isdigit() else None, GPU_UTILISATION)
