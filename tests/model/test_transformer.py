"""The model: causal, documents separated, any mixture of attention, trained on the next token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.model.config import ModelConfig
from tercet.model.loss import IGNORED
from tercet.model.transformer import Transformer

NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4, window=12)
KINDS = ["nsa", "dense", "window,nsa,dense"]


def small(attention="nsa", **changes) -> ModelConfig:
    sizes = {"dim": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 40}
    return ModelConfig(**{**sizes, "vocab_size": 37, "init_std": 0.2, "attention": attention, "nsa": NSA, **changes})


def lively(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model with random weights everywhere, also where they start at zero (gates, the last layer of φ)."""
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens_of(config: ModelConfig, *shape: int) -> Tensor:
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_token_sees_a_later_one(kind):
    config = small(kind)
    model, tokens = lively(config), tokens_of(config, 2, 70)
    before = model(tokens)
    for t in (0, 9, 33, 68):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % config.vocab_size
        after = model(changed)
        assert torch.equal(before[:, : t + 1], after[:, : t + 1])
        assert not torch.allclose(before[:, t + 1], after[:, t + 1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_max_seqlen_does_not_change_the_loss(kind):
    config = small(kind)
    model, tokens = lively(config), tokens_of(config, 1, 83)
    bounds = torch.tensor([0, 1, 30, 37, 83], dtype=torch.int32)
    wanted = model(tokens, bounds, tokens)
    for enough in (46, 64, 1000):
        assert torch.equal(model(tokens, bounds, tokens, max_seqlen=enough).total, wanted.total)
    with pytest.raises(ValueError, match=r"max_seqlen=45 .* document 3 has 46 tokens"):
        model(tokens, bounds, tokens, max_seqlen=45)
    with pytest.raises(ValueError, match="max_seqlen=83 was given without cu_seqlens"):
        model(tokens, None, tokens, max_seqlen=83)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_documents_equal_documents_one_by_one(kind):
    config = small(kind)
    model, tokens = lively(config), tokens_of(config, 1, 83)
    bounds = [0, 1, 30, 37, 83]
    packed = model(tokens, torch.tensor(bounds, dtype=torch.int32))
    alone = [model(tokens[:, a:b]) for a, b in pairwise(bounds)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [{"attention": "dense"}, {"attention": "window"}, {"shared_kv": True}, {"gate": "none", "selector": "learned"},
     {"branches": ("selected", "window"), "selector": "learned"}],
    ids=str,
)  # fmt: skip
def test_unused_keys_do_not_change_the_model(changes):
    others = {
        "compression": "mean", "gate": "softmax", "shared_kv": True, "compress_selected_keys": True,
        "branches": ("window",), "selector": "own", "selector_dim": 8, "selector_rotary": 4,
        "nsa.compress_block": 4, "nsa.compress_stride": 2, "nsa.select_block": 16, "nsa.select_count": 3,
        "nsa.window": 6,
    }  # fmt: skip
    config = small(**changes)
    model, tokens = lively(config), tokens_of(config, 1, 83)
    bounds = torch.tensor([0, 1, 30, 37, 83], dtype=torch.int32)
    keys = set(chain(*config.unused_keys.values())) & others.keys()
    if config.gate == "none":
        keys.remove("compression")  # mean is the only choice
    assert keys
    for key in keys:
        _, dot, size = key.partition("nsa.")
        value = {"nsa": replace(NSA, **{size: others[key]})} if dot else {key: others[key]}
        other = Transformer(small(**(changes | value))).double()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(tokens, bounds), model(tokens, bounds)), key


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_cross_entropy_of_the_logits(tied):
    config = small(tie_embeddings=tied)
    model, tokens = lively(config), tokens_of(config, 2, 40)
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORED
    loss = model(tokens, None, targets)
    logits = model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    assert loss.tokens.item() == 2 * 39
    assert ("head.weight" in model.state_dict()) != tied


def test_gradients_reach_every_parameter():
    config = small("window,dense,nsa", tie_embeddings=False, qk_norm=True)
    model, tokens = lively(config), tokens_of(config, 2, 64)
    model(tokens, None, tokens.roll(-1, 1)).total.backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []


def test_a_fresh_model_predicts_uniformly():
    config = small(init_std=0.02, vocab_size=256)
    model, tokens = Transformer(config), tokens_of(config, 4, 64)
    loss = model(tokens, None, tokens.roll(-1, 1))
    assert loss.total.item() / loss.tokens.item() == pytest.approx(math.log(256), abs=0.05)


def test_projections_into_the_residual_stream_start_smaller():
    config = ModelConfig(dim=64, layers=8, heads=4, kv_heads=2, head_dim=16, ffn_dim=256, init_std=0.04)
    for block in Transformer(config).blocks:
        assert block.ffn.gate_up.weight.std().item() == pytest.approx(0.04, rel=0.1)
        assert block.ffn.down.weight.std().item() == pytest.approx(0.04 / 4, rel=0.1)
        assert block.attention.o_proj.weight.std().item() == pytest.approx(0.04 / 4, rel=0.1)


def test_initial_weights_depend_only_on_the_seed():
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(Transformer(small()))
    same = [torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(models[0].embedding.weight, models[2].embedding.weight)


def test_a_model_on_the_meta_device_can_be_initialised_later():
    torch.manual_seed(3)
    here = Transformer(small(qk_norm=True))
    with torch.device("meta"):
        later = Transformer(small(qk_norm=True))
    later = later.to_empty(device="cpu")
    with torch.no_grad():
        for p in later.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(3)
    later.init_weights()
    for (name, a), b in zip(here.named_parameters(), later.parameters(), strict=True):
        assert torch.isfinite(b).all(), name
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.3, abs=1e-6), name
    assert torch.isfinite(later(tokens_of(here.config, 1, 30))).all()


def test_mismatched_bounds_and_caches_are_rejected():
    model, tokens = Transformer(small()), tokens_of(small(), 1, 20)
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(tokens, torch.tensor([0, 19], dtype=torch.int32))
    with pytest.raises(ValueError, match="cache has 1 layers, the model 3"):
        model(tokens, cache=[None])


# Two classic leaks make random data learnable: unshifted labels, and attention that reads token t + 1. So training on
# fresh random tokens must not reduce the loss.


def train_on(batches, model: Transformer, shift: int) -> float:
    """Mean loss of the last 10 training steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for sequence in batches:
        tokens, targets = sequence[:, :-1], sequence[:, shift : shift + sequence.shape[1] - 1]
        loss = model(tokens, None, targets)
        mean = loss.total / loss.tokens
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return sum(losses[-10:]) / 10


def noise(steps: int = 40, vocab: int = 16):
    g = torch.Generator().manual_seed(0)
    return (torch.randint(vocab, (8, 33), generator=g) for _ in range(steps))


def counting(steps: int = 40, vocab: int = 16):
    g = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield (torch.randint(vocab, (8, 1), generator=g) + 3 * torch.arange(33)) % vocab


def learner(kind="nsa") -> Transformer:
    return Transformer(small(kind, layers=2, vocab_size=16, init_std=0.1))


@pytest.mark.parametrize("kind", ["nsa", pytest.param("dense", marks=pytest.mark.slow)])
def test_noise_cannot_be_learned_and_counting_can(kind):
    assert train_on(noise(), learner(kind), shift=1) > math.log(16) - 0.03
    assert train_on(counting(), learner(kind), shift=1) < 0.3
