"""The whole operator on the kernels against the loop-written oracle and the reference: fp32, interpreted."""

from __future__ import annotations

import pytest
import torch

import tercet
from cases import Inputs, attend, cu, inputs, judge, one_branch, wrong_sets
from tercet.attention.kernels import compressed, window
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.varlen import Documents

pytestmark = pytest.mark.interpreter

NAMES = ("q", "kc", "vc", "ks", "vs", "kw", "vw", "gates")


def config(**changes: int) -> tercet.NSAConfig:
    small = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "select_count": 3, "window": 20}
    return tercet.NSAConfig(**{**small, "select_local": 1, **changes})


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)).item()


def gradients(x: Inputs, cfg: tercet.NSAConfig, backend: str, dout: torch.Tensor, **options):
    leaves = x.leaves()
    out, aux = attend(leaves, cfg, backend, return_aux=True, **options)
    return out, aux, torch.autograd.grad(out, leaves.tensors(), dout.to(out.dtype))


@pytest.mark.parametrize(
    ("documents", "batch", "per_group", "key_size", "value_size"),
    [(None, 2, 3, 24, 16), ((1, 34, 0, 5, 20), 1, 2, 16, 16)],
    ids=["batch", "documents"],
)
def test_output_selection_and_gradients(documents, batch, per_group, key_size, value_size) -> None:
    cfg = config()
    tokens = sum(documents) if documents else 53
    x = inputs(
        cfg, tokens, batch=batch, groups=1, per_group=per_group, key_size=key_size, value_size=value_size,
        documents=documents, padding=3 if documents else 0, dtype=torch.float32,
    )  # fmt: skip
    dout = torch.randn(batch, tokens, per_group, value_size)
    padded = x
    if documents:  # padding after the last document's compressed tokens is ignored, whatever it holds
        kc, vc = x.kc.clone(), x.vc.clone()
        kc[:, -3:] = vc[:, -3:] = float("nan")
        padded = x.with_(kc=kc, vc=vc)
    out, aux, grads = gradients(padded, cfg, "triton", dout, cu_seqlens=cu(documents))
    answer = judge(x, cfg, cu(documents))
    assert wrong_sets(answer, aux.block_indices, 1e-6) == []
    assert relative(out.detach(), torch.from_numpy(answer.out)) < 1e-5
    exact = x.map(lambda t: t.double())
    _, _, wanted = gradients(exact, cfg, "reference", dout, cu_seqlens=cu(documents), block_indices=aux.block_indices)
    worst = {n: relative(g, w) for n, g, w in zip(NAMES, grads, wanted, strict=True)}
    assert all(error < 1e-5 for error in worst.values()), worst


@pytest.mark.parametrize(
    ("branch", "changes"),
    [
        (0, {"compress_block": 1, "compress_stride": 1}),
        (1, {"select_count": 4}),
        (2, {"window": 64}),
    ],
    ids=["compressed", "selected", "window"],
)
def test_each_branch_alone_can_be_full_causal_attention(branch: int, changes: dict[str, int]) -> None:
    cfg = config(**changes)
    x = one_branch(inputs(cfg, 49, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32), branch)
    k, v = ((x.kc, x.vc), (x.ks, x.vs), (x.kw, x.vw))[branch]
    q, k, v = (t.double().transpose(1, 2) for t in (x.q, k, v))
    mask = torch.ones(49, 49, dtype=torch.bool).tril()
    s = (q @ k.transpose(-1, -2) * 16**-0.5).masked_fill(~mask, float("-inf"))
    wanted = (s.softmax(-1) @ v).transpose(1, 2)
    assert (attend(x, cfg, "triton") - wanted).abs().max() < 1e-5


