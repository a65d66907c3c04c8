"""The reference on a query range equals those rows of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from tercet.attention import reference
from tercet.attention.checks import check_span
from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing, Span
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.spec import block_sparse, window


def run_window(q, k, v, **options):
    return attend(AttentionInputs(q, k_window=k, v_window=v), window(CONFIG), **options)


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


def test_keys_that_do_not_reach_the_queries_are_rejected():
    q, k, v, _, _ = make(None)
    with pytest.raises(ValueError, match="k_window holds tokens 40 to 90: queries up to token 101"):
        run_window(q[:, FIRST:END], k[:, 40:90], v[:, 40:90], span=Span(FIRST, 40))
    with pytest.raises(ValueError, match="k_window begins at token 48: the window of query 70 begins at 47"):
        run_window(q[:, FIRST:END], k[:, 48:END], v[:, 48:END], span=Span(FIRST, 48))


def test_query_ranges_outside_the_sequence_are_rejected():
    q, k, v, compressed, packing = make([0, 50, LENGTH])
    with pytest.raises(ValueError, match="must not be negative"):
        run_window(q, k, v, span=Span(-1))
    with pytest.raises(ValueError, match="tokens 20 to 140 of 120"):
        run_window(q, k, v, packing=packing, span=Span(20))
    with pytest.raises(ValueError, match="k_compressed has 20 tokens: queries up to token 101 need 24"):
        check_span(q[:, FIRST:END], compressed[:, :20], "compressed", Span(FIRST), CONFIG, None)


def test_dense_below_beyond_the_selection_needs_whole_sequences():
    q, k, v, _, _ = make(None)
    with pytest.raises(ValueError, match=r"dense_below=65 is more than .* = 64"):
        attend(
            AttentionInputs(q[:, FIRST:], k_selected=k, v_selected=v),
            block_sparse(CONFIG, dense_below=65),
            span=Span(FIRST),
        )
