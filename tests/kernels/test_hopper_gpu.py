"""The Gluon kernels for Hopper beside the Triton kernels that do the same, on a GPU: documents of odd lengths, padding
after compressed tokens that holds anything, windows shorter than a tile."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

import tercet
from tercet.attention.kernels import compressed, scores, window
from tercet.attention.kernels.combine import by_branch, deltas
from tercet.attention.kernels.dq import compressed_window_dq
from tercet.attention.kernels.table import Launch, triton_launch
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents
from tercet.bench.attention import Shape, make_inputs, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def assert_alike(shape: Shape, config: tercet.NSAConfig, cuts: list[int], **query_range: int) -> None:
    found = everything(shape, config, cuts, **query_range)
    wanted = everything(shape, config, cuts, triton=True, **query_range)
    for kernel, results in wanted.items():
        for got, want in zip(found[kernel], results, strict=True):
            there = want.isfinite()
            assert torch.equal(got.isfinite(), there), kernel
            assert relative_error(got[there], want[there]) < 3e-3, kernel


def everything(
    shape: Shape, config: tercet.NSAConfig, cuts: list[int], *, triton: bool = False, first: int = 0, queries: int = -1
):
    """{kernel: its results}; by Triton's kernels, or by Gluon's where they are switched on. `first` and `queries`: only
    so many queries of each sequence, from that token on."""

    def of(kernel: str) -> Launch | None:
        return triton_launch(kernel, x.q, x.vw) if triton else None

    x = make_inputs(shape, config, "random", 0.0)
    cu = torch.tensor(cuts, dtype=torch.int32, device="cuda") if cuts else None
    ccu = None if cu is None else config.compressed_cu_seqlens(cu)
    if ccu is not None:
        x.kc[:, int(ccu[-1]) :] = float("nan")
        x.vc[:, int(ccu[-1]) :] = float("nan")
    documents = Documents(shape.B, shape.T, x.kc.shape[1], cu, ccu, first, queries)
    own = slice(first, first + documents.queries)
    x = x._replace(q=x.q[:, own].contiguous(), gates=x.gates[:, own].contiguous())
    generator = torch.Generator(device="cuda").manual_seed(1)
    dout = torch.randn(x.q.shape, dtype=x.q.dtype, device="cuda", generator=generator)
    found = {
        "compressed_forward": compressed.forward(x.q, x.kc, x.vc, config, documents, of("compressed_forward")),
        "window_forward": window.forward(x.q, x.kw, x.vw, config.window, documents, of("window_forward")),
    }
    (o_c, lse_c), (o_w, lse_w) = found["compressed_forward"], found["window_forward"]
    sums, gates = (by_branch(planes, dout.shape) for planes in deltas([o_c, o_c, o_w], dout, x.gates)[:2])
    by_compressed, by_window = (
        Branch(x.kc, x.vc, lse_c, sums[0], gates[0]),
        Branch(x.kw, x.vw, lse_w, sums[2], gates[2]),
    )
    found["query_gradient"] = (
        compressed_window_dq(x.q, dout, by_compressed, by_window, config, documents, of("query_gradient")),
        compressed_window_dq(x.q, dout, by_compressed, None, config, documents, of("query_gradient")),
        compressed_window_dq(x.q, dout, None, by_window, config, documents, of("query_gradient")),
    )
    found["compressed_key_gradients"] = compressed.dkv(
        x.q, dout, by_compressed, config, documents, of("compressed_key_gradients")
    )
    found["window_key_gradients"] = window.dkv(
        x.q, dout, by_window, config.window, documents, of("window_key_gradients")
    )
    return found


CUTS, EMPTY = [0, 20, 21, 500, 1531, 2048, 2100, 3001], [0, 20, 500, 500, 1531, 3001]
RANGE = {"first": 300, "queries": 257}
CALLS = {
    "plain": ((1, 3001, 12, 2, 64), 512, [], {}),
    "plain, heads of 128": ((1, 3001, 8, 2, 128), 512, [], {}),
    "packed": ((1, 3001, 12, 2, 64), 512, CUTS, {}),
    "packed, heads of 96": ((1, 3001, 4, 2, 96), 512, CUTS, {}),
    "one head per group, a window below a tile": ((1, 3001, 3, 3, 64), 40, CUTS, {}),
    "heads of 128, a window below a tile": ((1, 3001, 8, 2, 128), 40, CUTS, {}),
    "three sequences": ((3, 1001, 12, 2, 64), 512, [], {}),
    "a query range": ((2, 1001, 12, 2, 64), 512, [], RANGE),
    "a query range, heads of 96": ((2, 1001, 8, 2, 96), 512, [], RANGE),
    "an empty document": ((1, 3001, 12, 2, 64), 512, EMPTY, {}),
    "an empty document, heads of 128": ((1, 3001, 8, 2, 128), 512, EMPTY, {}),
}


@pytest.mark.parametrize(("shape", "window", "cuts", "query_range"), CALLS.values(), ids=CALLS)
def test_gluon_kernels_agree_with_tritons(shape, window: int, cuts: list[int], query_range: dict[str, int]) -> None:
    assert_alike(Shape(*shape), tercet.NSAConfig(window=window), cuts, **query_range)


@pytest.mark.parametrize("cuts", [[0, 4001], [0, 20, 21, 1500, 1531, 4001]], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("heads", "groups", "size", "overlap"),
    [(12, 2, 64, 32), (12, 4, 64, 64), (16, 1, 96, 32), (32, 2, 128, 32), (32, 2, 128, 64)],
)
def test_gluons_scores_equal_tritons(heads: int, groups: int, size: int, overlap: int, cuts, monkeypatch) -> None:
    config, shape = tercet.NSAConfig(compress_block=overlap), Shape(1, cuts[-1], heads, groups, size)
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
    config, bounds = tercet.NSAConfig(), [0, 300, 1003, 1100, 2047]
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
