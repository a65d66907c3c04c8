"""Statistics of gates and selection, against counts by loops and small examples."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import oracle
import tercet
from cases import attend, chosen, config, cu, inputs
from tercet.model.stats import COLLAPSE_SHARE, AttentionStats

CFG = config()


def counting() -> AttentionStats:
    stats = AttentionStats(CFG)
    stats.enabled = True
    return stats


def packing_of(documents, tokens: int):
    from tercet.attention.layout import Packing

    bounds = cu(documents)
    return None if bounds is None else Packing(bounds, tokens, tokens // CFG.compress_stride, CFG)


def counted_gates(gates: torch.Tensor) -> dict[str, float]:
    shares = [0.0, 0.0, 0.0]
    entropy = top = collapsed = 0.0
    rows = gates.reshape(-1, 3).tolist()
    for row in rows:
        parts = [g / sum(row) for g in row]
        shares = [a + p for a, p in zip(shares, parts, strict=True)]
        entropy -= sum(p * math.log(p) for p in parts if p > 0)
        top += max(parts)
        collapsed += max(parts) > COLLAPSE_SHARE
    n = len(rows)
    return {
        "gate_share_compressed": shares[0] / n,
        "gate_share_selected": shares[1] / n,
        "gate_share_window": shares[2] / n,
        "gate_entropy": entropy / n,
        "gate_max_share": top / n,
        "gate_collapse": collapsed / n,
    }


def counted_selection(indices: torch.Tensor, documents) -> dict[str, float]:
    batch, tokens, groups, _ = indices.shape
    positions = oracle.document_positions(tokens, cu(documents))
    blocks = distance = forced = rows = pairs = 0
    overlap = 0.0
    for b in range(batch):
        for g in range(groups):
            before: list[int] = []
            for row, t in enumerate(positions):
                now = chosen(indices, b, row, g)
                rows += 1
                blocks += len(now)
                distance += sum(t // CFG.select_block - j for j in now)
                forced += sum(j in oracle.forced_blocks(t, CFG) for j in now)
                free = set(now) - set(oracle.forced_blocks(t, CFG))
                if t // CFG.select_block + 1 > CFG.select_count and free:
                    pairs += 1
                    overlap += len(free & set(before)) / len(free)
                before = now
    return {
        "selected_blocks": blocks / rows,
        "selected_distance": distance / blocks,
        "selected_forced": forced / blocks,
        "selected_overlap": overlap / pairs,
    }


@pytest.mark.parametrize("documents", [None, (1, 30, 9, 23)], ids=["plain", "packed"])
def test_every_statistic_equals_a_count_by_loops(documents):
    x = inputs(CFG, 63, batch=1 if documents else 2, documents=documents, dtype=torch.float32)
    _, aux = attend(x, CFG, cu_seqlens=cu(documents), return_aux=True)
    stats = counting()
    stats.update(x.gates, aux.block_indices, packing_of(documents, 63))
    expected = {**counted_gates(x.gates), **counted_selection(aux.block_indices, documents)}
    assert stats.read() == pytest.approx(expected, rel=1e-5)


def test_overlap_counts_freely_selected_blocks_only():
    """One initial block and two local ones are forced, n - 3 chosen. From block n on there is a choice."""
    n, block = CFG.select_count, CFG.select_block
    assert (CFG.select_initial, CFG.select_local) == (1, 2)
    length = (n + 3) * block
    indices = torch.full((1, length, 1, n), -1, dtype=torch.int32)
    for t in range(length):
        c = t // block
        # Stuck: always the first ones after the initial block, whatever the token.
        row = list(range(c + 1)) if c < n else [*range(n - 2), c - 1, c]
        indices[0, t, 0, : len(row)] = torch.tensor(row, dtype=torch.int32)
    gates = torch.full((1, length, 2, 3), 0.5)

    def overlap(indices: torch.Tensor) -> float:
        stats = counting()
        stats.update(gates, indices)
        return stats.read()["selected_overlap"]

    assert overlap(indices) == 1.0  # although the forced blocks moved on twice
    moved = indices.clone()
    moved[0, -1, 0, 1] = n - 2  # the last token, one of whose n - 3 choices is another block
    tokens = 3 * block
    assert overlap(moved) == pytest.approx((tokens - 1 / (n - 3)) / tokens)


def test_a_dominant_branch_counts_as_collapsed():
    gates = torch.tensor([1.0, 1e-6, 1e-6]).expand(1, 4, 2, 3).clone()
    gates[0, 0] = 1 / 3
    stats = counting()
    stats.update(gates, None)
    assert stats.read()["gate_collapse"] == pytest.approx(0.75)
    assert stats.read()["gate_share_compressed"] == pytest.approx(0.25 / 3 + 0.75, rel=1e-4)


def test_the_gate_of_a_branch_that_the_layer_does_not_have_is_not_counted():
    gates = torch.tensor([0.8, 0.1, 0.3]).expand(1, 4, 2, 3)

    def read(*branches: str) -> dict[str, float]:
        layer = tercet.NativeSparseAttention(16, 2, 1, 8, config=CFG, branches=branches, selector="learned")
        layer.stats.enabled = True
        layer.stats.update(gates, None)
        return layer.stats.read()

    two = read("selected", "window")
    assert "gate_share_compressed" not in two
    assert two["gate_share_selected"] == pytest.approx(0.25)
    assert two["gate_share_window"] == two["gate_max_share"] == pytest.approx(0.75)
    assert two["gate_entropy"] == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    one = read("selected")
    assert (one["gate_share_selected"], one["gate_collapse"]) == (1.0, 0.0)  # one gate cannot collapse onto another


def test_updates_add_up_and_reset_clears_them():
    stats = counting()
    assert stats.read() == {}
    parts = [inputs(CFG, 40, seed=s, dtype=torch.float32) for s in (1, 2)]
    both = []
    for x in parts:
        _, aux = attend(x, CFG, return_aux=True)
        stats.update(x.gates, aux.block_indices)
        both.append(aux.block_indices)
    gates = torch.cat([x.gates for x in parts])
    expected = {**counted_gates(gates), **counted_selection(torch.cat(both), None)}
    assert stats.read() == pytest.approx(expected, rel=1e-5)
    stats.reset()
    assert stats.read() == {}


def test_distances_fall_into_doubling_bins():
    indices = torch.full((1, 64, 1, CFG.select_count), -1, dtype=torch.int32)
    indices[0, 63, 0] = torch.tensor([0, 10, 14, 15])
    stats = counting()
    stats.update(torch.ones(1, 64, 1, 3), indices)
    bins = stats.distances(stats.sums().tolist())
    # 15, 5, 1 and 0 blocks back fall into 8-15, 4-7, 1 and 0.
    assert bins[:5] == [1, 1, 0, 1, 1]
    assert sum(bins) == 4


def test_updating_never_reads_values_on_the_host():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = inputs(CFG, 40, dtype=torch.float32)
    _, aux = attend(x, CFG, return_aux=True)
    with mode:
        stats = counting()
        stats.update(mode.from_tensor(x.gates), mode.from_tensor(aux.block_indices))


def layer_with_captured_stats(monkeypatch, **options):
    captured = []
    update = AttentionStats.update

    def capture(self, gates, block_indices, packing=None):
        captured.append((gates.detach(), block_indices))
        update(self, gates, block_indices, packing)

    monkeypatch.setattr(AttentionStats, "update", capture)
    layer = tercet.NativeSparseAttention(32, 4, 2, 8, config=CFG, **options)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return layer, captured


@pytest.mark.parametrize("documents", [None, (7, 31, 12)], ids=["plain", "packed"])
def test_a_layer_updates_its_statistics(documents, monkeypatch):
    layer, captured = layer_with_captured_stats(monkeypatch)
    layer.stats.enabled = True
    layer(torch.randn(1, 50, 32), cu_seqlens=cu(documents))
    ((gates, indices),) = captured
    expected = {**counted_gates(gates), **counted_selection(indices, documents)}
    assert layer.stats.read() == pytest.approx(expected, rel=1e-5)


def test_disabled_statistics_change_nothing(monkeypatch):
    layer, _ = layer_with_captured_stats(monkeypatch)
    x = torch.randn(2, 50, 32)
    layer.stats.enabled = False
    quiet = layer(x)
    assert layer.stats.read() == {}
    layer.stats.enabled = True
    assert torch.equal(layer(x), quiet)
    assert layer.stats.read() != {}


def test_recomputed_passes_are_counted_once(monkeypatch):
    layer, _ = layer_with_captured_stats(monkeypatch)
    layer.stats.enabled = True
    x = torch.randn(1, 50, 32, requires_grad=True)
    layer(x).sum().backward()
    plain = layer.stats.sums().tolist()
    layer.stats.reset()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.stats.sums().tolist() == plain


def test_statistics_are_not_in_the_state_dict(monkeypatch):
    layer, _ = layer_with_captured_stats(monkeypatch)
    before = set(layer.state_dict())
    layer.stats.enabled = True
    layer(torch.randn(1, 20, 32))
    assert set(layer.state_dict()) == before
