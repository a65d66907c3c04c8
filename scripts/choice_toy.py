"""Does block selection find distant tokens? A toy: one layer on streams with long-range copies, two minutes per run.

    python scripts/choice_toy.py dense base base+all base+mean tie+mean --seeds 1 2 > toy.csv

A variant is words joined by "+": base; dense; tie (compress_selected_keys); mean (mean compression of keys and values),
keymean (of keys only); slow (compression learns ten times slower); half (compressed blocks of 4 tokens instead of 8);
small (select ten blocks of 8 instead of five of 16); free (no forced first block, one local block); shared (one K/V
set); all (read all blocks); learned (learned selector); random (random blocks); two (two branches: no compressed one);
sparse (block-sparse mode).

Streams alternate runs of random tokens with copies of earlier runs. The embedding includes the two previous tokens, as
lower layers would provide, so that one layer can match and copy. The model learns this at 64 tokens, where it reads
every block, then has to find the source at 512 tokens, where it may choose two of up to 29 blocks, and, with a third
number of steps, at 2,048 tokens, two of up to 125.

Columns: nats per copied token whose three predecessors are copied too, over all and by distance to the nearest place
with the same four tokens (near 16 to 79, far from 80, very far from 240). hit: how often the first layer selected a
block with such a place; chance: the same for a random selection; mean_8 to mean_1: for a selection by means of that
many of its own selected keys; mean gates; correct: how often such a token is predicted correctly.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tercet
from tercet.attention.config import BRANCHES, NSAConfig
from tercet.inference.selection_map import record_selections
from tercet.model.compression import Compression
from tercet.model.config import ModelConfig
from tercet.model.layer import SelectingLayer
from tercet.model.nsa import NativeSparseAttention
from tercet.model.rope import rotate
from tercet.model.transformer import Block, Transformer

SIZES: dict[str, Any] = {
    "dim": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn_dim": 128, "vocab_size": 64, "init_std": 0.08,
}  # fmt: skip
NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=5, window=16)
LENGTHS, TOKENS, RUN = (64, 512, 2048), 2048, (16, 32)
LR, WARM_UP, LAST_LR, DECAY = 1e-2, 30, 0.02, 0.01
BEFORE = 3  # number of predecessors that must match
WORDS: dict[str, dict[str, Any]] = {
    "base": {}, "dense": {"attention": "dense"}, "tie": {"compress_selected_keys": True}, "shared": {"shared_kv": True},
    "mean": {"compression": "mean"}, "keymean": {}, "slow": {}, "half": {"nsa": {"compress_block": 4}},
    "small": {"nsa": {"select_block": 8, "select_count": 10}}, "all": {"nsa": {"select_count": LENGTHS[-1] // 16}},
    "free": {"nsa": {"select_initial": 0, "select_local": 1}}, "learned": {"selector": "learned"},
    "random": {"selector": "random"}, "two": {"branches": ("selected", "window")}, "sparse": {"gate": "none"},
}  # fmt: skip
DISTANCES = {"near": (NSA.window, 80), "far": (80, LENGTHS[-1]), "very_far": (240, LENGTHS[-1])}
MEANS = {8: 4, 4: 2, 2: 2, 1: 1}  # block size -> stride
RATES = [
    f"{rule}_{name}" for rule in ("hit", "chance", *(f"mean_{size}" for size in MEANS)) for name in ("near", "far")
]
COLUMNS = [
    "variant", "layers", "seed", "copied", *DISTANCES, *RATES, *(f"gate_{branch}" for branch in BRANCHES),
    "correct_near", "correct_far",
]  # fmt: skip


class WithTwoBefore(nn.Embedding):
    """An embedding of a token and its two predecessors."""

    def __init__(self, old: nn.Embedding, std: float) -> None:
        super().__init__(old.num_embeddings, old.embedding_dim, _weight=old.weight.detach())
        self.before = nn.ModuleList(nn.Embedding(*old.weight.shape) for _ in range(2))
        for weight in self.before.parameters():
            nn.init.normal_(weight, std=std)

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        for back, table in enumerate(self.before, 1):
            out = out + F.pad(table(input)[:, :-back], (0, 0, back, 0))
        return out


def streams(rng: np.random.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens [count, length + 1] and the position each was copied from, -1 if it is new."""
    tokens, sources = np.zeros((2, count, length + 1), dtype=np.int64)
    for x, source in zip(tokens, sources, strict=True):
        x[:] = rng.integers(0, SIZES["vocab_size"], length + 1)
        source[:] = -1
        runs, t = [], 0
        while t <= length:
            runs.append((t, int(rng.integers(RUN[0], RUN[1] + 1))))
            t += runs[-1][1]
            if t <= length:
                first, size = runs[rng.integers(0, len(runs))]
                source[t : t + size] = np.arange(first, first + size)[: length + 1 - t]
                x[t : t + size] = x[source[t : t + size]]
                t += size
    return torch.from_numpy(tokens), torch.from_numpy(sources)


