"""Does a small model find facts beyond its window? One kind of attention per call, on one GPU, in a minute or two.

    python scripts/retrieval_small.py --kind learned --out learned.json

Source code of the installed Python packages is mixed with lines that set a key to a number and, further on, ask for it
(`#SET qwer = 12345`, later `#GET qwer = 12345`). Keys and numbers are random, so an answer must be looked up. Training
starts at 1,024 tokens, where every block is read, and continues at 8,192. An answer counts if all five digits are the
most likely ones. Kinds: dense; compressed (the paper's choice of blocks); learned; random blocks; all blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import queue
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import tercet
from tercet.config.sections import TrainConfig
from tercet.model.transformer import ModelConfig, Transformer
from tercet.train.optim import build_optimizer, global_norm, learning_rate, selector_group, update

KINDS = ("dense", "compressed", "learned", "random", "all")
DISTANCES = (0, 128, 1024, 2048, 4096, 8192)
LETTERS, DIGITS = (np.frombuffer(text, np.uint8) for text in (b"abcdefghijklmnopqrstuvwxyz", b"0123456789"))
SET, GET, IS, END = (np.frombuffer(text, np.uint8) for text in (b"\n#SET ", b"\n#GET ", b" = ", b"\n"))


def read_corpus(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of Python files for training and for validation (one file in 32), without repeated files."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    seen: set[bytes] = set()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        text = path.read_bytes()
        digest = hashlib.sha256(text).digest()
        if len(text) < 500 or digest in seen:
            continue
        seen.add(digest)
        parts[digest[0] < 8].append(text + b"\0")
        total += len(text)
        if total > limit:
            break
    np.random.default_rng(0).shuffle(parts[0])
    training, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return training, validation


def sequence(text: np.ndarray, length: int, rng: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """length + 1 bytes, and (first digit of an answer, distance to the fact) of every question."""
    facts, questions = max(2, length // 700), max(3, length // 350)
    kinds = rng.permutation([True] * facts + [False] * questions)
    start = rng.integers(len(text) - length - 2)
    parts, known, answers, at, taken = [], [], [], 0, 0
    for place, is_fact in zip(sorted(rng.integers(0, length, len(kinds))), kinds, strict=True):
        parts.append(text[start + taken : start + place])
        at, taken = at + place - taken, place
        if is_fact or not known:
            key, value = LETTERS[rng.integers(0, 26, 4)], DIGITS[rng.integers(0, 10, 5)]
            known.append((key, value, at + 13))
            line = (SET, key, IS, value, END)
        else:
            key, value, where = known[rng.integers(len(known))]
            answers.append((at + 13, at + 13 - where))
            line = (GET, key, IS, value, END)
        parts.extend(line)
        at += sum(map(len, line))
    parts.append(text[start + taken : start + length + 1])
    return np.concatenate(parts)[: length + 1], [(p, d) for p, d in answers if p + 5 <= length]


def batches(
    text: np.ndarray, length: int, rows: int, seed: int
) -> Iterator[tuple[Tensor, list[list[tuple[int, int]]]]]:
    """Endless batches, made by a thread ahead of time."""
    ready: queue.Queue[Any] = queue.Queue(8)

    def produce() -> None:
        rng = np.random.default_rng(seed)
        while True:
            made = [sequence(text, length, rng) for _ in range(rows)]
            ready.put((torch.from_numpy(np.stack([row for row, _ in made])).long(), [a for _, a in made]))

    threading.Thread(target=produce, daemon=True).start()
    while True:
        yield ready.get()


def build(kind: str, longest: int, args: argparse.Namespace) -> Transformer:
    count = -(-longest // 64) if kind == "all" else 16
    nsa = tercet.NSAConfig(compress_block=16, compress_stride=16, select_count=count, window=128)
    torch.manual_seed(args.seed)
    return Transformer(
        ModelConfig(
            dim=args.dim,
            layers=args.layers,
            heads=args.dim // 64,
            kv_heads=2,
            ffn_dim=args.dim * 8 // 3 // 64 * 64,
            attention="dense" if kind == "dense" else "nsa",
            nsa=nsa,
            compression="mean",
            compress_selected_keys=True,
            rope_theta=500000.0,
            selector=kind if kind in ("learned", "random") else "compressed",
        )
    ).to(args.device)


@torch.no_grad()
def evaluate(model: Transformer, text: np.ndarray, length: int, sequences: int, device: str) -> dict[str, Any]:
    """Loss, share of right answers by distance, and what learned selectors capture."""
    model.eval()
    rows = max(1, min(8, sequences))
    data, losses = batches(text, length, rows, seed=999), []
    right, asked = np.zeros(len(DISTANCES) - 1), np.zeros(len(DISTANCES) - 1)
    for _ in range(-(-sequences // rows)):
        tokens, answers = next(data)
        tokens = tokens.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1]).float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
        correct = (logits.argmax(-1) == tokens[:, 1:]).cpu().numpy()
        for row, found in enumerate(answers):
            for place, distance in found:
                band = np.searchsorted(DISTANCES, distance, side="right") - 1
                asked[band] += 1
                right[band] += correct[row, place - 1 : place + 4].all()
    model.train()
    share = [None if n == 0 else round(float(r / n), 4) for r, n in zip(right, asked, strict=True)]
    return {"length": length, "loss": float(np.mean(losses)), "right": share, "asked": asked.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--stages", default="1024:700,8192:250", help="length:steps, comma-separated")
    parser.add_argument("--tokens", type=int, default=65536, help="per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=128, help="of an evaluation")
    parser.add_argument("--corpus", type=int, default=150_000_000, help="bytes to read at most")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    stages = [tuple(map(int, stage.split(":"))) for stage in args.stages.split(",")]
    config = TrainConfig(steps=sum(steps for _, steps in stages), lr=args.lr, warmup_steps=min(100, stages[0][1]))
    training, validation = read_corpus(args.corpus)
    model = build(args.kind, max(length for length, _ in stages), args)
    optimizer = build_optimizer(model, config)
    selectors = selector_group(optimizer)
    separate = {id(p) for p in selectors["params"]} if selectors else set()
    results: dict[str, Any] = {"arguments": vars(args) | {"out": str(args.out)}, "steps": [], "evaluations": []}
    step, begun = 0, time.perf_counter()
    for length, steps in stages:
        data = batches(training, length, max(1, args.tokens // length), seed=1000 * args.seed + length)
        for _ in range(steps):
            step += 1
            tokens = next(data)[0].to(args.device, non_blocking=True)
            with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
                loss = model(tokens[:, :-1], targets=tokens[:, 1:]).total / tokens[:, 1:].numel()
            loss.backward()
            norm = global_norm(p for p in model.parameters() if id(p) not in separate)
            selector_norm = global_norm(selectors["params"]) if selectors else None
            skip = torch.zeros((), dtype=torch.bool, device=args.device)
            update(optimizer, learning_rate(config, step), config.clip, norm, skip, selector_norm)
            if step % 50 == 0 or step == config.steps:
                seconds = time.perf_counter() - begun
                results["steps"].append([step, length, loss.item(), seconds])
                print(
                    f"step {step}/{config.steps}  length {length}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True
                )
                assert math.isfinite(loss.item())
    for length in sorted({1024, 2048, 4096, stages[-1][0]} & set(range(stages[-1][0] + 1))):
        results["evaluations"].append(evaluate(model, validation, length, args.sequences, args.device))
        print(results["evaluations"][-1], flush=True)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
