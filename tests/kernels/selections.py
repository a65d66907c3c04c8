"""Selections and an independent dense check for the kernels of the selected branch."""

from itertools import pairwise

import torch


def starts(cu, total):
    """First token of each token's document."""
    out = torch.zeros(total, dtype=torch.long)
    for a, b in pairwise(cu):
        out[a:b] = a
    return out


def random_selection(cu, groups, n, select_block, initial, local, generator, forced=True):
    """int32 [N, G, n] as SPEC.md's step 5 leaves them, the free blocks drawn at random, on the CPU."""
    total = cu[-1]
    out = torch.full((total, groups, n), -1, dtype=torch.int32)
    first = starts(cu, total)
    for t in range(total):
        c = int(t - first[t]) // select_block
        must = {j for j in range(c + 1) if j < initial or j > c - local} if forced else set()
        for g in range(groups):
            rest = [j for j in range(c + 1) if j not in must]
            order = torch.randperm(len(rest), generator=generator).tolist()
            chosen = sorted(must | {rest[i] for i in order[: max(0, min(n, c + 1) - len(must))]})
            out[t, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out


def dense_masked(q, k, v, indices, cu, select_block):
    """The selected branch over flattened tokens by one masked softmax. q: [N, H, Dk], k/v: [N, G, D*]."""
    total, heads, dk = q.shape
    groups = k.shape[1]
    first = starts(cu, total).to(q.device)
    t = torch.arange(total, device=q.device)
    block = (t - first) // select_block  # of each key, within its document
    seen = (first[:, None] == first[None, :]) & (t[None, :] <= t[:, None])
    chosen = (indices[:, :, :, None] == block[None, None, None, :]).any(2)  # [N, G, keys]
    mask = (chosen & seen[:, None, :]).repeat_interleave(heads // groups, 1)
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    logits = torch.einsum("thd,shd->ths", q, k) * dk**-0.5
    p = torch.softmax(logits.masked_fill(~mask, -1e30), -1) * mask
    return torch.einsum("ths,shd->thd", p, v)


def relative_error(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    assert torch.isfinite(a).all()
    return float((a - b).norm() / b.norm())
