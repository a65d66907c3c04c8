"""The selected branch's kernels against a dense masked softmax, in Triton's interpreter."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

pytest.importorskip("triton")

from kernels.selections import case, dense_masked, poison_empty, relative_error, starts
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import ops
from tercet.model.layers import NativeSparseAttention

pytestmark = pytest.mark.interpreter

sel = import_module("tercet.attention.kernels.selected.launch")
UNION, KV_MAJOR = 1e9, -1.0


def small(limit=None, **changes):
    """Settings small enough for the interpreter; `limit` forces one design."""
    values = {
        "tile_rows": 16, "kv_forward_rows": 16, "dkv_rows": 16, "dkv_dq_rows": 16, "segment_rows": 64,
        "dkv_transposed": True, "forward_stages": 1, "kv_forward_stages": 1, **changes,
    }  # fmt: skip
    if limit is not None:
        values |= {"forward_limit": limit, "backward_limit": limit}
    return sel.SelectedSettings(**values)


def run(c, settings, save=True):
    q, dout, indices = (c.shaped(x) for x in (c.q, c.dout, c.indices))
    k, v = c.keys(c.k), c.keys(c.v)
    o, lse, saved = sel.selected_forward(q, k, v, indices, c.config, c.documents, settings)
    like = sel.selected_saved_like(q, k, v, indices, c.config, c.documents, settings)
    assert [x is None or (x.shape, x.dtype) for x in saved] == [x is None or (x.shape, x.dtype) for x in like]
    delta = (dout * o).sum(-1)
    gate = None if c.gate is None else c.shaped(c.gate)
    grads = sel.selected_backward(
        q, k, v, indices, lse, dout, gate, delta, c.config, c.documents, saved if save else (), settings
    )
    return tuple(x.reshape(-1, *x.shape[2:]) for x in (o, *grads)), saved


def expected(c):
    leaves = [x.double().requires_grad_() for x in (c.q, c.k, c.v)]
    o = dense_masked(*leaves, c.indices, c.cu, c.config.select_block)
    gated = o if c.gate is None else o * c.gate.double()[..., None]
    c.shaped(gated).backward(c.shaped(c.dout.double()))
    dq, dk, dv = (x.grad for x in leaves)
    return (*(c.shaped(x).flatten(0, 1) for x in (o.detach(), dq)), dk, dv)


def check(c, settings, save=True):
    got, saved = run(c, settings, save)
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, expected(c), strict=True):
        assert relative_error(a, b) <= 1e-5, name
    return got, saved


@pytest.fixture
def poison(monkeypatch):
    poison_empty(monkeypatch)


CONFIG = NSAConfig(16, 16, 16, select_count=3, select_initial=1, select_local=1, window=16)
WIDE = NSAConfig(16, 16, 16, select_count=4, select_initial=1, select_local=1, window=16)  # lists have room left
DESIGNS = pytest.mark.parametrize("limit", [UNION, KV_MAJOR], ids=["union", "kv_major"])


@DESIGNS
def test_selected_attention_equals_a_masked_softmax(limit):
    _, saved = check(case([0, 53], 4, 2, 16, 32, CONFIG), small(limit))
    assert (saved.decision is None) == (limit == UNION)


MANY_SLOTS = NSAConfig(16, 16, 16, 9, 2, 3, 16)
CASES = {
    "batches and three heads per group": case([0, 50, 100], 3, 1, 24, 16, CONFIG, batch=2, seed=1),
    "packed documents": case([0, 1, 1, 18, 83, 90], 2, 1, 16, 16, CONFIG, packed=True, seed=2),
    "more slots than blocks, no gate": case([0, 60], 1, 1, 16, 16, MANY_SLOTS, seed=3, gated=False),
    "groups wider than a tile": case([0, 20], 18, 1, 16, 16, CONFIG, seed=4),
    "a query range of a packed batch": case(
        [0, 1, 18, 83, 110], 2, 1, 16, 16, CONFIG, packed=True, seed=11, query_range=(60, 95)
    ),
    "a query range of each sequence": case([0, 55, 110], 3, 1, 16, 16, CONFIG, batch=2, seed=12, query_range=(19, 50)),
    "lists without their forced blocks": case([0, 54], 2, 1, 16, 16, CONFIG, seed=7, forced=False),
}


@DESIGNS
@pytest.mark.parametrize("name", CASES)
def test_other_shapes_equal_a_masked_softmax(name, limit):
    check(CASES[name], small(limit))


LARGE = NSAConfig(16, 16, 32, select_count=3, select_initial=1, select_local=1, window=16)


@pytest.mark.parametrize(
    ("large", "limit"),
    [
        (case([0, 150], 2, 1, 16, 16, LARGE, seed=14), UNION),
        (case([0, 1, 1, 50, 150, 190], 2, 1, 16, 16, LARGE, packed=True, seed=15), KV_MAJOR),
        (case([0, 110, 220], 3, 1, 16, 16, LARGE, batch=2, seed=16, query_range=(35, 90)), KV_MAJOR),
        (case([0, 104], 2, 1, 16, 16, LARGE, seed=17, forced=False), UNION),
    ],
    ids=["plain", "packed", "query range", "without forced blocks"],
)
def test_larger_blocks_are_read_in_parts(large, limit, monkeypatch):
    monkeypatch.setattr(sel.table, "LARGEST_BLOCK", 16)
    check(large, small(limit))
    check(with_later_blocks(large), small(limit))


def test_token_ranges_of_a_query_range_sum_to_the_whole(poison):
    """Keys before, after and between the query ranges of two sequences get gradients of zero."""
    c = case([0, 90, 180], 2, 1, 16, 16, CONFIG, batch=2, seed=13, query_range=(33, 75))
    settings = small(KV_MAJOR, range_bytes=1 << 13)
    _, saved = check(c, settings)
    assert saved.decision.shape[1] >= 3


@pytest.mark.parametrize("dkv_transposed", [True, False])
def test_key_gradients_of_union_tiles_sum_over_ranges_and_pieces(dkv_transposed):
    """Lists longer than a segment, several ranges, in both orientations of the scores."""
    c = case([0, 20, 90], 2, 1, 16, 16, CONFIG, packed=True, seed=5)
    check(c, small(UNION, range_bytes=1 << 13, segment_rows=32, dkv_transposed=dkv_transposed))


def test_each_range_decides_for_itself():
    """Sparse at the end, dense at the start: with a limit between, the first range runs as union, the last KV-major."""
    settings = small(1.5, range_bytes=1 << 14)
    _, saved = check(case([0, 130], 2, 1, 16, 16, CONFIG, seed=6), settings)
    decision = saved.decision
    assert decision[:, 0].tolist() == [0, 0]
    assert decision[:, -1].tolist() == [1, 1]


def with_later_blocks(c):
    """The same, padding replaced by blocks after each query's own: the next ones, and after them one beyond all."""
    own = (torch.arange(c.cu[-1]) - starts(c.cu, c.cu[-1])) // c.config.select_block
    slot = torch.arange(c.config.select_count)
    later = own[:, None, None] + 1 + slot - (c.indices >= 0).sum(-1, keepdim=True)
    later[..., -1] = 1 << 27  # its first token would not fit 31 bits
    indices = torch.where(c.indices < 0, later.int(), c.indices)
    return SimpleNamespace(**vars(c) | {"indices": indices})


