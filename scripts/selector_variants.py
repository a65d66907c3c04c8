"""Which selector would choose best? Variants learn side by side, on the attention of one trained model.

    python scripts/selector_variants.py --preset m7c --train.init_from RUN --run.dir runs/variants --train.steps 160 \\
        --train.lr 1e-12 --train.warmup_steps 1 --train.selector.every 32 --train.compile off --train.cuda_graph off …

Flags are those of `tercet train`; model and data must be those of RUN, whose selectors are learned ones. A learning
rate of 1e-12 leaves the model as it is, so all variants see the same queries, keys and teacher. Every 40 steps one row
per variant: KL; share of the attention to free blocks that its choice captures, and the best possible; and, of the
queries that put over 30% of that attention on one block, how many have it chosen, and of those where it is more than
2,048 tokens back. Queries that can read everything do not count.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tercet.attention.layout import Packing
from tercet.attention.selector import block_lse
from tercet.cli import main
from tercet.model import selector
from tercet.model.selector import BlockSelector, TaughtQueries

REPORT_EVERY = 40
WARMUP = 20
FAR = 32  # blocks


class Variant(NamedTuple):
    """One way to select, and to learn it.

    rotary   channels
    skip     one taught query in this many is used
    trained  starts as the run's own selector, not at random
    """

    size: int = 32
    rotary: int = 16
    lr: float = 1e-3
    skip: int = 4
    trained: bool = False


VARIANTS = {
    "the run's own": Variant(lr=0.0, trained=True),
    "the run's own, learning rate 2e-4": Variant(lr=2e-4, trained=True),
    "the run's own, learning rate 1e-3": Variant(lr=1e-3, trained=True),
    "16 channels, 8 rotated": Variant(16, 8),
    "32 channels, none rotated": Variant(32, 0),
    "32 channels, 8 rotated": Variant(32, 8),
    "32 channels, 16 rotated": Variant(32, 16),
    "64 channels, 16 rotated": Variant(64, 16),
    "64 channels, 32 rotated": Variant(64, 32),
    "32 channels, four times the queries": Variant(skip=1),
    "32 channels, learning rate 3e-3": Variant(lr=3e-3),
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
        if variant.trained:
            return copy.deepcopy(own)
        if own.rotary is None:
            sys.exit("the run's selectors rotate no channels: use a run with model.selector_rotary above 0")
        rotary = own.rotary.of_size(variant.rotary) if variant.rotary else None
        dim = own.q_proj.in_features
        built = BlockSelector(dim, own.kv_heads, variant.size, own.config, rotary)
        built.init_weights(std=0.02)
        return built

    def learn(self, x: Tensor, q: Tensor, k: Tensor, rows: Tensor, packing: Packing | None) -> None:
        """One step of every variant. x, q, k: as for BlockSelector.loss_of_rows."""
        config = next(iter(self.selectors.values())).config
        queries = selector._locate(rows, q.shape[1], packing)
        teacher = selector._teach(q.flatten(0, 1)[rows], k.flatten(0, 1), queries, config)
        blocks = teacher.free.shape[-1]
        slots = min(config.select_count - config.select_initial - config.select_local, blocks)
        best = teacher.mass.topk(slots, -1)
        chooses = teacher.counted & (teacher.free.sum(-1) > slots)[:, None]
        sharp = chooses & (best.values[..., 0] > 0.3)
        current = (queries.position // config.select_block)[:, None]
        far = sharp & (current - best.indices[..., 0] > FAR)
        total = torch.zeros((), device=x.device)
        positions = None if packing is None else packing.position
        for name, built in self.selectors.items():
            some = slice(None, None, VARIANTS[name].skip)
            found = TaughtQueries(queries.position[some], queries.row[some], queries.longest)
            mine, keys = built.queries(x.flatten(0, 1)[rows[some]], found.position), built(x, positions)[1]
            scores = block_lse(mine, keys.flatten(0, 1), found.row, found.position, blocks, config.select_block)
            p = scores[:, :, 0].masked_fill(~teacher.free[some][:, None], -1e30).log_softmax(-1)
            mass = teacher.mass[some]
            kl = (torch.special.xlogy(mass, mass) - mass * p).sum(-1)
            total = total + kl.mean()
            with torch.no_grad():
                chosen = p.topk(slots, -1).indices
                captured = mass.gather(-1, chosen).sum(-1)
                first = (chosen == best.indices[some][..., :1]).any(-1)
                counted, is_sharp, is_far = chooses[some], sharp[some], far[some]
                row = [
                    (kl * counted).sum(), (captured * counted).sum(), (best.values[some].sum(-1) * counted).sum(),
                    counted.sum(), (first * is_sharp).sum(), is_sharp.sum(), (first * is_far).sum(), is_far.sum(),
                ]  # fmt: skip
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
    print(f"after {steps} steps: KL, captured, best possible, sharpest block chosen, if far back", flush=True)
    for name in VARIANTS:
        sums = torch.stack([layer.sums.pop(name) for layer in LAYERS.values()]).sum(0)
        kl, captured, best, counted, first, sharp, far_first, far = sums.tolist()
        print(
            f"{name:36s} {kl / counted:.3f} {captured / counted:.3f} {best / counted:.3f} "
            f"{first / max(sharp, 1):.3f} {far_first / max(far, 1):.3f}"
        )


if __name__ == "__main__":
    BlockSelector.loss_of_rows = learn_beside  # type: ignore[method-assign, assignment]
    sys.exit(main(["train", *sys.argv[1:]]))
