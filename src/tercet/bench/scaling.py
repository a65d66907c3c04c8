"""Time training steps on several ranks under each strategy (`tercet bench scaling`).

A cell is a number of ranks and a strategy, started by torchrun. Its ranks train with the trainer's own step on random
tokens, as many per rank in every cell. Steps under the profiler show how long NCCL's kernels run, and how much of that
no other kernel covers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tercet.bench.settings import loaded, run
from tercet.bench.train_cell import Steps
from tercet.config.schema import RunConfig
from tercet.data.loader import Batch, LoaderStats
from tercet.parallel.launch import Launch, check_launch, join
from tercet.parallel.strategy import Single, Strategy, build_strategy
from tercet.terminal import Columns, table
from tercet.train.device import device_name, peak_memory_gib, pick_device
from tercet.train.step import to_device

COLUMNS: Columns = {
    "ranks": ("ranks", str), "strategy": ("strategy", str), "outcome": ("outcome", str),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format), "efficiency": ("efficiency", "{:.0%}".format),
    "nccl_ms": ("NCCL ms/step", "{:.1f}".format), "exposed_ms": ("exposed ms/step", "{:.1f}".format),
    "peak_gib": ("GiB per rank", "{:.2f}".format), "backend": ("over", str),
}  # fmt: skip


def main(
    preset: str, ranks: tuple[int, ...], strategies: tuple[str, ...], settings: dict[str, Any], *,
    batch: int, length: int, steps: int, seconds: float,
) -> int:  # fmt: skip
    """Measure all cells and print the table; the last line is JSON."""
    device = pick_device(settings.get("run.device", "auto"), flag="--device")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    cells: list[dict[str, Any]] = [{"ranks": 1, "strategy": "single"}] + [
        {"ranks": n, "strategy": s} for n, s in product((n for n in ranks if n > 1), strategies)
    ]
    about = f"{max(1, gpus)} x {device_name(device)}, torch {torch.__version__}"
    print(f"{about}: {preset}, {batch} x {length} tokens per rank, {steps} steps after warm-up", flush=True)
    rows: list[dict[str, Any]] = []
    for cell in cells:
        share = {"parallel.share_gpus": True} if gpus and cell["ranks"] > gpus else {}
        parallel = {"parallel.strategy": cell["strategy"], "parallel.world_size": cell["ranks"], **share}
        asked = {**cell, "preset": preset, "batch": batch, "length": length, "steps": steps}
        asked["flags"] = settings | (parallel if cell["ranks"] > 1 else {"parallel.allow_single_rank": True})
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell["ranks"])]
        command = [sys.executable, *(launch if cell["ranks"] > 1 else []), "-m", "tercet.bench.scaling"]
        found: list[str] = []
        ended = run([*command, json.dumps(asked)], seconds, found.append)
        last = next((line for line in reversed(found) if line.startswith("{")), None)
        result = json.loads(last) if not ended.failed and last else {"outcome": ended.reason}
        if "tokens_per_s" in result and "tokens_per_s" in (rows or [result])[0]:
            result["efficiency"] = result["tokens_per_s"] / cell["ranks"] / (rows or [result])[0]["tokens_per_s"]
        rows.append(cell | result)
        print(f"{len(rows)}/{len(cells)}  {cell['ranks']} ranks, {cell['strategy']}: {result['outcome']}", flush=True)
    print(f"\n{table(rows, COLUMNS)}\n")
    if max(ranks) > gpus:
        shared = f"ranks share {gpus} GPU{'s' * (gpus > 1)}" if gpus else "ranks on CPUs"
        print(f"{shared}: these speeds say nothing about several GPUs\n")
    print(json.dumps({"bench": "scaling", "device": about, "batch": batch, "length": length, "results": rows}))
    return int(any(row["outcome"] != "ok" for row in rows))


def rank_main() -> int:
    """On each rank: measure the cell in sys.argv; rank 0 prints it as JSON."""
    cell = json.loads(sys.argv[1])
    keys = {"data.seq_len": cell["length"], "train.micro_batch": cell["batch"]}
    if cell["strategy"] == "cp":  # all ranks share each sequence
        keys["train.micro_batch"] *= cell["ranks"]
    keys["train.tokens_per_step"] = cell["batch"] * cell["length"] * cell["ranks"]
    config, launch = loaded(cell, **keys), Launch.from_environment()
    device = pick_device(config.run.device, launch.local_rank, share=config.parallel.share_gpus)
    strategy: Strategy = Single()
    with TemporaryDirectory() as folder:
        if cell["ranks"] > 1:
            check_launch(
                config.parallel, launch, device.type, torch.cuda.device_count() if device.type == "cuda" else 0
            )
            world = join(launch, config.parallel, device, {}, lambda _: Path(folder))
            strategy = build_strategy(config.parallel, config.train, world)
        steps = Steps(config, strategy=strategy, batch=lambda: _batch(config, device, strategy))
        result = measured(steps, cell["steps"])
        if launch.rank == 0:
            result["backend"] = ("NCCL" if world.nccl else "gloo") if cell["ranks"] > 1 else None
            print(json.dumps(result), flush=True)
        strategy.close()
    return 0


def measured(steps: Steps, count: int) -> dict[str, Any]:
    """Tokens/s, the largest peak memory of all ranks, and this rank's time in NCCL."""
    device = steps.device
    steps.interval(min(3, count))  # compiles
    took = steps.interval(count)
    peak = torch.tensor(peak_memory_gib(device, 0))
    if steps.strategy.world_size > 1:
        steps.strategy.shorten_timeouts()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    result = {"outcome": "ok", "tokens_per_s": steps.config.train.tokens_per_step / took, "peak_gib": peak.item()}
    if device.type == "cuda" and steps.strategy.world_size > 1:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            steps.interval(2)
        communicating, exposed = communication(profiled.events() or [])
        result |= {"nccl_ms": communicating / 2e3, "exposed_ms": exposed / 2e3}
    return result


def communication(events: Iterable[Any]) -> tuple[float, float]:
    """How long NCCL's kernels ran in a profile, and how long of that no other kernel did; in microseconds."""
    edges = []
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith("nccl:"):
            sends = event.name.startswith("nccl")
            edges += [(event.time_range.start, 1, sends), (event.time_range.end, -1, sends)]
    total = exposed = 0.0
    running = {True: 0, False: 0}
    before = 0.0
    for time, change, sends in sorted(edges):
        if running[True]:
            total += time - before
            exposed += time - before if not running[False] else 0.0
        running[sends] += change
        before = time
    return total, exposed


def _batch(config: RunConfig, device: torch.device, strategy: Strategy) -> Any:
    """Sequences of one document each; other ones on ranks that read other data."""
    drawn = torch.Generator().manual_seed(config.run.seed + strategy.data_rank)
    rows, length = config.train.micro_batch, config.data.seq_len
    tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=drawn)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), bounds, {}, LoaderStats())
    return to_device(batch, device, strategy)


if __name__ == "__main__":
    try:
        sys.exit(rank_main())
    except Exception as error:  # the last line of stderr is torchrun's
        print(f"error: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
        raise