def test_the_future_changes_nothing() -> None:
    cfg = config()
    x = inputs(cfg, 90, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)
    cut = 70
    cut_compressed = cfg.num_compressed(cut)

    def scramble(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[:, cut_compressed if t.shape[1] < 90 else cut :] = 50.0
        return t

    out, aux = attend(x, cfg, "triton", return_aux=True)
    changed, changed_aux = attend(x.map(scramble), cfg, "triton", return_aux=True)
    assert torch.equal(out[:, :cut], changed[:, :cut])
    assert torch.equal(aux.block_indices[:, :cut], changed_aux.block_indices[:, :cut])
    assert not torch.equal(out[:, cut:], changed[:, cut:])


@pytest.mark.parametrize("tokens", [1, 7])
def test_queries_without_compressed_tokens_give_exact_zero_and_finite_gradients(tokens: int) -> None:
    cfg = config()
    x = inputs(cfg, tokens, groups=2, per_group=1, key_size=16, value_size=16, dtype=torch.float32)
    alone = attend(one_branch(x, 0), cfg, "triton")
    assert torch.equal(alone, torch.zeros_like(alone))
    *_, grads = gradients(x, cfg, "triton", torch.randn(1, tokens, 2, 16))
    assert all(g.isfinite().all() for g in grads)


def test_any_strides() -> None:
    cfg = config()
    x = inputs(cfg, 30, batch=2, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)

    def heads_first(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    fused = torch.cat([x.ks, x.kw, x.vw], -1)  # views into one projection
    strided = x.with_(
        q=heads_first(x.q), ks=fused[..., :16], kw=fused[..., 16:32], vw=fused[..., 32:], gates=heads_first(x.gates)
    )
    assert torch.equal(attend(strided, cfg, "triton"), attend(x, cfg, "triton"))


def test_heads_may_lie_further_apart_than_32_bits_count() -> None:
    cfg = config(select_count=2)
    x = inputs(cfg, 40, groups=1, per_group=3, key_size=16, value_size=16, dtype=torch.float16)
    dout = torch.randn(1, 40, 3, 16).half()

    def apart(t: torch.Tensor) -> torch.Tensor:
        """The last head at element 2^31. Only the pages that are written to take memory."""
        far = torch.empty((1 << 31) + 40 * 16, dtype=t.dtype).as_strided(t.shape, (40 * 16, 16, 1 << 30, 1))
        return far.copy_(t)

    out, _, grads = gradients(x, cfg, "triton", dout)
    q = apart(x.q).requires_grad_()
    found = attend(x.with_(q=q), cfg, "triton")
    assert torch.equal(found, out)
    assert torch.equal(torch.autograd.grad(found, q, apart(dout))[0], grads[0])


def test_branches_left_out_and_blocks_given() -> None:
    cfg = config()
    x = inputs(cfg, 50, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)
    given = torch.full((1, 50, 1, 3), -1, dtype=torch.int32)
    given[..., 0] = torch.arange(50)[None, :, None] // 16
    dout = torch.randn(1, 50, 2, 16)
    leaves, exact = x.leaves(), x.map(lambda t: t.double()).leaves()
    for branches in (("selected", "window"), ("compressed",)):
        blocks = given if "selected" in branches else None
        out = attend(leaves, cfg, "triton", branches=branches, block_indices=blocks)
        wanted = attend(exact, cfg, "reference", branches=branches, block_indices=blocks)
        assert relative(out.detach(), wanted.detach()) < 1e-5
        found = torch.autograd.grad(out, leaves.tensors(), dout, allow_unused=True)
        right = torch.autograd.grad(wanted, exact.tensors(), dout.double(), allow_unused=True)
        for name, f, r in zip(NAMES, found, right, strict=True):
            zero = r is None or not r.any()
            assert (f is None or not f.any()) if zero else relative(f, r) < 1e-5, name


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("window_size", [20, 300])
def test_what_is_not_finite_reaches_no_other_document(tma: bool, window_size: int) -> None:
    """TMA loads whole tiles, which reach into the next document."""
    cfg, bounds = config(window=window_size), torch.tensor([0, 70, 110, 140], dtype=torch.int32)
    q, k, v = (torch.randn(1, 140, heads, 16) for heads in (2, 1, 1))
    documents = Documents(1, 140, cfg.num_compressed(140), bounds, cfg.compressed_cu_seqlens(bounds))
    launch = Launch(rows=32, keys=32, stages=1, tma=tma)

    def outputs() -> tuple[torch.Tensor, ...]:
        kc, vc = (tercet.compress_mean(x, config=cfg, cu_seqlens=bounds) for x in (k, v))
        of_compressed = compressed.forward(q, kc[:, : documents.compressed_length], vc, cfg, documents, launch)[0]
        return of_compressed, window.forward(q, k, v, cfg.window, documents, launch)[0]

    expected = outputs()
    for x in (q, k, v):
        x[0, [70, 109]] = torch.nan
    for found, wanted in zip(outputs(), expected, strict=True):
        assert torch.equal(found[:, :70], wanted[:, :70])
        assert torch.equal(found[:, 110:], wanted[:, 110:])
        assert found[:, 109].isnan().all()
