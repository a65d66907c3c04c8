"""The operators and a layer, without a trainer: python examples/operator_alone.py"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import tercet

BLOCKS = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=4, window=32)


def operator() -> float:
    """Block-sparse attention of rotated queries and keys [batch, tokens, heads, size]; its difference from dense
    attention where it reads everything."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, heads, 32, requires_grad=True) for heads in (4, 2, 2))
    out, aux = tercet.block_sparse_attention(q, k, v, config=BLOCKS, scorer="own", return_aux=True)
    out.sum().backward()  # gradients reach q, k and v; none flows through the choice
    print(f"the last query reads blocks {aux.block_indices[0, -1, 0].tolist()} of 16")
    dense = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    error = (out - dense.transpose(1, 2)).detach().abs().amax((0, 2, 3))
    print(f"difference from dense: {error[:64].max():.1e} up to 64 tokens, {error[64:].max():.1e} later")
    return float(error[:64].max())


class Model(nn.Module):
    """Stands for yours. The layer maps [batch, tokens, dim] to the same, is causal and applies RoPE itself."""

    def __init__(self, vocab: int = 32, dim: int = 32) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(vocab, dim), nn.RMSNorm(dim), nn.Linear(dim, vocab)
        self.attention = tercet.NativeSparseAttention(dim, heads=4, kv_heads=1, head_dim=16, config=BLOCKS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x)))


def layer(steps: int = 60) -> list[float]:
    """Losses of learning to count: every token is its predecessor plus one."""
    torch.manual_seed(0)
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = (torch.randint(32, (4, 1)) + torch.arange(129)) % 32
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    operator()
    layer()
