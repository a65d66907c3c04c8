"""Exact choice of blocks by the kernels: ties, forced sets, long rows, packed documents; fp32 and fp16, interpreted."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import tercet
from cases import cu, inputs, judge, wrong_sets
from tercet.attention import reference
from tercet.attention.kernels import attend
from tercet.attention.kernels.compressed import forward
from tercet.attention.kernels.decode.common import Scores
from tercet.attention.kernels.decode.scores import select_blocks as decode_select
from tercet.attention.kernels.launch import LOG2E
from tercet.attention.kernels.scores import choose, largest, select
from tercet.attention.kernels.varlen import Documents
from tercet.attention.layout import Packing, Span

pytestmark = pytest.mark.interpreter


def config(**changes: int) -> tercet.NSAConfig:
    small = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "select_count": 4, "window": 8}
    return tercet.NSAConfig(**{**small, **changes})


def test_equal_scores_take_the_lowest_index() -> None:
    cfg = config(select_initial=0, select_local=1, select_count=3)
    x = inputs(cfg, 100, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)
    x = x.with_(q=torch.zeros_like(x.q))
    _, chosen = attend(*x.tensors(), cfg)
    # with q = 0 all compressed tokens weigh the same, and so do all inner blocks; block 0 has one half less
    assert chosen[0, 99, 0].tolist() == [1, 2, 6]
    assert chosen[0, 47, 0].tolist() == [0, 1, 2]
    assert chosen[0, 20, 0].tolist() == [0, 1, -1]
    assert wrong_sets(judge(x, cfg), chosen, 0.0) == []


@triton.jit
def largest_kernel(KEYS, TAKEN, wanted, R: tl.constexpr, N: tl.constexpr, FEW_FIRST: tl.constexpr):
    at = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(TAKEN + at, largest(tl.load(KEYS + at), wanted, FEW_FIRST).to(tl.int32))


@pytest.mark.parametrize(("size", "few_first"), [(128, True), (256, True), (1024, True), (1024, False)])
@pytest.mark.parametrize("wanted", [1, 13, 150])
def test_the_largest_keys_are_taken_lowest_index_first(size: int, few_first: bool, wanted: int) -> None:
    g = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2**31 - 1, (size,), generator=g)
    rows = [
        wide,
        torch.where(wide % 3 == 0, -1, wide % 7),  # ties, and keys that are not there
        torch.where(torch.arange(size) < wanted - 1, wide, -1),  # fewer than wanted
        torch.full((size,), -1),
    ]
    keys = torch.stack(rows).to(torch.int32)
    taken = torch.empty_like(keys)
    largest_kernel[(1,)](keys, taken, wanted, 4, size, few_first)
    for row, mask in zip(keys.tolist(), taken.tolist(), strict=True):
        best = sorted((i for i in range(size) if row[i] >= 0), key=lambda i: (-row[i], i))
        assert [i for i in range(size) if mask[i]] == sorted(best[:wanted])


@pytest.mark.parametrize(
    "changes",
    [
        {"select_initial": 2, "select_local": 2, "select_count": 4},
        {"select_initial": 0, "select_local": 1, "select_count": 2},
        {"compress_block": 16, "compress_stride": 2, "select_count": 3, "select_local": 1},
        {"compress_block": 16, "compress_stride": 16, "select_count": 3, "select_local": 1},
    ],
    ids=["all forced", "one forced", "long overlap", "no overlap"],
)
def test_any_valid_sizes(changes: dict[str, int]) -> None:
    cfg = config(**changes)
    x = inputs(cfg, 83, groups=1, per_group=3, key_size=16, value_size=16, dtype=torch.float32)
    _, chosen = attend(*x.tensors(), cfg)
    assert wrong_sets(judge(x, cfg), chosen, 1e-6) == []


def test_ranges_of_queries_and_rounds_of_blocks_change_nothing() -> None:
    cfg = config(select_count=3, select_local=1)
    x = inputs(cfg, 75, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)
    documents = Documents(1, 75, x.kc.shape[1], None, None)
    _, lse = forward(x.q, x.kc, x.vc, cfg, documents)
    once = select(x.q, x.kc, lse, cfg, documents)
    assert torch.equal(select(x.q, x.kc, lse, cfg, documents, scratch_bytes=2000), once)
    assert torch.equal(select(x.q, x.kc, lse, cfg, documents, widest=2), once)


@pytest.mark.parametrize("blocks", [34, 35, 66, 67])
def test_long_rows_choose_as_the_reference(blocks: int) -> None:
    """Scores of 128 blocks: a quarter or half of them, or one more, are those of the last queries."""
    cfg, lengths = config(select_count=12), (544, 16 * blocks)
    length, bounds = sum(lengths), cu(lengths)
    x = inputs(cfg, length, groups=1, per_group=1, key_size=16, value_size=16, documents=lengths, dtype=torch.float32)
    first, tokens = length - 16, x.kc.shape[1]
    q = x.q[:, first:]
    documents = Documents(1, length, tokens, bounds, cfg.compressed_cu_seqlens(bounds), first_query=first, queries=16)
    chosen = select(q, x.kc, forward(q, x.kc, x.vc, cfg, documents)[1], cfg, documents)
    packing = Packing(bounds, length, tokens, cfg)
    _, expected, _ = reference.compressed_attention(q, x.kc, x.vc, cfg, packing, span=Span(first))
    assert expected is not None
    assert torch.equal(chosen, expected)


def test_half_precision_inputs_select_as_exact_arithmetic_does() -> None:
    cfg = config(select_count=3, select_local=1)
    x = inputs(cfg, 90, groups=1, per_group=4, key_size=16, value_size=16, dtype=torch.float16, sharpness=3.0)
    _, chosen = attend(*x.tensors(), cfg)
    assert wrong_sets(judge(x, cfg), chosen, 1e-5) == []


def test_not_a_number_never_gives_an_index_outside_the_document() -> None:
    cfg = config()
    x = inputs(cfg, 100, groups=1, per_group=1, key_size=16, value_size=16, dtype=torch.float32)
    q = x.q.clone()
    q[:, 80:] = float("nan")
    _, chosen = attend(*x.with_(q=q).tensors(), cfg)
    own = torch.arange(100)[None, :, None, None] // 16
    assert ((chosen >= -1) & (chosen <= own)).all()
    assert (chosen[:, 80:].diff(dim=-1) > 0).all()


def test_not_a_number_is_the_lowest_score() -> None:
    cfg, tokens = config(select_count=5, select_initial=1, select_local=1), 160
    documents = Documents(1, tokens, cfg.num_compressed(tokens), None, None)

    def score(scores: torch.Tensor, blocks: int, *_: int) -> None:
        scores.fill_(1.0)
        scores.view(-1, blocks)[:, 2] = float("nan")

    chosen = choose(torch.zeros(1, tokens, 1, 16), 1, cfg, documents, 16, score, 1 << 20, 1024)
    assert chosen[0, -1, 0].tolist() == [0, 1, 3, 4, 9]
    assert chosen[0, 80, 0].tolist() == [0, 1, 3, 4, 5]
    assert chosen[0, 79, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("dtype", "top"), [(torch.float16, 25.0), (torch.float16, 60.0), (torch.float32, 60.0)])
def test_order_holds_far_below_the_largest_probability(dtype: torch.dtype, top: float) -> None:
    """Logits rise by .5 from block to block; block 5's is 50 or 120. Prefill and decode select the same."""
    cfg = config(compress_block=16, compress_stride=16, select_count=5)
    q, kc = torch.zeros(1, 1, 1, 16, dtype=dtype), torch.zeros(1, 20, 1, 16, dtype=dtype)
    q[..., 0] = 8
    kc[0, :, 0, 0] = 0.25 * torch.arange(20)
    kc[0, 5, 0, 0] = top
    last = Documents(1, 320, 20, None, None, first_query=319, queries=1)
    _, lse = forward(q, kc, kc, cfg, last)
    assert select(q, kc, lse, cfg, last)[0, 0, 0].tolist() == [0, 5, 17, 18, 19]

    logits = (q[:, 0].float() @ kc[:, :, 0].float().mT) * (0.25 * LOG2E)
    indices, counter = torch.empty(1, 1, 5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    scores = Scores(logits, lse.view(1, 1, 1))
    decode_select(scores, indices, torch.tensor([319]), None, counter, 1, 20, cfg)
    assert indices[0, 0].tolist() == [0, 5, 17, 18, 19]
