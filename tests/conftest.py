"""Every test starts from the same seed, on one thread; property tests draw the same examples on every run."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from fork_server import ForkServer
from parallel.world import GPUS, Rows, sharing_environment
from tercet.terminal import table

WORDS = ("case", "on", "outcome", "worst", "seconds", "limit", "ranks", "equal", "routes")  # columns without a format

# Processes that tests start use one thread too: the pytest workers already fill the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch logs two lines for every tensor of a checkpoint, which pytest would format and keep.
logging.disable(logging.DEBUG)

settings.register_profile(
    "tercet", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tercet")

# Folders with the longest test files. They run first, so that no worker runs one alone at the end.
LONGEST = ("kernels", "parallel", "resume", "train")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {folder: place for place, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") and not item.get_closest_marker("multi_gpu"):  # which fail instead
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Imported modules stay until the end. Exclude them from garbage collections, which would walk all of them."""
    gc.collect()
    gc.freeze()


COUNTS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", metavar="FILE", help="append the rows of `make test-multi-gpu` to FILE, a JSON each")


@pytest.fixture
def matrix_counts(request: pytest.FixtureRequest) -> list[str]:
    """Lines that a long matrix prints at the end of the session: how much it tried, and what happened."""
    return request.config.stash.setdefault(COUNTS, [])


@pytest.fixture
def rows(record_property: Callable[[str, object], None], request: pytest.FixtureRequest) -> Rows:
    """Rows of the table at the end of the session; unlike `matrix_counts` they come from pytest-xdist's workers too."""
    return Rows(record_property, request.config.getoption("--table"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in terminalreporter.config.stash.get(COUNTS, []):
        terminalreporter.write_line(line)
    reports = [r for name in ("passed", "failed") for r in terminalreporter.stats.get(name, [])]
    rows = [json.loads(str(value)) for r in reports for name, value in r.user_properties if name == "row"]
    if rows:
        heads = {key: (key, "{:.2g}".format if key not in WORDS else str) for row in rows for key in row}
        terminalreporter.write_line(table(rows, heads))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Starts child processes without start-up time; shared by all tests that kill, freeze or launch processes."""
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def sharing_server() -> Iterator[ForkServer]:
    """A fork server whose children may share GPUs over NCCL."""
    with ForkServer(sharing_environment()) as server:
        yield server


@pytest.fixture
def rank_server(backend: str, request: pytest.FixtureRequest) -> ForkServer:
    """Starts ranks that communicate over `backend`."""
    shared = backend == "nccl" and GPUS < 4
    return request.getfixturevalue("sharing_server" if shared else "fork_server")  # type: ignore[no-any-return]


@pytest.fixture(scope="session", params=["reference"])
def backend(request: pytest.FixtureRequest) -> str:
    """Backends that the laws are tested on everywhere; tests/kernels runs the same laws on the kernels."""
    return str(request.param)


@pytest.fixture(params=["directions", pytest.param("elements", marks=pytest.mark.slow)])
def fast_mode(request: pytest.FixtureRequest) -> bool:
    """For torch's gradcheck: compare derivatives along random directions, or (slow) in every element."""
    return bool(request.param == "directions")


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not read cu_seqlens on the host, as on a GPU. On a CPU it is read, since that needs no synchronisation."""
    for name in ("check_cu_seqlens", "check_packed_compressed"):
        monkeypatch.setattr(f"tercet.attention.checks.{name}", lambda *_, **__: None)
    monkeypatch.setattr("tercet.attention.layout._read_bounds", lambda *_: None)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, using torch's switch, which also covers allocations inside operators."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    yield
    torch.use_deterministic_algorithms(False)
