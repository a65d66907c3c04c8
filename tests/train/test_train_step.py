from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from runs import small
from tercet.config.sections import TrainConfig
from tercet.data.loader import build_loader
from tercet.model.loss import IGNORED
from tercet.model.transformer import Transformer
from tercet.parallel.strategy import Single
from tercet.train import optim
from tercet.train.optim import MuonAdamW, _build_muon, build_optimizer, learning_rate
from tercet.train.state import freeze_all_but_selectors
from tercet.train.step import MicroBatch, NonFiniteGuard, StepResult, loss_sum, to_device, train_step

CPU = torch.device("cpu")


def model_and_optimizer(
    clip: float = 1.0, optimizer: str = "adamw", **changes: object
) -> tuple[Transformer, torch.optim.Optimizer]:
    config = small(train__clip=clip, train__optimizer=optimizer, **changes)
    torch.manual_seed(3)
    model = Transformer(config.model)
    return model, build_optimizer(model, config.train)


def batch(sequences: int, seed: int = 0, ignored: int = 0) -> MicroBatch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 256, (sequences, 65), generator=draw)
    targets = tokens[:, 1:].clone()
    targets.view(-1)[:ignored] = IGNORED
    return MicroBatch(tokens[:, :-1], targets, None)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[MicroBatch],
    guard: NonFiniteGuard | None = None,
    number: int = 1,
    clip: float = 1.0,
) -> StepResult:
    guard = guard or NonFiniteGuard(CPU, 100, 5)
    return train_step(
        model, optimizer, batches, step=number, lr=1e-2, clip=clip, precision="fp32", guard=guard, strategy=Single()
    )


def halves(whole: MicroBatch, at: int) -> list[MicroBatch]:
    return [MicroBatch(whole.tokens[s], whole.targets[s], None) for s in (slice(0, at), slice(at, None))]


def captured_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[MicroBatch]
) -> dict[str, Tensor]:
    """Gradients as the optimizer sees them, unclipped."""
    seen: dict[str, Tensor] = {}
    names = {p: n for n, p in model.named_parameters()}

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            seen.update({names[p]: p.grad.clone() for p in group["params"] if p.grad is not None})

    handle = optimizer.register_step_pre_hook(look)
    step(model, optimizer, batches, clip=0.0)
    handle.remove()
    return seen


def test_accumulated_gradients_equal_those_of_the_big_batch() -> None:
    # The first half has far fewer targets than the second: a mean of the halves' means would be another number.
    whole = batch(4, ignored=100)
    big = captured_gradients(*model_and_optimizer(), [whole])
    accumulated = captured_gradients(*model_and_optimizer(), halves(whole, 2))
    assert big.keys() == accumulated.keys()
    for name, expected in big.items():
        assert torch.allclose(accumulated[name], expected, rtol=1e-4, atol=1e-8), name


def test_the_loss_is_the_mean_over_the_target_tokens_of_the_whole_step() -> None:
    whole = batch(4, ignored=100)
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        logits = model(whole.tokens).double()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), whole.targets.flatten(), ignore_index=IGNORED)
    result = step(model, optimizer, halves(whole, 1))
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_without_targets_has_no_loss_and_is_not_skipped() -> None:
    result = step(*model_and_optimizer(), [batch(2, ignored=2 * 64)])
    assert (result.loss.item(), result.grad_norm.item(), bool(result.nonfinite)) == (0, 0, False)


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_grad_norm_is_the_norm_before_clipping(clip: float) -> None:
    model, optimizer = model_and_optimizer()
    whole = batch(2)
    loss = model(whole.tokens, None, whole.targets)
    gradients = torch.autograd.grad(loss.total / loss.tokens, list(model.parameters()))
    by_hand = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert by_hand > 0.01
    assert step(model, optimizer, [whole], clip=clip).grad_norm.item() == pytest.approx(by_hand, rel=1e-5)


def test_clipping_scales_all_gradients_to_the_global_norm() -> None:
    free = captured_gradients(*model_and_optimizer(), [batch(2)])
    model, optimizer = model_and_optimizer()
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.extend(p.grad.clone().flatten() for g in o.param_groups for p in g["params"])
    )
    step(model, optimizer, [batch(2)], clip=0.01)
    clipped = torch.cat(seen)
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)
    total = torch.cat([g.flatten() for g in free.values()]).norm()
    largest = max(float(g.abs().max()) for g in free.values())
    assert clipped.abs().max().item() == pytest.approx(0.01 * largest / float(total), rel=1e-3)


