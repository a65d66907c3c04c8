"""How similar are the blocks that neighbouring queries select, in text and in the benchmark's random and smooth inputs?

    python scripts/selection_order.py              # the recording that comes with Tercet; 13 seconds on one core
    python scripts/selection_order.py FILE.npz     # yours, by `tercet eval selections`

Over 64 consecutive queries of one KV head, a mean over 24 places in the second half of each length:
distinct   different blocks that the queries select, divided by the 16 that each selects (1: all select the same)
shared     share of a query's blocks that the query before selected too
Random and smooth inputs have 6 query heads of 64 per KV head.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.reference import block_importance, select, visible_compressed
from tercet.bench.attention import recording, smooth

CONFIG = NSAConfig()
LENGTHS = (8192, 32_768, 65_536)
QUERIES, PLACES, HEADS, SIZE = 64, 24, 6, 64


def starts(length: int) -> list[int]:
    places = torch.linspace(length // 2, length - QUERIES, PLACES).long()
    return (places // QUERIES * QUERIES).tolist()


def order(blocks: Tensor) -> tuple[float, float]:
    """[QUERIES, n] -> distinct, shared"""
    shared = (blocks[1:, :, None] == blocks[:-1, None]).any(-1).float().mean()
    return len(blocks.unique()) / blocks.shape[1], shared.item()


def selections(length: int, correlated: bool) -> list[Tensor]:
    """Blocks of the queries at every place, for the inputs of `tercet bench attention`."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, length, HEADS, SIZE, generator=generator)
    q = smooth(q, 0.996) if correlated else q
    keys = torch.randn(CONFIG.num_compressed(length), SIZE, generator=generator)
    found = []
    for start in starts(length):
        t = torch.arange(start, start + QUERIES)
        logits = q[0, t].transpose(0, 1) @ keys.T * SIZE**-0.5
        logits = logits.masked_fill(~visible_compressed(t, torch.arange(len(keys)), CONFIG), -torch.inf)
        scores = block_importance(logits.softmax(-1).sum(0), 0, CONFIG.num_blocks(length), CONFIG)
        found.append(select(scores, t, CONFIG))
    return found


def main() -> None:
    recorded = recording(sys.argv[1] if len(sys.argv) > 1 else "")
    print(recorded.about)
    print(f"{'length':>7}  {'selections':<22} distinct  shared")
    for length in (n for n in LENGTHS if n <= recorded.tokens):
        kinds = {"random": selections(length, correlated=False)}
        for place, layer in enumerate(recorded.layers):
            for head, blocks in enumerate(recorded.block_indices(place, length, recorded.bits.shape[1])[0].unbind(1)):
                kinds[f"layer {layer}, KV head {head}"] = [blocks[n : n + QUERIES] for n in starts(length)]
        kinds["smooth"] = selections(length, correlated=True)
        for name, found in kinds.items():
            distinct, shared = torch.tensor([order(blocks) for blocks in found]).mean(0).tolist()
            print(f"{length:>7,}  {name:<22} {distinct:>8.2f}  {shared:>6.2f}")


if __name__ == "__main__":
    main()
