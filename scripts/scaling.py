"""Estimate communication, memory and throughput of multi-GPU runs by formula, as on docs/scaling.md.

The assumptions are the constants below. Tests compare the byte counts with PyTorch's sharding and with the plan of the
context-parallel exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tercet.config.load import load
from tercet.model import cost
from tercet.model.config import ModelConfig
from tercet.parallel.context_layout import ContextLayout

# An H100/H200 node: 8 GPUs, NVLink 450 GB/s per direction and GPU, one 400 Gb/s adapter per GPU between nodes.
PEAK, NVLINK, NETWORK, NODE = 989e12, 450e9, 50e9, 8
# Assumed efficiency. UTILISATION is a goal, not a measurement.
UTILISATION, WIRE = 0.40, 0.75
BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Case:
    """A model on some number of GPUs. context: GPUs that share one sequence; sequences: per group of them and pass."""

    name: str
    model: ModelConfig
    gpus: int
    length: int
    context: int = 1
    sequences: int = 1
    checkpointing: str = "full"


class Outlook(NamedTuple):
    """Estimate for one GPU and one step with a single pass."""

    shards: float  # bytes of weights, gradients, moments
    activations: float
    weights: float  # bytes of all-gather forward, all-gather backward, reduce-scatter
    keys: float  # bytes of keys and values of other ranks: forward, recomputation, backward
    compute: float  # seconds
    wire: float
    tokens_per_s: float


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
    plans = [layout.lookback_plan(n) for n in (None, nsa.window - 1, nsa.compress_block - 1)]
    plans.append(layout.compressed_plan())
    rows = max(sum(plan.fetched(rank) for plan in plans) for rank in range(ranks))
    row_bytes = BF16 * model.kv_heads * (model.head_dim + model.head_value_dim)
    return float(passes * model.layers * rows * row_bytes)


def outlook(case: Case) -> Outlook:
    """Communication overlaps with compute: a step takes the longer of the two."""
    model, gpus, full = case.model, case.gpus, case.checkpointing == "full"
    tokens = case.length * case.sequences // case.context
    flops = cost.flops_per_token(model, case.length) * (4 / 3 if full else 1) * tokens
    activations = cost.memory(
        model, tokens, case.length, compute_bytes=BF16, activation_checkpointing=case.checkpointing
    ).activations
    weights = weight_traffic(model, gpus)
    keys = case.sequences * context_traffic(model, case.length, case.context, 3 if full else 2)
    compute = flops / (PEAK * UTILISATION)
    wire = weights / (WIRE * (NVLINK if gpus <= NODE else NETWORK))
    wire += keys / (WIRE * (NVLINK if case.context <= NODE else NETWORK))
    return Outlook(shard_bytes(model, gpus), activations, weights, keys, compute, wire, tokens / max(compute, wire))


def seven_billion() -> ModelConfig:
    """Llama-2-7B's sizes with NSA over 4 KV heads."""
    return ModelConfig(
        dim=4096, layers=32, heads=64, kv_heads=4, head_dim=128, value_dim=128, ffn_dim=11008, vocab_size=32000,
        tie_embeddings=False,
    )  # fmt: skip


def cases() -> list[Case]:
    m7c, seven = load(preset="m7c", flags={"model.selector": "compressed"}).config.model, seven_billion()
    found = []
    for gpus in (8, 64):
        found += [
            Case("M7C, 2k", m7c, gpus, 2048, sequences=32, checkpointing="none"),
            Case("M7C, 1M", m7c, gpus, 1 << 20, context=8),
            Case("7B, 8k", seven, gpus, 8192, sequences=2),
            Case("7B, 1M", seven, gpus, 1 << 20, context=gpus),
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
        lines.append(
            f"| {case.name} | {case.gpus} | {case.context} | {o.shards / 2**30:.2f} | {o.activations / 2**30:.1f} | "
            f"{o.weights / 1e9:.2f} | {o.keys / 1e9:.2f} | {o.compute:.3f} | {o.wire:.3f} | {o.tokens_per_s:,.0f} | "
            f"{'compute' if o.compute >= o.wire else 'communication'} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(table(cases())))