@pytest.mark.parametrize(
    ("limit", "packed"),
    [
        pytest.param(UNION, True, id="union-packed"),
        pytest.param(KV_MAJOR, False, id="kv_major-plain"),
        pytest.param(UNION, False, id="union-plain", marks=pytest.mark.slow),
        pytest.param(KV_MAJOR, True, id="kv_major-packed", marks=pytest.mark.slow),
    ],
)
def test_of_given_blocks_after_the_querys_own_nothing_is_read(limit, packed):
    """Nor do they change a list's order, on which hopper/selected_dkv.py relies, or the range that first sums a
    block."""
    c = case([0, 16, 56] if packed else [0, 28, 56], 2, 1, 16, 16, WIDE, packed, batch=1 if packed else 2, seed=12)
    later = with_later_blocks(c)
    assert (later.indices >= 0).all()
    settings = small(limit, range_bytes=1 << 13)
    check(later, settings)

    def index(c):
        call = sel.Call(*(c.shaped(x) for x in (c.q, c.k, c.v, c.indices)), c.config, c.documents, settings)
        assert call.plan.ranges > 1
        order, lists, pieces, span = sel._build_inverted_lists(call)
        return order, lists[[0, 1, 3]], pieces, span

    assert all(torch.equal(a, b) for a, b in zip(index(later), index(c), strict=True))


def test_what_is_not_saved_is_recomputed():
    for limit in (KV_MAJOR, UNION):
        check(case([0, 50], 2, 1, 16, 16, CONFIG, seed=8), small(limit), save=False)


