"""torch.compile traces the layer as one graph, without graph breaks."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

import tercet
from stepping import compile_counted
from tercet.attention import dispatch, layout
from tercet.attention.layout import Packing
from tercet.model.transformer import ModelConfig, Transformer

CONFIG = tercet.NSAConfig(8, 4, 16, 4, 1, 2, 20)


def fake_kernels(q, kc, vc, ks, vs, kw, vw, gates, config, *_):  # type: ignore[no-untyped-def]
    """Signature and output shapes of kernels.attend, which is a single operator to the compiler."""
    if gates is None:
        k, v = (kw, vw) if ks is None else (ks, vs)
        return q + (k * v).repeat_interleave(2, dim=2), None
    indices = torch.zeros(*q.shape[:2], ks.shape[2], config.select_count, dtype=torch.int32)
    return q * gates[..., :1] + (ks + kw).repeat_interleave(2, dim=2) + kc.sum() + vc.sum(), indices


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the kernels, which claim to run here."""
    found = pytest.importorskip("tercet.attention.kernels")
    monkeypatch.setattr(dispatch, "why_not_triton", lambda tensors, config: None)
    return found


def check_compiles(layer: nn.Module, bounds: list[int] | None) -> None:
    """Compiled to one graph, the layer computes what it computes uncompiled."""
    x, documents = torch.randn(1, 70, 32), None
    if bounds is not None:
        documents = Packing(torch.tensor(bounds, dtype=torch.int32), 70, 70 // CONFIG.compress_stride, CONFIG)
        documents.first_tokens(66)  # as the model does, once for all layers
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, documents), layer(x, documents))


@pytest.mark.parametrize(
    ("packed", "statistics"),
    [(True, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((False, False), (False, True), (True, False)))],
)
def test_the_layer_compiles_to_one_graph(monkeypatch, kernels, packed: bool, statistics: bool) -> None:
    monkeypatch.setattr(kernels, "attend", fake_kernels)
    layer = tercet.NativeSparseAttention(32, 4, 2, 8, config=CONFIG)
    layer.stats.enabled = statistics
    check_compiles(layer, [0, 30, 70] if packed else None)
    assert layer.routes == dict.fromkeys(layer.spec.branches, "triton")
    assert bool(layer.stats.read()) == statistics


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_window_layer_compiles_to_one_graph(monkeypatch, kernels, packed: bool) -> None:
    monkeypatch.setattr(kernels, "attend", fake_kernels)
    layer = tercet.WindowAttention(32, 4, 2, 8, config=CONFIG)
    check_compiles(layer, [0, 30, 70] if packed else None)
    assert layer.routes == {"window": "triton"}


@pytest.mark.parametrize(
    ("packed", "dense_below"),
    [
        (True, 66),
        (False, 100),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, 0), (False, 0), (True, 100), (False, 66))),
    ],
)
def test_a_block_sparse_layer_compiles_to_one_graph(monkeypatch, kernels, packed: bool, dense_below: int) -> None:
    indices = torch.zeros(1, 70, 2, CONFIG.select_count, dtype=torch.int32)
    monkeypatch.setattr(kernels, "select_by_keys", lambda q, keys, *_: indices + (keys.sum() > 1e9))
    monkeypatch.setattr(kernels, "attend", fake_kernels)
    layer = tercet.BlockSparseAttention(32, 4, 2, 8, config=CONFIG, dense_below=dense_below)
    layer.stats.enabled = dense_below == 100
    check_compiles(layer, [0, 3, 70] if packed else None)
    assert layer.routes == ({"dense": "sdpa"} if dense_below == 100 else {"selected": "triton"})


@pytest.mark.parametrize(
    "kind", ["BlockSparseAttention", pytest.param("NativeSparseAttention", marks=pytest.mark.slow)]
)
def test_the_reference_compiles_to_one_graph(kind: str) -> None:
    layer = getattr(tercet, kind)(32, 4, 2, 8, config=CONFIG)
    check_compiles(layer, [0, 3, 70] if kind == "NativeSparseAttention" else None)
    assert set(layer.routes.values()) == {"reference"}


def test_a_new_document_count_does_not_recompile(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    monkeypatch.setattr(kernels, "attend", fake_kernels)
    monkeypatch.setattr(layout, "_read_bounds", lambda *bounds: None)  # as on a device
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 32, "vocab_size": 16}
    model = Transformer(ModelConfig(**sizes, nsa=CONFIG))
    model.compiled = True
    compiled = compile_counted(model)
    for bounds in ([0, 30, 70], [0, 10, 20, 50, 70], [0, 70], [0, 1, 2, 3, 4, 5, 6, 70]):
        model.hidden(torch.zeros(1, 70, dtype=torch.int64), torch.tensor(bounds, dtype=torch.int32))
    assert len(compiled) == 1  # for both layers, too
