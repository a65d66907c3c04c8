"""The reference on a query range equals those rows of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from tercet.attention import reference
from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing, Span
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.spec import block_sparse

CONFIG = NSAConfig(8, 4, 16, 4, 1, 2, 24)
LENGTH, FIRST, END = 120, 70, 101


def make(bounds):
    q, k, v = torch.randn(1, LENGTH, 4, 8), torch.randn(1, LENGTH, 2, 8), torch.randn(1, LENGTH, 2, 6)
    if bounds is None:
        return q, k, v, torch.randn(1, CONFIG.num_compressed(LENGTH), 2, 14), None
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    count = int(CONFIG.compressed_cu_seqlens(cu_seqlens)[-1])
    return q, k, v, torch.randn(1, count, 2, 14), Packing(cu_seqlens, LENGTH, count, CONFIG)


@pytest.mark.parametrize("bounds", [None, [0, 50, 75, 90, LENGTH]])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_query_range_equals_those_rows_of_the_whole(bounds, on_device, request):
    if on_device:
        request.getfixturevalue("as_on_a_device")
    q, k, v, compressed, packing = make(bounds)
    kc, vc = compressed.split((8, 6), dim=-1)
    part = slice(FIRST, END)
    whole, chosen, _ = reference.compressed_attention(q, kc, vc, CONFIG, packing)
    some, some_chosen, _ = reference.compressed_attention(q[:, part], kc, vc, CONFIG, packing, span=Span(FIRST))
    torch.testing.assert_close(some, whole[:, part])
    assert torch.equal(some_chosen, chosen[:, part])
    # keys from the beginning of the document of the first query
    start = 0 if bounds is None else 50
    span, keys = Span(FIRST, start), slice(start, END)
    torch.testing.assert_close(
        reference.selected_attention(q[:, part], k[:, keys], v[:, keys], chosen[:, part], CONFIG, packing, span),
        reference.selected_attention(q, k, v, chosen, CONFIG, packing)[:, part],
    )
    start = FIRST - CONFIG.window + 1
    span, keys = Span(FIRST, start), slice(start, END)
    torch.testing.assert_close(
        reference.window_attention(q[:, part], k[:, keys], v[:, keys], CONFIG, packing, span),
        reference.window_attention(q, k, v, CONFIG, packing)[:, part],
    )


def test_queries_below_dense_below_read_everything_in_a_query_range_too():
    q, k, v, _, packing = make([0, LENGTH])
    spec = block_sparse(CONFIG, dense_below=85)
    whole = attend(AttentionInputs(q, k_selected=k, v_selected=v), spec).out
    for first, end in ((FIRST, END), (3, 70), (90, END), (10, LENGTH)):
        part = AttentionInputs(q[:, first:end], k_selected=k[:, :end], v_selected=v[:, :end])
        torch.testing.assert_close(attend(part, spec, span=Span(first)).out, whole[:, first:end])
    with pytest.raises(ValueError, match=r"dense_below=85 is more than .* = 64"):
        attend(AttentionInputs(q[:, FIRST:], k_selected=k, v_selected=v), spec, packing=packing, span=Span(FIRST))
