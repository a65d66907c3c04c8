"""What learned selectors cost: steps of a small model with each kind of selector, and the kernels that differ. GPU.

    python scripts/selector_cost.py [--lengths 8192 32768 65536] [--layers 3] [--out FILE]

The model has m7c's width and few layers, fresh weights, compiled blocks, 65,536 tokens a step, no optimizer. The kinds
take turns; printed: the median step of each turn, then milliseconds per kernel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

import tercet
from tercet.model.transformer import ModelConfig, Transformer

TOKENS, KINDS, TURNS = 65536, ("compressed", "learned"), 2


def stepper(kind: str, layers: int, length: int):
    torch.manual_seed(0)
    nsa = tercet.NSAConfig(compress_block=16, compress_stride=16, window=128)
    config = ModelConfig(layers=layers, nsa=nsa, compression="mean", compress_selected_keys=True, selector=kind)
    model = Transformer(config).cuda().train()
    model.compiled = True
    for block in model.blocks:
        block.compile()
    tokens = torch.randint(0, 256, (TOKENS // length, length), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, None, tokens)
        (loss.total / TOKENS).backward()
        model.zero_grad()

    return step


def timed(step, steps: int = 8, repeats: int = 5) -> float:
    """Milliseconds per step."""
    found = []
    for _ in range(repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(steps):
            step()
        marks[1].record()
        torch.cuda.synchronize()
        found.append(marks[0].elapsed_time(marks[1]) / steps)
    return median(found)


def kernels(step, steps: int = 3) -> dict[str, float]:
    """Milliseconds per step of each kernel; fused ones without the numbers that differ between graphs."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
    total: dict[str, float] = {}
    for event in found.key_averages():
        name = event.key.rstrip("0123456789")[:70]
        total[name] = total.get(name, 0.0) + event.self_device_time_total / 1000 / steps
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for length in arguments.lengths:
        steps = {kind: stepper(kind, arguments.layers, length) for kind in KINDS}
        for step in steps.values():
            timed(step, 4, 1)
        turns = {kind: [] for kind in KINDS}
        for kind in KINDS * TURNS:
            turns[kind].append(timed(steps[kind]))
        best = {kind: min(turns[kind]) for kind in KINDS}
        print(f"{length:,} tokens: " + ", ".join(f"{k} {' '.join(f'{x:.2f}' for x in v)} ms" for k, v in turns.items()))
        print(f"  learned / compressed {best['learned'] / best['compressed']:.3f}")
        by_kind = {kind: kernels(steps[kind]) for kind in KINDS}
        names = sorted({*by_kind["compressed"], *by_kind["learned"]})
        more = {name: by_kind["learned"].get(name, 0.0) - by_kind["compressed"].get(name, 0.0) for name in names}
        print(f"  sum of the kernels: {sum(more.values()):+.2f} ms; those that differ most")
        for name, ms in sorted(more.items(), key=lambda item: -abs(item[1]))[:24]:
            print(f"    {ms:+.3f}  {name}", flush=True)
        results.append({"length": length, "ms": turns, "kernels": by_kind})
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