def test_strided_inputs_are_read_in_place():
    c = case([0, 33, 66], 2, 1, 16, 16, CONFIG, batch=2, seed=9)
    plain, _ = run(c, small(KV_MAJOR))
    fused = torch.randn(2, 40, 4, 40)
    q, k, v = fused[:, :33, :2, :16], fused[:, :33, 2:3, :16], fused[:, :33, 3:, 8:24]
    for view, x in zip((q, k, v), (c.q, c.k, c.v), strict=True):
        view.copy_(c.shaped(x))
    gates = torch.randn(2, 33, 2, 3)
    gates[..., 1] = c.shaped(c.gate)
    dout = c.shaped(c.dout).transpose(1, 2).contiguous().transpose(1, 2)
    indices = c.shaped(c.indices)
    for limit in (UNION, KV_MAJOR):
        o, lse, saved = sel.selected_forward(q, k, v, indices, CONFIG, None, small(limit))
        grads = sel.selected_backward(
            q, k, v, indices, lse, dout, gates[..., 1], (dout * o).sum(-1), CONFIG, None, saved, small(limit)
        )
        for a, b in zip((o, *grads), plain, strict=True):
            assert relative_error(a.reshape(b.shape), b) <= 1e-6


def test_empty_memory_is_never_read(poison):
    c = case([0, 13, 50], 2, 1, 16, 16, CONFIG, packed=True, seed=10)
    for limit in (UNION, KV_MAJOR):
        check(c, small(limit))


def test_saved_shapes_follow_a_symbolic_number_of_documents():
    """Under torch.compile a batch with another number of documents must not compile anew."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    c = case([0, 1, 1, 18, 83, 90], 2, 1, 16, 16, CONFIG, packed=True, seed=2)
    real = (c.shaped(c.q), c.shaped(c.k), c.shaped(c.v), c.shaped(c.indices))
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[None])
    cu = mode.from_tensor(c.documents.cu, symbolic_context=context)
    q, k, v, indices = (mode.from_tensor(x, static_shapes=True) for x in real)
    with mode:
        fake = sel.selected_saved_like(q, k, v, indices, CONFIG, replace(c.documents, cu=cu), small(KV_MAJOR))
    true = sel.selected_saved_like(*real, CONFIG, c.documents, small(KV_MAJOR))
    assert isinstance(fake[4].shape[1], torch.SymInt)
    assert not mode.shape_env.guards
    assert [tuple(map(int, x.shape)) for x in fake] == [tuple(x.shape) for x in true]


def test_what_the_kernels_cannot_take_is_refused():
    q, k = torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 1, 16)
    indices = torch.zeros(1, 8, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="select_block=8"):
        sel.selected_forward(q, k, k, indices, NSAConfig(8, 8, 8, 4, 1, 1, 8), None)
    with pytest.raises(ValueError, match="stride 2"):
        sel.selected_forward(torch.zeros(1, 8, 2, 32)[..., ::2], k, k, indices, CONFIG, None, small())


@pytest.mark.parametrize(
    ("limit", "bounds", "batch"),
    [(UNION, [0, 5, 23, 30], 1), (KV_MAJOR, [0, 5, 23, 30], 1), (UNION, [0, 9, 18], 2)],
    ids=["union", "kv_major", "sequences"],
)
def test_values_that_are_not_finite_stay_in_their_document(limit, bounds, batch):
    """Tiles and blocks straddle documents and sequences."""
    c = case(bounds, 2, 1, 16, 16, CONFIG, batch == 1, batch=batch, seed=14)
    clean, _ = run(c, small(limit))
    first, end = bounds[-3:-1]
    spoiled = SimpleNamespace(**vars(c) | {name: getattr(c, name).clone() for name in ("q", "k", "v", "dout")})
    for name, value in (("q", "nan"), ("k", "nan"), ("v", "inf"), ("dout", "nan")):
        getattr(spoiled, name)[[first, end - 1]] = float(value)
    found, _ = run(spoiled, small(limit))
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, clean, strict=True):
        assert not a[first:end].isfinite().all(), name
        assert torch.equal(a[:first], b[:first]), name
        assert torch.equal(a[end:], b[end:]), name


def test_earlier_queries_ignore_later_values_that_are_not_finite():
    c = case([0, 30], 2, 1, 16, 16, CONFIG, seed=15)
    (o, dq, *_), _ = run(c, small(UNION))
    c.k[25] = c.v[25] = float("nan")
    (found, found_dq, *_), _ = run(c, small(UNION))
    assert torch.equal(found[:25], o[:25])
    assert torch.equal(found_dq[:25], dq[:25])
    assert found[25:].isnan().all()


def test_lists_for_a_backward_pass_are_built_only_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def selected_forward(*args: Any, backward: bool, **options: Any) -> Any:
        asked.append(backward)
        return forward(*args, backward=backward, **options)

    forward = ops.selected_forward
    monkeypatch.setattr(ops, "selected_forward", selected_forward)
    layer, x = NativeSparseAttention(16, 2, 1, 16), torch.randn(1, 40, 16)
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    assert asked == [True, False]
