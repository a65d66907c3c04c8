"""The Gluon kernels of the selected branch beside Triton's, on a GPU, whatever documents, heads and ranges are, and
whatever memory held before: dk and dv bit for bit, scattered selections to rounding. Scores beside Triton's, and
documents that are not finite."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import tercet
from kernels.selections import dense_masked, random_selection, relative_error, starts
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import compressed, scores
from tercet.attention.kernels.table import triton_launch
from tercet.attention.kernels.varlen import Documents
from tercet.bench.attention import Shape, make_inputs

sel = import_module("tercet.attention.kernels.selected.launch")
DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
GLUON, TRITON = "hopper_selected_dkv", "kv_major_dkv_transposed"
KERNELS = {GLUON, TRITON}
SCATTERED_TRITON = {"kv_major_forward", "kv_major_dkv"}
UNION, SCATTERED = 1e9, 0.0
DECIDED = 0.75  # between what these documents have and what their sum might have
PLAIN, ODD = [0, 2001], [0, 1, 1, 300, 1003, 1100, 2001]
CONFIG, BLOCKS_OF_32 = NSAConfig(), NSAConfig(select_block=32, select_count=24)
SIZES = pytest.mark.parametrize("size", [64, 96, 128], ids=["head 64", "head 96", "head 128"])


def case(
    cu, heads, groups, size=64, *, batch=1, dtype=BF16, first=0, queries=-1, longest=-1, seed=0, config=CONFIG
):  # fmt: skip
    """Sequences of one length, or one of packed documents; `first` and `queries`: a query range of each."""
    g = torch.Generator().manual_seed(seed)
    T = cu[-1] // batch
    packed = len(cu) > batch + 1
    bounds = torch.tensor(cu, dtype=torch.int32, device=DEVICE) if packed else None
    documents = Documents(batch, T, 0, bounds, None, first, queries, longest)

    def rand(count):
        return torch.randn(batch, T, count, size, generator=g).to(DEVICE, dtype)

    q, k, v, dout = rand(heads), rand(groups), rand(groups), rand(heads)
    gate = torch.randn(batch, T, heads, generator=g).to(DEVICE)
    chosen = (config.select_count, config.select_block, config.select_initial, config.select_local)
    indices = random_selection(cu, groups, *chosen, g).to(DEVICE).reshape(batch, T, groups, -1)
    own = slice(first, first + documents.queries)
    q, dout, gate, indices = (x[:, own].contiguous() for x in (q, dout, gate, indices))
    return SimpleNamespace(
        q=q, k=k, v=v, dout=dout, gate=gate, indices=indices, documents=documents, cu=cu, config=config
    )


def settings_of(c):
    """At head 128 Triton's dK/dV has the same bits only if it computes Sᵀ too."""
    return replace(sel.selected_settings(*[c.q.shape[-1]] * 2, c.q.dtype, c.config.select_block), dkv_transposed=True)


def forward(c, limit=UNION, **changes):
    """o, log-sum-exp, what the backward reuses, and the settings. limit=SCATTERED: KV-major in both directions."""
    forward_limit = SCATTERED if limit == SCATTERED else UNION
    settings = replace(settings_of(c), forward_limit=forward_limit, backward_limit=limit, **changes)
    return *sel.selected_forward(c.q, c.k, c.v, c.indices, c.config, c.documents, settings), settings


def run(c, limit=UNION, outputs=None, **changes):
    """o, dq, dk, dv, and the names of the kernels that were launched. `outputs`: the o and log-sum-exp that the
    backward reads, if not this forward's own."""
    launched = []
    real = sel.Call.launch

    def launch(call, kernel, *args, **options):
        launched.append(kernel.__name__)
        real(call, kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sel.Call, "launch", launch)
        own, own_lse, saved, settings = forward(c, limit, **changes)
        o, lse = outputs or (own, own_lse)
        delta = (c.dout.float() * o.float()).sum(-1)
        found = sel.selected_backward(
            c.q, c.k, c.v, c.indices, lse, c.dout, c.gate, delta, c.config, c.documents, saved, settings
        )
    return (own, *found), launched


def assert_same_bits(first, again) -> None:
    for what, a, b in zip(("o", "dq", "dk", "dv"), first, again, strict=True):
        assert torch.isfinite(a).all(), what
        assert torch.equal(a, b), f"{what}: {int((a != b).sum())} of {a.numel()} numbers differ"


def assert_close_to_triton(c, limit=SCATTERED, **changes) -> None:
    """Scattered selections: Triton's kernels compute logarithms and reciprocals more exactly, and add dk and dv up in
    another order. Both backward passes read the same outputs, in which a few numbers round differently."""
    o, lse, *_ = forward(c, limit, gluon=False, **changes)
    found, launched = run(c, limit, (o, lse), **changes)
    wanted, others = run(c, limit, (o, lse), gluon=False, **changes)
    assert not SCATTERED_TRITON & set(launched)
    assert SCATTERED_TRITON & set(others)
    for what, a, b in zip(("o", "dq", "dk", "dv"), found, wanted, strict=True):
        assert relative_error(a, b.float()) <= 2e-4, what


