"""Every test starts from the same seed, on one thread; property tests draw the same examples on every run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Processes that tests start use one thread too: the pytest workers already fill the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "tercet", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tercet")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=["reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backends that the laws hold on any machine; the kernels meet the same laws in tests/kernels."""
    return str(request.param)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the numbers of cu_seqlens are read, as that costs no synchronisation there: read them no more."""
    for name in ("check_cu_seqlens", "check_packed_compressed"):
        monkeypatch.setattr(f"tercet.attention.checks.{name}", lambda *_, **__: None)
    monkeypatch.setattr("tercet.attention.layout._read_bounds", lambda *_: None)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN: by torch's own switch, which also reaches allocations inside operators."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    yield
    torch.use_deterministic_algorithms(False)
