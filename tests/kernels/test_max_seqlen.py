"""max_seqlen, an upper bound on document length, makes launches smaller and changes no result; interpreted."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import tercet
from cases import Inputs, attend, compressed_length, cu, inputs
from tercet.attention.kernels.selected.plan import make_plan
from tercet.attention.kernels.table import selected_settings
from tercet.attention.kernels.varlen import Documents

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=2, select_initial=0, select_local=1, window=12
)
DOCUMENTS = (34, 5, 0, 25)
TOKENS, LONGEST = sum(DOCUMENTS), max(DOCUMENTS)


def sample(documents: tuple[int, ...] = DOCUMENTS, config: tercet.NSAConfig = CONFIG) -> Inputs:
    return inputs(
        config, sum(documents), groups=1, per_group=1, key_size=16, value_size=16, documents=documents,
        dtype=torch.float32,
    )  # fmt: skip


def outcome(x: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    leaves = x.leaves()
    out, aux = attend(leaves, CONFIG, "triton", return_aux=True, **options)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out.detach(), aux.block_indices, torch.autograd.grad((out * weights).sum(), leaves.tensors())


def assert_same(found: Any, wanted: Any) -> None:
    """Two outcomes: the same blocks, and results that differ by rounding only."""
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close((found[0], *found[2]), (wanted[0], *wanted[2]), rtol=1e-5, atol=1e-5)


def plan(documents: int | None, longest: int | None, batch: int = 1) -> Any:
    shape = (batch, 65536 // batch, 65536 // batch, 12, 2, 16, 64, 64)
    return make_plan(shape, 2, documents, (64, 1, 2), selected_settings(64, 64, torch.bfloat16, 64), longest)


@pytest.fixture
def two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that max_seqlen decides between two plans for documents of this size."""
    selected = importlib.import_module("tercet.attention.kernels.selected.launch")
    settings = replace(selected_settings(16, 16, torch.float32, 16), forward_limit=1.6, backward_limit=1.6)
    monkeypatch.setattr(selected, "selected_settings", lambda *_: settings)
    shape = (1, TOKENS, TOKENS, 1, 1, 2, 16, 16)
    assert make_plan(shape, 4, 4, (16, 0, 1), settings, LONGEST).query_major_only
    assert not make_plan(shape, 4, 4, (16, 0, 1), settings).query_major_only


def test_max_seqlen_changes_no_result(two_plans: None) -> None:
    x, bounds = sample(), cu(DOCUMENTS)
    found = out, chosen, _ = outcome(x, cu_seqlens=bounds, max_seqlen=LONGEST)
    assert_same(found, outcome(x, cu_seqlens=bounds))
    first = 0
    for begin, end in pairwise(bounds.tolist()):
        if end == begin:
            continue
        past = first + compressed_length(end - begin, CONFIG)
        places = (slice(begin, end), *[slice(first, past)] * 2, *[slice(begin, end)] * 5)
        alone = Inputs(*(t[:, s] for t, s in zip(x.tensors(), places, strict=True)))
        with torch.no_grad():
            one, aux = attend(alone, CONFIG, "triton", return_aux=True)
        assert torch.equal(chosen[:, begin:end], aux.block_indices)
        torch.testing.assert_close(out[:, begin:end], one, rtol=1e-5, atol=1e-5)
        first = past


