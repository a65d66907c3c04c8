"""Synthetic tasks: every answer is in the document, far away, and only answers count in the loss."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.config.data import DataConfig, SyntheticConfig
from tercet.data.stream import DataError
from tercet.data.synthetic import make_task


@given(
    st.integers(0, 2**64 - 1), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 600),
    st.integers(0, 300),
)  # fmt: skip
def test_every_answer_appears_once_beyond_min_distance(number, pairs, queries, values, distance, more):
    queries = min(queries, pairs)
    config = SyntheticConfig(task="recall", pairs=pairs, queries=queries, value_tokens=values, min_distance=distance)
    length = pairs * (values + 4) + distance + queries * (values + 5) + 1 + more
    tokens, loss = make_task(config, length, 256, 0)(number)
    assert len(tokens) == len(loss) == length
    assert tokens[-1] == 0
    assert (tokens[:-1] != 0).all()
    text = bytes(tokens.tolist())
    facts = {m.group(1): m for m in re.finditer(rb"(?<!\?)([a-z]{2})=([0-9]+);", text)}
    asked = list(re.finditer(rb"\?([a-z]{2})=([0-9]+);", text))
    assert len(facts) == pairs
    assert len(asked) == queries == len({m.group(1) for m in asked})
    answers = np.zeros(length, dtype=bool)
    for question in asked:
        fact = facts[question.group(1)]
        assert fact.group(2) == question.group(2)
        assert len(fact.group(2)) == values
        # Not even the last token of the fact is within min_distance of the first answer.
        assert question.start(2) - (fact.end() - 1) > distance
        answers[question.start(2) : question.end(2)] = True
    assert np.array_equal(loss, answers)


def test_the_copy_equals_the_original_and_is_far_away():
    config = SyntheticConfig(task="copy", copy_tokens=20, min_distance=100)
    make = make_task(config, 200, 256, 0)
    for number in range(20):
        tokens, loss = make(number)
        text = bytes(tokens.tolist())
        begin, ask = text.index(b"^") + 1, text.index(b"?") + 1
        assert text[begin : begin + 20] == text[ask : ask + 20]
        assert np.array_equal(np.flatnonzero(loss), np.arange(ask, ask + 20))
        assert ask - (begin + 19) > 100


@pytest.mark.parametrize(
    ("task", "said"), [("recall", "room for 0 of 8 pairs before min_distance=500"), ("copy", "min_distance=500")]
)
def test_a_document_too_short_for_its_task_names_the_required_length(task, said):
    config = SyntheticConfig(task=task, min_distance=500)
    with pytest.raises(DataError, match=rf"{said}.*>= (\d+)") as error:
        make_task(config, 300, 256, 0)
    need = int(re.search(r">= (\d+)", str(error.value)).group(1))
    make_task(config, need, 256, 0)
    with pytest.raises(DataError):
        make_task(config, need - 1, 256, 0)


def test_a_vocabulary_without_the_letters_of_a_task_is_refused():
    config = SyntheticConfig(task="recall", min_distance=500)
    with pytest.raises(DataError, match="vocab_size=64 is below 128"):
        make_task(config, 2000, 64, 0)
    with pytest.raises(DataError, match="EOS is 65"):
        make_task(config, 2000, 256, 65)


def test_random_tokens_are_uniform_without_eos(read):
    data = DataConfig(source="synthetic", seq_len=512)
    tokens = np.concatenate([b.tokens.flatten() for b in read(data, 30, sequences=8)])
    counts = np.bincount(tokens, minlength=256)
    assert counts[0] == 240, "EOS appears only at the end of each document"
    expected = (len(tokens) - 240) / 255
    assert (np.abs(counts[1:] - expected) < 6 * expected**0.5).all()


def test_validation_and_other_seeds_have_different_documents(read):
    data = DataConfig(source="synthetic", seq_len=64, validation_fraction=0.25)
    train = {tuple(row) for b in read(data, 20) for row in b.tokens.tolist()}
    validation = {tuple(row) for b in read(data, 20, split="validation") for row in b.tokens.tolist()}
    other = {tuple(row) for b in read(data, 20, seed=8) for row in b.tokens.tolist()}
    assert len(train) == len(validation) == len(other) == 80
    assert not train & validation
    assert not train & other
