"""Tapes of calls, with kernels in Python: a replay computes what the function computes, and the operators launch the
same kernels with the same arguments."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.offline import AbsentGPU
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import launch, ops, replay, table
from tercet.attention.kernels.replay import replayed
from tercet.attention.layout import Packing


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replay on a CPU."""
    monkeypatch.setattr(replay, "can_replay", lambda x: torch._C._len_torch_dispatch_stack() == 0)
    before = driver._active
    driver.set_active(AbsentGPU(GPUTarget("cuda", 90, 32)))
    replay.forget_tapes()
    yield
    replay.forget_tapes()
    driver._active = before


@dataclass(frozen=True)
class Kernel:
    """A kernel in Python, and what its first launch returns."""

    compute: Callable[..., None]
    compiles: bool = True
    function: None = None
    packed_metadata: None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **options: int) -> Any:
            self.compute(*args)
            return self if self.compiles else None

        return start

    def run(self, *args: Any) -> None:
        self.compute(*args[9:])  # after grid, stream, handles and hooks


def _scaled_sum(out: Tensor, x: Tensor, y: Any, factor: float) -> None:
    out.copy_(x + factor * (y.base if isinstance(y, TensorDescriptor) else y))


SCALED_SUM = Kernel(_scaled_sum)
NOT_COMPILED = Kernel(_scaled_sum, compiles=False)


class Both(NamedTuple):
    total: Tensor
    sorted: Tensor


@pytest.fixture
def function() -> Any:
    """A replayed function that counts how often it really runs."""

    @replayed
    def run(x: Tensor, others: list[Tensor], factor: float, kernel: Kernel = SCALED_SUM) -> Both:
        run.ran += 1
        (y,) = others
        out, scratch = torch.empty_like(x), torch.zeros(2, *x.shape)
        launch.call(kernel, (1,), (scratch[0], x, y), (), (factor,))
        tiles = TensorDescriptor(y, [4, 4], [4, 1], [4, 4])
        launch.call(kernel, (1,), (scratch.unbind(0)[1], x.flip(0), tiles), (), (1.0,))
        launch.call(kernel, (1,), (out, scratch[0], scratch[1].view(x.shape)), (), (2.0,))
        out += 1
        order, _ = torch.sort(out.flatten(), stable=True)
        return Both(out, order)

    run.ran = 0
    return run


def expected(x: Tensor, y: Tensor, factor: float) -> Both:
    out = x + factor * y + 2 * (x.flip(0) + y) + 1
    return Both(out, out.flatten().sort().values)


def pair(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=draw), torch.randn(4, 4, generator=draw)


def check(function: Any, x: Tensor, y: Tensor, factor: float = 3.0) -> None:
    found = function(x, [y], factor)
    assert isinstance(found, Both)
    for a, b in zip(found, expected(x, y, factor), strict=True):
        torch.testing.assert_close(a, b)


def test_later_calls_replay_the_first_with_their_own_tensors(function: Any) -> None:
    first = function(*_list(pair(0)), 3.0)
    for seed in range(1, 4):
        check(function, *pair(seed))
    assert function.ran == 1
    torch.testing.assert_close(first.total, expected(*pair(0), 3.0).total)  # its tensors are its own