RANGE = {"first": 300, "queries": 257}
CALLS = {
    "plain": {"cu": PLAIN, "heads": 12, "groups": 2},
    "packed": {"cu": ODD, "heads": 12, "groups": 2, "size": 128},
    "one group, fp16": {"cu": ODD, "heads": 7, "groups": 1, "size": 96, "dtype": FP16},
    "64 heads": {"cu": ODD, "heads": 64, "groups": 1},
    "one head per group": {"cu": PLAIN, "heads": 3, "groups": 3, "size": 128},
    "three sequences": {"cu": [0, 701, 1402, 2103], "heads": 12, "groups": 2, "batch": 3},
    "a bound": {"cu": ODD, "heads": 12, "groups": 2, "longest": 1024},
    "blocks of 32": {"cu": ODD, "heads": 7, "groups": 1, "config": BLOCKS_OF_32},
    "a query range": {"cu": [0, 20, 500, 500, 1531, 2001], "heads": 12, "groups": 2, **RANGE},
    "a query range of two": {"cu": [0, 1001, 2002], "heads": 12, "groups": 2, "size": 128, "batch": 2, **RANGE},
    "short ranges": {"cu": ODD, "heads": 12, "groups": 2, "range_bytes": 1 << 20},
    "short pieces": {"cu": ODD, "heads": 12, "groups": 2, "size": 128, "segment_rows": 384},
}


def split(call):
    """The case, and the changed settings."""
    changed = {"range_bytes", "segment_rows"} & call.keys()
    made = case(**{name: value for name, value in call.items() if name not in changed})
    return made, {name: call[name] for name in changed}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_scattered_selections_have_tritons_results(call) -> None:
    made, changes = split(call)
    assert_close_to_triton(made, **changes)


def assert_as_triton(c, limit=UNION, **changes) -> None:
    found, launched = run(c, limit, **changes)
    wanted, others = run(c, limit, gluon=False, **changes)
    assert KERNELS & set(launched) == {GLUON}
    assert KERNELS & set(others) == {TRITON}
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_gluon_kernel_gives_tritons_bits(call) -> None:
    made, changes = split(call)
    assert_as_triton(made, **changes)


@SIZES
@pytest.mark.parametrize("changes", [{}, {"range_bytes": 1 << 21}], ids=["one range", "ranges"])
def test_the_device_may_decide_which_ranges_are_scattered(changes, size: int) -> None:
    c = case(ODD, 12, 2, size)
    assert_close_to_triton(c, DECIDED, **changes)
    settings = replace(settings_of(c), forward_limit=1e9, backward_limit=DECIDED, **changes)
    decision = sel.selected_forward(c.q, c.k, c.v, c.indices, CONFIG, c.documents, settings)[2].decision
    assert (decision[1] == 0).any()  # and so the kernel had work


@pytest.mark.parametrize("wider", [8, 768], ids=["8 more", "768 more"])
def test_the_gluon_kernel_takes_rows_of_a_wider_tensor(wider: int) -> None:
    c = case([0, 701, 1402], 12, 2, batch=2)
    expected, _ = run(c)
    wide = torch.full((2, 711, 768 + wider), float("nan"), dtype=BF16, device=DEVICE)
    wide[:, :701, :768] = c.q.flatten(2)
    c.q = wide[:, :701, :768].unflatten(-1, (12, 64))
    found, launched = run(c)
    assert GLUON in launched
    assert_same_bits(found, expected)


@pytest.mark.parametrize("changes", [{}, {"range_bytes": 1 << 20}], ids=["one range", "ranges"])
@pytest.mark.parametrize("cu", [[0, 1024], [0, 300, 1024]], ids=["plain", "packed"])
@pytest.mark.parametrize("limit", [UNION, DECIDED], ids=["union", "decided"])
def test_of_given_blocks_after_the_querys_own_the_gluon_kernel_reads_nothing(limit, cu: list[int], changes) -> None:
    """Every block for every query: the bits of lists that end with the query's own block, and of a masked softmax."""
    c = case(cu, 12, 2, seed=4)
    every = torch.arange(CONFIG.select_count, dtype=torch.int32, device=DEVICE).expand(1, 1024, 2, -1)
    own = (torch.arange(1024) - starts(cu, 1024)).to(DEVICE) // CONFIG.select_block
    cut = torch.where(every > own[None, :, None, None], -1, every)
    wanted, _ = run(SimpleNamespace(**vars(c) | {"indices": cut}), limit, **changes)
    given = SimpleNamespace(**vars(c) | {"indices": every.contiguous()})
    found, launched = run(given, limit, **changes)
    assert GLUON in launched
    assert_same_bits(found, wanted)
    if limit == UNION:
        assert_as_triton(given, limit, **changes)
    leaves = [x[0].float().requires_grad_() for x in (c.q, c.k, c.v)]
    o = dense_masked(*leaves, cut[0], cu, CONFIG.select_block)
    (o * c.gate[0, ..., None]).backward(c.dout[0].float())
    for what, a, b in zip(("o", "dq", "dk", "dv"), found, (o, *(x.grad for x in leaves)), strict=True):
        assert relative_error(a[0], b.detach()) <= 1e-2, what


