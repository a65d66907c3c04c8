"""On a GPU: no hidden waiting, what recomputation saves, and gradients of compiled steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rounding import check_as_near, distance
from runs import losses, small, train_small
from tercet.model.transformer import Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Single
from tercet.train.optim import build_optimizer
from tercet.train.state import compile_blocks
from tercet.train.step import MicroBatch, NonFiniteGuard, StepResult, train_step
from tercet.train.trainer import train

pytestmark = pytest.mark.gpu

# Kernel sizes: heads of 64, blocks of 64.
SIZES: dict[str, Any] = {
    "model__dim": 128, "model__layers": 3, "model__heads": 2, "model__kv_heads": 1, "model__head_dim": 64,
    "model__ffn_dim": 256, "model__nsa__compress_block": 32, "model__nsa__compress_stride": 16,
    "model__nsa__select_block": 64, "model__nsa__select_count": 4, "model__nsa__window": 128, "data__seq_len": 1024,
    "train__tokens_per_step": 4096, "run__device": "cuda",
}  # fmt: skip


class Setting:
    def __init__(self, mode: str = "none", optimizer: str = "adamw") -> None:
        config = small(**SIZES, train__optimizer=optimizer)
        self.device = torch.device("cuda")
        self.model = Transformer(config.model).to(self.device)
        apply_activation_checkpointing(self.model.blocks, mode)
        self.optimizer = build_optimizer(self.model, config.train)
        self.guard = NonFiniteGuard(self.device, 100, 5)
        tokens = torch.randint(1, 256, (4, 1025), device=self.device)
        cu_seqlens = torch.tensor([0, 700, 1024, 2048, 3072, 3500, 4096], dtype=torch.int32, device=self.device)
        targets = tokens[:, 1:].reshape(1, -1)
        self.batch = MicroBatch(tokens[:, :-1].reshape(1, -1), targets, cu_seqlens)

    def step(self, number: int) -> StepResult:
        return train_step(
            self.model, self.optimizer, [self.batch, self.batch], step=number, lr=1e-3, clip=1.0, precision="bf16",
            guard=self.guard, strategy=Single(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "optimizer"), [("none", "adamw"), ("selective", "adamw"), ("full", "adamw"), ("none", "muon")]
)
def test_a_step_never_syncs_with_the_device(mode: str, optimizer: str) -> None:
    setting = Setting(mode, optimizer)
    for number in (1, 2):
        setting.step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = setting.step(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.loss)
    assert setting.guard.total() == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_nonfinite_step_is_skipped_without_a_sync(optimizer: str) -> None:
    setting = Setting(optimizer=optimizer)
    setting.step(1)
    before = [p.detach().clone() for p in setting.model.parameters()]
    setting.model.register_forward_hook(lambda m, i, out: out._replace(total=out.total * float("nan")))
    torch.cuda.set_sync_debug_mode("error")
    try:
        setting.step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, setting.model.parameters(), strict=True))
    assert setting.guard.total() == 1


@pytest.mark.serial
def test_checkpointing_saves_memory() -> None:
    kept = {}
    for mode in ("none", "selective", "full"):
        setting = Setting(mode)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = setting.model(setting.batch.tokens, setting.batch.cu_seqlens, setting.batch.targets)
        kept[mode] = torch.cuda.memory_allocated() - before
        del loss
    assert kept["full"] < 0.8 * kept["selective"] < 0.8 * kept["none"], kept


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_with_checkpointing_equal_those_without_on_the_kernels(mode: str) -> None:
    gradients = {}
    for chosen in ("none", mode):
        torch.manual_seed(0)
        setting = Setting(chosen)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = setting.model(setting.batch.tokens, setting.batch.cu_seqlens, setting.batch.targets)
        loss.total.backward()
        gradients[chosen] = {n: p.grad for n, p in setting.model.named_parameters() if p.grad is not None}
    for name, expected in gradients["none"].items():
        assert torch.equal(gradients[mode][name], expected), name


def gradients(attention: str, packed: bool, *, compiled: bool, narrow: bool = True) -> dict[str, torch.Tensor]:
    """The loss and every parameter's gradient. Every block fits into the selection, so that no near-tie can choose
    others."""
    config = small(**{**SIZES, "model__nsa__select_count": 16, "model__attention": attention})
    device = torch.device("cuda")
    tokens = torch.randint(1, 256, (4, 1025), device=device, generator=torch.Generator(device).manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    bounds = torch.tensor([0, 700, 1024, 2048, 3072, 3500, 4096], dtype=torch.int32, device=device)
    batch = MicroBatch(inputs.view(1, -1), targets.view(1, -1), bounds) if packed else MicroBatch(inputs, targets, None)
    torch.manual_seed(0)
    model = Transformer(config.model).to(device)
    for layer in model.attention_layers():  # far from its beginning, where gates and φ are at rest
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.05)
    # blocks compiled for too many cases are no longer compiled, and would be compared with themselves
    torch._dynamo.reset()
    counters.clear()
    if compiled:
        compile_blocks(model, "none")
    with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
        loss = model(batch.tokens, batch.cu_seqlens, batch.targets).total
    (loss / targets.numel()).backward()
    assert (counters["stats"]["unique_graphs"] > 0) == compiled
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["nsa", "dense", "window"])
def test_a_compiled_step_is_as_close_to_the_true_gradients_as_an_eager_one(attention: str, packed: bool) -> None:
    """As near, not the same: what moves all keys alike moves no softmax but by their rotary turns, so that gradients
    of φ's position and biases are what is left of sums that nearly cancel. bf16 leaves two digits of them, and a
    compiler that rounds less often leaves others."""
    found, known = (gradients(attention, packed, compiled=compiled) for compiled in (True, False))
    check_as_near(found, known, gradients(attention, packed, compiled=False, narrow=False))


@pytest.mark.parametrize("packed", [False, True])
def test_in_fp32_a_compiled_step_has_the_gradients_of_an_eager_one(packed: bool) -> None:
    found, known = (gradients("nsa", packed, compiled=compiled, narrow=False) for compiled in (True, False))
    assert found.keys() == known.keys()
    for name, wanted in known.items():
        assert distance(found[name], wanted) < 1e-4, name


def test_a_compiled_run_resumes_to_the_same_losses(tmp_path: Path) -> None:
    told = {}
    for name in ("straight", "resumed"):
        folder = tmp_path / name
        config = small(run__dir=str(folder), run__deterministic=True, **SIZES)
        if name == "resumed":
            assert train_small(folder, run__deterministic=True, **SIZES | {"train__max_skipped": 100}) == 0
            for step in (5, 6):  # as if the machine had died after step 4
                for path in (folder / "checkpoints").glob(f"step-{step:08d}"):
                    path.rename(path.with_name(f"gone-{step}"))
            assert train(config, origins={}, resume="auto") == 0
        else:
            assert train(config) == 0
        told[name] = losses(folder)
    torch.use_deterministic_algorithms(False)
    assert told["resumed"] == told["straight"]
