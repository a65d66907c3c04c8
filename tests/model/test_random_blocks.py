"""Random selection, the control: which sets it draws, that they depend on positions alone, gradients, caches, runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tercet
from runs import losses, train_small
from stepping import compile_counted
from tercet.attention import dispatch
from tercet.config.schema import RunConfig
from tercet.model.decode import why_not_kernels
from tercet.model.selector import RandomBlocks
from tercet.model.transformer import ModelConfig, Transformer

NSA = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=6, window=8)
BOUNDS = [0, 70, 75, 160]


def make_layer(**options: Any) -> tercet.NativeSparseAttention:
    layer = tercet.NativeSparseAttention(32, 4, 2, 8, config=NSA, selector="random", **options)
    layer.init_weights(0.3, 0.1)
    return layer


def make_model(**options: Any) -> Transformer:
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 64, "init_std": 0.2}
    return Transformer(ModelConfig(**sizes, nsa=NSA, selector="random", **options))


@pytest.mark.parametrize("length", [48, 49, 400])  # of as many blocks as are selected, one more, and many
def test_sets_are_complete_ascending_and_hold_the_forced_blocks(length: int) -> None:
    chosen = RandomBlocks(3, NSA)(torch.arange(length), length)
    assert chosen.dtype == torch.int32
    for t, groups in enumerate(chosen.tolist()):
        current = t // NSA.select_block
        for blocks in groups:
            real = [j for j in blocks if j >= 0]
            assert real == sorted(set(real))
            assert blocks == real + [-1] * (NSA.select_count - len(real))
            assert len(real) == min(NSA.select_count, current + 1)
            assert {0, max(0, current - 1), current} <= set(real) <= set(range(current + 1))


def test_free_blocks_are_equally_likely_in_every_layer_and_group() -> None:
    # One query in block 14 of each of many random choices: 3 of the 12 free blocks, so 220 sets of 3.
    position = torch.arange(14 * 8, 15 * 8)
    random, counts = RandomBlocks(50, NSA), torch.zeros(220)
    number = {tuple(c): i for i, c in enumerate(torch.combinations(torch.arange(1, 13), 3).tolist())}
    for layer in range(20):
        random.layer = layer
        for blocks in random(position, 120)[..., 1:4].flatten(0, 1).tolist():
            counts[number[tuple(blocks)]] += 1
    expected = counts.sum() / 220
    assert ((counts - expected) ** 2 / expected).sum() < 302  # chi-squared, 219 degrees of freedom: p = 0.0002


@pytest.mark.parametrize("bounds", [None, torch.tensor(BOUNDS, dtype=torch.int32)])
def test_outputs_do_not_depend_on_later_tokens_and_documents_are_separate(bounds: torch.Tensor | None) -> None:
    layer, x = make_layer().double(), torch.randn(1, 160, 32, dtype=torch.float64)
    y = layer(x, cu_seqlens=bounds)
    changed = x.clone()
    changed[:, 120:] += 1
    assert torch.equal(layer(changed, cu_seqlens=bounds)[:, :120], y[:, :120])
    if bounds is not None:
        alone = [layer(part) for part in x.split([70, 5, 85], dim=1)]
        torch.testing.assert_close(torch.cat(alone, dim=1), y)


def test_gradients_are_those_of_finite_differences() -> None:
    config = tercet.NSAConfig(compress_block=4, compress_stride=4, select_block=4, select_count=4, window=4)
    layer = tercet.NativeSparseAttention(8, 2, 1, 4, config=config, selector="random").double()
    layer.init_weights(0.5, 0.5)
    x = torch.randn(1, 30, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), x, fast_mode=True)


@pytest.mark.parametrize("chunks", [[90, 1, 1, 68], [1] * 10 + [150], [64, 96]])
def test_a_cache_gives_the_results_of_the_whole_sequence(chunks: list[int]) -> None:
    model, tokens = make_model().double().eval(), torch.randint(0, 256, (2, 160))
    caches = [layer.make_cache(2) for layer in model.attention_layers()]
    parts = [model(part, cache=caches) for part in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))
    layer = model.attention_layers()[0]
    assert "selector=random" in str(why_not_kernels(layer, torch.zeros(2, 1, 32), caches[0], None))
    layer.backend = "triton"
    with pytest.raises(RuntimeError, match="selector=random"):
        why_not_kernels(layer, torch.zeros(2, 1, 32), caches[0], None)


def test_layers_share_compiled_code_and_choose_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("tercet.attention.kernels")

    def fake_kernels(q, kc, vc, ks, vs, kw, vw, gates, config, layout, branches, block_indices, *_):  # type: ignore[no-untyped-def]
        return q * gates[..., :1] + (ks + kw).repeat_interleave(2, dim=2) + block_indices.sum() * 1e-3, block_indices

    monkeypatch.setattr(dispatch, "why_not_triton", lambda tensors, config: None)
    monkeypatch.setattr(kernels, "nsa", fake_kernels)
    model, tokens = make_model(), torch.randint(0, 256, (1, 160))
    expected = model(tokens)
    compiled = compile_counted(model)
    for block in model.blocks:
        block.attention.random_blocks.layer = -1  # must come from outside of the compiled code
    torch.testing.assert_close(model(tokens), expected)
    assert len(compiled) == 1
    first, second = (RandomBlocks(2, NSA)(torch.arange(160), 160, torch.tensor(layer)) for layer in (0, 1))
    assert not torch.equal(first, second)


def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    options = {"model__selector": "random", "train__schedule": "constant"}
    train_small(tmp_path / "straight", train__steps=4, **options)
    for steps in (2, 4):
        train_small(tmp_path / "run", train__steps=steps, **options, resume="auto")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"selector": "random"}, "parallel": {"strategy": "cp", "world_size": 2}}, "parallel.strategy=cp"),
        ({"model": {"selector": "random"}, "train": {"selector": {"every": 64}}}, "train.selector.every"),
        ({"model": {"selector": "random", "gate": "none"}}, "block-sparse"),
    ],
)
def test_what_it_does_not_combine_with_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(sections)