def places(tokens: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the token after query t is copied [B, T], and the places p to copy it from [B, T, T]: token p equals
    token t + 1, and their predecessors match too, as an induction head needs."""
    alike = tokens[:, 1:, None] == tokens[:, None, :-1]
    found = alike.tril()
    for back in range(1, BEFORE + 1):
        found &= F.pad(alike[:, :-back, :-back], (back, 0, back, 0))
    last, first = sources[:, BEFORE + 1 :], sources[:, 1:-BEFORE]
    copied = F.pad((last >= 0) & (first >= 0) & (last - first == BEFORE), (BEFORE, 0))
    return copied & found.any(-1), found


def build(words: list[str], seed: int, layers: int) -> Transformer:
    options = {key: value for word in words for key, value in WORDS[word].items() if key != "nsa"}
    nsa = replace(NSA, **{key: value for word in words for key, value in WORDS[word].get("nsa", {}).items()})
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**SIZES, layers=layers, nsa=nsa, backend="reference", **options))
    model.embedding = WithTwoBefore(model.embedding, SIZES["init_std"])
    for layer in model.attention_layers():
        if "keymean" in words and isinstance(layer, NativeSparseAttention):
            layer.compress_k = Compression("mean", layer.head_dim, nsa)
    return model


def train(model: Transformer, slow: bool, seed: int, steps: list[int]) -> None:
    """So many steps at each length, with a cosine decay of the learning rate at the last one."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        is_slow = slow and ".compress_" in name
        groups[0.1 if is_slow else 1.0, DECAY if weight.dim() > 1 or is_slow else 0.0].append(weight)
    parts = [{"params": weights, "weight_decay": decay, "pace": pace} for (pace, decay), weights in groups.items()]
    optimizer = torch.optim.AdamW(parts, betas=(0.9, 0.95))
    named = list(model.named_parameters())
    clipped = [[w for name, w in named if (".selector." in name) is selector] for selector in (False, True)]
    rng = np.random.default_rng(seed)
    before = sum(steps[:-1])
    lengths = [length for length, count in zip(LENGTHS, steps, strict=False) for _ in range(count)]
    for step, length in enumerate(lengths, 1):
        decayed = 0.5 * (1 + math.cos(math.pi * (step - before) / steps[-1])) if step > before else 1.0
        for group in optimizer.param_groups:
            group["lr"] = group["pace"] * LR * min(1, step / WARM_UP) * (LAST_LR + (1 - LAST_LR) * decayed)
        tokens, _ = streams(rng, TOKENS // length, length)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for weights in clipped:
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


def by_means(layer: NativeSparseAttention, x: Tensor) -> dict[str, Tensor]:
    """Blocks [B, T, n] that means of the layer's selected keys would select, by the number of keys in a mean."""
    q, _, keys, _ = layer.project(x, None)
    cos, sin = layer.rotary.cos_sin(torch.arange(x.shape[1]))
    unrotated = rotate(keys["selected"], (cos, -sin))
    found = {}
    for size, stride in MEANS.items():
        config = replace(layer.config, compress_block=size, compress_stride=stride)
        k = rotate(tercet.compress_mean(unrotated, config=config), layer.rotary.of_compressed(x, None, config))
        found[f"mean_{size}"] = tercet.compressed_attention(q, k, k, config=config)[1][:, :, 0]  # values do not matter
    return found


def by_chance(wanted: Tensor, nsa: NSAConfig) -> Tensor:
    """Probability that a random selection includes one of the wanted blocks [B, T, blocks]: [B, T]."""
    block = torch.arange(wanted.shape[-1])
    current = torch.arange(wanted.shape[1])[:, None] // nsa.select_block
    forced = (block < nsa.select_initial) | ((block > current - nsa.select_local) & (block <= current))
    missed = 1 - (nsa.select_count - forced.sum(-1)) / (current[:, 0] + 1 - forced.sum(-1))
    drawn = 1 - missed.clamp(min=0) ** (wanted & ~forced).sum(-1)
    return torch.where((wanted & forced).any(-1), 1.0, drawn)


@torch.no_grad()
def measure(model: Transformer, tokens: Tensor, sources: Tensor) -> dict[str, str]:
    """The numeric columns of a row."""
    nsa, block = model.config.nsa, cast(Block, model.blocks[0])
    layer = block.attention
    model.eval()
    values: dict[str, list[Tensor]] = defaultdict(list)
    for x, source in zip(tokens.split(4), sources.split(4), strict=True):
        logits, after = model(x[:, :-1]), x[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="none").view(len(x), -1)
        copied, found = places(x, source)
        position = torch.arange(found.shape[-1])
        back = position - torch.where(found, position, -1).amax(-1)
        at = {name: copied & (back >= first) & (back < end) for name, (first, end) in DISTANCES.items()}
        values["copied"].append(loss[copied])
        for name, here in at.items():
            values[name].append(loss[here])
            values[f"correct_{name}"].append((logits.argmax(-1) == after)[here])
        if not isinstance(layer, SelectingLayer):
            continue
        wanted = found.unflatten(-1, (-1, nsa.select_block)).any(-1)
        first_layers = [record_selections(model, row.tolist())[0] for row in x[:, :-1]]
        selected = {"hit": torch.stack([found.blocks[:, 0] for found in first_layers])}
        if isinstance(layer, NativeSparseAttention):
            normed = block.attention_norm(model.embedding(x[:, :-1]))
            selected |= by_means(layer, normed)
            for branch, gates in zip(BRANCHES, layer.gate(normed).unbind(-1), strict=True):
                values[f"gate_{branch}"].append(gates.flatten())
        rates = {"chance": by_chance(wanted, nsa)}
        for rule, blocks in selected.items():
            rates[rule] = (wanted.gather(-1, blocks.clamp(min=0).long()) & (blocks >= 0)).any(-1).float()
        chooses = position >= nsa.select_count * nsa.select_block
        for rule, rate in rates.items():
            for name in ("near", "far"):
                values[f"{rule}_{name}"].append(rate[at[name] & chooses])
    whole = {column: torch.cat(parts).double() for column, parts in values.items() if column in COLUMNS}
    return {column: f"{each.mean():.3f}" for column, each in whole.items() if len(each)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="+", help=f"words joined by +: {', '.join(WORDS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", nargs="+", type=int, default=[200, 300], help=f"at {', '.join(map(str, LENGTHS))}")
    parser.add_argument("--every", type=int, default=8, help="learned selectors learn from one query in this many")
    parser.add_argument("--held-out", type=int, default=48, help="streams of the last length to measure on")
    given = parser.parse_args(arguments)
    for variant in given.variants:
        if unknown := [word for word in variant.split("+") if word not in WORDS]:
            parser.error(f"variant {variant}: {unknown[0]} is unknown: pick from {', '.join(WORDS)}")
    if len(given.steps) > len(LENGTHS):
        parser.error(f"--steps: {len(given.steps)} numbers for the {len(LENGTHS)} lengths {LENGTHS}")
    torch.set_num_threads(1)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for variant, seed in product(given.variants, given.seeds):
        words = variant.split("+")
        model = build(words, seed, given.layers)
        model.selector_every = given.every
        train(model, "slow" in words, seed, given.steps)
        length = LENGTHS[len(given.steps) - 1]
        found = measure(model, *streams(np.random.default_rng(20_000 + seed), given.held_out, length))
        writer.writerow({"variant": variant, "layers": given.layers, "seed": seed, **found})
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
