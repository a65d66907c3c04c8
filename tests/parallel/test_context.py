"""Context parallelism: a sequence split over ranks gives what the whole sequence gives."""

from __future__ import annotations

import itertools

import pytest

from parallel.world import assert_below, run_ranks, run_torchrun
from tercet.attention.config import NSAConfig
from tercet.errors import TercetError
from tercet.parallel.context_layout import ContextLayout

CONFIG = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 4, 1, 2, 24)
ALL, FEW = 56, 30  # cells of context_ranks.py


@pytest.mark.parametrize("cells", [FEW, pytest.param(ALL, marks=pytest.mark.slow)])
def test_a_split_sequence_equals_the_whole_one_in_outputs_gradients_and_statistics(fork_server, cells):
    results = run_ranks(fork_server, 3, "context_ranks", *([] if cells == ALL else ["--few"]))
    assert len({r["layer"] for r in results}) == 14
    assert len(results) == cells
    for r in results:
        assert r["forward"] < 1e-12, r
        assert r["gradients"] < 1e-8, r
        assert r["stats"] < 1e-12, r
    fetched = {r["layer"]: r["bytes"] for r in results if r["bounds"] == "one document"}
    # as planned, forward and backward, in fp64: rows of two KV heads of 8 and 4
    layout, row = ContextLayout((0, 384), 3, SMALL), 8 * 2 * (8 + 4)
    # a window layer fetches the end of the chunk before it and nothing else, and no layer what it does not read
    assert fetched["window"].keys() == {"window"}
    assert "compressed" not in fetched["two branches"]
    for kind, plan in {"selected": layout.lookback_plan(None), "compressed": layout.compressed_plan()}.items():
        rows = plan.fetched(0) + sum(plan.received(rank, 0) for rank in (1, 2))
        assert fetched["nsa"][kind] == rows * row, kind


@pytest.mark.slow
def test_a_split_sequence_equals_the_whole_one_on_the_kernels():
    pytest.importorskip("triton")
    results = run_torchrun(2, "context_ranks", "--triton", seconds=900, env={"TRITON_INTERPRET": "1"})
    assert len(results) == 2
    assert all(r["routes"] == ["triton"] for r in results), results
    assert_below(results, forward=1e-6, gradients=1e-5, stats=1e-9)


def test_one_long_document_is_split_in_zig_zag_within_one_percent_of_balance():
    for ranks in (2, 4, 8, 64):
        layout = ContextLayout((0, 1 << 20), ranks, CONFIG)
        assert layout.owned == tuple((r, 2 * ranks - 1 - r) for r in range(ranks))
        costs = [sum(map(layout.cost, pair)) for pair in layout.owned]
        assert max(costs) * len(costs) / sum(costs) < 1.01


def test_cost_is_the_number_of_keys_that_queries_read():
    layout = ContextLayout((0, 37, 160), 2, SMALL)
    for chunk in range(4):
        total = 0
        for token in range(*layout.tokens(chunk)):
            t = token - layout.document_start(token)
            total += (
                SMALL.num_visible(t) + min(SMALL.select_count * SMALL.select_block, t + 1) + min(SMALL.window, t + 1)
            )
        assert layout.cost(chunk) == total


def test_every_compressed_token_belongs_to_the_chunk_of_its_last_token():
    layout = ContextLayout((0, 5, 100, 110, 290, 291, 384), 3, SMALL)
    lasts = []
    for start, end in itertools.pairwise(layout.bounds):
        lasts += [
            start + i * SMALL.compress_stride + SMALL.compress_block - 1
            for i in range(SMALL.num_compressed(end - start))
        ]
    for chunk, (first, end) in enumerate(itertools.pairwise(layout.compressed_edges)):
        inside = [i for i, token in enumerate(lasts) if layout.tokens(chunk)[0] <= token < layout.tokens(chunk)[1]]
        assert inside == list(range(first, end))


def test_short_documents_are_only_fetched_by_the_ranks_that_share_them():
    """Documents of 1024 tokens in a batch of 64k: a rank fetches selected keys of documents it shares, no others."""
    bounds = tuple(range(0, 65536 + 1, 1024))
    plan = ContextLayout(bounds, 4, CONFIG).lookback_plan(None)
    assert sum(plan.fetched(r) for r in range(4)) == 0
    unaligned = ContextLayout((0, *range(1000, 65536, 1024), 65536), 4, CONFIG).lookback_plan(None)
    assert max(unaligned.fetched(r) for r in range(4)) <= 2 * 1024


@pytest.mark.parametrize("bounds", [(0, 96), (0, 30, 31, 96), (0, 5, 48, 50, 96)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_fetches_no_row_twice(bounds, ranks):
    """Gradients of fetched rows are added to their owners' by index, where a repeated row would count once."""
    layout = ContextLayout(bounds, ranks, SMALL)
    plans = [layout.lookback_plan(tokens) for tokens in (None, 0, 7, 23)]
    for plan in (*plans, layout.compressed_plan(), layout.previous_token_plan()):
        for pieces in plan.pieces:
            rows = [(p.owner, row) for p in pieces for row in range(p.local, p.local + p.count)]
            assert len(rows) == len(set(rows))


def test_a_length_that_does_not_split_is_refused_with_one_that_does():
    with pytest.raises(TercetError, match="multiple of 8, such as 104"):
        ContextLayout((0, 100), 4, CONFIG)
