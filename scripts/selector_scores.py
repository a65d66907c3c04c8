"""How should the tokens of a block make one score? Learned selectors of one layer, with several answers.

    python scripts/selector_scores.py

A layer with random weights attends to random tokens, more and less sharply; only its selector learns (120 steps, three
seeds). Printed: the share of what a choice can gain over a random one in captured attention, mean of the last 20 steps.
The answers, in learning and in choosing: log-sum-exp of the logits; their maximum; the sum of the positive ones. In
choosing only, cheaper functions that resemble exp: `selector_weight`, which Tercet uses, linear between powers of two;
max(0, 1 + x/4)^4; and exp of the larger of two tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tercet
from tercet.attention import reference
from tercet.model import selector
from tercet.model.selector import sample_queries

CONFIG = tercet.NSAConfig(compress_block=4, compress_stride=4, select_block=8, select_count=6, window=8)
STEPS, LAST, SIZE = 120, 20, 32
ANSWERS = ("log-sum-exp", "maximum", "positive sum", "interpolated", "fourth power", "larger of two")


def scores(answer: str):
    """In place of `reference.block_lse`, for one head per group: [S, G, 1, blocks]."""

    def of_blocks(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int, *_: str) -> Tensor:
        logits = torch.einsum("sgd,tgd->sgt", q, k) * q.shape[-1] ** -0.5
        s = torch.arange(blocks * block)
        token = ((row - position)[:, None] + s).clamp(max=k.shape[0] - 1)
        logits = logits.gather(-1, token[:, None].expand(-1, q.shape[1], -1))
        logits = logits.masked_fill((s > position[:, None])[:, None], -1e30).unflatten(-1, (blocks, block))
        found = {
            "log-sum-exp": lambda: logits.logsumexp(-1),
            "maximum": lambda: logits.amax(-1),
            "positive sum": lambda: logits.relu().sum(-1),
            "interpolated": lambda: reference.selector_weight(logits).sum(-1),
            "larger of two": lambda: logits.unflatten(-1, (2, -1)).amax(-2).logsumexp(-1).exp(),
            "fourth power": lambda: (1 + logits / 4).relu().pow(4).sum(-1),
        }
        return found[answer]()[:, :, None]

    return of_blocks


def _positive(scores: Tensor, answer: str) -> Tensor:
    return scores.exp() if answer in ("log-sum-exp", "maximum") else scores


def gained(learns: str, chooses: str, sharpness: float, seed: int) -> float:
    lse, usual = selector.block_lse, reference.selector_scores
    torch.manual_seed(seed)
    # rope_scaling: positions that do not matter, so that only tokens can be learned from
    layer = tercet.NativeSparseAttention(
        32, 4, 2, 8, config=CONFIG, selector="learned", selector_dim=SIZE, rope_scaling=1e6
    )
    layer.init_weights(0.3, 0.1)
    with torch.no_grad():
        layer.q_proj.weight *= sharpness
    optimizer = torch.optim.AdamW(layer.selector.parameters(), lr=2e-2)
    layer.stats.enabled, found = True, []
    student, chosen = scores(learns), scores(chooses)
    # the teacher has several heads per group and stays as it is
    selector.block_lse = lambda q, k, *rest: (lse if q.shape[1] > k.shape[1] else student)(q, k, *rest[:4])
    # scores must not be negative
    reference.selector_scores = lambda *arguments: _positive(chosen(*arguments)[:, :, 0], chooses)
    try:
        for _ in range(STEPS):
            x = torch.nn.functional.one_hot(torch.randint(0, 32, (2, 160)), 32).float()
            layer(x, taught=sample_queries(x.argmax(-1), 8)).sum().backward()
            optimizer.step()
            layer.zero_grad()
            read = layer.stats.read()
            layer.stats.reset()
            possible = read["selector_best"] - read["selector_random"]
            found.append((read["selector_mass"] - read["selector_random"]) / possible)
    finally:
        selector.block_lse, reference.selector_scores = lse, usual
    return sum(found[-LAST:]) / LAST


if __name__ == "__main__":
    print("sharpness  learns by     chooses by      gained, by seed")
    for sharpness in (5, 60):
        for learns in ANSWERS[:3]:
            for chooses in dict.fromkeys((learns, *(ANSWERS if learns == "log-sum-exp" else ()))):
                values = " ".join(f"{gained(learns, chooses, sharpness, seed):.2f}" for seed in range(3))
                print(f"{sharpness:9d}  {learns:12s}  {chooses:12s}  {values}", flush=True)
