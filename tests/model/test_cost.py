"""Computed costs against counted ones: parameters of the model, pairs of every query, saved bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.attention.config import NSAConfig
from tercet.bench.settings import KINDS
from tercet.config.load import load
from tercet.config.sections import TrainConfig
from tercet.model.config import ModelConfig
from tercet.model.cost import (
    RANGE_BYTES,
    activation_bytes_per_token,
    attention_pairs,
    compression_flops,
    flops_per_token,
    forward_flops,
    memory,
    optimizer_numbers,
    parameters,
    scoring_flops,
)
from tercet.model.transformer import Transformer
from tercet.train.optim import build_optimizer
from tercet.train.state import freeze_all_but_selectors

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "performance"
BLOCK_SPARSE = {"gate": "none", "shared_kv": True, "branches": ("selected",), "compression": "mean"}
SIZES = {"dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 40, "vocab_size": 37}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "dense"},
        {"attention": ("nsa", "dense", "nsa")},
        {"attention": "window,nsa,dense", "selector": "learned"},
        {"attention": "window", "qk_norm": True, "attention_bias": True, "shared_kv": True, "value_dim": 12},
        {"tie_embeddings": False, "value_dim": 12},
        {"shared_kv": True, "compression": "mean"},
        {"qk_norm": True},
        {"qk_norm": True, "attention": "dense"},
        {"compress_selected_keys": True, "qk_norm": True, "attention_bias": True, "value_dim": 12},
        {"branches": ("selected", "window")},
        {"branches": ("selected", "window"), "selector": "learned", "compression": "mlp"},
        {"gate": "softmax", "kv_heads": 4},
        {**BLOCK_SPARSE, "qk_norm": True},
        {**BLOCK_SPARSE, "selector": "learned", "attention": ("nsa", "dense", "nsa")},
    ],
    ids=str,
)
def test_parameter_counts_match_the_model(changes):
    config = ModelConfig(**{**SIZES, **changes})
    with torch.device("meta"):
        model = Transformer(config)
    found, real = parameters(config), sum(p.numel() for p in model.parameters())
    assert found.total == real
    assert found.attention == sum(p.numel() for layer in model.attention_layers() for p in layer.parameters())
    assert found.ffn == sum(p.numel() for block in model.blocks for p in block.ffn.parameters())


@st.composite
def configs(draw):
    d = draw(st.integers(1, 6))
    l = d * draw(st.integers(1, 4))
    block = l + d * draw(st.integers(0, 4))
    first, local = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    n = first + local + draw(st.integers(0, 3))
    return NSAConfig(l, d, block, n, first, local, draw(st.integers(1, 30)))


@given(configs(), st.integers(1, 200))
def test_pairs_match_a_count_query_by_query(nsa, length):
    compressed = selected = window = 0
    for t in range(length):
        compressed += sum(1 for i in range(length) if i * nsa.compress_stride + nsa.compress_block <= t + 1)
        current = t // nsa.select_block
        blocks = min(nsa.select_count, current + 1)
        selected += (blocks - 1) * nsa.select_block + t % nsa.select_block + 1
        window += min(nsa.window, t + 1)
    found = attention_pairs(ModelConfig(**SIZES, nsa=nsa), "nsa", length)
    assert (found.compressed, found.selected, found.window) == (compressed, selected, window)


@given(configs(), st.integers(1, 120), st.integers(0, 60))
def test_pairs_of_block_sparse_attention_match_a_count_query_by_query(nsa, length, dense_below):
    config = ModelConfig(**SIZES, **BLOCK_SPARSE, nsa=nsa, dense_below=dense_below)
    count = 0
    for t in range(length):
        blocks = min(nsa.select_count, t // nsa.select_block + 1)
        count += t + 1 if t < dense_below else (blocks - 1) * nsa.select_block + t % nsa.select_block + 1
    assert attention_pairs(config, "nsa", length).total == count


@given(configs(), st.integers(1, 200))
def test_a_selector_scores_free_blocks_of_queries_that_choose(nsa, length):
    config = ModelConfig(**SIZES, nsa=nsa, selector="learned", selector_dim=6)
    current = [t // nsa.select_block for t in range(length)]
    keys = sum((c - nsa.select_local + 1) * nsa.select_block for c in current if c >= nsa.select_count)
    assert scoring_flops(config, length) == 2 * 2 * 6 * keys


@given(configs(), st.integers(1, 200))
def test_phi_multiplies_each_chunk_once_in_documents_that_have_compressed_tokens(nsa, length):
    config = ModelConfig(**SIZES, nsa=nsa)
    compressed = max(0, (length - nsa.compress_block) // nsa.compress_stride + 1)
    products = length // nsa.compress_stride * nsa.compress_block + compressed if compressed else 0
    assert compression_flops(config, length) == 2 * 2 * 2 * 8 * 8 * products


def test_compressed_scores_cost_something_without_their_branch_too():
    def flops(**changes):
        return forward_flops(ModelConfig(**SIZES, **changes), 2048)

    two = ("selected", "window")
    learned = {"selector": "learned", "selector_dim": 1, "branches": two}
    # a product of queries and compressed keys twice, instead of once and one of probabilities and values
    assert flops(branches=two) == pytest.approx(flops())
    assert flops(branches=("window",)) < flops(**learned) < flops(branches=two)


def test_own_queries_and_keys_cost_their_channels_in_free_blocks():
    def flops(**changes):
        config = ModelConfig(**SIZES, nsa=nsa, gate="none", shared_kv=True, selector="own", **changes)
        return scoring_flops(config, 2048)

    nsa = NSAConfig(select_block=64, select_count=16)
    pairs = sum((t // 64 - 1) * 64 for t in range(2048) if t // 64 >= 16)
    heads, size = SIZES["heads"], SIZES["head_dim"]
    assert flops() == 2 * heads * size * pairs
    means = 2 * heads * 2 * size / 64 * pairs
    none, half = [[]] * SIZES["layers"], [[0]] * SIZES["layers"]
    assert flops(exact_groups=none) == pytest.approx(means)
    assert flops(exact_groups=half) == pytest.approx((flops() + means) / 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "dense"},
        {"attention": "window,nsa,dense"},
        {"shared_kv": True, "value_dim": 12},
        {"compress_selected_keys": True},
        {"selector": "learned"},
    ],
    ids=str,
)
def test_projection_flops_match_the_matmuls_that_run(changes, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    # the counter's own global hooks would send φ through its linear layers one block at a time
    monkeypatch.setattr("tercet.model.compression._has_any_global_hook", lambda: False)

    config, length = ModelConfig(**{**SIZES, **changes}), 48
    model = Transformer(config).eval()  # in training, a sample of queries is projected again to teach the selectors
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    ops = counter.get_flop_counts()["Global"]
    ran = ops[torch.ops.aten.mm] + ops.get(torch.ops.aten.addmm, 0)
    assert ran == forward_flops(config, length) - _attended(config, length)


def _attended(config: ModelConfig, length: int) -> int:
    per_pair = 2 * config.heads * (config.head_dim + config.head_value_dim)
    return sum(per_pair * attention_pairs(config, kind, length).total for kind in config.attention_kinds)


def test_training_costs_three_forwards():
    config = load("m7c", flags={"model.selector": "compressed"}).config.model
    assert flops_per_token(config, 2048) == pytest.approx(3 * forward_flops(config, 2048) / 2048)
    # 6 per parameter and token is the usual estimate without attention
    assert flops_per_token(config, 1) == pytest.approx(6 * parameters(config).total, rel=0.05)


@pytest.mark.parametrize("changes", [{}, {**BLOCK_SPARSE, "attention": "nsa,dense,nsa"}], ids=str)
def test_training_selectors_alone_costs_little_more_than_a_forward(changes, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr("tercet.model.compression._has_any_global_hook", lambda: False)
    config, length = ModelConfig(**{**SIZES, "layers": 3, "selector": "learned", **changes}), 48
    model = Transformer(config)
    freeze_all_but_selectors(model)
    with FlopCounterMode(display=False) as counter:
        model(
            torch.zeros(1, length, dtype=torch.int64), None, torch.ones(1, length, dtype=torch.int64)
        ).total.backward()
    ops = counter.get_flop_counts()["Global"]
    ran = ops[torch.ops.aten.mm] + ops.get(torch.ops.aten.addmm, 0)
    estimate = flops_per_token(config, length, selectors_only=True) * length - _attended(config, length)
    assert ran == pytest.approx(estimate, rel=0.05)
    assert estimate < 0.6 * (flops_per_token(config, length) * length - 3 * _attended(config, length))
    settings = {"compute_bytes": 4, "activation_checkpointing": "none"}
    alone, everything = (memory(config, length, length, **settings, selectors_only=only) for only in (True, False))
    assert alone.gradients == 4 * sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert alone.optimizer == 2 * alone.gradients
    assert alone.activations < everything.activations


@pytest.mark.parametrize(
    "changes",
    [{"attention": "dense"}, {"attention": "window"}, {}, {**BLOCK_SPARSE, "nsa": NSAConfig(select_count=4)}],
    ids=str,
)
def test_estimated_activations_are_close_to_what_autograd_saves(changes):
    measured, estimate = saved_and_estimated(**changes)
    assert 0.7 < estimate / measured < 1.4


def saved_and_estimated(**changes):
    """Activation bytes per token of a small model: (measured, estimated)."""
    config = ModelConfig(dim=96, layers=2, heads=6, kv_heads=2, head_dim=16, ffn_dim=256, **changes)
    length, kept = 512, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model = Transformer(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden = model.hidden(tokens)
    measured = sum(size for pointer, size in kept.items() if pointer not in weights) / length
    del hidden
    return measured, activation_bytes_per_token(config, 4, "none")


def measured_steps():
    """Training steps measured on a GPU, the longest and the shortest of each kind: docs/results/performance."""
    cells = {}
    for part in ("train", "large"):
        for cell in json.loads((RESULTS / f"{part}.json").read_text(encoding="utf-8"))["results"]:
            kind = cell["kind"], cell.get("selector"), cell["packed"], cell["preset"]
            shortest, longest = cells.get(kind, (cell, cell))
            cells[kind] = min(shortest, cell, key=lambda c: c["length"]), max(longest, cell, key=lambda c: c["length"])
    return [cell for pair in cells.values() for cell in {c["length"]: c for c in pair}.values()]


@pytest.mark.parametrize("cell", measured_steps(), ids=lambda x: f"{x['kind']}-{x['preset']}-{x['length']}")
def test_planned_memory_is_within_8_percent_of_the_measured_peak(cell):
    selector = {"model.selector": cell["selector"]} if "selector" in cell else {}
    flags = KINDS[cell["kind"]] | selector | {"run.device": "auto"}
    sizes = {"data.seq_len": cell["length"], "train.micro_batch": cell["batch"], "train.tokens_per_step": 65536}
    config = load(cell["preset"], flags=flags | sizes).config
    model, checkpointing = config.model, cell["checkpointing"]
    planned = memory(model, 65536, cell["length"], compute_bytes=2, activation_checkpointing=checkpointing).total
    if cell["kind"] == "dense" and cell["packed"]:  # torch 2.11 repeats keys and values for every query head
        planned += 65536 * model.layers * 2 * (model.heads - model.kv_heads) * model.head_dim * 2
    assert 0 <= planned / 2**30 / cell["peak_gib"] - 1 < 0.08


def test_scattered_selections_are_planned_with_the_scratch_that_the_kernels_take():
    table = pytest.importorskip("tercet.attention.kernels.table")
    assert table.SelectedSettings().range_bytes == RANGE_BYTES


def test_memory_shrinks_with_checkpointing_and_shards():
    config = load("m7c").config.model

    def total(**changes):
        settings = {"compute_bytes": 2, "activation_checkpointing": "none", **changes}
        return memory(config, 65536, 8192, **settings)

    none, selective, full = (total(activation_checkpointing=m) for m in ("none", "selective", "full"))
    assert none.activations > selective.activations > full.activations
    assert total(optimizer_shards=4).optimizer * 4 == none.optimizer
    assert none.optimizer == 8 * parameters(config).total
    assert (
        none.total
        == none.weights + none.gradients + none.optimizer + none.compute_copies + none.activations + none.loss
    )


@pytest.mark.parametrize("selector", ["compressed", "learned"])
@pytest.mark.parametrize("attention", ["nsa", "window,dense"])
def test_muon_keeps_one_number_per_hidden_weight(attention, selector):
    config = ModelConfig(
        dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=48, attention=attention, selector=selector
    )
    optimizer = build_optimizer(Transformer(config), TrainConfig(optimizer="muon"))
    kept = sum(p.numel() * (1 if "parts" in g else 2) for g in optimizer.param_groups for p in g["params"])
    assert optimizer_numbers(config, "muon") == kept < optimizer_numbers(config, "adamw")
