"""NativeSparseAttention in your own model and training loop: python examples/layer_in_a_loop.py

The layer is a plain nn.Module, [batch, tokens, dim] -> [batch, tokens, dim]. It is causal and applies RoPE itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tercet


class Model(nn.Module):
    """Stands for your model; here as small as possible."""

    def __init__(self, vocab: int = 32, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        config = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4, window=16)
        self.embedding = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(layers))
        self.attentions = nn.ModuleList(
            tercet.NativeSparseAttention(dim, heads=4, kv_heads=1, head_dim=16, config=config) for _ in range(layers)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return self.head(x)


def main(steps: int = 60) -> list[float]:
    """Learn to count: every token is its predecessor plus one."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = (torch.randint(32, (4, 1)) + torch.arange(65)) % 32
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
