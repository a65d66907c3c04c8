"""How a stretch of a sequence's queries is told to the kernels: one number for each branch, and the documents' bounds
over the keys at hand.

A kernel counts tokens from the first key that it has. Documents that began before that are cut there: a window does
not reach further back than its keys do, and blocks of a selection are counted from their document's first token, which
must therefore be at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.attention.layout import Packing, Span


def obstacle(span: Span, packing: Packing | None, branches: tuple[str, ...]) -> str | None:
    """Why the kernels cannot take this stretch; None if they can."""
    if "selected" not in branches or span.first_key == 0:
        return None
    if packing is None:
        return f"k_selected begins at token {span.first_key} of the sequence, and blocks are counted from the first"
    if packing.bounds is None:
        return f"whether k_selected begins with a document, at token {span.first_key}, is known on the device only"
    if all(first != span.first_key for first, *_ in packing.bounds):
        return f"k_selected begins at token {span.first_key}, within a document, and blocks are counted from its first"
    return None


def places(q: Tensor, span: Span, packing: Packing | None) -> list[int]:
    """Tokens of the whole, and the first query's place for the compressed branch, the selected and the window."""
    whole = span.first_query + q.shape[1] if packing is None else packing.length
    return [whole, span.first_query, span.first_query - span.first_key, span.first_query - span.first_window_key]


def bounds(k_selected: Tensor, k_window: Tensor, span: Span, packing: Packing | None) -> Tensor | None:
    """int32 [3, documents + 1]: of the whole sequence, over the selected keys and over the window's keys."""
    if packing is None:
        return None
    at_hand = ((0, packing.length), (span.first_key, k_selected.shape[1]), (span.first_window_key, k_window.shape[1]))
    if (kept := packing.over_keys.get(at_hand)) is None:
        cu = packing.cu_seqlens
        kept = torch.stack([(cu - first).clamp(0, count) for first, count in at_hand])
        packing.over_keys[at_hand] = kept
    return kept
