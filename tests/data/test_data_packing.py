"""Packing: boundaries, targets, masks and padding, compared with an oracle written with lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.data.packing import IGNORE, BatchLayout, pack
from tercet.data.stream import DataError, Document

EOS = 0


class ListStream:
    """Documents from lists, with optional masks."""

    def __init__(self, documents: list[list[int]], masks: list[list[bool]] | None = None) -> None:
        self.identity = {}
        self._documents, self._masks = documents, masks

    def documents(self, cursor=None):
        start = cursor["documents"] if cursor else 0
        for i in range(start, len(self._documents)):
            loss = None if self._masks is None else np.array(self._masks[i])
            here = {"epoch": 0, "documents": i + 1, "skipped": 0, "left_out": 0}
            yield Document(np.array(self._documents[i], dtype=np.uint16), loss, here)


def packing(seq_len: int, sequences: int, *, whole: bool = False) -> BatchLayout:
    return BatchLayout(seq_len, sequences, 0, sequences, whole, EOS)


def oracle(documents: list[list[int]], seq_len: int, sequences: int, whole: bool):
    """(token, target, first of its segment?) one by one; padding is (EOS, IGNORE, first of its segment?)."""
    line: list[tuple[int, int, bool]] = []
    for document in documents:
        used = len(line) % seq_len
        if whole and used and len(document) > seq_len - used:
            line += [(EOS, IGNORE, i == 0) for i in range(seq_len - used)]
        for i, token in enumerate(document):
            target = document[i + 1] if i + 1 < len(document) else IGNORE
            line.append((token, target, i == 0 or len(line) % seq_len == 0))
    batch = seq_len * sequences
    first = True
    while len(line) % batch:
        line.append((EOS, IGNORE, first or len(line) % seq_len == 0))
        first = False
    return [line[i : i + batch] for i in range(0, len(line), batch)]


documents_strategy = st.lists(
    st.lists(st.integers(1, 999), min_size=0, max_size=25).map(lambda tokens: [*tokens, EOS]), min_size=1, max_size=12
)


@settings(max_examples=200)
@given(documents_strategy, st.integers(2, 9), st.integers(1, 4), st.booleans())
def test_packed_batches_equal_the_oracle(documents, seq_len, sequences, whole):
    batches = list(pack(ListStream(documents), packing(seq_len, sequences, whole=whole)))
    expected = oracle(documents, seq_len, sequences, whole)
    assert len(batches) == len(expected)
    for batch, line in zip(batches, expected, strict=True):
        tokens, targets, firsts = zip(*line, strict=True)
        assert batch.tokens.tolist() == list(tokens)
        assert batch.targets.tolist() == list(targets)
        assert batch.cu_seqlens.tolist() == [i for i, first in enumerate(firsts) if first] + [len(line)]
    stats = batches[-1].stats
    assert stats.documents == len(documents)
    assert stats.tokens == sum(map(len, documents))
    assert stats.tokens + stats.padding == len(batches) * seq_len * sequences


def test_masked_tokens_are_inputs_but_not_targets():
    mask = [False, False, True, False, True]
    (batch,) = pack(ListStream([[5, 6, 7, 8, EOS]], [mask]), packing(5, 1))
    assert batch.tokens.tolist() == [5, 6, 7, 8, EOS]
    assert batch.targets.tolist() == [IGNORE, 7, IGNORE, EOS, IGNORE]


@pytest.mark.parametrize("left", [[], [[1, EOS]], [[1, 2, 3, EOS]]])
def test_a_cursor_past_the_end_of_its_document_is_refused(left):
    state = next(pack(ListStream([[*range(1, 20), EOS]]), packing(4, 1))).state
    with pytest.raises(DataError, match="token 4 of a document that is now shorter"):
        next(pack(ListStream(left), packing(4, 1), state))
