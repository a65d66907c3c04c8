"""Replays on a GPU: of strided inputs, on other streams, in several threads, and through Triton's own launcher."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import tercet
from tercet.attention.kernels import launch, replay
from tercet.bench.attention import Shape, make_inputs

pytestmark = pytest.mark.gpu
CONFIG = tercet.NSAConfig(window=128)
SHAPE = Shape(2, 2048, 12, 2, 64)


def given(seed: int, strided: bool = False) -> list[Tensor]:
    torch.manual_seed(seed)
    x = [torch.randn_like(t) for t in make_inputs(SHAPE, CONFIG, "random", 0.0)]
    # as slices of a wider projection
    return [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in x] if strided else x


def both(x: list[Tensor]) -> list[Tensor]:
    x = [t.detach().requires_grad_() for t in x]
    out = tercet.nsa_attention(*x, config=CONFIG, backend="triton")
    return [out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))]


def first_and_other(strided: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs, and the results of a call that records; a later call replays."""
    x = given(0, strided)
    replay.forget_tapes()
    wanted = both(x)
    replay.forget_tapes()
    both(given(1, strided))
    return x, wanted


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_strided_inputs() -> None:
    x, wanted = first_and_other(strided=True)
    check(both(x), wanted)


def test_the_current_stream() -> None:
    x, wanted = first_and_other()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # launches on another stream would not wait for it
        y = [t + 0 for t in x]
        found = both(y)
    torch.cuda.current_stream().wait_stream(stream)
    check(found, wanted)


def test_several_threads() -> None:
    x, wanted = first_and_other()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()

    def work(stream: torch.cuda.Stream) -> list[Tensor]:
        with torch.cuda.stream(stream):
            found = [both(x) for _ in range(10)][-1]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, streams):
            check(found, wanted)


def test_a_triton_whose_c_function_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.triton, "__version__", "9.0.0")
    x, wanted = first_and_other()
    check(both(x), wanted)
    replay.forget_tapes()
