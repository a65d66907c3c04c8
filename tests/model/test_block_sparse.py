"""BlockSparseAttention: dense where it must be, its cache, its statistics, its selector, and models that use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import layer_oracle
import tercet
from cases import cu
from tercet.config.flags import key_options, read_arguments
from tercet.config.load import load, to_toml
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer

NSA = tercet.NSAConfig(compress_block=4, compress_stride=2, select_block=4, select_count=4, window=1)
REACH = 16  # select_count · select_block
DOCUMENTS = (37, 0, 3, 40)
BLOCK_SPARSE = {"gate": "none", "shared_kv": True, "branches": ("selected",), "compression": "mean"}


def make(dtype: torch.dtype = torch.float64, **options: object) -> tercet.BlockSparseAttention:
    layer = tercet.BlockSparseAttention(12, 4, 2, 4, config=NSA, **options)
    layer.init_weights(0.6, 0.3)
    return layer.to(dtype)


def make_model(**options: object) -> Transformer:
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 64, "init_std": 0.2}
    return Transformer(ModelConfig(**{**sizes, "nsa": NSA, **BLOCK_SPARSE, **options}))


@pytest.mark.parametrize("options", [{}, {"dense_below": 25}, {"qk_norm": True, "bias": True}])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_layer_equals_the_oracle(options: dict[str, object], documents: tuple[int, ...] | None):
    layer, x = make(**options), torch.randn(1, 80, 12, dtype=torch.float64)
    y = layer(x, cu_seqlens=cu(documents))
    np.testing.assert_allclose(
        y.detach().numpy(), layer_oracle.one_branch(layer, x, cu(documents)).out, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_has_the_weights_of_a_dense_one_and_its_results_below_dense_below(backend: str):
    layer = make(dense_below=30, qk_norm=True, backend=backend)
    dense = tercet.DenseAttention(12, 4, 2, 4, qk_norm=True).double()
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(2, 60, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[:, :30], dense(x)[:, :30])
    torch.testing.assert_close(layer(x[:, :30]), dense(x[:, :30]))
    assert layer.routes == {"dense": "sdpa" if backend == "auto" else "reference"}
    assert not torch.allclose(layer(x)[:, 30:], dense(x)[:, 30:])


def test_a_decode_step_reads_block_keys_and_selected_tokens():
    layer, x = make(dense_below=25), torch.randn(2, 60, 12, dtype=torch.float64)
    cache = layer.make_cache(2)
    layer(x[:, :20], cache=cache, lengths=torch.tensor([8, 20]))

    def expected(t: int) -> int:
        selected = NSA.select_block * (NSA.select_count - 1) + t % NSA.select_block + 1
        return t + 1 if t < 25 else NSA.num_visible(t) + selected

    for t in range(8, 48):
        layer(x[:, t : t + 1], cache=cache)
        assert cache.reads.tolist() == [[[expected(at)] * 2] for at in (t, t + 12)]


def test_the_cache_holds_one_set_of_keys_and_values_and_their_means():
    layer, three = make(torch.float32), tercet.NativeSparseAttention(12, 4, 2, 4, config=NSA)
    size = layer.make_cache(1, 1000).nbytes()
    assert size == 4 * 2 * 4 * (2 * 1001 + NSA.num_compressed(1000) + 1)
    assert size < three.make_cache(1, 1000).nbytes()


@pytest.mark.parametrize(("length", "dense_below", "teaches"), [(12, 0, False), (40, 60, True), (60, 0, True)])
@pytest.mark.parametrize("measured", [True, False])
def test_a_learned_selector_learns_wherever_blocks_are_free(
    length: int, dense_below: int, teaches: bool, measured: bool
):
    """Even where every query reads all keys. Below REACH no block is free."""
    layer = make(selector="learned", selector_dim=6, dense_below=dense_below)
    layer.stats.enabled = measured
    x = torch.randn(1, length, 12, dtype=torch.float64)
    layer(x, sampled=torch.arange(length)).sum().backward()
    grads = [p.grad for p in layer.selector.parameters()]
    assert all(g is not None and bool(g.any()) == teaches for g in grads)
    assert ("selector_kl" in layer.stats.read()) == (teaches and measured)


@pytest.mark.parametrize("length", [12, 60])
def test_selected_blocks_are_counted_even_where_every_query_reads_all(length: int):
    layer = make()
    layer.stats.enabled = True
    layer(torch.randn(1, length, 12, dtype=torch.float64))
    found = layer.stats.read()
    assert "gate_entropy" not in found
    assert found["selected_blocks"] == pytest.approx(sum(min(4, t // 4 + 1) for t in range(length)) / length)


def test_a_model_trains_and_its_gradients_survive_checkpointing():
    from tercet.parallel.activation_checkpointing import apply_activation_checkpointing

    tokens = torch.randint(0, 256, (1, 80))
    grads = []
    for mode in (None, "full", "selective"):
        torch.manual_seed(0)
        model = make_model(dense_below=25, layers=3, selector="own", exact_groups=[[0, 1], [1], []])
        if mode:
            apply_activation_checkpointing(model.blocks, mode)
        model(tokens, cu_seqlens=cu(DOCUMENTS), targets=tokens).total.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True))


def test_each_layer_has_its_exact_groups_also_as_flags_and_in_files(tmp_path: Path):
    model = make_model(selector="own", exact_groups=[[1], []])
    assert [layer.spec.exact_groups for layer in model.attention_layers()] == [(1,), ()]
    flags = {"model.gate": "none", "model.selector": "own", "model.layers": 2, "model.kv_heads": 2}
    options = key_options({})
    given = read_arguments(["--model.exact_groups", "0,1", "none"], options, prog="tercet train")
    config = load("tiny", flags={**flags, **given}).config
    assert config.model.exact_groups == ((0, 1), ())
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(file=tmp_path / "config.toml").config.model == config.model


def test_no_gate_implies_the_other_settings_of_the_mode():
    assert ModelConfig(gate="none") == ModelConfig(**BLOCK_SPARSE)
    found = load("m7c", flags={"model.gate": "none", "model.compress_selected_keys": False}).config.model
    assert (found.shared_kv, found.branches, found.compression) == (True, ("selected",), "mean")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shared_kv": False}, "shared_kv=true"),
        ({"branches": ("selected", "window")}, "branches"),
        ({"compression": "mlp"}, "compression=mean"),
        ({"gate": "sigmoid", "dense_below": 64}, "dense_below=64 needs gate=none"),
        ({"exact_groups": [[0], [1]]}, "layer 0: exact_groups=0 needs selector=own, not compressed"),
        ({"selector": "own", "exact_groups": [[0]]}, "exact_groups names 1 layers but layers=2"),
        (
            {"selector": "own", "exact_groups": [[0], [0, 2]]},
            "layer 1: exact_groups=0,2: .* 0 … 1,",
        ),
        ({"selector": "own", "exact_groups": [[0], [0]], "attention": "nsa,dense"}, "layer 1, which is dense"),
    ],
)
def test_settings_that_contradict_the_mode_are_refused(changes: dict[str, object], words: str):
    with pytest.raises(ValidationError, match=words):
        make_model(**changes)