def test_results_are_the_same_if_only_the_backward_pass_may_run_kv_major(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = importlib.import_module("tercet.attention.kernels.selected.launch")
    x, bounds = sample(), cu(DOCUMENTS)
    wanted = outcome(x, cu_seqlens=bounds)
    settings = replace(selected_settings(16, 16, torch.float32, 16), backward_limit=0.1)
    monkeypatch.setattr(selected, "selected_settings", lambda *_: settings)
    p = make_plan((1, TOKENS, TOKENS, 1, 1, 2, 16, 16), 4, 4, (16, 0, 1), settings)
    assert p.query_major_forward_only
    assert not p.query_major_only
    assert_same(outcome(x, cu_seqlens=bounds), wanted)


def test_score_rows_are_as_wide_as_max_seqlen(monkeypatch: pytest.MonkeyPatch) -> None:
    score = importlib.import_module("tercet.attention.kernels.scores")
    q, kc, bounds = torch.zeros(1, 65536, 1, 16), torch.zeros(1, 4096, 1, 16), cu([1024] * 64)
    launches: list[tuple[str, int]] = []

    def record(kernel: Any, grid: Any, pointers: Any, free: tuple[int, ...], *_: Any, **__: Any) -> None:
        name = kernel.fn.__name__
        launches.append((name, free[-1 if name == "select_kernel" else -3]))  # blocks in a row of scores

    monkeypatch.setattr(score, "call", record)
    for longest, expected in (
        (-1, [("scores_kernel", 1024), ("select_kernel", 1024)] * 2),  # two ranges of queries
        (2048, [("scores_kernel", 32), ("select_kernel", 32)]),
        (1024, [("select_kernel", 0)]),  # all blocks are selected: nothing is scored, nothing is read
    ):
        launches.clear()
        documents = Documents(1, 65536, 4096, bounds, bounds, longest=longest)
        score.select(q, kc, torch.zeros(1, 1, 65536), tercet.NSAConfig(), documents, scratch_bytes=256 << 20)
        assert launches == expected


@pytest.mark.parametrize(
    ("max_seqlen", "widest"),
    [(30, 1024), (10, 1024), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (30, 50))],
)
def test_documents_longer_than_max_seqlen_are_selected_worse_without_reading_foreign_memory(
    monkeypatch: pytest.MonkeyPatch, max_seqlen: int, widest: int
) -> None:
    score = importlib.import_module("tercet.attention.kernels.scores")
    compressed = importlib.import_module("tercet.attention.kernels.compressed")
    config, documents = replace(CONFIG, select_block=8), (50, 10)
    x, bounds = sample(documents, config), cu(documents)
    ccu, found = config.compressed_cu_seqlens(bounds), []
    _, lse = compressed.forward(x.q, x.kc, x.vc, config, Documents(1, 60, x.kc.shape[1], bounds, ccu))
    empty, packed = torch.empty, Documents(1, 60, x.kc.shape[1], bounds, ccu, longest=max_seqlen)
    for poison in (0, 1 << 29):  # as a score, and as an index that was never written

        def surrounded(*shape: int, poison: int = poison, **options: Any) -> torch.Tensor:
            whole = empty((3, *shape), **options)
            return whole.fill_(poison)[1]

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", surrounded)
            found.append(score.select(x.q, x.kc, lse, config, packed, widest=widest))
    assert torch.equal(*found)
    current = torch.cat([torch.arange(n) for n in documents])[:, None] // config.select_block
    first, last = found[0][0, :, 0].split(1, dim=1)
    several = current > 0
    assert torch.equal(torch.where(several, last, first), current.int()), "a query's own block is always selected"
    assert torch.all((first >= 0) & (first < torch.where(several, current, 1)))
    # one of the blocks that have scores, which are multiples of four; the lowest if none has
    assert int(first.max()) < {10: 1, 30: 4, 50: 6}[max_seqlen]


def test_short_documents_are_query_major_only() -> None:
    packed, rows = plan(32, 2048), plan(None, None, batch=32)
    assert packed.query_major_only
    assert rows.query_major_only
    assert (packed.ranges, packed.forced) == (rows.ranges, rows.forced) == (1, 0)
    assert not plan(32, None).query_major_only
    assert plan(32, None).identity != packed.identity, "they launch different kernels"
    assert not plan(16, 4096).query_major_only
    assert plan(16, 4096).query_major_forward_only, "the forward pass allows larger unions"
    assert plan(16, 4096).limits[0] > 65536, "a design that is not launched is never chosen"
    assert not plan(8, 8192).query_major_forward_only
    assert not plan(16, None).query_major_forward_only
    assert plan(4096, 16).query_major_only


def test_a_query_range_of_short_documents_is_query_major_only() -> None:
    settings, shape = selected_settings(64, 64, torch.bfloat16, 64), (1, 16384, 65536, 12, 2, 16, 64, 64)
    assert make_plan(shape, 2, 64, (64, 1, 2), settings, 1024).query_major_only
    assert not make_plan(shape, 2, 64, (64, 1, 2), settings, 2048).query_major_only, (
        "its queries may all lie at the end of their documents"
    )


@pytest.mark.parametrize("design", ["union", pytest.param("kv-major", marks=pytest.mark.slow)])
def test_empty_documents_at_the_end_change_no_bit(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has a fixed number of bounds, and so empty documents after the last one."""
    if design == "kv-major":  # for every range, by limits that any union of blocks exceeds
        selected = importlib.import_module("tercet.attention.kernels.selected.launch")
        settings = replace(selected_settings(16, 16, torch.float32, 16), forward_limit=0.0, backward_limit=0.0)
        monkeypatch.setattr(selected, "selected_settings", lambda *_: settings)
    documents = (18, 0, 14)
    x = sample(documents)
    found = [outcome(x, cu_seqlens=cu((*documents, *[0] * more)), max_seqlen=18) for more in (0, 5)]
    (out, blocks, grads), (again, same_blocks, same_grads) = found
    assert all(torch.equal(a, b) for a, b in zip((out, blocks, *grads), (again, same_blocks, *same_grads), strict=True))
