"""Does selection find facts beyond the reach of windows? Train two models on the recall task and test by distance.

    python scripts/recall_beyond_windows.py small --out recall-small.json       # CPU, sequences of 256 tokens
    python scripts/recall_beyond_windows.py long --out recall-long.json         # GPU, sequences of 16,384 tokens
    python scripts/recall_beyond_windows.py long-one --out recall-one.json      # the same with a single fact
    python scripts/recall_beyond_windows.py --draw recall-long.json recall-long.svg

The models differ in one setting: all three branches, or the window alone. The length grows in stages with one
optimizer. A stage ends early once its loss is low, which only a model that finds the facts achieves, so the window-only
model trains for at least as many steps. The number of facts grows as well: with one fact a model learns to copy, with
two to match the previous tokens, with many to match whole keys. Values have four tokens because the later ones teach
the matching that the first one needs; with one token it is learned much later.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stage:
    length: int
    batch: int
    steps: int  # maximum
    pairs: int
    queries: int
    gone: float = 0.05  # end the stage below this loss: nats per answer token, mean over `say_every` steps


@dataclass(frozen=True)
class Scale:
    model: dict[str, Any]
    stages: tuple[Stage, ...]
    lr: float
    documents: int  # test documents per length
    device: str
    value_tokens: int


LONG = {
    "model.dim": 128, "model.layers": 2, "model.heads": 4, "model.kv_heads": 1, "model.head_dim": 64,
    "model.ffn_dim": 256, "model.rope_theta": 1e6, "model.nsa.window": 128,
}  # fmt: skip
SCALES = {
    "small": Scale(
        {
            "model.dim": 64, "model.layers": 2, "model.heads": 4, "model.kv_heads": 1, "model.head_dim": 16,
            "model.ffn_dim": 128, "model.nsa.compress_block": 8, "model.nsa.compress_stride": 4,
            "model.nsa.select_block": 8, "model.nsa.select_count": 8, "model.nsa.window": 16,
        },
        (Stage(64, 16, 1000, 1, 1, 0.2), Stage(64, 16, 2000, 2, 2, 0.25), Stage(128, 8, 3000, 5, 4, 0.1),
         Stage(256, 4, 3000, 10, 8)),
        lr=3e-3, documents=48, device="cpu", value_tokens=4,
    ),
    "long": Scale(
        LONG,
        (Stage(256, 64, 600, 1, 1, 0.2), Stage(256, 64, 600, 2, 2, 0.25), Stage(512, 32, 2000, 8, 6, 0.1),
         Stage(1024, 16, 1000, 24, 16, 0.1), Stage(4096, 8, 600, 64, 48, 0.1), Stage(16384, 2, 600, 100, 64)),
        lr=2e-3, documents=16, device="cuda", value_tokens=4,
    ),
    "long-one": Scale(
        LONG,
        (Stage(256, 64, 600, 1, 1), Stage(1024, 16, 400, 1, 1), Stage(4096, 8, 400, 1, 1), Stage(16384, 4, 400, 1, 1)),
        lr=2e-3, documents=128, device="cuda", value_tokens=2,
    ),
}  # fmt: skip


def config(scale: Scale, stage: Stage, branches: tuple[str, ...]) -> Any:
    from tercet.config.load import load

    task = {"task": "recall", "min_distance": 1, "pairs": stage.pairs, "queries": stage.queries,
            "value_tokens": scale.value_tokens}  # fmt: skip
    flags = {
        "model.vocab_size": 256,
        "model.init_std": 0.08,
        **scale.model,
        "model.branches": branches,
        "data.source": "synthetic",
        "data.seq_len": stage.length,
        "train.micro_batch": stage.batch,
        "train.tokens_per_step": stage.batch * stage.length,
        **{f"data.synthetic.{key}": value for key, value in task.items()},
    }
    return load(flags=flags).config


def trained(
    scale: Scale, branches: tuple[str, ...], name: str, *, graph: bool, say_every: int, seed: int, limit: float
) -> Any:
    """Train a model: (model, training record)."""
    import torch

    from tercet.data.loader import build_loader
    from tercet.inference.load import LanguageModel

    torch.manual_seed(seed)
    device = torch.device(scale.device)
    model = LanguageModel(config(scale, scale.stages[0], branches)).to(device)
    parts = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    groups: list[dict[str, Any]] = [
        {"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.01, 0.0), strict=True)
    ]
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=scale.lr, betas=(0.9, 0.95), capturable=on_gpu)
    if on_gpu:
        for group in optimizer.param_groups:  # a tensor, so that graph replays see updates
            group["lr"] = torch.tensor(scale.lr, device=device)
        torch.autograd.set_multithreading_enabled(False)  # simplifies graph capture

    def step(tokens: Any, targets: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            loss = model(tokens, None, targets)  # one document per row: no cu_seqlens
        mean = loss.total / loss.tokens
        optimizer.zero_grad(set_to_none=not graph)
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return mean.detach()

    done, begin, history = 0, time.perf_counter(), []
    for stage in scale.stages:
        tokens = torch.zeros(stage.batch, stage.length, dtype=torch.int64, device=device)
        targets = torch.full_like(tokens, -100)
        run, taken, recent = _Captured(step, tokens, targets) if graph else step, 0, []
        with build_loader(config(scale, stage, branches).data, seed=seed, batch_sequences=stage.batch) as loader:
            for batch in islice(loader, stage.steps):
                warm = scale.lr * min(1.0, (done + 1) / 50)
                for group in optimizer.param_groups:
                    if on_gpu:
                        group["lr"].fill_(warm)
                    else:
                        group["lr"] = warm
                tokens.copy_(batch.tokens, non_blocking=True)
                targets.copy_(batch.targets, non_blocking=True)
                recent.append(run(tokens, targets))
                done, taken = done + 1, taken + 1
                if taken % say_every == 0:
                    loss, seconds = float(torch.stack(recent).mean()), time.perf_counter() - begin
                    recent = []
                    history.append((done, stage.length, loss))
                    print(f"{name}: {stage.length} tokens, step {taken}, loss {loss:.4f}, {seconds:.0f} s", flush=True)
                    if not math.isfinite(loss):
                        raise SystemExit(f"{name}: loss {loss} at step {done}")
                    if loss < stage.gone or seconds > limit:
                        break
    happened = {"steps": done, "seconds": time.perf_counter() - begin, "history": history,
                "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip
    return model.eval(), happened


class _Captured:
    """Replay a step as a CUDA graph, after a few eager steps that compile kernels and allocate gradients. Models this
    small are otherwise bound by launch overhead."""

    def __init__(self, step: Any, tokens: Any, targets: Any) -> None:
        self._step, self._inputs, self._eager, self._graph, self._loss = step, (tokens, targets), 3, None, None

    def __call__(self, tokens: Any, targets: Any) -> Any:
        import torch

        assert tokens is self._inputs[0]
        assert targets is self._inputs[1]
        if self._eager:
            self._eager -= 1
            return self._step(tokens, targets)
        if self._graph is None:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: the loader's thread may pin memory meanwhile
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._loss = self._step(tokens, targets)
        self._graph.replay()
        return self._loss.clone()


def asked(model: Any, scale: Scale, branches: tuple[str, ...]) -> list[dict[str, Any]]:
    """Accuracy by distance, over documents of every stage's length: long documents have few short distances."""
    import torch

    from tercet.inference.recall import RecallBucket, recall_by_distance

    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for stage in {stage.length: stage for stage in scale.stages}.values():
        model.run = config(scale, stage, branches)
        with torch.autocast(scale.device, torch.bfloat16, enabled=scale.device == "cuda"):
            found = recall_by_distance(model, length=stage.length, documents=scale.documents, batch=stage.batch)
        for r in found:
            counts[r.first][0] += r.right
            counts[r.first][1] += r.asked
    return [RecallBucket(first, 2 * first - 1, right, of).as_dict() for first, (right, of) in sorted(counts.items())]


