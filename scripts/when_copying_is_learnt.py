"""When does a model learn to copy? Train small models on the recall task, one minute each on one core.

    python scripts/when_copying_is_learnt.py --seeds 1 2 3 --out copying.jsonl
    python scripts/when_copying_is_learnt.py --models nsa nsa-values-alike --seeds 1 2 3 --out copying.jsonl
    python scripts/when_copying_is_learnt.py --compare copying.jsonl

Two facts of four digits in 64 tokens, both queried: the loss drops when a model learns to match the previous digit and
copy the next. Runs with the same seed read the same documents in the same order and share initial weights where shapes
agree, so models are compared seed by seed. `nsa-alike` initialises the K/V projections of the three branches with the
same weights, `nsa-values-alike` only their values; `nsa` draws all six independently.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

SIZES = {
    "model.vocab_size": 256, "model.dim": 64, "model.layers": 2, "model.heads": 4, "model.kv_heads": 2,
    "model.head_dim": 16, "model.ffn_dim": 128, "model.init_std": 0.08, "model.nsa.compress_block": 8,
    "model.nsa.compress_stride": 4, "model.nsa.select_block": 8, "model.nsa.select_count": 5, "model.nsa.window": 16,
    "data.source": "synthetic", "data.seq_len": 64, "data.synthetic.task": "recall", "data.synthetic.min_distance": 1,
    "data.synthetic.pairs": 2, "data.synthetic.queries": 2, "data.synthetic.value_tokens": 4, "train.micro_batch": 16,
    "train.tokens_per_step": 1024,
}  # fmt: skip
MODELS = ("dense", "nsa", "nsa-alike", "nsa-values-alike")
LR, WARM_UP, DECAY, MEAN_OF = 3e-3, 30, 0.01, 25


def trained(kind: str, seed: int, steps: int, flags: dict[str, Any]) -> list[float]:
    """Losses on answer tokens, averaged over MEAN_OF steps."""
    import torch

    from tercet.config.load import load
    from tercet.data.loader import build_loader
    from tercet.model.transformer import Transformer

    config = load(flags={**SIZES, **flags, "model.attention": "dense" if kind == "dense" else "nsa"}).config
    torch.manual_seed(seed)
    model = Transformer(config.model)
    if kind.endswith("alike"):
        keys = config.model.kv_heads * config.model.head_dim
        for layer in model.attention_layers():
            *others, window = layer.kv_proj.weight.detach().chunk(3)  # each: key rows, then value rows
            for other in others:
                first = keys if "values" in kind else 0
                other[first:] = window[first:]
    groups = [[p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": part, "weight_decay": decay} for part, decay in zip(groups, (DECAY, 0.0), strict=True)],
        lr=LR, betas=(0.9, 0.95),
    )  # fmt: skip
    means, recent = [], []
    with build_loader(config.data, seed=seed, batch_sequences=config.train.micro_batch) as loader:
        for step, batch in enumerate(islice(loader, steps), start=1):
            for group in optimizer.param_groups:
                group["lr"] = LR * min(1.0, step / WARM_UP)
            loss = model(batch.tokens, None, batch.targets)  # one document per row
            mean = loss.total / loss.tokens
            optimizer.zero_grad()
            mean.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent.append(mean.item())
            if step % MEAN_OF == 0:
                means.append(statistics.mean(recent))
                recent = []
    return means


def compare(files: list[Path]) -> None:
    """Print mean losses over the last third of the steps, and paired differences to dense with their standard error."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in (line for file in files for line in file.read_text().splitlines()):
        run = json.loads(line)
        losses = run["losses"]
        found[run["model"]][run["seed"]] = statistics.mean(losses[-max(1, len(losses) // 3) :])
    for kind, by_seed in sorted(found.items(), key=lambda item: statistics.mean(item[1].values())):
        line = f"{kind:10s} {statistics.mean(by_seed.values()):.3f}  of {len(by_seed)} seeds"
        pairs = [loss - found["dense"][seed] for seed, loss in by_seed.items() if seed in found["dense"]]
        if kind != "dense" and len(pairs) > 1:
            line += f"  against dense {statistics.mean(pairs):+.3f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.3f}"
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS[:2]))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=JSON", help="e.g. model.gate='\"softmax\"'")
    parser.add_argument("--out", type=Path, default=Path("copying.jsonl"), help="file to append one line per run to")
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE", help="summarise these files")
    arguments = parser.parse_args()
    if arguments.compare:
        compare(arguments.compare)
        return 0
    flags = {key: json.loads(value) for key, _, value in (item.partition("=") for item in arguments.set)}
    for seed in arguments.seeds:
        for kind in arguments.models:
            losses = trained(kind, seed, arguments.steps, flags)
            print(f"{kind}, seed {seed}: " + " ".join(f"{loss:.2f}" for loss in losses), flush=True)
            with arguments.out.open("a") as out:
                out.write(json.dumps({"model": kind, "seed": seed, "losses": losses, **flags}) + "\n")
    compare([arguments.out])
    return 0


if __name__ == "__main__":
    sys.exit(main())
