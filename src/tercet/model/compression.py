"""Compression φ (Eq. 7): the l tokens of a block become one compressed token. [B, Tc, l, G, D] -> [B, Tc, G, D]"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing, move_rows
from tercet.attention.stages import compression_blocks
from tercet.attention.tiling import compute_dtype

KINDS = ("mlp", "mean")


class Compression(nn.Module):
    """φ = "mean", or "mlp": the mean plus a learned correction from all l tokens and their positions in the block.

    The last layer of the correction starts at zero, so "mlp" equals the mean at initialisation. A plain MLP would start
    as noise, and the first thousands of selections would follow that noise.
    """

    def __init__(self, kind: str, size: int, config: NSAConfig) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"compression={kind!r} is unknown: pick one of {', '.join(KINDS)}")
        self.config = config
        self.kind = kind
        if kind == "mlp":
            self.position = nn.Parameter(torch.empty(config.compress_block, size))
            self.up = nn.Linear(config.compress_block * size, size)
            self.down = nn.Linear(size, size)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.kind == "mean":
            return
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.up.weight, std=self.up.in_features**-0.5)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        """x: [B, T, G, D] -> [B, Tc, G, D]"""
        stride = self.config.compress_stride
        if x.shape[1] < self.config.compress_block or not self.is_plain():
            return self.phi(compression_blocks(x, self.config, packing))
        if packing is None:
            return self._phi_of_chunks(x[:, : x.shape[1] // stride * stride].unflatten(1, (-1, stride)))
        chunks = move_rows(x[0], packing.tokens_to_chunks).unflatten(0, (-1, stride))[None]
        return move_rows(self._phi_of_chunks(chunks)[0], packing.chunks_to_compressed)[None]

    def is_plain(self) -> bool:
        """Whether φ is fully described by its weights, so that they may be multiplied without calling its layers."""
        return self.kind == "mean" or are_plain(self.up, self.down)

    def phi(self, blocks: Tensor) -> Tensor:
        """blocks: [B, Tc, l, G, D] -> [B, Tc, G, D]"""
        mean = blocks.mean(2)
        if self.kind == "mean":
            return mean
        placed = (blocks + self.position[:, None].to(blocks.dtype)).transpose(2, 3).flatten(3)
        correction = self.down(F.gelu(self.up(placed)))
        return mean + correction.to(mean.dtype)

    def _phi_of_chunks(self, chunks: Tensor) -> Tensor:
        """φ of every l/d consecutive chunks. [B, S, d, G, D] -> [B, S - l/d + 1, G, D]

        Each chunk is part of l/d blocks. Laying out blocks would write and save it l/d times, and gather its gradient
        with a sorting index_put. Instead, each chunk is multiplied once by the weights of all its places in a block,
        and the products are summed.
        """
        l, d = self.config.compress_block, self.config.compress_stride
        places, count = l // d, chunks.shape[1] - l // d + 1
        sums = chunks.sum(2, dtype=torch.promote_types(chunks.dtype, torch.float32))
        mean = (_sum([sums[:, j : j + count] for j in range(places)]) / l).to(chunks.dtype)
        if self.kind == "mean":
            return mean
        weight = self.up.weight.unflatten(1, (places, -1)).transpose(0, 1).flatten(0, 1)
        products = F.linear(chunks.transpose(2, 3).flatten(3), weight).unflatten(-1, (places, -1))
        hidden = _sum([products[:, j : j + count, :, j] for j in range(places)])
        # W(x + position) = Wx + W·position: one vector instead of an addition to every token
        bias = self.up.bias + (self.up.weight * self.position.flatten()).sum(1)
        correction = self.down(F.gelu(hidden + bias))
        return mean + correction.to(mean.dtype)


def compress_keys_and_values(
    chunks: Tensor, k: Compression, v: Compression, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    """k(keys), v(values) of stacked chunks: [2, B, S, G, d, D] -> two of [B, Tc, G, D].

    The same arithmetic on small tensors: batching both halves the number of kernels.
    """
    l, d = k.config.compress_block, k.config.compress_stride
    places, count = l // d, chunks.shape[2] - l // d + 1
    sums = chunks.sum(4, dtype=torch.promote_types(chunks.dtype, torch.float32))
    both = (_sum([sums[:, :, j : j + count] for j in range(places)]) / l).to(chunks.dtype)
    if k.kind == "mlp":
        ups = torch.stack((k.up.weight, v.up.weight))
        weights = ups.unflatten(2, (places, -1)).transpose(1, 2).flatten(1, 2)
        products = torch.bmm(chunks.reshape(2, -1, weights.shape[2]), weights.transpose(1, 2))
        products = products.unflatten(1, chunks.shape[1:4]).unflatten(-1, (places, -1))
        hidden = _sum([products[:, :, j : j + count, :, j] for j in range(places)])
        positions = torch.stack((k.position, v.position)).flatten(1)
        bias = torch.stack((k.up.bias, v.up.bias)) + (ups * positions[:, None]).sum(2)
        active = F.gelu(hidden + bias[:, None, None, None])
        downs = torch.stack((k.down.weight, v.down.weight))
        correction = torch.bmm(active.flatten(1, 3), downs.transpose(1, 2)).unflatten(1, active.shape[1:4])
        correction = correction + torch.stack((k.down.bias, v.down.bias))[:, None, None, None]
        both = both + correction.to(both.dtype)
    if packing is not None:
        rows = move_rows(both[:, 0].transpose(0, 1), packing.chunks_to_compressed)
        both = rows.transpose(0, 1)[:, None]
    return both[0], both[1]


def mean_keys(blocks: Tensor) -> Tensor:
    """`pool_keys` of given blocks: [B, E, l, G, D] -> [B, E, G, D]"""
    return blocks.to(compute_dtype(blocks)).mean(2).to(blocks.dtype)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def are_plain(*layers: nn.Module) -> bool:
    """Whether these are bare linear layers, whose weights may be multiplied without calling them.

    Adapters, subclasses, parametrizations (which create a subclass) and hooks, also global ones, only act through the
    layer's call. FSDP2 wraps blocks, not the linear layers inside.
    """
    if _has_any_global_hook():
        return False
    for layer in layers:
        if type(layer) is not nn.Linear:
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    return True
