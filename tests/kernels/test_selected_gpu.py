"""The selected branch's kernels on a GPU: real tiles in bf16, fp16 and fp32, and the laws that need a device."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

import tercet
from kernels import selections
from kernels.selections import dense_masked, relative_error
from tercet.attention.config import NSAConfig
from tercet.attention.kernels.varlen import Documents
from tercet.bench.attention import Shape, make_inputs

pytestmark = pytest.mark.gpu
sel = import_module("tercet.attention.kernels.selected.launch")
UNION, KV_MAJOR = 1e9, -1.0
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL_BLOCKS = NSAConfig(32, 16, 32, 8, 1, 2, 64)
WIDE_BLOCKS = NSAConfig(32, 16, 128, 4, 1, 1, 64)
TINY_BLOCKS = NSAConfig(16, 16, 16, 6, 0, 1, 64)

# bounds of documents, batch, query heads, KV heads, Dk, Dv, config, dtype
CASES = {
    "P": ([0, 2048], 1, 64, 4, 128, 128, NSAConfig(), BF16),
    "C, packed": ([0, 1, 1, 300, 1003, 1100, 2047], 1, 12, 2, 64, 64, NSAConfig(), BF16),
    "three heads, 96/64": ([0, 700, 1400, 2100], 3, 6, 2, 96, 64, NSAConfig(), BF16),
    "one head, 192/128": ([0, 1500], 1, 2, 2, 192, 128, NSAConfig(), BF16),
    "blocks of 32": ([0, 1111], 1, 4, 2, 64, 64, SMALL_BLOCKS, FP16),
    "blocks of 128": ([0, 2000], 1, 8, 1, 128, 128, WIDE_BLOCKS, BF16),
    "eighty heads per group": ([0, 600], 1, 80, 1, 64, 64, TINY_BLOCKS, BF16),
    "full precision": ([0, 900], 1, 4, 2, 64, 64, NSAConfig(), FP32),
}
DESIGNS = pytest.mark.parametrize("limit", [UNION, KV_MAJOR], ids=["union", "kv_major"])


def case(name, seed=0):
    cu, batch, *sizes, config, dtype = CASES[name]
    return selections.case(cu, *sizes, config, len(cu) > batch + 1, batch, seed, dtype=dtype, device="cuda")


def run(c, limit, **changes):
    default = sel.selected_settings(c.q.shape[-1], c.v.shape[-1], c.q.dtype, c.config.select_block)
    settings = replace(default, forward_limit=limit, backward_limit=limit, **changes)
    q, k, v, dout, gate, indices = map(c.shaped, (c.q, c.k, c.v, c.dout, c.gate, c.indices))
    o, lse, saved = sel.selected_forward(q, k, v, indices, c.config, c.documents, settings)
    delta = (dout.float() * o.float()).sum(-1)
    grads = sel.selected_backward(q, k, v, indices, lse, dout, gate, delta, c.config, c.documents, saved, settings)
    return [x.reshape(-1, *x.shape[2:]) for x in (o, *grads)]


@DESIGNS
@pytest.mark.parametrize("name", CASES)
def test_selected_attention_equals_a_masked_softmax(name, limit):
    c = case(name)
    leaves = [x.float().requires_grad_() for x in (c.q, c.k, c.v)]
    o = dense_masked(*leaves, c.indices, c.cu, c.config.select_block)
    (o * c.gate[..., None]).backward(c.dout.float())
    tolerance = 1e-5 if c.q.dtype == FP32 else 1e-2
    for what, a, b in zip(("o", "dq", "dk", "dv"), run(c, limit), (o, *(x.grad for x in leaves)), strict=True):
        assert relative_error(a, b.detach()) <= tolerance, what


@DESIGNS
def test_same_inputs_same_bits_whatever_memory_held(limit, monkeypatch):
    c = case("C, packed", seed=1)
    first = run(c, limit, range_bytes=1 << 20)
    selections.poison_empty(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, run(c, limit, range_bytes=1 << 20), strict=True))


def test_remembered_launches_follow_strides_and_alignment():
    """A second call of the same shape with other strides, then with memory off 16 bytes, compiles its own variants: to
    rounding, because TMA needs aligned memory, and the kernel without it adds rows in another order."""
    c = case("C, packed", seed=4)
    expected = run(c, KV_MAJOR)
    N = c.cu[-1]
    wide = torch.zeros(N, 12, 80, device="cuda", dtype=BF16)
    wide[..., :64] = c.q
    flat = torch.zeros(N * 12 * 64 + 1, device="cuda", dtype=BF16)
    flat[1:] = c.q.reshape(-1)
    for q in (wide[..., :64], flat[1:].view(N, 12, 64)):
        c.q = q
        c.shaped = lambda x: x[None]
        for what, a, b in zip(("o", "dq", "dk", "dv"), expected, run(c, KV_MAJOR), strict=True):
            assert relative_error(a, b.float()) <= 2e-4, what


@DESIGNS
@pytest.mark.parametrize("name", ["C, packed", "three heads, 96/64"])
def test_values_that_are_not_finite_stay_in_their_document(name, limit):
    """Tiles and blocks straddle documents and sequences."""
    c = case(name)
    clean = run(c, limit)
    first, end = c.cu[-3:-1]
    for x in (c.q, c.k, c.v, c.dout):
        x[[first, end - 1]] = float("nan")
    for what, a, b in zip(("o", "dq", "dk", "dv"), run(c, limit), clean, strict=True):
        assert a[first:end].isnan().any(), what
        assert torch.equal(a[:first], b[:first]), what
        assert torch.equal(a[end:], b[end:]), what


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "shape", [Shape(8, 8192, 12, 2, 64), Shape(2, 8192, 8, 2, 128)], ids=["8 of 8k", "2 of 8k, heads of 128"]
)
def test_scattered_selections_give_the_outputs_of_union_tiles_in_every_row(shape: Shape, packed: bool) -> None:
    """Of the whole a race's few rows are a thousandth; of themselves they are half."""
    config = NSAConfig(window=128)
    x = make_inputs(shape, config, "random", 0.0)
    with torch.no_grad():
        _, aux = tercet.nsa_attention(*x, config=config, backend="triton", return_aux=True)
    blocks = aux.block_indices
    q, k, v = x.q, x.ks, x.vs
    documents = Documents(shape.B, shape.T, 0, None, None)
    if packed:
        q, k, v, blocks = (t.flatten(0, 1)[None] for t in (q, k, v, blocks))
        cu = torch.arange(0, shape.B * shape.T + 1, shape.T, dtype=torch.int32, device="cuda")
        documents = Documents(1, shape.B * shape.T, 0, cu, None, longest=shape.T)
    usual = sel.selected_settings(shape.D, shape.D, q.dtype, config.select_block)
    o, lse, saved = sel.selected_forward(q, k, v, blocks, config, documents)
    assert (saved.decision[0] == 1).all()  # KV-major in every range
    unions = replace(usual, forward_limit=1e9, backward_limit=1e9)
    wanted, wanted_lse, _ = sel.selected_forward(q, k, v, blocks, config, documents, unions)
    off = (o.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert off.max() < 3e-2
    assert (lse - wanted_lse).abs().max() < 1e-2
