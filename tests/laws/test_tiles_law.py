"""The reference processes long inputs in tiles of queries: tile size does not affect the result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from cases import Case, assert_matches_oracle, attend, cases, config, cu, inputs

DOCUMENTS = [None, (3, 41, 26), (70,)]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smallest tiles: 16 queries each."""
    monkeypatch.setattr("tercet.attention.tiling.TILE_NUMBERS", 1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_small_tiles_equal_the_oracle(case: Case, backend: str, small_tiles: None):
    assert_matches_oracle(case, backend)


@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
@pytest.mark.parametrize("bounds_readable", [True, False])
def test_small_tiles_change_neither_sets_nor_gradients(documents, bounds_readable: bool, backend: str, request):
    cfg = config()
    weight = torch.randn(1, 70, 4, 6, dtype=torch.float64)

    def outcome() -> list[torch.Tensor]:
        x = inputs(cfg, 70, documents=documents).leaves()
        out, aux = attend(x, cfg, backend, cu_seqlens=cu(documents), return_aux=True)
        (out * weight).sum().backward()
        return [aux.block_indices, out.detach(), *(v.grad for v in x.tensors())]

    whole = outcome()
    request.getfixturevalue("small_tiles")
    if not bounds_readable:
        request.getfixturevalue("as_on_a_device")
    for a, b in zip(whole, outcome(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_default_config_over_several_tiles_equals_one_tile(backend: str, request):
    import tercet

    cfg = tercet.NSAConfig(select_count=4, window=100)
    x = inputs(cfg, 500, groups=1, per_group=2, key_size=8, value_size=4)
    whole, aux = attend(x, cfg, backend, return_aux=True)
    request.getfixturevalue("small_tiles")
    tiled, tiled_aux = attend(x, cfg, backend, return_aux=True)
    torch.testing.assert_close(tiled, whole, rtol=1e-10, atol=1e-10)
    assert torch.equal(aux.block_indices, tiled_aux.block_indices)