def test_what_the_gluon_kernel_cannot_address_is_left_to_triton() -> None:
    c = case([0, 301, 602], 12, 2, batch=2)
    expected, _ = run(c)
    flat = torch.zeros(602 * 768 + 16, dtype=BF16, device=DEVICE)
    for view in (flat[1:], flat[:]):  # off 16 bytes; then a batch stride of 8 numbers more
        stride = 301 * 768 + (8 if view.storage_offset() == 0 else 0)
        q = view.as_strided((2, 301, 12, 64), (stride, 768, 64, 1), view.storage_offset())
        q.copy_(c.q)
        found, launched = run(SimpleNamespace(**vars(c) | {"q": q}))
        assert KERNELS & set(launched) == {TRITON}
        assert_same_bits(found, expected)


# ------------------------------------------------------------ scores, and the other branches


@pytest.mark.parametrize("cuts", [[0, 4001], [0, 20, 21, 1500, 1531, 4001]], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "overlap"),
    [(12, 2, 64, 32), (12, 4, 64, 64), (16, 1, 96, 32), (32, 2, 128, 32), (32, 2, 128, 64)],
)
def test_gluons_scores_equal_tritons(heads: int, groups: int, size: int, overlap: int, cuts, monkeypatch) -> None:
    config, shape = NSAConfig(compress_block=overlap), Shape(1, cuts[-1], heads, groups, size)
    x = make_inputs(shape, config, "random", 0.0)
    cu = torch.tensor(cuts, dtype=torch.int32, device="cuda") if len(cuts) > 2 else None
    ccu = None if cu is None else config.compressed_cu_seqlens(cu)
    documents = Documents(1, shape.T, x.kc.shape[1], cu, ccu)
    _, lse = compressed.forward(x.q, x.kc, x.vc, config, documents)
    blocks = config.num_blocks(shape.T) + 1

    def written(q, G, config, documents, queries, score, *limits):
        """The scores of free blocks, document by document."""
        found = torch.full((documents.query_tiles(queries), queries, G, blocks), torch.nan, device="cuda")
        score(found, blocks, 0, len(found))
        pieces = [found[a // queries + d :].flatten(0, 1)[: b - a] for d, (a, b) in enumerate(pairwise(cuts))]
        own = torch.cat([torch.arange(b - a, device="cuda") // config.select_block for a, b in pairwise(cuts)])[:, None]
        number = torch.arange(blocks, device="cuda")
        free = (own >= config.select_count) & (number <= own - config.select_local)
        return torch.cat(pieces)[free[:, None].expand(-1, G, -1)]

    monkeypatch.setattr(scores, "choose", written)
    found = scores.select(x.q, x.kc, lse, config, documents)
    wanted = scores.select(x.q, x.kc, lse, config, documents, triton_launch("score", x.q, x.kc))
    assert len(found) > 10_000
    # a probability is cut to 17 bits: the last of them may differ
    assert ((found - wanted).abs() <= 2**-15 * wanted).all()


@pytest.mark.parametrize("branch", ["compressed", "window"])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_outputs_are_finite_beside_a_document_that_is_not(branch: str, size: int) -> None:
    config, bounds = NSAConfig(), [0, 300, 1003, 1100, 2047]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    x = list(make_inputs(Shape(1, 2047, 4, 2, size), config, "random", 0.0))
    clean = tercet.nsa_attention(*x, config=config, cu_seqlens=cu, branches=(branch,), backend="triton")
    rows = config.compressed_cu_seqlens(cu)[-3:-1].tolist() if branch == "compressed" else bounds[-3:-1]
    first = 1 if branch == "compressed" else 5
    for t in x[first : first + 2]:
        t[0, rows[0] : rows[0] + 2] = float("nan")  # not all: a query whose every score is NaN sees nothing
    found = tercet.nsa_attention(*x, config=config, cu_seqlens=cu, branches=(branch,), backend="triton")
    assert torch.equal(found[0, : bounds[-3]], clean[0, : bounds[-3]])
    assert torch.equal(found[0, bounds[-2] :], clean[0, bounds[-2] :])
    assert found[0, bounds[-3] : bounds[-2]].isnan().any()
