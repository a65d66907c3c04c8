"""The Gluon kernels for Hopper on a CPU (gluon_interpreter.py), against masked softmaxes."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.gluon_interpreter import gluon_on_cpu
from kernels.selections import case, dense_masked, poison_empty, relative_error
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import compressed, scores, table, window
from tercet.attention.kernels import hopper as hopper_kernels
from tercet.attention.kernels.dq import compressed_window_dq
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents

sel = import_module("tercet.attention.kernels.selected.launch")
pytestmark = pytest.mark.interpreter
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(table, "generation", lambda x: 9)


def masked(q, k, v, seen):
    """Softmax over the keys that are seen, (o, log-sum-exp); q: [T, H, D], k, v: [S, G, D], seen: [T, S]."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
    logits = torch.einsum("thd,shd->ths", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse[..., None].clamp(min=-1e30)).exp()
    return torch.einsum("ths,shd->thd", p, v), lse


def seen_in_window(cu, size):
    t = torch.arange(cu[-1])
    doc = torch.bucketize(t, torch.tensor(cu[1:]), right=True)
    return (doc[:, None] == doc) & (t <= t[:, None]) & (t > t[:, None] - size)


def seen_compressed(cu, ccu, config):
    seen = torch.zeros(cu[-1], int(ccu[-1]), dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(cu), pairwise(ccu), strict=True):
        end = torch.arange(d - c) * config.compress_stride + config.compress_block - 1
        seen[a:b, c:d] = end <= torch.arange(b - a)[:, None]
    return seen


CONFIG = NSAConfig(window=100)
PLAIN, PACKED = [0, 333], [0, 40, 41, 200, 333]


def quick_and_slow(quick, every):
    """The quick calls, and all others marked slow."""
    return [*quick, *(pytest.param(*call, marks=pytest.mark.slow) for call in every if call not in quick)]


BRANCHES = [  # every size, layout and late part once
    ("compressed", PACKED, 64, "copies"), ("compressed", PLAIN, 96, "products"),
    ("window", PACKED, 128, "products"), ("window", PLAIN, 64, "copies"),
]  # fmt: skip
ALL = product(("compressed", "window"), (PLAIN, PACKED), (64, 96, 128), ("copies", "products"))


@pytest.mark.parametrize(("branch", "cu", "size", "late"), quick_and_slow(BRANCHES, ALL))
def test_a_branch_equals_a_masked_softmax(branch, cu, size, late):
    T, H, G = cu[-1], 4, 2
    g = torch.Generator().manual_seed(0)
    bounds = torch.tensor(cu, dtype=torch.int32) if len(cu) > 2 else None
    ccu = None if bounds is None else CONFIG.compressed_cu_seqlens(bounds)
    rows = T if branch == "window" else CONFIG.num_compressed(T)
    documents = Documents(1, T, CONFIG.num_compressed(T), bounds, ccu)
    q, dout = (torch.randn(1, T, H, size, generator=g).to(BF16) for _ in range(2))
    k, v = (torch.randn(1, rows, G, size, generator=g).to(BF16) for _ in range(2))
    gate = torch.rand(H, 1, T, generator=g)
    if branch == "window":
        seen, used = seen_in_window(cu, CONFIG.window), T
    else:
        seen = seen_compressed(cu, [0, rows] if ccu is None else ccu.tolist(), CONFIG)
        used = seen.shape[1]
        k[:, used:] = v[:, used:] = torch.nan  # padding
    leaves = [x[0].float().requires_grad_() for x in (q, k[:, :used], v[:, :used])]
    o, lse = masked(*leaves, seen)
    (o * gate.permute(1, 2, 0)[0][..., None]).backward(dout[0].float())

    with gluon_on_cpu(late) as launched:
        if branch == "window":
            found, found_lse = window.forward(q, k, v, CONFIG.window, documents)
        else:
            found, found_lse = compressed.forward(q, k, v, CONFIG, documents)
        delta = (dout.float() * found.float()).sum(-1).permute(2, 0, 1).contiguous()
        both = Branch(k, v, found_lse, delta, gate)
        if branch == "window":
            dk, dv = window.dkv(q, dout, both, CONFIG.window, documents)
        else:
            dk, dv = compressed.dkv(q, dout, both, CONFIG, documents)
        assert launched == ["hopper_forward", "hopper_dkv"]
        if table.gluon_launch("query_gradient", q, dout, k, v, packed=documents.packed):
            given = (both, None) if branch == "compressed" else (None, both)
            dq = compressed_window_dq(q, dout, *given, CONFIG, documents)
            assert launched[-1] == "hopper_dq"
            assert relative_error(dq[0], leaves[0].grad) <= 5e-3
    some = lse.isfinite()
    assert relative_error(found_lse.permute(1, 2, 0)[0][some], lse[some].detach() * 1.4426950408889634) <= 1e-6
    for a, b in ((found[0], o.detach()), (dk[0, :used], leaves[1].grad), (dv[0, :used], leaves[2].grad)):
        assert relative_error(a, b) <= 5e-3


def test_no_constant_is_assigned_in_a_loop():
    """The compiler refuses the second assignment, which Python allows."""
    loops = [
        (file.name, loop.lineno)
        for file in Path(hopper_kernels.__file__).parent.glob("*.py")
        for loop in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(loop, ast.For) and any(isinstance(node, ast.AnnAssign) for node in ast.walk(loop))
    ]
    assert loops == []


