"""Replays of the operator on a CPU: launches run in Triton's interpreter, given addresses as on a GPU."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from cases import Inputs, cu, inputs
from tercet.attention import kernels
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import launch, replay
from tercet.attention.layout import WHOLE, Packing, Span, kernel_layout

pytestmark = pytest.mark.interpreter

CONFIG = NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=2, select_initial=0, select_local=1, window=12
)


class Interpreted:
    """Stands in for a compiled kernel. The interpreter needs the dtype of a pointer, not the tensor's shape."""

    function = packed_metadata = None

    def __init__(self, executor: GridExecutor, args: tuple, options: dict[str, Any], execute: Any) -> None:
        self.executor, self.options, self.execute = executor, options, execute
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in args]

    def run(self, *args: Any) -> None:
        grid, given = args[:3], args[9:]  # between them: stream, handles and hooks
        executor = GridExecutor(self.executor.fn, self.executor.arg_names, grid)
        tensors = [x if dtype is None else at(x, dtype) for x, dtype in zip(given, self.dtypes, strict=True)]
        self.execute(executor, *tensors, **self.options)


def at(x: Any, dtype: torch.dtype) -> Tensor:
    """The first element at an address."""
    if isinstance(x, Tensor):
        return x
    if x == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(x), dtype=dtype)


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usual = GridExecutor.__call__

    def execute(self: GridExecutor, *args: Any, **options: Any) -> None:
        with _disable_current_modes():  # no operators are recorded inside a kernel
            usual(self, *args, **options)

    def start(self: GridExecutor, *args: Any, **options: Any) -> Interpreted:
        execute(self, *args, **options)
        return Interpreted(self, args, options, execute)

    selected = importlib.import_module("tercet.attention.kernels.selected.launch")
    monkeypatch.setattr(GridExecutor, "__call__", start)
    monkeypatch.setattr(selected, "_compiled", {})
    monkeypatch.setattr(launch, "_VARIANTS", {})
    for module in (launch, replay):
        monkeypatch.setattr(module, "current_stream", lambda: 0)
    monkeypatch.setattr(replay, "can_replay", lambda x: torch._C._len_torch_dispatch_stack() == 0)
    replay.forget_tapes()
    yield
    replay.forget_tapes()


@pytest.mark.parametrize(
    "kind",
    ["all branches", "few blocks", "without compressed", "not contiguous", "scattered", "query range", "packed"],
)
def test_replayed_calls_have_the_bits_of_first_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = ("selected", "window") if kind == "without compressed" else ("compressed", "selected", "window")
    tokens = 24 if kind == "few blocks" else 40  # few: all are selected, without scores
    documents = (24, 16) if kind == "packed" else None
    sizes = {"groups": 1, "per_group": 2, "key_size": 16, "value_size": 16}
    first, other = (
        inputs(CONFIG, tokens, **sizes, dtype=torch.float32, documents=documents, seed=seed) for seed in (1, 2)
    )
    packing = None if documents is None else Packing(cu(documents), tokens, first.kc.shape[1], CONFIG)
    span = Span(20) if kind == "query range" else WHOLE
    if kind == "query range":
        first, other = (x.with_(q=x.q[:, 20:], gates=x.gates[:, 20:]) for x in (first, other))
    if kind == "scattered":
        selected = importlib.import_module("tercet.attention.kernels.selected.launch")
        usual = selected.selected_settings
        always = {"forward_limit": -1.0, "backward_limit": -1.0}
        monkeypatch.setattr(selected, "selected_settings", lambda *sizes: replace(usual(*sizes), **always))

    def call(given: Inputs) -> list[Tensor]:
        x = [t.detach().clone() for t in given.tensors()]
        if kind == "not contiguous":
            x = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
        x = [t.requires_grad_() for t in x]
        out, blocks = kernels.attend(*x, CONFIG, kernel_layout(x[0], packing, span), branches)
        grads = torch.autograd.grad(out, x, torch.linspace(-1, 1, out.numel()).view_as(out), allow_unused=True)
        return [y for y in (out, blocks, *grads) if y is not None]

    wanted = call(other)
    replay.forget_tapes()
    call(first)
    assert len(replay._tapes) == (0 if kind == "packed" else 2)
    recorded = list(replay._tapes.values())
    assert None not in recorded
    found = call(other)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert list(replay._tapes.values()) == recorded
