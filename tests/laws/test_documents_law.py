"""Law "documents": a packed batch equals its documents one by one, in outputs, selections and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import tercet
from cases import Case, Inputs, assert_matches_oracle, attend, cases, compressed_length, config, cu, inputs


def document(x: Inputs, rows: slice, compressed: slice) -> Inputs:
    return Inputs(*(v[:, compressed if i in (1, 2) else rows] for i, v in enumerate(x.tensors())))


def gradient(v: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(v) if v.grad is None else v.grad


@settings(max_examples=40)
@given(case=cases(packed=True))
def test_packed_documents_equal_documents_one_by_one(case: Case, backend: str):
    packed = case.x.leaves()
    out, aux = attend(packed, case.cfg, backend, cu_seqlens=cu(case.documents), return_aux=True)
    out.square().sum().backward()
    row = short = 0
    for tokens in filter(None, case.documents or ()):
        rows = slice(row, row + tokens)
        compressed = slice(short, short + compressed_length(tokens, case.cfg))
        alone = document(case.x, rows, compressed).leaves()
        alone_out, alone_aux = attend(alone, case.cfg, backend, return_aux=True)
        alone_out.square().sum().backward()
        torch.testing.assert_close(out[:, rows], alone_out, rtol=1e-10, atol=1e-10)
        assert torch.equal(aux.block_indices[:, rows], alone_aux.block_indices)
        for i, (p, a) in enumerate(zip(packed.tensors(), alone.tensors(), strict=True)):
            part = gradient(p)[:, compressed if i in (1, 2) else rows]
            torch.testing.assert_close(part, gradient(a), rtol=1e-9, atol=1e-10)
        row, short = rows.stop, compressed.stop


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(packed=True))
def test_documents_are_separated_without_reading_bounds_on_the_host(case: Case, backend: str, as_on_a_device: None):
    assert_matches_oracle(case, backend)


@pytest.mark.parametrize("documents", [(17, 0, 2, 26), (1, 1, 1), (0, 30, 0), (45,)], ids=str)
def test_gradients_are_the_same_without_reading_bounds_on_the_host(documents, backend: str, request):
    cfg = config()

    def gradients() -> list[torch.Tensor]:
        x = inputs(cfg, sum(documents), documents=documents, padding=3).leaves()
        attend(x, cfg, backend, cu_seqlens=cu(documents)).square().sum().backward()
        return [gradient(v) for v in x.tensors()]

    expected = gradients()
    request.getfixturevalue("as_on_a_device")
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_one_document_equals_no_cu_seqlens(backend: str):
    cfg = config()
    x = inputs(cfg, 61)
    plain, plain_aux = attend(x, cfg, backend, return_aux=True)
    packed, packed_aux = attend(x, cfg, backend, cu_seqlens=cu([61]), return_aux=True)
    torch.testing.assert_close(packed, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain_aux.block_indices, packed_aux.block_indices)


@pytest.mark.parametrize("bounds_readable", [True, False])
def test_padding_after_the_compressed_tokens_is_ignored_whatever_it_holds(bounds_readable, backend: str, request):
    if not bounds_readable:
        request.getfixturevalue("as_on_a_device")
    cfg = config()
    documents = (17, 2, 26)
    x = inputs(cfg, 45, documents=documents)
    expected = attend(x, cfg, backend, cu_seqlens=cu(documents))
    for garbage in (0.0, 1e30, float("nan"), float("inf")):

        def padded(v: torch.Tensor, garbage: float = garbage) -> torch.Tensor:
            return torch.cat([v, torch.full_like(v[:, :5], garbage)], 1)

        wide = x.with_(kc=padded(x.kc), vc=padded(x.vc)).leaves()
        out = attend(wide, cfg, backend, cu_seqlens=cu(documents))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        for v in wide.tensors():
            assert torch.isfinite(v.grad).all(), garbage
        for v in (wide.kc, wide.vc):
            assert torch.count_nonzero(v.grad[:, -5:]) == 0


@pytest.mark.parametrize("documents", [None, "known", "not read"], ids=lambda kind: f"documents={kind}")
def test_what_is_not_finite_reaches_no_other_document_and_no_earlier_query(documents, backend: str, request):
    """Other documents, and other sequences of a batch."""
    cfg = config()
    lengths = None if documents is None else (17, 22, 6)
    if documents == "not read":
        request.getfixturevalue("as_on_a_device")
    x = inputs(cfg, 45, batch=2 if lengths is None else 1, documents=lengths)
    expected = attend(x, cfg, backend, cu_seqlens=cu(lengths))
    row, first, end, at = (0, 0, 45, 30) if lengths is None else (0, 17, 39, 30)
    compressed = compressed_length(at - first, cfg) + (0 if lengths is None else compressed_length(17, cfg))
    for name in ("q", "kc", "vc", "ks", "vs", "kw", "vw"):
        for value in (torch.nan, torch.inf):
            spoiled = getattr(x, name).clone()
            spoiled[row, compressed if name in ("kc", "vc") else at] = value
            out = attend(x.with_(**{name: spoiled}), cfg, backend, cu_seqlens=cu(lengths))
            own = torch.zeros_like(out, dtype=torch.bool)
            own[row, at:end] = True
            torch.testing.assert_close(out[~own], expected[~own], rtol=1e-12, atol=1e-12)
            assert not out[own].isfinite().all()


def test_many_documents_of_one_token(backend: str):
    cfg = config()
    documents = [1] * 13
    x = inputs(cfg, 13, documents=documents)
    out = attend(x, cfg, backend, cu_seqlens=cu(documents))
    expected = x.gates[..., 1:2] * x.vs.repeat_interleave(2, 2) + x.gates[..., 2:] * x.vw.repeat_interleave(2, 2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_the_bounds_of_the_compressed_tokens_follow_the_documents():
    cfg = config()
    bounds = cfg.compressed_cu_seqlens(cu([17, 2, 26, 1, 4]))
    assert bounds.dtype == torch.int32
    lengths = [compressed_length(n, cfg) for n in (17, 2, 26, 1, 4)]
    assert bounds.diff().tolist() == lengths
    assert int(bounds[0]) == 0


def test_bounds_of_another_integer_type_or_stride_mean_the_same_documents():
    case_cfg = tercet.NSAConfig(4, 2, 8, 3, 1, 1, 6)
    torch.manual_seed(0)
    layer = tercet.NativeSparseAttention(16, 4, 2, 4, config=case_cfg)
    x, bounds = torch.randn(1, 30, 16), torch.tensor([0, 11, 30], dtype=torch.int32)
    spread = torch.tensor([0, -1, 11, -1, 30, -1], dtype=torch.int32)[::2]
    expected = layer(x, bounds)
    for other in (bounds.long(), spread):
        assert torch.equal(layer(x, other), expected)


def test_a_document_too_short_to_compress_ignores_its_neighbours():
    config = tercet.NSAConfig(8, 4, 8, 3, 1, 1, 6)
    bounds = torch.tensor([0, 8, 14, 22], dtype=torch.int32)  # 6 tokens have no compressed token; 8 have one
    torch.manual_seed(0)
    shapes = [(1, 22, 2, 4), (1, 2, 1, 4), (1, 2, 1, 4), *[(1, 22, 1, 4)] * 4]
    tensors = [torch.randn(shape) for shape in shapes]
    gates = torch.full((1, 22, 2, 3), 0.5)
    tensors[2][:, 0] = torch.nan  # the first document's only compressed value
    out = tercet.nsa_attention(*tensors, gates, config=config, cu_seqlens=bounds)
    assert out[:, :8].isnan().any()
    assert out[:, 8:].isfinite().all()
