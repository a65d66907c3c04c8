"""Where does the time of the selected branch go, with scattered selections? Kernels alone, on a GPU.

    python scripts/selected_branch.py [--shapes C8x8k C1x64k B8x8k P1x64k] [--block 64] [--triton]

Each query selects its forced blocks and others drawn uniformly: 1,024 tokens in all. Prints milliseconds per kernel of
a forward and of a backward pass, and the largest relative difference from Triton's kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.selected.launch import selected_backward, selected_forward
from tercet.attention.kernels.table import selected_settings
from tercet.attention.kernels.varlen import Documents
from tercet.bench.timing import profile

# documents, their length, query heads, KV heads, head size; several documents are packed
SHAPES = {
    "C8x8k": (8, 8192, 12, 2, 64), "C1x64k": (1, 65536, 12, 2, 64), "B8x8k": (8, 8192, 16, 4, 128),
    "P1x8k": (1, 8192, 64, 4, 128), "P1x64k": (1, 65536, 64, 4, 128),
}  # fmt: skip
SELECTED_TOKENS, LOCAL_TOKENS = 1024, 128


def random_blocks(length: int, groups: int, config: NSAConfig, device: str) -> Tensor:
    """int32 [length, groups, n]: forced blocks and random others, ascending, padded with -1."""
    blocks, count = config.num_blocks(length), config.select_count
    number = torch.arange(blocks, device=device)
    found = []
    for t in torch.arange(length, device=device).split(max(1, (1 << 27) // (groups * blocks))):
        own = (t // config.select_block)[:, None]
        forced = (number < config.select_initial) | (number > own - config.select_local)
        order = torch.rand(len(t), groups, blocks, device=device) + forced[:, None]
        order = torch.where((number <= own)[:, None], order, -1.0)
        best = order.topk(min(count, blocks), -1)
        chosen = torch.where(best.values < 0, blocks, best.indices).sort(-1).values
        found.append(torch.where(chosen == blocks, -1, chosen).int())
    return torch.cat(found)


def passes(name: str, block: int) -> Callable[[bool], tuple[Callable[[], Any], Callable[[], Any]]]:
    """A function that returns forward and backward; its argument: with Hopper's own kernels."""
    B, T, H, G, size = SHAPES[name]
    config = NSAConfig(
        select_block=block, select_count=SELECTED_TOKENS // block, select_local=LOCAL_TOKENS // block, window=128
    )
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, B * T, heads, size, device="cuda", dtype=torch.bfloat16) for heads in (H, G, G, H))
    gate = torch.rand(1, B * T, H, device="cuda")
    blocks = torch.cat([random_blocks(T, G, config, "cuda") for _ in range(B)])[None]
    bounds = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda") if B > 1 else None
    documents = Documents(1, B * T, 0, bounds, None, longest=T)

    def calls(hopper: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        settings = replace(selected_settings(size, size, q.dtype, block), gluon=hopper)

        def forward() -> tuple[Tensor, Tensor, Any]:
            return selected_forward(q, k, v, blocks, config, documents, settings)

        o, lse, saved = forward()
        delta = (dout.float() * o.float()).sum(-1)

        def backward() -> tuple[Tensor, Tensor, Tensor]:
            return selected_backward(q, k, v, blocks, lse, dout, gate, delta, config, documents, saved, settings)

        return forward, backward

    return calls


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["C8x8k", "C1x64k", "B8x8k", "P1x64k"])
    parser.add_argument("--block", type=int, choices=(32, 64), default=64, help="select_block")
    parser.add_argument("--triton", action="store_true", help="time Triton's kernels instead of Hopper's own")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this script times kernels, run it on a machine with a GPU")
    for name in options.shapes:
        calls = passes(name, options.block)
        forward, backward = calls(not options.triton)
        wanted, wanted_gradients = (call() for call in calls(False))
        pairs = zip((forward()[0], *backward()), (wanted[0], *wanted_gradients), strict=True)
        print(f"{name}, blocks of {options.block}; difference from Triton {max(difference(*p) for p in pairs):.1e}")
        for what, call in (("forward", forward), ("backward", backward)):
            times = [(ms, kernel) for ms, _, kernel in profile(call)]
            parts = ", ".join(f"{kernel} {ms:.3f}" for ms, kernel in sorted(times, reverse=True)[:6])
            print(f"  {what:<8} {sum(ms for ms, _ in times):6.3f} ms: {parts}", flush=True)


if __name__ == "__main__":
    main()
