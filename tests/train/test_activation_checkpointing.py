from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runs import small
from tercet.model.transformer import Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing


class OpCounter(TorchDispatchMode):
    """Counts operator calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def build(mode: str, layers: int = 3) -> Transformer:
    torch.manual_seed(7)
    model = Transformer(small(model__layers=layers, model__attention=("nsa", "dense", "window", "nsa")[:layers]).model)
    with torch.no_grad():
        for p in model.parameters():  # gates and φ begin at zero, where some gradients are zero too
            p += 0.1 * torch.randn_like(p)
    apply_activation_checkpointing(model.blocks, mode)
    return model


def inputs(packed: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    tokens = torch.randint(1, 256, (2, 65))
    flat, targets = tokens[:, :-1], tokens[:, 1:]
    if not packed:
        return flat, None, targets
    return flat.reshape(1, -1), torch.tensor([0, 30, 64, 100, 128], dtype=torch.int32), targets.reshape(1, -1)


def gradients(model: Transformer, data: tuple[Tensor, Tensor | None, Tensor]) -> dict[str, Tensor]:
    loss = model(*data)
    (loss.total / loss.tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_with_checkpointing_equal_those_without_in_every_layer(mode: str, packed: bool) -> None:
    data = inputs(packed)
    plain, recomputed = gradients(build("none"), data), gradients(build(mode), data)
    assert plain.keys() == recomputed.keys()
    for name, expected in plain.items():
        assert expected.abs().max() > 0, name
        assert torch.equal(recomputed[name], expected), name


@contextmanager
def counted() -> Iterator[OpCounter]:
    counter = OpCounter()
    with counter:
        yield counter


def test_every_block_recomputes_itself_and_not_the_last_one() -> None:
    """Guards against a late-bound closure, which would recompute the last block every time."""
    model = build("full")
    ran: list[int] = []
    for i, block in enumerate(model.blocks):
        block.ffn.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    gradients(model, inputs(packed=False))
    assert ran == [0, 1, 2, 2, 1, 0]


def test_parameter_names_are_unchanged() -> None:
    assert list(build("none").state_dict()) == list(build("full").state_dict())


class Product(torch.nn.Module):
    """gelu of a batched matmul of [2, 6, wide] and [2, wide, narrow], or the other way round."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, given, made))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(torch.bmm(x, self.weight))


@pytest.mark.parametrize(("given", "made", "kept"), [(16, 4, True), (4, 16, False)], ids=["φ's", "scores"])
def test_batched_matmuls_are_saved_unless_they_are_wider_than_their_inputs(given: int, made: int, kept: bool) -> None:
    blocks = torch.nn.ModuleList([Product(given, made)])
    apply_activation_checkpointing(blocks, "selective")
    out = blocks[0](torch.randn(2, 6, given, requires_grad=True))
    with counted() as backward:
        out.sum().backward()
    assert backward.calls["aten::bmm"] == 2 + (not kept)  # gradients of both sides, and the product again
