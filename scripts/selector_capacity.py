"""How many tokens can one key of a selector stand for? A simulation without a model.

    python scripts/selector_capacity.py             # all rows of the table in docs/lab-notes/learned-selection.md
    python scripts/selector_capacity.py mean:64:16  # one: pooling, channels, tokens per key

Every token has a random vector of 64 numbers, and a query is the vector of one token. Linear projections to a few
channels give queries and keys, as in a selector; keys are pooled over some neighbours, by the mean or the maximum of
each channel. A block of 64 tokens scores by the log-sum-exp of its keys. The projections learn by cross-entropy to find
the block of the query's token among those of 8,192 tokens. Printed: how often it is among the 13 best blocks (16 less
the forced ones) of 8,192, 32,768 and 65,536 tokens, over 256 queries; chance is .10, .025, .013. Eight minutes on one
core.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 64  # of a token's vector
BLOCK, SLOTS = 64, 13
LENGTHS = (8192, 32_768, 65_536)
VARIANTS = (
    "max:64:16", "max:64:8", "max:64:4", "max:128:4", "max:64:2", "max:32:2",
    "mean:64:16", "mean:64:8", "mean:64:4", "mean:128:4", "mean:64:2", "mean:32:2",
    "none:16:1", "none:24:1", "none:32:1",
)  # fmt: skip


def block_scores(queries: Tensor, keys: Tensor, pooling: str, tokens: int) -> Tensor:
    """queries [Q, channels], keys [T, channels] -> [Q, T / BLOCK]"""
    groups = keys.unflatten(0, (-1, tokens))
    pooled = groups.amax(1) if pooling == "max" else groups.mean(1)
    return (queries @ pooled.T).unflatten(1, (-1, BLOCK // tokens)).logsumexp(-1)


def draw(length: int, queries: int) -> tuple[Tensor, Tensor]:
    """Vectors of tokens, and the tokens that the queries look for."""
    return torch.randn(length, SIZE), torch.randint(0, length, (queries,))


def found(scores: Tensor, wanted: Tensor) -> Tensor:
    """Whether fewer than SLOTS blocks score higher than the wanted one. bool [Q]"""
    return (scores > scores.gather(1, wanted[:, None])).sum(1) < SLOTS


def simulate(pooling: str, channels: int, tokens: int, steps: int = 900) -> list[float]:
    """Share of queries whose block is found, by length."""
    torch.manual_seed(0)
    to_keys = (torch.randn(SIZE, channels) / SIZE**0.5).requires_grad_()
    to_queries = to_keys.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([to_keys, to_queries], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        vectors, wanted = draw(LENGTHS[0], 64)
        scores = block_scores(vectors[wanted] @ to_queries, vectors @ to_keys, pooling, tokens)
        optimizer.zero_grad()
        F.cross_entropy(scores, wanted // BLOCK).backward()
        optimizer.step()
        schedule.step()
    shares = []
    with torch.no_grad():
        for length in LENGTHS:
            hits = []
            for _ in range(2):
                vectors, wanted = draw(length, 128)
                scores = block_scores(vectors[wanted] @ to_queries, vectors @ to_keys, pooling, tokens)
                hits.append(found(scores, wanted // BLOCK))
            shares.append(torch.cat(hits).double().mean().item())
    return shares


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    print(f"{'pooling:channels:tokens':<24}" + "".join(f"{length:>9,}" for length in LENGTHS))
    for variant in arguments or VARIANTS:
        pooling, channels, tokens = variant.split(":")
        shares = simulate(pooling, int(channels), int(tokens))
        print(f"{variant:<24}" + "".join(f"{share:>9.3f}" for share in shares), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
