"""Learned selection: its definition, that it teaches nothing but the choice, caches, and that it learns to choose."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import tercet
from layer_oracle import linear
from tercet.attention.layout import Packing
from tercet.attention.selector import block_lse
from tercet.model.rope import Rotary
from tercet.model.selector import BlockSelector, measure_choice, sample_queries
from tercet.model.transformer import ModelConfig, Transformer

NSA = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4, window=8)
BOUNDS = torch.tensor([0, 70, 75, 160], dtype=torch.int32)


def make_layer(config: tercet.NSAConfig = NSA, **options: object) -> tercet.NativeSparseAttention:
    layer = tercet.NativeSparseAttention(
        32, 4, 2, 8, config=config, selector="learned", **{"selector_dim": 16, **options}
    )
    layer.init_weights(0.3, 0.1)
    return layer


def make_model(**options: object) -> Transformer:
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 64, "init_std": 0.2}
    model = Transformer(ModelConfig(**sizes, nsa=NSA, selector="learned", selector_dim=16, **options))
    model.selector_every = 4
    return model.train()


def turned(x: np.ndarray, position: int, layer: tercet.NativeSparseAttention) -> np.ndarray:
    """The first channels of x rotated, pair by pair."""
    x, size = x.copy(), 0 if layer.selector.rotary is None else layer.selector.rotary.size
    for i in range(size // 2):
        angle = position * layer.rotary.theta ** (-2 * i / size)
        a, b = x[i], x[i + size // 2]
        x[i], x[i + size // 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return x


def weight(logit: float) -> float:
    """exp, by powers of two and straight lines between them."""
    y = logit * math.log2(math.e)
    return 2.0 ** math.floor(y) * (1 + y - math.floor(y))


def chosen_by_loops(layer: tercet.NativeSparseAttention, x: torch.Tensor, bounds: list[int]) -> np.ndarray:
    """Selected blocks [T, G, n] as docs/nsa.md defines them, in float64 and without shared code."""
    cfg, selector = layer.config, layer.selector
    tokens = x[0].detach().double().numpy()
    found = np.full((len(tokens), layer.kv_heads, cfg.select_count), -1)
    for first, end in itertools.pairwise(bounds):
        for t in range(end - first):
            current = t // cfg.select_block
            for g in range(layer.kv_heads):
                at = slice(g * selector.size, (g + 1) * selector.size)
                q = turned(linear(selector.q_proj, tokens[first + t])[at], t, layer)
                scores = np.zeros(current + 1)
                for token in range(t + 1):
                    key = turned(linear(selector.k_proj, tokens[first + token])[at], token, layer)
                    scores[token // cfg.select_block] += weight(q @ key / math.sqrt(selector.size))
                forced = {j for j in range(current + 1) if j < cfg.select_initial or j > current - cfg.select_local}
                others = sorted(set(range(current + 1)) - forced, key=lambda j: (-scores[j], j))
                blocks = sorted(forced | set(others[: cfg.select_count - len(forced)]))
                found[first + t, g, : len(blocks)] = blocks
    return found


@pytest.mark.parametrize(("bounds", "rotary"), [(None, 0), (BOUNDS, 6), (None, 16)])
def test_blocks_are_chosen_as_defined(bounds: torch.Tensor | None, rotary: int) -> None:
    config = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=5, window=8)
    layer = make_layer(config, selector_rotary=rotary).double()
    x = torch.randn(1, 160, 32, dtype=torch.float64)
    seen = []
    layer.stats.update = lambda gates, block_indices, packing: seen.append(block_indices)  # type: ignore[method-assign]
    layer(x, cu_seqlens=bounds)
    expected = chosen_by_loops(layer, x, [0, 160] if bounds is None else bounds.tolist())
    np.testing.assert_array_equal(seen[0][0].numpy(), expected)


def test_a_loss_without_weight_is_computed_only_where_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, find = [], tercet.model.selector._find_teacher
    monkeypatch.setattr(tercet.model.selector, "_find_teacher", lambda *a, **b: calls.append(1) or find(*a, **b))
    layer, x = make_layer(NSA), torch.randn(1, 160, 32)
    layer.selector.weight = 0.0
    layer(x).sum().backward()
    assert not calls
    layer.stats.enabled = True
    layer(x)
    assert calls
    assert layer.stats.means(layer.stats.sums(x.device).tolist())["selector_kl"] > 0


@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_an_update_with_the_loss_leaves_all_other_parameters_the_same_bits(bounds: torch.Tensor | None) -> None:
    from tercet.config.sections import SelectorConfig, TrainConfig
    from tercet.parallel.strategy import Single
    from tercet.train.optim import build_optimizer
    from tercet.train.step import MicroBatch, NonFiniteGuard, train_step

    tokens, ends = torch.randint(0, 256, (1, 160)), []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        model = make_model()
        for layer in model.attention_layers():
            layer.selector.weight = weight
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        train = TrainConfig(clip=0.01, selector=SelectorConfig(lr=1e-2))
        optimizer = build_optimizer(model, train)
        train_step(
            model, optimizer, [MicroBatch(tokens, tokens, bounds)], step=1, lr=1e-3, clip=train.clip, precision="fp32",
            guard=NonFiniteGuard(torch.device("cpu"), 0, 0), strategy=Single(),
        )  # fmt: skip
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    others = [name for name in before if ".selector." not in name]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in others)
    moved = [(ends[1][name] - before[name]).abs().max() for name in before if ".selector." in name]
    assert all(step > 5e-3 for step in moved)  # AdamW's first step is about the learning rate: the selector's, 1e-2


def test_gradients_of_the_loss_are_those_of_finite_differences() -> None:
    selector = BlockSelector(8, 1, 4, NSA, Rotary(2)).double()
    selector.init_weights(0.5)
    x, q, k = (torch.randn(1, 72, *size, dtype=torch.float64) for size in ((8,), (2, 4), (1, 4)))
    indices = torch.arange(4, dtype=torch.int32).expand(1, 72, 1, 4)
    rows = torch.tensor([40, 55, 71])

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.selector = selector

        def forward(self) -> torch.Tensor:
            return selector.loss_of_rows(x, selector(x, None)[1], q, k, rows, indices, None)[0]

    def loss(*weights: torch.Tensor) -> torch.Tensor:
        names = ("selector.q_proj.weight", "selector.k_proj.weight")
        return torch.func.functional_call(Loss(), dict(zip(names, weights, strict=True)), ())

    weights = [p.detach().clone().requires_grad_() for p in selector.parameters()]
    assert torch.autograd.gradcheck(loss, weights)


@pytest.mark.parametrize("teacher", ["all", "selected"])
def test_the_teacher_is_the_attention_of_the_selected_branch(teacher: str) -> None:
    """Mass and best possible mass of one query, added up by hand."""
    selector = BlockSelector(8, 1, 4, NSA)
    selector.init_weights(0.5)
    selector.teacher = teacher
    x, q, k = torch.randn(1, 72, 8), torch.randn(1, 72, 2, 4), torch.randn(1, 72, 1, 4)
    indices = torch.tensor([0, 3, 7, 8], dtype=torch.int32).expand(1, 72, 1, 4)
    rows = torch.tensor([70])
    _, captured = selector.loss_of_rows(x, selector(x, None)[1], q, k, rows, indices, None, measure=True)
    assert captured is not None
    p = torch.einsum("hd,td->ht", q[0, 70], k[0, :71, 0]).div(2).exp()
    if teacher == "selected":
        p *= torch.isin(torch.arange(71) // 8, indices[0, 0, 0])
    p = (p / p.sum(-1, keepdim=True)).mean(0)
    blocks = torch.nn.functional.pad(p, (0, 1)).unflatten(0, (9, 8)).sum(-1)
    free = blocks[1:7] / blocks[1:7].sum()
    torch.testing.assert_close(captured.mass.float(), free[2])
    torch.testing.assert_close(captured.best.float(), free.max())
    torch.testing.assert_close(captured.random.float(), torch.tensor(1 / 6))
    assert captured.queries == 1


def test_a_teacher_of_selected_blocks_compares_these_blocks_only() -> None:
    selector = BlockSelector(8, 1, 4, NSA)
    selector.init_weights(0.5)
    selector.teacher = "selected"
    x, q, k = torch.randn(1, 72, 8), torch.randn(1, 72, 2, 4), torch.randn(1, 72, 1, 4)
    indices = torch.tensor([0, 3, 7, 8], dtype=torch.int32).expand(1, 72, 1, 4)  # one that is free
    loss, _ = selector.loss_of_rows(x, selector(x, None)[1], q, k, torch.tensor([70]), indices, None)
    assert loss == 0


def test_the_loss_is_a_mean_over_all_sampled_queries() -> None:
    """Even over those without a choice, so that ranks and micro-batches weigh the same."""
    selector = BlockSelector(8, 1, 4, NSA)
    selector.init_weights(0.5)
    x, q, k = torch.randn(1, 72, 8), torch.randn(1, 72, 2, 4), torch.randn(1, 72, 1, 4)
    indices = torch.tensor([0, 3, 7, 8], dtype=torch.int32).expand(1, 72, 1, 4)

    def loss(*rows: int) -> float:
        return selector.loss_of_rows(x, selector(x, None)[1], q, k, torch.tensor(rows), indices, None)[0].item()

    assert loss(5) == 0
    assert loss(50, 70) == pytest.approx((loss(50) + loss(70)) / 2)
    assert loss(5, 70) == pytest.approx(loss(70) / 2)


def test_log_sum_exps_of_blocks_stop_at_the_query_and_start_at_its_document() -> None:
    q, k = torch.randn(2, 2, 4), torch.randn(40, 1, 4)
    rows, position = torch.tensor([12, 35]), torch.tensor([12, 15])
    lse = block_lse(q, k, rows, position, 3, 8)
    for s, (row, first) in enumerate(((12, 0), (35, 20))):
        for j in range(3):
            inside = k[first + 8 * j : min(first + 8 * j + 8, row + 1), 0]
            expected = (q[s] @ inside.T / 2).logsumexp(-1) if len(inside) else torch.full((2,), -math.inf)
            torch.testing.assert_close(lse[s, 0, :, j], expected)


def test_sampled_queries_are_spread_over_the_batch_and_depend_on_it_alone() -> None:
    tokens = torch.randint(0, 256, (2, 512))
    rows = sample_queries(tokens, 64)
    assert torch.equal(rows // 64, torch.arange(16))
    assert torch.equal(rows, sample_queries(tokens.clone(), 64))
    assert not torch.equal(rows, sample_queries(torch.randint(0, 256, (2, 512)), 64))
    assert sample_queries(tokens[:, :3], 64).shape == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_samples_queries_at_any_place_whatever_the_precision(dtype: torch.dtype) -> None:
    rows = make_layer()._sample(torch.randn(2, 16384, 32, dtype=dtype))
    assert rows is not None
    assert torch.equal(rows // 128, torch.arange(256))
    assert (rows % 128).unique().numel() > 64


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_in_another_model_trains_its_selector_and_nothing_else_changes(training: bool) -> None:
    layer, x = make_layer().train(training), torch.randn(2, 256, 32)
    out = layer(x)
    out.sum().backward()
    assert torch.equal(out, layer.eval()(x))
    for name, p in layer.named_parameters():
        if name.startswith("selector."):
            assert (p.grad is not None and p.grad.abs().max() > 0) == training, name
    with torch.no_grad():
        assert layer.train()._sample(x) is None


def test_rows_taken_and_put_continue_with_their_own_positions() -> None:
    layer = make_layer(selector_rotary=8).double().eval()
    x = torch.randn(3, 60, 32, dtype=torch.float64)
    whole, cache, alone = layer(x), layer.make_cache(2), layer.make_cache(1)
    layer(x[:2, :40], cache=cache, lengths=torch.tensor([40, 21]))
    cache.take_rows(torch.tensor([1, 0, 1]))
    layer(x[2:, :9], cache=alone)
    cache.put_row(2, alone)
    source, at = [1, 0, 2], [21, 40, 9]
    for step in range(18):
        tokens = torch.stack([x[row, first + step] for row, first in zip(source, at, strict=True)])
        found = layer(tokens[:, None], cache=cache)[:, 0]
        wanted = torch.stack([whole[row, first + step] for row, first in zip(source, at, strict=True)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_selector_learns_to_choose_what_attention_reads() -> None:
    """One layer reads random tokens; only the selector is trained. Its choice captures nearly all that could be."""
    torch.manual_seed(0)
    config = tercet.NSAConfig(compress_block=4, compress_stride=4, select_block=8, select_count=6, window=8)
    layer = make_layer(config, rope_scaling=1e6)  # positions that do not matter: only tokens can be learned from
    with torch.no_grad():
        layer.q_proj.weight *= 20  # attention to few tokens
    optimizer = torch.optim.AdamW(layer.selector.parameters(), lr=2e-2)
    layer.stats.enabled = True
    masses = []
    for _ in range(40):
        x = torch.nn.functional.one_hot(torch.randint(0, 32, (2, 160)), 32).float()
        layer(x, sampled=sample_queries(x.argmax(-1), 8)).sum().backward()
        optimizer.step()
        layer.zero_grad()
        masses.append(layer.stats.read())
        layer.stats.reset()
    first, last = masses[0], masses[-1]
    assert abs(first["selector_mass"] - first["selector_random"]) < 0.1
    gained = last["selector_mass"] - last["selector_random"]
    possible = last["selector_best"] - last["selector_random"]
    assert possible > 0.1
    assert gained > 0.7 * possible


@pytest.mark.parametrize("bounds", [[0, 160], [0, 9, 90, 160]], ids=["whole", "packed"])
def test_the_attention_that_a_choice_captures_is_measured_whatever_chose(bounds: list[int]) -> None:
    config = tercet.NSAConfig(compress_block=4, compress_stride=4, select_block=8, select_count=5, window=8)
    q, k = torch.randn(1, 160, 4, 8, dtype=torch.float64), torch.randn(1, 160, 2, 8, dtype=torch.float64)
    cu = torch.tensor(bounds, dtype=torch.int32)
    packing = Packing(cu, 160, 40, config) if len(bounds) > 2 else None
    blocks = tercet.select_blocks(torch.rand(1, 160, 2, 20), config=config, cu_seqlens=cu)
    rows = torch.arange(3, 160, 7)
    found = measure_choice(q, k, rows, blocks, packing, config)

    wanted, count = np.zeros(3), 0
    for t in rows.tolist():
        first = max(bound for bound in bounds if bound <= t)
        free = range(1, (t - first) // 8 - 1)  # not the first, the current or the one before it
        for g in range(2) if len(free) else ():
            logits = q[0, t, 2 * g : 2 * g + 2] @ k[0, first : t + 1, g].T / math.sqrt(8)
            p = logits.softmax(-1).mean(0)
            mass = np.array([p[8 * j : 8 * j + 8].sum() for j in free])
            mass /= mass.sum()
            chosen = [j in blocks[0, t, g].tolist() for j in free]
            wanted += mass[chosen].sum(), np.sort(mass)[-2:].sum(), min(1, 2 / len(free))
            count += 1
    assert [float(x) for x in found[1:4]] == pytest.approx(wanted / count, rel=1e-5)
    assert int(found.queries) == count
    assert math.isnan(found.kl)  # nothing is learned
