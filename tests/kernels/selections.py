"""Inputs, selections and an independent dense check for the kernels of the selected branch."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from tercet.attention.kernels.varlen import Documents


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


def case(
    cu, heads, groups, dk, dv, config, packed=False, batch=1, seed=0, forced=True, gated=True, query_range=None,
    dtype=torch.float32, device="cpu",
):  # fmt: skip
    """Random inputs over flattened tokens. `query_range`: the tokens of each sequence that are queries; all, unless
    given. `keys` and `shaped` give tensors of keys and of queries their batch axis."""
    g = torch.Generator().manual_seed(seed)
    N = cu[-1]
    T = N // batch

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    sizes = (heads, dk), (groups, dk), (groups, dv), (heads, dv)
    q, k, v, dout = (rand(N, *size).to(device, dtype) for size in sizes)
    gate = rand(N, heads).to(device)
    chosen = config.select_count, config.select_block, config.select_initial, config.select_local
    indices = random_selection(cu, groups, *chosen, g, forced).to(device)
    first, past = query_range or (0, T)

    def keys(x):
        return x.reshape(batch, T, *x.shape[1:])

    def shaped(x):
        return keys(x)[:, first:past].contiguous()

    bounds = torch.tensor(cu, dtype=torch.int32, device=device) if packed else None
    return SimpleNamespace(
        q=q, k=k, v=v, dout=dout, gate=gate if gated else None, indices=indices, cu=cu, config=config, shaped=shaped,
        keys=keys, documents=Documents(batch, T, 0, bounds, None, first, past - first),
    )  # fmt: skip


def poison_empty(monkeypatch):
    """Memory that nothing was written to holds NaN, or numbers beyond every table."""
    real = torch.empty

    def poisoned(*args, **kwargs):
        x = real(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else min(1 << 20, torch.iinfo(x.dtype).max))

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: poisoned(x.shape, dtype=x.dtype, device=x.device))