SCORED = [
    (3, 64, (32, 16, 64)),
    (8, 64, (64, 16, 64)),
    (1, 64, (16, 16, 32)),
    (6, 128, (32, 16, 64)),
    (5, 96, (32, 8, 64)),
]
ONE, SEVERAL = [0, 1200], [0, 40, 41, 1200]
SCORES = [
    (*SCORED[0], ONE, "copies"), (*SCORED[1], SEVERAL, "products"), (*SCORED[3], SEVERAL, "copies"),
    (*SCORED[4], ONE, "products"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "size", "blocks", "cu", "late"),
    quick_and_slow(SCORES, [(*x, *rest) for x in SCORED for rest in product((ONE, SEVERAL), ("copies", "products"))]),
)
def test_scores_equal_the_sum_of_softmaxes_over_each_block(heads, size, blocks, cu, late, monkeypatch):
    T, G = cu[-1], 1
    config = NSAConfig(*blocks, select_count=3, select_initial=1, select_local=1)
    g = torch.Generator().manual_seed(0)
    bounds = torch.tensor(cu, dtype=torch.int32) if len(cu) > 2 else None
    ccu = None if bounds is None else config.compressed_cu_seqlens(bounds)
    rows = config.num_compressed(T)
    q = torch.randn(1, T, heads * G, size, generator=g).to(BF16)
    k = torch.randn(1, rows, G, size, generator=g).to(BF16)
    given = [0, rows] if ccu is None else ccu.tolist()
    k[:, given[-1] :] = torch.nan  # padding
    used = k[0, : given[-1]].float()
    seen = seen_compressed(cu, given, config)
    _, lse = masked(q[0].float(), used, used, seen)
    logits = torch.einsum("tgd,sgd->tgs", q[0].float(), used.repeat_interleave(heads, 1)) * size**-0.5
    p = (logits - lse[..., None]).exp().masked_fill(~seen[:, None], 0.0).unflatten(1, (G, heads)).sum(2)
    written = []

    def choose(q, G, config, documents, queries, score, *limits):
        blocks = -(-config.num_blocks(documents.longest) // 4) * 4
        written.append(torch.full((documents.query_tiles(queries), queries, G, blocks), torch.nan))
        score(written[0], blocks, 0, len(written[0]))

    monkeypatch.setattr(scores, "choose", choose)
    with gluon_on_cpu(late) as launched:
        lse = lse.T[:, None].contiguous() * 1.4426950408889634
        scores.select(q, k, lse, config, Documents(1, T, rows, bounds, ccu))
    assert launched == ["hopper_scores"]
    queries = written[0].shape[1]
    for d, ((a, b), (c, e)) in enumerate(zip(pairwise(cu), pairwise(given), strict=True)):
        start = torch.arange(e - c)[:, None] * config.compress_stride
        block = torch.arange(-(-(b - a) // config.select_block)) * config.select_block
        ends = torch.minimum(start + config.compress_block, block + config.select_block)
        share = (ends - torch.maximum(start, block)).clamp(min=0) / config.compress_block
        want = p[a:b, :, c:e] @ share
        got = written[0][a // queries + d :].flatten(0, 1)[: b - a, :, : len(block)] * 2.0**-100
        own = torch.arange(b - a)[:, None] // config.select_block
        free = (own >= config.select_count) & (torch.arange(len(block)) <= own - config.select_local)
        where = free[:, None].expand_as(want)
        assert len(cu) > 2 or where.sum() > 1000
        # probabilities are cut to 17 bits
        assert torch.allclose(got[where], want[where], rtol=2**-15, atol=0)


BLOCKS = NSAConfig(select_block=64, select_count=3, select_initial=1, select_local=1)
BLOCKS_OF_32 = replace(BLOCKS, select_block=32, select_count=4, select_local=2)


SCATTERED, UNION = -1.0, 1e9
SELECTED = [(64, BLOCKS, SCATTERED, "copies"), (128, BLOCKS, SCATTERED, "products"), (96, BLOCKS, UNION, "products")]
EVERY = [
    (*of, *how)
    for of in ((64, BLOCKS), (96, BLOCKS), (128, BLOCKS), (64, BLOCKS_OF_32))
    for how in ((SCATTERED, "copies"), (SCATTERED, "products"), (UNION, "products"))
]


@pytest.mark.parametrize(("size", "config", "limit", "late"), quick_and_slow(SELECTED, EVERY))
def test_the_selected_branch_equals_a_masked_softmax(size, config, limit, late, monkeypatch):
    """Scattered selections; with a high limit, dk and dv of unions."""
    poison_empty(monkeypatch)
    c = case([0, 1, 30, 270], 6, 1, size, size, config, packed=True, dtype=torch.float16)
    # pieces long enough to use every slot of shared memory twice
    settings = sel.SelectedSettings(
        tile_rows=16, segment_rows=660, forward_limit=limit, backward_limit=limit, tma=False
    )  # fmt: skip
    q, dout, indices, gate = (c.shaped(x) for x in (c.q, c.dout, c.indices, c.gate))
    k, v = c.keys(c.k), c.keys(c.v)
    leaves = [x.float().requires_grad_() for x in (c.q, c.k, c.v)]
    o = dense_masked(*leaves, c.indices, c.cu, config.select_block)
    (o * c.gate[..., None]).backward(c.dout.float())

    with gluon_on_cpu(late) as launched:
        found, lse, saved = sel.selected_forward(q, k, v, indices, config, c.documents, settings)
        delta = (dout.float() * found.float()).sum(-1)
        grads = sel.selected_backward(q, k, v, indices, lse, dout, gate, delta, config, c.documents, saved, settings)
    assert set(launched) == {"hopper_selected_dkv"} | ({"hopper_selected_forward"} if limit < 0 else set())
    for what, a, b in zip(("o", "dq", "dk", "dv"), (found, *grads), (o, *(x.grad for x in leaves)), strict=True):
        assert relative_error(a[0], b.detach()) <= 6e-4, what
