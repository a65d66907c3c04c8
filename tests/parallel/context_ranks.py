"""On each rank: context-parallel attention layers against the same layers on whole sequences."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from parallel.world import report
from tercet.attention.config import NSAConfig
from tercet.model.layers import BlockSparseAttention, DenseAttention, NativeSparseAttention, WindowAttention
from tercet.parallel.context import apply_context_parallelism, shard_sequence

SMALL = NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=4, select_initial=1, select_local=2, window=24
)
# wide: compressed blocks that overlap by more than one stride, and a window longer than a chunk.
LAYERS = {
    "nsa": lambda: NativeSparseAttention(24, 4, 2, 8, 4, SMALL),
    "shared": lambda: NativeSparseAttention(24, 4, 1, 8, config=SMALL, shared_kv=True, qk_norm=True, gate="softmax"),
    "tied": lambda: NativeSparseAttention(24, 4, 2, 8, config=SMALL, compress_selected_keys=True),
    "as m7c": lambda: NativeSparseAttention(
        24, 4, 2, 8, config=replace(SMALL, compress_block=4), compression="mean", compress_selected_keys=True
    ),
    "ablated": lambda: NativeSparseAttention(24, 2, 2, 8, config=SMALL, branches=("selected",), compression="mean"),
    "wide": lambda: NativeSparseAttention(24, 2, 2, 8, config=NSAConfig(12, 4, 16, 3, 1, 1, 200)),
    "dense": lambda: DenseAttention(24, 4, 2, 8),
    "window": lambda: WindowAttention(24, 4, 2, 8, config=SMALL),
    "block sparse": lambda: BlockSparseAttention(24, 4, 2, 8, config=SMALL, dense_below=40, qk_norm=True),
    "own": lambda: BlockSparseAttention(24, 4, 2, 8, config=SMALL, selector="own"),
    "own, one group": lambda: BlockSparseAttention(24, 4, 2, 8, config=SMALL, selector="own", exact_groups=(1,)),
    "own, gated": lambda: NativeSparseAttention(24, 4, 2, 8, config=SMALL, selector="own"),
    "two branches": lambda: NativeSparseAttention(
        24, 4, 2, 8, config=SMALL, branches=("selected", "window"), selector="learned", selector_dim=8
    ),
    "one branch": lambda: NativeSparseAttention(24, 4, 2, 8, config=SMALL, branches=("window",), selector="learned"),
}
ON_KERNELS = [
    partial(layer, 24, 4, 2, 16, 16, SMALL, backend="triton") for layer in (NativeSparseAttention, WindowAttention)
]
BOUNDS = {
    "one document": [0, 384],
    "documents across ranks": [0, 5, 100, 110, 290, 291, 384],
    "many short ones": [0, *range(7, 378, 13), 384],
    "longer than a chunk, then short": [0, 301, 305, 384],
}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    on_kernels(group) if "--triton" in sys.argv else every_layer(group, few="--few" in sys.argv)
    dist.destroy_process_group()


def on_kernels(group) -> None:  # type: ignore[no-untyped-def]
    """In Triton's interpreter, which is slow: few tokens."""
    for build in ON_KERNELS:
        result = compare(build, [0, 5, 60, 128], group, torch.float32)
        if dist.get_rank() == 0:
            report(**result)


def every_layer(group, few: bool) -> None:  # type: ignore[no-untyped-def]
    """`few`: the first layer with all bounds, the others with the first and one more."""
    for i, (layer_name, build) in enumerate(LAYERS.items()):
        for j, (bounds_name, bounds) in enumerate(BOUNDS.items()):
            if few and i and j not in (0, 1 + i % 3):
                continue
            result = compare(build, bounds, group)
            if dist.get_rank() == 0:
                report(layer=layer_name, bounds=bounds_name, **result)


def compare(build, bounds, group, dtype=torch.float64):  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    # fp64: some gradients are zero up to rounding (a single compressed token does not depend on its keys)
    layer: nn.Module = build().to(dtype).eval()  # in training mode a selector would learn as well
    for p in layer.parameters():
        nn.init.normal_(p, std=0.2)
    x = torch.randn(1, bounds[-1], 24, dtype=dtype)
    weight = torch.randn_like(x)
    whole_x = x.clone().requires_grad_()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    if hasattr(layer, "stats"):
        layer.stats.enabled = True
    y = layer(whole_x, cu_seqlens)
    (y * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    expected_stats = layer.stats.read() if hasattr(layer, "stats") else {}
    layer.zero_grad()
    if hasattr(layer, "stats"):
        layer.stats.reset()

    apply_context_parallelism(layer)
    config = getattr(layer, "config", None) or SMALL
    own_x, own_weight, shard = shard_sequence(x, weight, bounds, config, group)
    own_x.requires_grad_()
    own_y = layer(own_x, shard)
    (own_y * own_weight).sum().backward()
    scale = 1e-6 * max(g.norm().item() for g in expected.values())
    errors = {"y": relative(own_y, shard.own_tokens(y)), "x": relative(own_x.grad, shard.own_tokens(whole_x.grad))}
    for name, p in layer.named_parameters():
        if name in expected:
            dist.all_reduce(p.grad)
            errors[name] = relative(p.grad, expected[name], scale)
    worst = torch.tensor([errors["y"], max(errors.values())])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    stats = 0.0
    if expected_stats:
        sums = layer.stats.sums()
        dist.all_reduce(sums)
        got = layer.stats.means(sums.tolist())
        assert got.keys() == expected_stats.keys()
        stats = max(abs(got[k] - expected_stats[k]) for k in got)
    fetched = dict(shard.traffic)
    routes = sorted({str(route) for route in layer.routes.values()})
    return {
        "routes": routes,
        "forward": worst[0].item(),
        "gradients": worst[1].item(),
        "stats": stats,
        "bytes": fetched,
    }


def relative(got: torch.Tensor, want: torch.Tensor, least: float = 1e-12) -> float:
    return (got - want).norm().item() / max(want.norm().item(), least)


if __name__ == "__main__":
    sys.exit(main())
