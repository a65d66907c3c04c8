"""Tapes of calls, with kernels in Python: a replay computes what the function computes. The operator's replays:
test_replay_interpreted.py"""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.offline import AbsentGPU
from tercet.attention.kernels import launch, replay
from tercet.attention.kernels.replay import replayed


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
    """A kernel in Python, and what its first launch returns. Replays give it addresses in place of tensors."""

    compute: Callable[..., None]
    compiles: bool = True
    function: None = None
    packed_metadata: None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, **options: int) -> Any:
            self._compute(*args)
            return self if self.compiles else None

        return start

    def run(self, *args: Any) -> None:
        self._compute(*args[9:])  # after grid, stream, handles and hooks

    def _compute(self, *args: Any) -> None:
        with _disable_current_modes():  # no operators are recorded inside a kernel
            self.compute(*args)


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


def _tensor(x: Any, layout: Layout) -> Tensor:
    """The float32 tensor at an address."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, TensorDescriptor):
        return _tensor(x.base, layout)
    shape, stride = layout
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    memory = (ctypes.c_float * reach).from_address(x)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided(shape, stride)


def _scaled_sum(out: Any, x: Any, y: Any, factor: float, *layouts: Layout) -> None:
    out, x, y = map(_tensor, (out, x, y), layouts)
    out.copy_(x + factor * y)


def scaled_sum(out: Tensor, x: Tensor, y: Any, factor: float, kernel: Kernel | None = None) -> None:
    """Launch out = x + factor · y."""
    tensors = (out, x, y.base if isinstance(y, TensorDescriptor) else y)
    layouts = tuple((tuple(t.shape), t.stride()) for t in tensors)
    launch.call(kernel or SCALED_SUM, (1,), (out, x, y), (), (factor, *layouts))


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
        scaled_sum(scratch[0], x, y, factor, kernel)
        tiles = TensorDescriptor(y, [4, 4], [4, 1], [4, 4])
        scaled_sum(scratch.unbind(0)[1], x.flip(0), tiles, 1.0, kernel)
        scaled_sum(out, scratch[0], scratch[1].view(x.shape), 2.0, kernel)
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
    x, y = pair(0)
    first = function(x, [y], 3.0)
    for seed in range(1, 4):
        check(function, *pair(seed))
    assert function.ran == 1
    torch.testing.assert_close(first.total, expected(x, y, 3.0).total)  # its tensors are its own


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
        scaled_sum(out, x[1], x.view(16)[4:8], 1.0)
        return out

    for x in whole:
        torch.testing.assert_close(second_row(x), 2 * x[1])


def test_temporaries_share_the_memory_of_one_workspace() -> None:
    addresses: list[int] = []

    def compute(out: Any, *args: Any) -> None:
        addresses.append(out.data_ptr() if isinstance(out, Tensor) else out)
        _scaled_sum(out, *args)

    kernel = Kernel(compute)

    @replayed
    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            out = torch.empty(4)
            scaled_sum(out, x, x, 1.0, kernel)
            x = out
        return x

    for _ in range(3):
        addresses.clear()
        found = chain(torch.ones(4))
        assert found.tolist() == [32.0] * 4
    a, b, c, d, e = addresses  # each but the last is needed for two launches
    assert (c, d, b) == (a, b, a + 512)
    assert e == found.data_ptr()


def test_a_tape_holds_no_tensors_and_frees_its_own_after_their_last_use() -> None:
    gc.freeze()  # look only at later objects

    def alive() -> int:
        return sum(isinstance(x, Tensor) for x in gc.get_objects())

    counts: list[int] = []

    def compute(*args: Any) -> None:
        counts.append(alive())
        _scaled_sum(*args)

    kernel = Kernel(compute)

    @replayed
    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.flip(0)
            out = torch.empty(4)
            scaled_sum(out, x, x, 1.0, kernel)
            x = out
        return x

    x = torch.ones(4)
    for _ in range(3):
        before = alive()
        counts.clear()
        found = chain(x)
        assert found.tolist() == [8.0] * 4
        del found
        assert alive() == before
    # of a replay: a sum that is flipped next or returned, and the flipped one that the launch reads
    assert [count - before for count in counts] == [2, 2, 2]

    @replayed
    def two_sums(x: Tensor) -> Tensor:
        scratch, out = torch.empty(4), torch.empty(4)
        scaled_sum(scratch, x, x, 1.0, kernel)
        scaled_sum(out, scratch, x, 1.0, kernel)
        scaled_sum(out, x, x, 1.0, kernel)
        return out

    for _ in range(2):
        counts.clear()
        assert two_sums(x).tolist() == [2.0] * 4
    assert [count - before for count in counts] == [2, 2, 1]  # the workspace until its last use
    gc.unfreeze()


def test_tensors_that_are_needed_at_the_same_time_do_not_overlap() -> None:
    draw = random.Random(0)
    for _ in range(50):
        lifetimes = []
        for _ in range(12):
            first = draw.randrange(10)
            lifetimes.append((draw.randrange(1, 5000), first, first + draw.randrange(5)))
        offsets, total = replay.share_memory(lifetimes)
        placed = list(zip(offsets, lifetimes, strict=True))
        for i, (a, (size, first, last)) in enumerate(placed):
            assert a % 512 == 0
            assert a + size <= total
            for b, (other, begin, end) in placed[:i]:
                assert last < begin or end < first or a + size <= b or b + other <= a
        assert total < sum(size for size, _, _ in lifetimes) + 12 * 512
    assert replay.share_memory([(600, 0, 1), (512, 1, 2), (600, 2, 3)])[1] == 1024 + 512


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
