"""Child processes for runs that are frozen or killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runs import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made