def test_gradients_of_selectors_are_clipped_by_themselves_or_not_at_all() -> None:
    def norm(clip: float) -> float:
        model, optimizer = model_and_optimizer(model__selector="learned")
        next(group for group in optimizer.param_groups if "clip" in group)["clip"] = clip
        model.selector_every = 4
        seen = captured_gradients(model, optimizer, [batch(2)])
        return torch.cat([g.flatten() for name, g in seen.items() if ".selector." in name]).norm().item()

    free = norm(0.0)
    assert free > 0
    assert norm(free / 2) == pytest.approx(free / 2, rel=0.05)  # torch adds 1e-6 to the norm


def test_weight_decay_applies_to_matrices_only() -> None:
    model, optimizer = model_and_optimizer()
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] > 0 for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim >= 2), name
    grouped = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))


def test_frozen_matrices_are_in_no_optimizer() -> None:
    config = small(train__optimizer="muon", model__selector="learned")
    model = Transformer(config.model)
    freeze_all_but_selectors(model)
    grouped = {p for group in build_optimizer(model, config.train).param_groups for p in group["params"]}
    assert grouped == {p for name, p in model.named_parameters() if ".selector." in name}


@pytest.mark.parametrize("most_together", [1, 1 << 25])
@pytest.mark.parametrize("shared", [False, True])
def test_muon_updates_every_part_of_a_fused_matrix_as_a_matrix_of_its_own(
    shared: bool, most_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's Muon and AdamW on separate parameters, bit for bit."""
    monkeypatch.setattr(optim, "_MOST_TOGETHER", most_together)
    config = small(train__optimizer="muon", model__shared_kv=shared, train__lr=1e-2, train__muon__lr=3e-2)
    torch.manual_seed(3)
    model = Transformer(config.model)
    optimizer = build_optimizer(model, config.train)
    size, sets = config.model.head_dim, 1 if shared else 3
    rows = {"q_proj": (16,), "kv_proj": (size,) * 2 * sets, "o_proj": (16,), "gate_up": (32, 32), "down": (16,)}
    names = [n for n, _ in model.named_parameters() if n.split(".")[-2] in rows and "compress" not in n]
    assert len(names) == 2 * len(rows)
    params = {n: [part.clone() for part in p.detach().split(rows.get(n.split(".")[-2], p.shape[:1]))]
              if n in names else [p.detach().clone()] for n, p in model.named_parameters()}  # fmt: skip
    matrices = torch.optim.Muon(
        [part for n in names for part in params[n]],
        lr=3e-2,
        weight_decay=config.train.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [part for n in params if n not in names for part in params[n]]
    vectors = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}],
        lr=1e-2, betas=config.train.betas, weight_decay=config.train.weight_decay, fused=True,
    )  # fmt: skip
    for number in range(1, 4):
        gradients = captured_gradients(model, optimizer, [batch(2, seed=number)])
        for name, gradient in gradients.items():
            for part, own in zip(params[name], gradient.split([len(p) for p in params[name]]), strict=True):
                part.grad = own
        matrices.step()
        vectors.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.cat(params[name]), parameter), name


def test_muon_gives_parts_of_different_shapes_their_own_learning_rates() -> None:
    rows, train = (8, 40), TrainConfig(optimizer="muon", lr=1e-2, weight_decay=0.1)  # 40 rows of 16: a higher rate
    matrices = [nn.Parameter(torch.randn(48, 16)) for _ in range(3)]
    parts = [nn.Parameter(part.clone()) for matrix in matrices for part in matrix.detach().split(rows)]
    theirs = torch.optim.Muon(parts, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    ours = MuonAdamW(adamw, _build_muon(dict.fromkeys(matrices, rows), train))
    for _ in range(2):
        for i in (0, 2):
            matrices[i].grad = torch.randn(48, 16) if i else torch.zeros(48, 16)
            parts[2 * i].grad, parts[2 * i + 1].grad = matrices[i].grad.split(rows)
        ours.step()
        theirs.step()
    for i, matrix in enumerate(matrices):
        torch.testing.assert_close(matrix, torch.cat(parts[2 * i : 2 * i + 2]), rtol=1e-6, atol=1e-8)


def test_muon_leaves_learned_selectors_to_their_own_group() -> None:
    config = small(train__optimizer="muon", model__selector="learned", train__selector__lr=1e-3)
    optimizer = build_optimizer(Transformer(config.model), config.train)
    (selectors,) = (g for g in optimizer.param_groups if "clip" in g)
    assert len(selectors["params"]) == 4
    assert selectors["lr_factor"] == 1e-3 / config.train.lr
    assert "betas" in selectors


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [t.clone() for state in optimizer.state.values() for t in state.values()]
    return [p.detach().clone() for p in model.parameters()] + moments


class Poison:
    """Makes the loss of given steps NaN on the device, like an overflow."""

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        model.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, inputs: object, output: object) -> object:
        return output._replace(total=output.total * float("nan")) if self.on else output  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_nonfinite_step_changes_nothing_and_training_continues(name: str) -> None:
    model, optimizer = model_and_optimizer(optimizer=name)
    poison, guard = Poison(model), NonFiniteGuard(CPU, 100, 5)
    step(model, optimizer, [batch(2)], guard)
    before = snapshot(model, optimizer)
    poison.on = True
    result = step(model, optimizer, [batch(2, seed=1)], guard)
    assert bool(result.nonfinite)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    poison.on = False
    assert not bool(step(model, optimizer, [batch(2, seed=2)], guard).nonfinite)
    assert not all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    assert guard.total() == 1
    assert guard.halted_at() == 0


