"""One real run for all report tests: saved, validated, stopped and resumed. Tests that change it copy it first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.report.read import Run
from watched import corpus, even_clock
from watched import run as train_run


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "healthy"
    with even_clock():
        train_run(folder, data, train__steps=20)
        found, result = train_run(folder, data, train__steps=60, resume="auto")
    assert result == 0
    return found
