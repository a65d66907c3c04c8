"""The whole operator, forward and backward, gives the same bits every time, in each of the selected branch's designs at
sizes where thousands of programs are under way: merging KV-major outputs once had a race that shows only there."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

import tercet
from tercet.attention.kernels.varlen import Documents
from tercet.bench.attention import Shape, make_inputs

sel = import_module("tercet.attention.kernels.selected.launch")
pytestmark = pytest.mark.gpu
CONFIG = tercet.NSAConfig(window=128)
NAMES = ("out", "blocks", "q", "kc", "vc", "ks", "vs", "kw", "vw", "gates")
SCATTERED = {
    "8 of 8k": Shape(8, 8192, 12, 2, 64),
    "2 of 8k, heads of 128": Shape(2, 8192, 8, 2, 128),
}


def chosen_blocks(x):
    with torch.no_grad():
        return tercet.nsa_attention(*x, config=CONFIG, backend="triton", return_aux=True)[1].block_indices


@pytest.mark.parametrize("kind", ["random", "smooth"])
@pytest.mark.parametrize("shape", SCATTERED.values(), ids=SCATTERED)
def test_the_operator_gives_the_same_bits_every_time(shape: Shape, kind: str) -> None:
    x = [t.requires_grad_() for t in make_inputs(shape, CONFIG, kind, 0.996)]
    dout = torch.randn(x[0].shape, dtype=x[0].dtype, device="cuda")

    def both():
        out, aux = tercet.nsa_attention(*x, config=CONFIG, backend="triton", return_aux=True)
        return out.detach(), aux.block_indices, *torch.autograd.grad(out, x, dout)

    first = both()
    for again in (both() for _ in range(4)):
        for name, a, b in zip(NAMES, first, again, strict=True):
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} numbers differ"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("shape", SCATTERED.values(), ids=SCATTERED)
def test_scattered_selections_give_the_outputs_of_union_tiles_in_every_row(shape: Shape, packed: bool) -> None:
    """Of the whole a race's few rows are a thousandth; of themselves they are half."""
    x = make_inputs(shape, CONFIG, "random", 0.0)
    blocks = chosen_blocks(list(x))
    q, k, v = x.q, x.ks, x.vs
    documents = Documents(shape.B, shape.T, 0, None, None)
    if packed:
        q, k, v, blocks = (t.flatten(0, 1)[None] for t in (q, k, v, blocks))
        cu = torch.arange(0, shape.B * shape.T + 1, shape.T, dtype=torch.int32, device="cuda")
        documents = Documents(1, shape.B * shape.T, 0, cu, None, longest=shape.T)
    usual = sel.selected_settings(shape.D, shape.D, q.dtype, CONFIG.select_block)
    o, lse, saved = sel.selected_forward(q, k, v, blocks, CONFIG, documents)
    assert (saved.decision[0] == 1).all()  # KV-major in every range
    unions = replace(usual, forward_limit=1e9, backward_limit=1e9)
    wanted, wanted_lse, _ = sel.selected_forward(q, k, v, blocks, CONFIG, documents, unions)
    off = (o.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert off.max() < 3e-2
    assert (lse - wanted_lse).abs().max() < 1e-2