def measure(name: str, scale: Scale, arguments: argparse.Namespace) -> None:
    import torch

    from tercet.inference.recall import window_reach

    kinds = {
        "NSA": ("compressed", "selected", "window"),
        "window only": ("window",),
        "without selection": ("compressed", "window"),
    }
    record: dict[str, Any] = {"scale": name, "seed": arguments.seed, **asdict(scale)}
    record |= {"torch": torch.__version__, "models": {}, "settings": record.pop("model")}
    if scale.device == "cuda":
        record["device_name"] = torch.cuda.get_device_name()
    for kind in arguments.models:
        branches = kinds[kind]
        with _stream(scale.device):
            model, happened = trained(
                scale, branches, kind, graph=arguments.graph, say_every=arguments.say_every, seed=arguments.seed,
                limit=arguments.limit,
            )  # fmt: skip
        found = asked(model, scale, branches)
        record["reach"] = window_reach(model)
        record["models"][kind] = {**happened, "by_distance": found}
        for r in found:
            far = "  beyond the windows" if r["first"] > record["reach"] else ""
            print(
                f"{kind}: {r['first']} to {r['last']} tokens back: {r['accuracy']:.1%} of {r['asked']}{far}", flush=True
            )
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps({kind: [round(r["accuracy"], 3) for r in m["by_distance"]] for kind, m in record["models"].items()})
    )


def _stream(device: str) -> Any:
    """A side stream for training: the default stream cannot be captured."""
    import torch

    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()


def draw(records: list[Path], target: Path) -> None:
    from tercet.inference.plots import recall_plot

    curves: dict[str, list[tuple[int, float]]] = {}
    reach = 0
    for path in records:  # one file with both models, or one file per model
        record = json.loads(path.read_text())
        reach = record["reach"]
        for kind, m in record["models"].items():
            curves[kind] = [(r["last"], r["accuracy"]) for r in m["by_distance"] if r["asked"] >= 10]
    recall_plot(curves, target, window_reach=reach)
    print(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scale", nargs="?", choices=sorted(SCALES))
    parser.add_argument("--out", type=Path, default=Path("recall.json"))
    parser.add_argument("--models", nargs="+", default=["NSA", "window only"])
    parser.add_argument("--graph", action="store_true", help="GPU: capture whole steps as CUDA graphs")
    parser.add_argument("--limit", type=float, default=math.inf, help="after this many seconds, end each stage early")
    parser.add_argument("--lr", type=float, help="overrides the scale's learning rate")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=JSON", help="e.g. model.layers=3")
    parser.add_argument("--say-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="plot: JSON files, then the SVG to write")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw[:-1], arguments.draw[-1])
    elif arguments.scale:
        scale = SCALES[arguments.scale]
        model = {
            **scale.model,
            **{key: json.loads(value) for key, _, value in (s.partition("=") for s in arguments.set)},
        }
        measure(arguments.scale, replace(scale, lr=arguments.lr or scale.lr, model=model), arguments)
    else:
        parser.error(f"no scale given: pick from {', '.join(sorted(SCALES))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
