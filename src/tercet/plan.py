"""`tercet plan`: estimate memory, time and FLOPs of a run from its configuration. No torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tercet.config.schema import RunConfig, kernel_warning, uses_cuda_graph
from tercet.config.sections import resolved_precision
from tercet.doctor.memory import Fix, find_fixes, fits, largest_stage, step_memory, usable
from tercet.errors import TercetError, UsageError
from tercet.model import cost
from tercet.telemetry.hardware import (
    CPU_UTILISATION,
    GIB,
    GPU_UTILISATION,
    GPUS,
    find_gpu,
    host_memory,
    measured_cpu_flops,
    peak_flops,
)
from tercet.terminal import duration, plural, quantity, size


@dataclass(frozen=True)
class Device:
    """The device to plan for. `flops`: peak FLOP/s, None if unknown."""

    name: str
    flops: float | None
    memory: int | None
    utilisation: float

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"

    @property
    def type(self) -> str:
        return "cuda" if self.is_gpu else "cpu"


@dataclass(frozen=True)
class StagePlan:
    """The estimated cost of one stage of train.stages."""

    seq_len: int
    steps: int
    micro_batch: int
    accumulation: int
    tokens_per_step: int
    rope_theta: float
    flops_per_token: float
    memory_total: int
    seconds: float | None


@dataclass(frozen=True)
class CostPlan:
    """The estimated cost of a run. With stages, memory and batch are those of the stage that needs the most memory,
    and flops_per_token is a mean."""

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
    fits: bool | None  # None if the device's memory is unknown
    fixes: tuple[Fix, ...]  # settings that would make it fit
    stages: tuple[StagePlan, ...]  # one, if there is no train.stages

    def as_dict(self) -> dict[str, Any]:
        totals = {"parameters_total": self.parameters.total, "memory_total": self.memory.total}
        return {**asdict(self), **totals}


def find_device(wanted: str, gpu: str | None = None) -> Device:
    """The device that `run.device` selects on this machine, or the named GPU for a run elsewhere."""
    if gpu is not None:
        return _named_gpu(gpu)
    found = None if wanted == "cpu" else _nvidia_smi()
    if wanted == "cuda" and found is None:
        raise TercetError("run.device=cuda, but this machine has no GPU: name one with --gpu, e.g. --gpu H200")
    if found is not None:
        return found
    return Device("CPU", measured_cpu_flops(), host_memory(), CPU_UTILISATION)


def make_plan(config: RunConfig, device: Device) -> CostPlan:
    """Estimate the cost of a run on this device. Refuses a CUDA graph and a backend where training does."""
    uses_cuda_graph(config, device.type)
    model, parallel = config.model, config.parallel
    shuffle = config.largest_shuffle.shuffle_warning(config.data.max_vocab(model.vocab_size))
    precision = resolved_precision(config.train.precision, device.type)
    # The known peak is bf16 on a GPU and fp32 on a CPU; it says nothing about the other precision.
    peak = device.flops if (precision == "bf16") == device.is_gpu else None
    rate = None if peak is None else peak * device.utilisation * parallel.world_size
    stages = []
    for stage, steps in zip(config.stages, config.train.stage_steps, strict=True):
        length, tokens = stage.data.seq_len, stage.train.tokens_per_step
        flops = cost.flops_per_token(model, length, selectors_only=stage.train.selector.only)
        stages.append(StagePlan(
            length, steps, stage.train.micro_batch, stage.accumulation, tokens, stage.model.rope_theta, flops,
            step_memory(stage, precision).total, None if rate is None else steps * tokens * flops / rate,
        ))  # fmt: skip
    largest = largest_stage(config, precision)[1]
    memory, length = step_memory(largest, precision), largest.data.seq_len
    fit = None if device.memory is None else fits(memory.total, device.memory)
    fixes = find_fixes(largest, precision, device.memory or 0, on_gpu=device.is_gpu) if fit is False else []
    return CostPlan(
        parameters=cost.parameters(model),
        tokens_per_step=largest.train.tokens_per_step,
        accumulation=largest.accumulation,
        tokens=config.total_tokens,
        flops_per_token=sum(s.steps * s.tokens_per_step * s.flops_per_token for s in stages) / config.total_tokens,
        pairs=sum(cost.attention_pairs(model, kind, length).total for kind in model.attention_kinds),
        dense_pairs=model.layers * cost.attention_pairs(model, "dense", length).total,
        memory=memory,
        device=device,
        seconds=None if rate is None else sum(stage.seconds or 0 for stage in stages),
        warnings=tuple(text for text in (shuffle, kernel_warning(config, device.type)) if text is not None),
        fits=fit,
        fixes=tuple(fixes),
        stages=tuple(stages),
    )


def render(config: RunConfig, plan: CostPlan) -> list[str]:
    """The plan as lines of text."""
    model, p, m = config.model, plan.parameters, plan.memory
    kinds = model.attention_names
    counts = Counter(kinds)
    mix = kinds[0] if len(counts) == 1 else " + ".join(f"{counts[kind]} {kind}" for kind in counts)
    head = "tied head" if model.tie_embeddings else f"head {quantity(p.head)}"
    largest = max(range(len(plan.stages)), key=lambda i: plan.stages[i].memory_total)
    per_step = f"{quantity(plan.flops_per_token * plan.tokens_per_step, 'FLOP')} per step, " * (not config.train.stages)
    stages = zip(config.stages, plan.stages, strict=True)
    steps = {f"  stage {n}": f"{_step_line(c)}; {_stage_cost(stage)}" for n, (c, stage) in enumerate(stages, 1)}
    rows = {
        "model": f"{plural(model.layers, 'layer')} ({mix}{model.nsa_options}), dim {model.dim}, "
        f"{plural(model.heads, 'query head')} and {plural(model.kv_heads, 'KV head')} of {model.head_dim}, "
        f"ffn {model.ffn_dim}, vocabulary {model.vocab_size:,}",
        "parameters": f"{quantity(p.total)}: embedding {quantity(p.embedding)}, attention {quantity(p.attention)}, "
        f"ffn {quantity(p.ffn)}, norms {quantity(p.norms)}, {head}",
        **(steps if config.train.stages else {"step": _step_line(config)}),
        "run": f"{config.train.steps:,} steps, {quantity(plan.tokens)} tokens",
        "compute": f"{quantity(plan.flops_per_token, 'FLOP')} per token, {per_step}"
        f"{quantity(plan.flops_per_token * plan.tokens, 'FLOP')} in total (forward and backward)",
        "attention": "dense: every query reads all earlier tokens"
        if plan.pairs == plan.dense_pairs
        else f"{plan.pairs / plan.dense_pairs:.0%} of the query-key pairs of dense attention at length "
        f"{plan.stages[largest].seq_len:,}",
        "memory": f"about {size(m.total)} per device at the peak of a step",
        "  weights": f"{size(m.weights)}, gradients {size(m.gradients)}, optimizer {size(m.optimizer)}, "
        f"compute copies {size(m.compute_copies)}",
        "  transient": f"activations {size(m.activations)} (activation_checkpointing="
        f"{config.train.activation_checkpointing}), logits and their gradients {size(m.loss)}",
        "device": _device_line(plan),
        "fit": f"\n{'':12}".join(_fit_lines(plan, config, largest)),
        "time": _time_line(plan),
    }
    if config.train.stages:
        rows["memory"] += f", in stage {largest + 1}"
    notes = [("warning", text) for text in plan.warnings]
    if config.run.device == "auto" and not plan.device.is_gpu:
        notes.append(("hint", "no GPU found: plan for one with --gpu H200"))
    strategy, ranks = config.parallel.strategy, config.parallel.world_size
    if strategy != "single" and ranks == 1:
        notes.append(("hint", f"planned {strategy} on one rank: plan for more with --parallel.world_size N"))
    return [line for name, text in (*rows.items(), *notes) for line in f"{name:<11} {text}".splitlines()]


def _fit_lines(plan: CostPlan, config: RunConfig, stage: int) -> list[str]:
    """Whether a step fits and, if not, what would make it fit."""
    if plan.device.memory is None:
        return ["not checked: the memory of this device is unknown"]
    left = f"{size(usable(plan.device.memory))} usable of {size(plan.device.memory)}"
    if plan.fits:
        return [f"fits: {left}"]
    if not plan.fixes:
        return [f"does not fit: {left}; use a smaller model, or a device with more memory"]
    texts = {fix.text(config, stage): size(fix.memory) for fix in plan.fixes}
    fixes = [f"  {text:<{max(map(len, texts))}}  {memory}" for text, memory in texts.items()]
    return [f"does not fit: {left}; {'each of these' if len(fixes) > 1 else 'this'} would make it fit:", *fixes]


def _stage_cost(stage: StagePlan) -> str:
    time = "" if stage.seconds is None else f", {duration(stage.seconds)}"
    flops, rope = quantity(stage.flops_per_token, "FLOP"), f"rope_theta {stage.rope_theta:g}"
    return f"{stage.steps:,} steps, {rope}, {flops} per token, {size(stage.memory_total)}{time}"


def _step_line(config: RunConfig) -> str:
    """What a step is made of."""
    ranks, sequences, passes = config.parallel.data_ranks, config.train.micro_batch, config.accumulation
    parts = [
        *([f"{ranks} ranks"] if ranks > 1 else []),
        plural(sequences, "sequence"),
        f"{config.data.seq_len:,} tokens",
        *([f"{passes} passes"] if passes > 1 else []),
    ]
    shared = f", each sequence over {config.parallel.context} ranks" if config.parallel.context > 1 else ""
    return f"{config.train.tokens_per_step:,} tokens = {' × '.join(parts)}{shared}"


def _device_line(plan: CostPlan) -> str:
    device, basis = plan.device, "bf16 peak" if plan.device.is_gpu else "measured, fp32 matmul"
    speed = "peak unknown" if device.flops is None else f"{quantity(device.flops, 'FLOP/s')} ({basis})"
    return f"{device.name}: {speed}" + ("" if device.memory is None else f", {size(device.memory)}")


def _time_line(plan: CostPlan) -> str:
    if plan.seconds is not None:
        share = f"{plan.device.utilisation:.0%} of the device's peak"
        return f"about {duration(plan.seconds)} at {plan.tokens / plan.seconds:,.0f} tokens/s, if steps reach {share}"
    known, used = ("bf16", "fp32") if plan.device.is_gpu else ("fp32", "bf16")
    why = f"only the {known} peak of this device is known, not {used}"
    if plan.device.flops is None:
        why = "the peak of this device is unknown"
    return f"not estimated: {why}; measure with a short run"


def _named_gpu(name: str) -> Device:
    """The device of --gpu: a known model in any spelling, perhaps with its memory (A100 40GB), or a memory size."""
    asked = re.search(r"(\d+) *gi?b\b", name.lower())
    memory = int(asked[1]) if asked else None
    if asked and memory and asked[0] == name.lower().strip():
        # of advertised GB, CUDA reports fewer GiB: 7% fewer, or what the smallest known card of this size has
        least = min((gpu.memory[memory] for gpu in GPUS if memory in gpu.memory), default=0.93 * memory)
        unit, usable = ("GiB", memory) if "gib" in asked[0] else ("GB", least)
        return Device(f"a GPU with {memory} {unit}", None, round(usable * GIB), GPU_UTILISATION)
    known = find_gpu(name)
    if known is None or (memory is not None and memory not in known.memory):
        models = ", ".join(f"{gpu.name} ({' or '.join(f'{n} GB' for n in gpu.memory)})" for gpu in GPUS)
        raise UsageError(f"--gpu {name} is unknown: pick one of {models}, or give its memory, e.g. --gpu 24GB")
    memory = memory or next(iter(known.memory))
    shown = f"{known.name} {memory} GB" if len(known.memory) > 1 else known.name
    return Device(shown, known.tflops * 1e12, round(known.memory[memory] * GIB), GPU_UTILISATION)


def _nvidia_smi() -> Device | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode or not answer.stdout.strip():
        return None
    name, mib = (part.strip() for part in answer.stdout.splitlines()[0].rsplit(",", 1))
    return Device(name, peak_flops(name), int(mib) * 2**20 if mib.isdigit() else None, GPU_UTILISATION)