def test_a_nonfinite_key_of_a_learned_selector_is_caught_although_the_loss_is_finite() -> None:
    model, optimizer = model_and_optimizer(model__selector="learned", model__branches=("selected", "window"))
    model.selector_every = 1
    assert not bool(step(model, optimizer, [batch(2)]).nonfinite)
    before = snapshot(model, optimizer)

    def poison(projection: nn.Module, inputs: object, keys: Tensor) -> Tensor:
        return torch.where(torch.arange(keys.shape[-1]) == 0, torch.nan, keys)  # one channel of the first KV head

    model.attention_layers()[0].selector.k_proj.register_forward_hook(poison)
    result = step(model, optimizer, [batch(2, seed=1)])
    assert torch.isfinite(result.loss)
    assert bool(result.nonfinite)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))


@pytest.mark.parametrize(("total", "in_row", "halts_at"), [(100, 2, 3), (1, 100, 2), (0, 0, 1)])
def test_past_a_limit_the_weights_freeze(total: int, in_row: int, halts_at: int) -> None:
    model, optimizer = model_and_optimizer()
    poison, guard = Poison(model), NonFiniteGuard(CPU, total, in_row)
    poison.on = True
    for number in range(1, halts_at + 1):
        assert guard.halted_at() == 0
        step(model, optimizer, [batch(2)], guard, number)
    assert guard.halted_at() == halts_at
    before = snapshot(model, optimizer)
    step(model, optimizer, [batch(2)], guard, halts_at + 1)
    poison.on = False
    result = step(model, optimizer, [batch(2, seed=3)], guard, halts_at + 2)
    assert not bool(result.nonfinite)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    assert guard.halted_at() == guard.total() == halts_at


def test_finite_steps_reset_the_count_in_a_row_but_not_the_total() -> None:
    model, optimizer = model_and_optimizer()
    poison, guard = Poison(model), NonFiniteGuard(CPU, 3, 1)
    for number in range(1, 7):
        poison.on = number % 2 == 0
        step(model, optimizer, [batch(2)], guard, number)
    assert guard.total() == 3
    assert guard.halted_at() == 0


def test_the_model_gets_the_sequence_length_as_max_seqlen() -> None:
    config = small()
    with build_loader(config.data, seed=1, batch_sequences=3, split="train") as loader:
        found = next(iter(loader))
    told = []

    def model(tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor, max_seqlen: int | None) -> SimpleNamespace:
        told.append((tuple(tokens.shape), max_seqlen))
        return SimpleNamespace(total=None)

    for given in (found, replace(found, cu_seqlens=None)):
        loss_sum(model, to_device(given, CPU))  # type: ignore[arg-type]
    assert told == [((1, 192), 64), ((3, 64), None)]


@pytest.mark.parametrize(
    ("schedule", "settings", "rates"),  # rates: of steps; the peak is 1
    [
        ("constant", {"warmup_steps": 10}, {1: 0.1, 5: 0.5, 10: 1.0, 100: 1.0}),
        ("cosine", {"steps": 110, "min_lr_ratio": 0.1}, {35: 0.55 + 0.45 * math.cos(math.pi / 4), 60: 0.55, 110: 0.1}),
        ("wsd", {"decay_ratio": 0.2}, {10: 1.0, 80: 1.0, 85: 0.75, 90: 0.5, 100: 0.0}),
        ("wsd", {"decay_ratio": 0.5, "warmup_steps": 80}, {40: 0.5, 80: 1.0, 90: 0.5, 100: 0.0}),  # no decay in warm-up
        *((name, {"steps": 10, "warmup_steps": 100}, {10: 0.1}) for name in ("cosine", "wsd", "constant")),
    ],
)
def test_the_learning_rate_warms_up_and_decays(schedule: str, settings: dict, rates: dict[int, float]) -> None:
    given = {"steps": 100, "warmup_steps": 10, "lr": 1.0, "min_lr_ratio": 0.0, "schedule": schedule} | settings
    config = TrainConfig(**given)
    assert [learning_rate(config, step) for step in rates] == pytest.approx(list(rates.values()))
