"""Estimate communication, memory and throughput of multi-GPU runs by formula. No torch.

`python -m tercet.bench.scaling` prints the tables of docs/scaling.md. The assumptions are the constants below. Tests
compare the byte counts with PyTorch's sharding and with the plan of the context-parallel exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.config.load import load
from tercet.model import cost
from tercet.model.config import ModelConfig
from tercet.parallel.context_layout import ContextLayout

# An H100/H200 node: 8 GPUs, NVLink 450 GB/s per direction and GPU, one 400 Gb/s adapter per GPU between nodes.
PEAK = 989e12
NVLINK = 450e9
NETWORK = 50e9
NODE = 8
# Assumed efficiency. UTILISATION is a goal, not a measurement.
UTILISATION = 0.40
WIRE = 0.75
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Case:
    """A model on some number of GPUs. context: GPUs that share one sequence; tokens: per GPU and step."""

    name: str
    model: ModelConfig
    gpus: int
    length: int
    context: int = 1
    sequences: int = 1  # per group of `context` GPUs, and pass
    checkpointing: str = "full"

    @property
    def tokens(self) -> int:
        return self.length * self.sequences // self.context


@dataclass(frozen=True)
class Outlook:
    """Estimate for one GPU and one step with a single pass."""

    sharded_bytes: float  # weights, gradients, moments
    activation_bytes: float
    weight_traffic: float  # all-gather forward, all-gather backward, reduce-scatter
    context_traffic: float  # keys and values of other ranks: forward, recomputation, backward
    compute_seconds: float
    weight_seconds: float
    context_seconds: float
    tokens: int

    @property
    def step_seconds(self) -> float:
        """Communication overlaps with compute: a step takes the longer of the two."""
        return max(self.compute_seconds, self.weight_seconds + self.context_seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.step_seconds else "communication"


def shard_bytes(model: ModelConfig, ranks: int) -> float:
    """fp32 weights, gradients and two Adam moments of one rank under full sharding."""
    return 4 * FP32 * cost.parameters(model).total / ranks


def weight_traffic(model: ModelConfig, ranks: int) -> float:
    """Bytes one rank receives per pass under full sharding: two all-gathers (blocks in bf16; embedding, head and last
    norm in fp32) and one fp32 reduce-scatter."""
    p = cost.parameters(model)
    rest = p.embedding + p.head + model.dim
    once = BF16 * (p.total - rest) + FP32 * rest
    return (2 * once + FP32 * p.total) * (ranks - 1) / ranks


def context_traffic(model: ModelConfig, length: int, ranks: int, passes: int = 3) -> float:
    """Bytes the busiest rank receives for one sequence, over all layers: forward, recomputation and backward (gradients
    of the same rows). Uses the plan of the context-parallel exchange."""
    if ranks == 1:
        return 0.0
    nsa = model.nsa
    layout = ContextLayout((0, length), ranks, nsa)
    plans = (
        layout.lookback_plan(None),
        layout.lookback_plan(nsa.window - 1),
        layout.lookback_plan(nsa.compress_block - 1),
        layout.compressed_plan(),
    )
    rows = max(sum(plan.fetched(rank) for plan in plans) for rank in range(ranks))
    row_bytes = BF16 * model.kv_heads * (model.head_dim + model.head_value_dim)
    return float(passes * model.layers * rows * row_bytes)


def outlook(case: Case) -> Outlook:
    model, gpus = case.model, case.gpus
    recomputed = {"none": 3, "selective": 3, "full": 4}[case.checkpointing] / 3
    flops = cost.flops_per_token(model, case.length) * recomputed * case.tokens
    activations = cost.memory(
        model, case.tokens, case.length, compute_bytes=BF16, activation_checkpointing=case.checkpointing
    ).activations
    weights = weight_traffic(model, gpus)
    context = case.sequences * context_traffic(
        model, case.length, case.context, 3 if case.checkpointing == "full" else 2
    )
    return Outlook(
        sharded_bytes=shard_bytes(model, gpus),
        activation_bytes=activations,
        weight_traffic=weights,
        context_traffic=context,
        compute_seconds=flops / (PEAK * UTILISATION),
        weight_seconds=weights / (WIRE * (NVLINK if gpus <= NODE else NETWORK)),
        context_seconds=context / (WIRE * (NVLINK if case.context <= NODE else NETWORK)),
        tokens=case.tokens,
    )


def seven_billion() -> ModelConfig:
    """Llama-2-7B's sizes with NSA over 4 KV heads."""
    return ModelConfig(
        dim=4096, layers=32, heads=64, kv_heads=4, head_dim=128, value_dim=128, ffn_dim=11008, vocab_size=32000,
        tie_embeddings=False,
    )  # fmt: skip


def cases() -> list[Case]:
    m7c, seven = load(preset="m7c", flags={"model.selector": "compressed"}).config.model, seven_billion()
    found = []
    for gpus in (8, 64, 1024):
        found += [
            Case("M7C, 2k", m7c, gpus, 2048, sequences=32, checkpointing="none"),
            Case("M7C, 1M", m7c, gpus, 1 << 20, context=8),
            Case("7B, 8k", seven, gpus, 8192, sequences=2),
            Case("7B, 1M", seven, gpus, 1 << 20, context=min(gpus, 64)),
        ]
    return found


def table(rows: list[Case]) -> list[str]:
    columns = (
        "model", "GPUs", "GPUs/seq", "shards GiB", "activations", "weights GB", "keys GB", "compute s",
        "wire s", "tokens/s", "bound",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case in rows:
        o = outlook(case)
        wire = o.weight_seconds + o.context_seconds
        lines.append(
            f"| {case.name} | {case.gpus} | {case.context} | {o.sharded_bytes / 2**30:.2f} | "
            f"{o.activation_bytes / 2**30:.1f} | {o.weight_traffic / 1e9:.2f} | {o.context_traffic / 1e9:.2f} | "
            f"{o.compute_seconds:.3f} | {wire:.3f} | {o.tokens_per_s:,.0f} | {o.bound} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table(cases())))
