"""Law "checkpointing": recomputing activations changes no gradient; the selection is saved, never recomputed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tercet
from cases import config, cu

CFG = config()
DOCUMENTS = [None, (7, 30, 3)]


def make(**options) -> tercet.NativeSparseAttention:
    layer = tercet.NativeSparseAttention(12, 4, 2, 4, config=CFG, **options).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def keep_selection_only(_context, op, *_, **__) -> CheckpointPolicy:
    kept = op is torch.ops.tercet.keep_selection.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def plainly(layer, x, bounds):
    return layer(x, bounds)


def recomputing_everything(layer, x, bounds):
    return checkpoint(layer, x, bounds, use_reentrant=False)


def keeping_the_selection(layer, x, bounds):
    contexts = partial(create_selective_checkpoint_contexts, keep_selection_only)
    return checkpoint(layer, x, bounds, use_reentrant=False, context_fn=contexts)


def gradients(layers, x, documents, run, before_backward=lambda: None) -> list[torch.Tensor]:
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    y = start = x.clone().requires_grad_()
    for layer in layers:
        y = y + run(layer, y, cu(documents))
    loss = y.square().sum()
    before_backward()
    loss.backward()
    return [start.grad, *(p.grad for layer in layers for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("documents", DOCUMENTS, ids=["plain", "packed"])
@pytest.mark.parametrize("run", [recomputing_everything, keeping_the_selection])
def test_gradients_of_three_layers_are_the_same_bits(documents, run):
    layers = [make() for _ in range(3)]
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    expected = gradients(layers, x, documents, plainly)
    recomputed = gradients(layers, x, documents, run)
    assert len(expected) == 1 + sum(len(list(layer.parameters())) for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(expected, recomputed, strict=True))


def spoiled_selection(layers):
    """Negates the compressed keys behind autograd's back: a recomputed selection would read other blocks."""
    for layer in layers:
        layer.kv_proj.weight.data[: layer.kv_heads * layer.head_dim] *= -1


@pytest.mark.parametrize("documents", DOCUMENTS, ids=["plain", "packed"])
def test_a_saved_selection_is_not_recomputed(documents):
    """Without the compressed branch its keys only affect the selection, so nothing else can change."""
    layers = [make(branches=("selected", "window"), compression="mean") for _ in range(3)]
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    state = [{k: v.clone() for k, v in layer.state_dict().items()} for layer in layers]
    expected = gradients(layers, x, documents, plainly)
    kept = gradients(layers, x, documents, keeping_the_selection, partial(spoiled_selection, layers))
    for a, b in zip(expected, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for layer, saved in zip(layers, state, strict=True):
        layer.load_state_dict(saved)
    anew = gradients(layers, x, documents, recomputing_everything, partial(spoiled_selection, layers))
    assert not torch.allclose(expected[0], anew[0])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_every_checkpointing_mode_saves_the_selection(mode: str):
    from tercet.parallel.activation_checkpointing import apply_activation_checkpointing

    layers = torch.nn.ModuleList(make(branches=("selected", "window"), compression="mean") for _ in range(3))
    x = torch.randn(1, 40, 12, dtype=torch.float64)
    expected = gradients(layers, x, None, plainly)
    apply_activation_checkpointing(layers, mode)
    kept = gradients(layers, x, None, plainly, partial(spoiled_selection, layers))
    for a, b in zip(expected, kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
