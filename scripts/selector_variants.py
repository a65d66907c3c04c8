"""Which selector would choose best? Variants learn side by side, on the attention of one trained model.

    python scripts/selector_variants.py --preset m7c --train.init_from RUN --run.dir runs/variants --train.steps 160 \\
        --train.lr 1e-12 --train.warmup_steps 1 --train.selector.every 32 --train.compile off --train.cuda_graph off …

Flags are those of `tercet train`; model and data must be those of RUN, whose selectors are learned ones. A learning
rate of 1e-12 leaves the model as it is, so all variants see the same queries, keys and teacher. Every 40 steps one row
per variant: KL; share of the attention to free blocks that its choice captures, and the best possible; and, of the
queries that put over 30% of that attention on one block, how many have it chosen. Queries that can read everything do
not count.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tercet.attention.layout import Packing
from tercet.cli import main
from tercet.model import selector
from tercet.model.selector import BlockSelector, TaughtQueries

REPORT_EVERY = 40
WARMUP = 20


class Variant(NamedTuple):
    """One way to select, and to learn it. `rotary`: channels; `skip`: one taught query in this many is used."""

    heads: int = 1
    size: int = 64
    rotary: int = 0
    lr: float = 1e-3
    skip: int = 4


VARIANTS = {
    "1 head of 64": Variant(),
    "four times the queries": Variant(skip=1),
    "learning rate 3e-3": Variant(lr=3e-3),
    "1 head of 128": Variant(size=128),
    "3 heads": Variant(heads=3),
    "6 heads": Variant(heads=6),
    "6 heads of 32": Variant(heads=6, size=32),
    "16 of 64 channels rotated": Variant(rotary=16),
    "32 of 64 channels rotated": Variant(rotary=32),
    "64 of 64 channels rotated": Variant(rotary=64),
    "3 heads, 32 of 64 rotated": Variant(heads=3, rotary=32),
}


class Layer:
    """The variants of one layer, their optimizer, and what they reached since the last report."""

    def __init__(self, own: BlockSelector, device: torch.device) -> None:
        torch.manual_seed(0)
        self.selectors = {name: self._build(own, variant).to(device) for name, variant in VARIANTS.items()}
        groups = [{"params": list(s.parameters()), "lr": VARIANTS[name].lr} for name, s in self.selectors.items()]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / WARMUP, total_iters=WARMUP)
        self.sums: dict[str, Tensor] = {}
        self.steps = 0

    @staticmethod
    def _build(own: BlockSelector, variant: Variant) -> BlockSelector:
        if own.rotary is None:
            sys.exit("the run's selectors rotate no channels: use a run with model.selector_rotary above 0")
        rotary = own.rotary.of_size(variant.rotary) if variant.rotary else None
        dim = own.q_proj.in_features
        built = BlockSelector(dim, own.kv_heads, variant.heads, variant.size, own.config, rotary)
        built.init_weights(std=0.02)
        return built

    def learn(self, x: Tensor, q: Tensor, k: Tensor, rows: Tensor, packing: Packing | None) -> None:
        """One step of every variant. x, q, k: as for BlockSelector.loss_of_rows."""
        config = next(iter(self.selectors.values())).config
        compressed = config.num_compressed(q.shape[1])
        queries = selector._locate(rows, q.shape[1], compressed, packing)
        teacher = selector._teach(q.flatten(0, 1)[rows], k.flatten(0, 1), queries, config)
        blocks = torch.arange(teacher.free.shape[-1], device=x.device)
        slots = min(config.select_count - config.select_initial - config.select_local, len(blocks))
        best = teacher.mass.topk(slots, -1)
        chooses = teacher.counted & (teacher.free.sum(-1) > slots)[:, None]
        sharp = chooses & (best.values[..., 0] > 0.3)
        total = torch.zeros((), device=x.device)
        for name, built in self.selectors.items():
            some = slice(None, None, VARIANTS[name].skip)
            position, key_row, first_key = (part[some] for part in queries[:3])
            found = TaughtQueries(position, key_row, first_key, queries.longest)
            _, keys = built(x, packing)
            mine = built.at(built.queries(x.flatten(0, 1)[rows[some]])[None], position)[0]
            with torch.autocast(x.device.type, enabled=False):
                p = built._block_probabilities(mine, keys.flatten(0, 1), found.position, found.first_key, blocks)
            p = p * teacher.free[some][:, None] + 1e-12
            mass = teacher.mass[some]
            kl = (torch.special.xlogy(mass, mass) - mass * (p / p.sum(-1, keepdim=True)).log()).sum(-1)
            total = total + kl.mean()
            with torch.no_grad():
                chosen = p.topk(slots, -1).indices
                captured = mass.gather(-1, chosen).sum(-1)
                first = (chosen == best.indices[some][..., :1]).any(-1)
                counted, is_sharp = chooses[some], sharp[some]
                row = [(kl * counted).sum(), (captured * counted).sum(), (best.values[some].sum(-1) * counted).sum(),
                       counted.sum(), (first * is_sharp).sum(), is_sharp.sum()]  # fmt: skip
                self.sums[name] = self.sums.get(name, 0) + torch.stack(row).double()
        self.optimizer.zero_grad()
        total.backward()
        for built in self.selectors.values():
            nn.utils.clip_grad_norm_(built.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1


LAYERS: dict[int, Layer] = {}


def learn_beside(
    self: BlockSelector, x: Tensor, selector_k: Tensor, q: Tensor, k: Tensor, rows: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, None]:
    """In place of BlockSelector.loss_of_rows: the variants learn, the model's own selector does not."""
    if id(self) not in LAYERS:
        LAYERS[id(self)] = Layer(self, x.device)
    layer = LAYERS[id(self)]
    with torch.enable_grad():
        layer.learn(x.detach(), q.detach(), k.detach(), rows, rest[1])
    if layer is next(iter(LAYERS.values())) and layer.steps % REPORT_EVERY == 1 and layer.steps > 1:
        report(layer.steps - 1)
    return selector_k.float().sum() * 0, None


def report(steps: int) -> None:
    print(f"after {steps} steps: KL, captured, best possible, sharpest block chosen", flush=True)
    for name in VARIANTS:
        sums = torch.stack([layer.sums.pop(name) for layer in LAYERS.values()]).sum(0)
        kl, captured, best, counted, first, sharp = sums.tolist()
        print(
            f"{name:28s} {kl / counted:.3f} {captured / counted:.3f} {best / counted:.3f} {first / max(sharp, 1):.3f}"
        )


if __name__ == "__main__":
    BlockSelector.loss_of_rows = learn_beside  # type: ignore[method-assign, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
