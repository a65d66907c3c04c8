"""Query ranges on the kernels: outputs and gradients of those rows of the sequence alone; fp32, interpreted, against
the reference in fp64."""

from __future__ import annotations

import pytest
import torch

import tercet
from cases import cu, inputs
from tercet.attention.layout import Packing, Span
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.spec import AttentionSpec

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=3, select_initial=1, select_local=1, window=20
)
NAMES = ("q", "kc", "vc", "ks", "vs", "kw", "vw", "gates")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)).item()


def run(x, backend, dout, packing, span, block_indices=None):
    leaves = x.map(lambda t: t.detach().clone().requires_grad_())
    out, chosen, _, route = attend(
        AttentionInputs(*leaves.tensors()), AttentionSpec(CONFIG), packing=packing, backend=backend, span=span,
        block_indices=block_indices,
    )  # fmt: skip
    assert route[0] == backend
    return out, chosen, torch.autograd.grad(out, leaves.tensors(), dout.to(out.dtype))


@pytest.mark.parametrize(
    ("documents", "batch", "queries", "selected", "window"),
    [
        # two sequences, from within a block to the end; the window's keys begin within a tile
        (None, 2, (37, 75), (0, 75), (18, 75)),
        # the first tokens alone, which see no compressed key, with keys after the last query
        (None, 1, (0, 6), (0, 40), (0, 33)),
        # a query range that begins within one document, holds two whole ones and ends within another; keys past the end
        ((30, 0, 41, 5, 20, 29), 1, (50, 111), (30, 118), (31, 115)),
        # a query range within one document of many, its window cut by the document's beginning
        ((9, 60, 25), 1, (20, 33), (9, 69), (9, 40)),
    ],
    ids=["two sequences", "no compressed key", "across documents", "within a document"],
)
def test_a_query_range_equals_its_rows_of_the_whole_sequence(documents, batch, queries, selected, window) -> None:
    tokens = sum(documents) if documents else 75
    x = inputs(
        CONFIG, tokens, batch=batch, groups=1, per_group=3, key_size=16, value_size=16, documents=documents,
        padding=2 if documents else 0, dtype=torch.float32,
    )  # fmt: skip
    packing = None if documents is None else Packing(cu(documents), tokens, x.kc.shape[1], CONFIG)
    part, blocks, near = slice(*queries), slice(*selected), slice(*window)
    some = x.with_(
        q=x.q[:, part], gates=x.gates[:, part], ks=x.ks[:, blocks], vs=x.vs[:, blocks], kw=x.kw[:, near],
        vw=x.vw[:, near],
    )  # fmt: skip
    dout = torch.randn(batch, queries[1] - queries[0], 3, 16)
    span = Span(queries[0], selected[0], window[0])
    out, chosen, grads = run(some, "triton", dout, packing, span)
    exact = x.map(lambda t: t.double()).leaves()
    wanted, all_chosen, *_ = attend(
        AttentionInputs(*exact.tensors()), AttentionSpec(CONFIG), packing=packing, backend="reference"
    )
    assert torch.equal(chosen, all_chosen[:, part])
    assert relative(out, wanted[:, part]) < 1e-5
    whole = dict(zip(NAMES, torch.autograd.grad(wanted[:, part], exact.tensors(), dout.double()), strict=True))
    at_hand = {"q": part, "gates": part, "ks": blocks, "vs": blocks, "kw": near, "vw": near}
    worst = {n: relative(g, whole[n][:, at_hand.get(n, slice(None))]) for n, g in zip(NAMES, grads, strict=True)}
    assert all(error < 1e-5 for error in worst.values()), worst
    # keys that no query of the range reads have a gradient of exactly zero
    found = dict(zip(NAMES, grads, strict=True))
    for branch in "csw":
        unread = (whole[f"v{branch}"][:, at_hand.get(f"v{branch}", slice(None))] == 0).all(-1)
        assert not found[f"k{branch}"][unread].any(), branch
        assert not found[f"v{branch}"][unread].any(), branch


def test_keys_that_begin_within_a_document_are_left_to_the_reference() -> None:
    documents = (9, 60, 25)
    x = inputs(CONFIG, 94, groups=1, per_group=1, key_size=16, value_size=16, documents=documents, dtype=torch.float32)
    packing = Packing(cu(documents), 94, x.kc.shape[1], CONFIG)
    some = x.with_(
        q=x.q[:, 50:60], gates=x.gates[:, 50:60], **{n: getattr(x, n)[:, 25:] for n in ("ks", "vs", "kw", "vw")}
    )
    call = {"packing": packing, "span": Span(50, 25)}
    with pytest.raises(RuntimeError, match="k_selected begins at token 25, within a document"):
        attend(AttentionInputs(*some.tensors()), AttentionSpec(CONFIG), backend="triton", **call)
    assert attend(AttentionInputs(*some.tensors()), AttentionSpec(CONFIG), **call).route[0] == "reference"
    # without the selected branch nothing counts blocks
    without = AttentionSpec(CONFIG, ("compressed", "window"))
    attend(AttentionInputs(*some.tensors()), without, backend="triton", **call)