def _list(given: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
    return given[0], [given[1]]


def test_another_layout_another_number_and_the_same_tensor_twice_have_their_own_tapes(function: Any) -> None:
    x, y = pair(0)
    for args in ((x, y), (x.t(), y), (x, y, 4.0), (x, x)):
        for _ in range(2):
            check(function, *args)
    assert function.ran == 4
    check(function, y, x)
    assert function.ran == 4


def test_views_are_those_of_the_new_tensors_wherever_they_start(function: Any) -> None:
    whole = torch.randn(3, 4, 4)

    @replayed
    def second_row(x: Tensor) -> Tensor:
        out = torch.empty(4)
        launch.call(SCALED_SUM, (1,), (out, x[1], x.view(16)[4:8]), (), (1.0,))
        return out

    for x in whole:
        torch.testing.assert_close(second_row(x), 2 * x[1])


def test_a_tape_holds_no_tensors_and_frees_its_own(function: Any) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def compute(out: Tensor, x: Tensor, y: Any, factor: float) -> None:
        seen.append(weakref.ref(out))
        alive.append(sum(ref() is not None for ref in seen))
        _scaled_sum(out, x, y, factor)

    alive: list[int] = []
    kernel = Kernel(compute)

    @replayed
    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            out = torch.empty(4)
            launch.call(kernel, (1,), (out, x, x), (), (1.0,))
            x = out
        return x

    for _ in range(3):
        alive.clear()
        found = chain(torch.ones(4))
        assert found.tolist() == [8.0] * 4
        del found
        gc.collect()
        assert not any(ref() is not None for ref in seen)
        assert max(alive) <= 3
    assert alive == [1, 2, 2]  # of a replay: what a launch reads, and what it writes


def test_what_is_not_compiled_is_not_replayed(function: Any) -> None:
    """As in Triton's interpreter."""
    for seed in range(3):
        x, y = pair(seed)
        torch.testing.assert_close(function(x, [y], 3.0, NOT_COMPILED).total, expected(x, y, 3.0).total)
    assert function.ran == 3


def test_a_profilers_hook_sees_every_launch(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(function, *pair(0))
    monkeypatch.setattr(replay, "hooked", lambda: True)
    check(function, *pair(1))
    assert function.ran == 2


# ------------------------------------------------------------ the operators


class Recorded:
    """Stands in for a compiled kernel: notes what it is launched with."""

    function = packed_metadata = None
    launches: list[tuple] = []  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any) -> None:
        self.note(args[:3], args[9:])

    def note(self, grid: tuple[int, ...], args: tuple) -> None:
        self.launches.append((self.name, grid, tuple(map(self.described, args))))

    def described(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.shape, x.stride(), x.dtype, x.storage_offset()
        if hasattr(x, "block_shape"):
            return self.described(x.base), x.shape, x.strides, x.block_shape
        return x


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Recorded:
        kernel = Recorded(self.fn.__name__)
        kernel.note(grid, args)
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(table, "generation", lambda x: 9)
    monkeypatch.setattr(Recorded, "launches", [])
    selected = importlib.import_module("tercet.attention.kernels.selected.launch")
    monkeypatch.setattr(selected, "_compiled", {})
    monkeypatch.setattr(launch, "_VARIANTS", {})
    return Recorded.launches


@pytest.mark.parametrize("kind", ["plain", "packed", "scattered", "query range"])  # packed: not replayed
def test_a_replayed_operator_launches_what_the_operator_launches(kind: str, recorded: list[tuple]) -> None:
    config = NSAConfig()
    T = 32768 if kind == "scattered" else 2048
    Q = T // 2 if kind == "query range" else T
    cu = torch.tensor([0, 700, T], dtype=torch.int32) if kind == "packed" else None
    packing = None if cu is None else Packing(cu, T, T // 16, config)
    ccu = None if packing is None else packing.compressed_cu_seqlens
    numbers = ops.Numbers(config, [T, *[T - Q] * 3] if Q < T else [], None)

    def calls() -> None:
        def new(tokens: int, heads: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(1, tokens, heads, size, dtype=dtype)

        q, dout, gates = new(Q, 12), new(Q, 12), new(Q, 12, 3, torch.float32)
        kc, vc = (new(T // 16 if cu is not None else config.num_compressed(T), 2) for _ in range(2))
        ks, vs, kw, vw = (new(T, 2) for _ in range(4))
        o_c, lse_c = ops.compressed_attention(q, kc, vc, cu, ccu, numbers)
        blocks = ops.select_blocks(q, kc, lse_c, cu, ccu, numbers)
        x = ops.Tensors(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, blocks, cu, ccu)
        out, o_s, lse_s, o_w, lse_w, saved = ops.attend(x, numbers)
        kept = ops.Kept(*x[:10], o_s, lse_s, o_w, lse_w, blocks, cu, ccu)
        assert out.shape == o_s.shape
        grads = ops.gradients(dout, kept, tuple(s for s in saved if s is not None), numbers)
        assert [g.shape for g in grads] == [y.shape for y in x[:8]]

    calls()  # compiles and records
    written = list(recorded)
    assert len(written) >= 14
    recorded.clear()
    calls()
    assert len(replay._tapes) == (0 if kind == "packed" else 4)
    assert all(tape is not None for tape in replay._tapes.values())
    assert recorded == written
