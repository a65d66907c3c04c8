"""The choice by single tokens' keys, interpreted, against plain PyTorch: sizes, packing, query ranges, ties;
and layers against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tercet
from cases import cu
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.varlen import Documents
from tercet.attention.reference import selector_weight
from tercet.model.selector import sample_queries

pytestmark = pytest.mark.interpreter

FEW = Launch(rows=16, keys=32)  # small tiles, for few queries


def config(block: int = 16, count: int = 4, initial: int = 1, local: int = 1) -> tercet.NSAConfig:
    return tercet.NSAConfig(16, 16, block, count, initial, local)


def chosen(q: Tensor, k: Tensor, cfg: tercet.NSAConfig, last: int | None = None) -> Tensor:
    """One document's choice: q [T, G, size] of a selector, or [T, H, size], k [T, G, size] -> [T, G, n]; `last`: of
    this many queries at the end."""
    tokens, block, count = q.shape[0], cfg.select_block, cfg.select_count
    q, position = q[-(last or tokens) :], torch.arange(tokens, device=q.device)[-(last or tokens) :]
    blocks = cfg.num_blocks(tokens)
    logits = torch.einsum("tghd,sgd->tghs", q.unflatten(1, (k.shape[1], -1)), k) * q.shape[-1] ** -0.5
    logits = torch.nn.functional.pad(logits, (0, blocks * block - tokens)).unflatten(-1, (blocks, block))
    own = q.shape[1] > k.shape[1]
    score = logits.amax((2, -1)) if own else selector_weight(logits[:, :, 0]).sum(-1)
    j, current = torch.arange(blocks, device=q.device), position[:, None, None] // block
    score = score.masked_fill((j < cfg.select_initial) | (j > current - cfg.select_local), torch.inf)
    score = score.masked_fill(j > current, -torch.inf)
    best = score.sort(descending=True, stable=True).indices[..., :count]
    best = best.masked_fill(best > current, blocks).sort().values
    best = best.masked_fill(best == blocks, -1).int()
    return torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=-1)


def batch(q: Tensor, k: Tensor, cfg: tercet.NSAConfig, lengths: tuple[int, ...] | None = None) -> Tensor:
    """[B, T, G, size] -> [B, T, G, n]; `lengths`: of packed documents."""
    if lengths is None:
        return torch.stack([chosen(*x, cfg) for x in zip(q.double(), k.double(), strict=True)])
    pairs = zip(q[0].double().split(lengths), k[0].double().split(lengths), strict=True)
    return torch.cat([chosen(*x, cfg) for x in pairs if len(x[0])])[None]


def end_of(k: Tensor, queries: int) -> Documents:
    """The last queries of each sequence."""
    return Documents(k.shape[0], k.shape[1], 0, None, None, k.shape[1] - queries, queries)


SIZES = [  # heads per group: 1 of a selector, 2 or more of own queries; block, size of heads, tokens
    (1, 16, 32, 135), (1, 32, 16, 170), (1, 64, 64, 330), (3, 16, 32, 110), (4, 32, 48, 150),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 128, 32, 600), (7, 64, 16, 300), (16, 16, 64, 90))),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "block", "size", "tokens"), SIZES)
def test_any_sizes_choose_as_fp64_does(heads: int, block: int, size: int, tokens: int) -> None:
    cfg = config(block, count=3)
    q, k = torch.randn(1, tokens, 2 * heads, size), torch.randn(1, tokens, 2, size)
    found = select_by_tokens(q[:, -20:].contiguous(), k, cfg, end_of(k, 20), FEW, own=heads > 1)
    assert torch.equal(found, batch(q, k, cfg)[:, -20:])


@pytest.mark.parametrize(
    ("dtype", "count", "initial", "local"),
    [
        (torch.float32, 4, 1, 2),
        (torch.float16, 5, 0, 1),
    ],
)
def test_a_batch_of_sequences(dtype: torch.dtype, count: int, initial: int, local: int) -> None:
    cfg = config(16, count, initial, local)
    q, k = torch.randn(2, 101, 1, 32).to(dtype), torch.randn(2, 101, 1, 32).to(dtype)
    assert torch.equal(select_by_tokens(q, k, cfg, end_of(k, 101)), batch(q, k, cfg))


def test_equal_scores_take_the_lowest_index() -> None:
    cfg = config(count=5)
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 200, 1, 16)
    k[0, 16:50] = -0.0
    assert select_by_tokens(q, k, cfg, end_of(k, 1), FEW).flatten().tolist() == [0, 1, 2, 3, 12]
    assert select_by_tokens(q, k[:, :21], cfg, end_of(k[:, :21], 1), FEW).flatten().tolist() == [0, 1, -1, -1, -1]


def test_extreme_logits_are_cut_off_and_choose_valid_blocks() -> None:
    cfg = config(count=4)
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 160, 1, 16)

    def choose(*of_blocks: float) -> list[int]:
        q[..., 0], k[..., 0] = 4, torch.tensor(of_blocks).repeat_interleave(16)[:, None]
        return select_by_tokens(q, k, cfg, end_of(k, 1), FEW).flatten().tolist()

    assert choose(0, -80, -50, -60, -70, -1e30, -torch.inf, -80, -80, 0) == [0, 2, 3, 9]
    assert choose(0, 70, 1e30, 80, 60, torch.inf, 70, 50, 0, 0) == [0, 2, 5, 9]
    assert choose(0, -1e30, -200, -100, -90, -1e30, -100, -100, -100, 0) == [0, 1, 2, 9]  # equal: all 0


def test_own_scores_hold_their_order_at_every_magnitude() -> None:
    cfg = config(count=4)  # of 10 blocks 0 and 9 are forced
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 160, 1, 16)

    def choose(*of_blocks: float) -> list[int]:
        q[..., 0], k[..., 0] = 1, -torch.inf
        k[0, 16:144:16, 0, 0] = torch.tensor(of_blocks)
        return select_by_tokens(q, k, cfg, end_of(k, 1), FEW, own=True).flatten().tolist()[1:3]

    assert choose(-1e30, -2e-30, -5, -1e-30, -3, -2, -7, -8) == [2, 4]
    assert choose(0.0, -0.0, 1e-30, -1, -1, -1, -1, -1) == [1, 3]
    assert choose(-1, -1, -0.0, 0.0, 0.0, -1, -1, -1) == [3, 4]
    assert choose(1e30, 1, 9e37, 1e38, 1e38, 8e37, 1, torch.inf) == [4, 8]
    assert choose(torch.nan, -1e38, -torch.inf, torch.nan, -9e37, -1e38, -torch.inf, -torch.inf) == [2, 5]


@pytest.mark.parametrize("longest", [97, pytest.param(-1, marks=pytest.mark.slow)])
def test_packed_documents_choose_among_their_own_blocks(longest: int) -> None:
    cfg, lengths = config(count=3), (97, 0, 1, 70, 16, 64, 41)
    q, k = torch.randn(1, 289, 1, 32), torch.randn(1, 289, 1, 32)
    documents = Documents(1, 289, 0, cu(lengths), None, longest=longest)
    assert torch.equal(select_by_tokens(q, k, cfg, documents), batch(q, k, cfg, lengths))


@pytest.mark.parametrize(
    ("lengths", "begin", "queries"),
    [
        (None, 0, (100, 120)),
        # from within one document into another; keys from the first one's beginning on
        ((30, 0, 80, 15, 70, 20), 30, (95, 170)),
        # within one document
        ((30, 120, 20), 30, (111, 140)),
    ],
    ids=["two sequences", "across documents", "within a document"],
)
def test_a_query_range_chooses_as_the_whole(lengths, begin: int, queries: tuple[int, int]) -> None:
    cfg, tokens, sequences = config(count=3), sum(lengths) if lengths else 150, 1 if lengths else 2
    q, k = torch.randn(sequences, tokens, 2, 32), torch.randn(sequences, tokens, 2, 32)
    whole = batch(q, k, cfg, lengths)[:, slice(*queries)]
    some = q[:, slice(*queries)].contiguous()
    if lengths is None:  # every sequence begins with its first key
        keys, first, bounds = k, queries[0], None
    else:
        # bounds of documents that the keys do not hold are cut
        keys, first = k[:, begin:], queries[0] - begin
        bounds = (cu(lengths) - begin).clamp(0, tokens - begin)
    documents = Documents(sequences, keys.shape[1], 0, bounds, None, first, queries[1] - queries[0])
    assert torch.equal(select_by_tokens(some, keys, cfg, documents, FEW), whole)


@pytest.mark.parametrize("rounds", [{"scratch_bytes": 1}, {"widest": 4}, {"widest": 4, "scratch_bytes": 1}])
def test_scratch_and_rounds_of_blocks_change_nothing(rounds: dict[str, int]) -> None:
    cfg, lengths = config(count=4), (40, 190)
    q, k = torch.randn(1, 230, 1, 16), torch.randn(1, 230, 1, 16)
    documents = Documents(1, 230, 0, cu(lengths), None, 222, 8)
    found = select_by_tokens(q[:, 222:].contiguous(), k, cfg, documents, FEW, **rounds)
    assert torch.equal(found, batch(q, k, cfg, lengths)[:, 222:])


def test_not_a_number_counts_as_lowest() -> None:
    cfg = config(count=4)
    q, k = torch.randn(1, 160, 1, 16), torch.randn(1, 160, 1, 16)
    k[0, 32:64] = torch.nan
    q[0, 150:] = torch.nan
    found = select_by_tokens(q[:, 140:].contiguous(), k, cfg, end_of(k, 20), FEW)
    assert torch.equal(found, batch(q, k, cfg)[:, 140:])
    assert not ((found[0, :10] == 2) | (found[0, :10] == 3)).any()
    assert (found[0, 10:, 0] == torch.tensor([0, 1, 2, 9])).all()


@pytest.mark.parametrize("widest", [1024, 2])
def test_a_document_longer_than_the_bound_chooses_among_the_blocks_with_scores(widest: int) -> None:
    cfg = config(count=3)
    q, k = torch.ones(1, 1, 1, 16), -torch.ones(1, 200, 1, 16)
    k[0, 16:64] = -2  # a row has scores of 4 blocks; without the bound, one of those after them would be chosen
    documents = Documents(1, 200, 0, cu([200]), None, 199, 1, longest=64)
    assert select_by_tokens(q, k, cfg, documents, FEW, widest=widest).flatten().tolist() == [0, 1, 12]


def test_strided_queries_and_keys() -> None:
    """As slices of one projection, whose heads and tokens are apart."""
    cfg, both = config(count=3), torch.randn(1, 80, 2, 2, 32)
    q, k = both.unbind(2)
    assert torch.equal(select_by_tokens(q, k, cfg, end_of(k, 80)), batch(q, k, cfg))


# ------------------------------------------------------------ layers

NSA = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=4, window=8)


@pytest.mark.parametrize(
    "bounds",
    [pytest.param(None, marks=pytest.mark.slow), torch.tensor([0, 7, 90], dtype=torch.int32)],
    ids=["whole", "packed"],
)
def test_a_layer_chooses_and_learns_like_the_reference(bounds: Tensor | None) -> None:
    layer = tercet.NativeSparseAttention(
        32, 2, 1, 16, config=NSA, selector="learned", selector_dim=16, selector_rotary=8
    )
    layer.init_weights(0.3, 0.1)
    x = torch.randn(1, 90, 32)
    sampled = sample_queries(torch.arange(90)[None], 16)
    found = {}
    for backend in ("reference", "triton"):
        layer.backend = backend
        layer.zero_grad()
        y = layer(x, cu_seqlens=bounds, sampled=sampled)
        y.sum().backward()
        found[backend] = y.detach(), [p.grad.clone() for p in layer.selector.parameters()]
    torch.testing.assert_close(found["triton"][0], found["reference"][0], rtol=1e-4, atol=1e-5)
    for a, b in zip(found["triton"][1], found["reference"][1], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_a_layer_whose_own_queries_choose_equals_the_reference() -> None:
    layer = tercet.NativeSparseAttention(32, 4, 2, 16, config=NSA, selector="own")
    layer.init_weights(0.3, 0.1)
    x, found = torch.randn(1, 110, 32), {}
    for backend in ("reference", "triton"):
        layer.backend = backend
        layer.zero_grad()
        y = layer(x)
        y.sum().backward()
        found[backend] = [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
