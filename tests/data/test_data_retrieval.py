"""Retrieval exercises: the text stays complete, questions follow their facts, and nothing of the evaluation is in."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.config.load import ConfigError, load
from tercet.data.exercises import (
    HELD_OUT_WORDINGS,
    HELD_OUT_WORDS,
    MODULUS,
    REMAINDER,
    TRAINING_WORDINGS,
    TRAINING_WORDS,
    VERSION,
    Draws,
    ExerciseWriter,
    Pair,
    write_lines,
)
from tercet.data.sources import open_stream
from tercet.data.tokenizers import ByteTokenizer

KINDS = ["jsonl", "shards", "text"]


@pytest.fixture(scope="module")
def lessons(configs):
    """The configurations with half of the text in exercises, and sequences that hold some."""
    changes = {"seq_len": 768, "retrieval": 0.5, "prefetch": 0}
    found = {kind: configs[kind].model_copy(update=changes) for kind in KINDS}
    parts = tuple(
        part.model_copy(update={"retrieval": 0.5 * (i < 2)}) for i, part in enumerate(configs["mixture"].mixture)
    )
    found["mixture"] = configs["mixture"].model_copy(update={"seq_len": 768, "mixture": parts, "prefetch": 0})
    found["whole"] = found["jsonl"].model_copy(update={"packing": "whole"})
    found["shuffled"] = found["shards"].model_copy(update={"shuffle_sequences": 5})
    return found


@pytest.fixture
def one_wording(monkeypatch):
    """Facts are `SET key = value`, questions for one `THEN GET key = value`."""
    wordings = replace(TRAINING_WORDINGS, pairs=(Pair("SET {key} = {value}", "THEN GET {key} = "),))
    monkeypatch.setattr("tercet.data.exercises._P", wordings)


def is_inside(part, whole) -> bool:
    """Whether `part` is a subsequence."""
    rest = iter(whole)
    return all(token in rest for token in part)


@pytest.mark.parametrize("kind", [*KINDS, "mixture", "whole", "shuffled"])
def test_resuming_after_any_batch_is_exact(kind, lessons, assert_resumes):
    assert assert_resumes(lessons[kind], 24, sequences=3)[-1].stats.exercises > 12


def test_all_text_is_read_once_and_in_order(lessons, read):
    plain = lessons["jsonl"].model_copy(update={"retrieval": 0.0, "exhaustion": "stop"})
    text = [t for t in np.concatenate([b.tokens.flatten() for b in read(plain)]).tolist() if t]
    data = plain.model_copy(update={"retrieval": 0.5})
    written = np.concatenate([b.tokens.flatten() for b in read(data)]).tolist()
    assert is_inside(text, written)
    lines = len([t for t in written if t]) - len(text)
    assert 0.02 * len(text) < lines < len(text)


def test_a_longer_stage_continues_inside_an_exercise_without_losing_text(lessons, read):
    data = lessons["jsonl"].model_copy(update={"exhaustion": "stop"})
    first = next(
        batches for n in range(2, 12) if (batches := read(data, n, sequences=1))[-1].state["offset"] > 0
        and batches[-1].state["cursor"]["retrieval"]["next"]
    )  # fmt: skip
    then = read(data.model_copy(update={"seq_len": 1100}), sequences=1, state=first[-1].state)
    plain = read(data.model_copy(update={"retrieval": 0.0}))
    text = [t for t in np.concatenate([b.tokens.flatten() for b in plain]).tolist() if t]
    assert is_inside(text, np.concatenate([b.tokens.flatten() for b in first + then]).tolist())


def test_lines_do_not_split_characters():
    """In text without line breaks, a line may be inserted anywhere."""
    text = "né日本🎉" * 200
    tokens = np.frombuffer(text.encode() + b"\0", dtype=np.uint8)
    writer = ExerciseWriter(ByteTokenizer())
    for stream in range(20):
        written = writer.segment(tokens, None, stream, 0, 2 * len(tokens)).tokens
        assert len(written) > len(tokens)
        bytes(written).decode()


def test_every_target_is_the_next_token(lessons, read):
    for batch in read(lessons["shards"], 6):
        tokens, targets, bounds = batch.tokens.flatten(), batch.targets.flatten(), batch.cu_seqlens.tolist()
        for begin, end in pairwise(bounds):
            assert np.array_equal(targets[begin : end - 1], tokens[begin + 1 : end])
        continued = targets[[end - 1 for end in bounds[1:] if tokens[end - 1] != 0]]
        assert (continued >= 0).all(), "the last token of a sequence has a target in the next one"


@pytest.mark.usefixtures("one_wording")
def test_facts_come_before_their_questions_in_the_same_sequence(lessons, read):
    asked, distances = set(), []
    for batch in read(lessons["shards"].model_copy(update={"retrieval": 1.0}), 100):
        tokens = batch.tokens.flatten().tolist()
        for begin, end in pairwise(batch.cu_seqlens.tolist()):
            text = bytes(tokens[begin:end]).decode(errors="replace")
            for question in re.finditer(r"^THEN GET (\S+ = \S+)$", text, re.M):
                place = text.find(f"SET {question.group(1)}\n", 0, question.start())
                assert place >= 0, question.group()
                asked.add(question.group(1))
                distances.append((question.start() - place) / 768)
    assert len(asked) == len(distances) > 50, "every sequence asks for keys of its own"
    assert min(distances) < 0.1 < 0.7 < max(distances)


@pytest.mark.usefixtures("one_wording")
def test_questions_have_the_answers_that_the_evaluation_asks_for():
    """All values in order of appearance, several keys in any order, chains from the first name to the last."""
    sizes = Counter()
    for n in range(300):
        for *facts, question in write_lines(Draws(9, n), 4000):
            assert all(fact.at <= question.at <= 1 for fact in facts)
            found = [re.fullmatch(r"SET (\S+) = (\S+)", fact.text) for fact in facts]
            if len(facts) > 1 and not all(found):
                names = re.split(r"[:?] | of ", question.text)[-1].rstrip(".").split(", ")
                for fact, name, source in zip(facts, names, [names[0], *names], strict=False):
                    assert name in fact.text
                    assert source in fact.text
                sizes["chain", len(facts)] += 1
                continue
            if not all(found):
                continue  # a word list
            names, values = [fact.group(1) for fact in found], [fact.group(2) for fact in found]
            sizes["keys" if len(set(names)) > 1 else "values", len(facts)] += 1
            if len(facts) == 1:
                assert question.text == f"THEN GET {names[0]} = {values[0]}"
            elif len(facts) > 1:
                asked = ", ".join(dict.fromkeys(names))
                assert re.search(rf"{asked}.*{', '.join(values)}", question.text), question
                assert [fact.at for fact in facts] == sorted(fact.at for fact in facts) or len(set(names)) > 1
    sizes = {size for size, count in sizes.items() if count > 10}
    assert {("values", n) for n in range(1, 5)} | {("keys", n) for n in range(2, 5)} <= sizes
    assert {("chain", n) for n in range(2, 6)} <= sizes


def test_lines_change_only_with_the_version():
    """Runs resume in the middle of exercises: other lines for the same key need another VERSION."""
    lines = repr([write_lines(Draws(9, n), size) for n in range(200) for size in (512, 20_000)])
    assert (VERSION, hashlib.sha256(lines.encode()).hexdigest()[:16]) == (5, "3917670569abd2e4")


def test_validation_text_is_never_changed(lessons, read):
    for kind in ("jsonl", "mixture"):
        parts = tuple(p.model_copy(update={"retrieval": 0.0}) for p in lessons[kind].mixture)
        plain = lessons[kind].model_copy(update={"retrieval": 0.0, "mixture": parts})
        ours, theirs = (read(data, 6, split="validation") for data in (lessons[kind], plain))
        assert ours
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))
        assert ours[-1].state == theirs[-1].state


def test_the_share_of_the_text_is_as_asked(lessons):
    for share in (0.1, 0.6):
        data = lessons["shards"].model_copy(update={"retrieval": share})
        documents = open_stream(data, ByteTokenizer(), seed=1, split="train").documents()
        last = [document for document, _ in zip(documents, range(400), strict=False)][-1]
        counts = last.cursor["retrieval"]
        assert abs(counts["joined"] / counts["read"] - share) < 0.05


def test_the_share_holds_within_a_long_document(tmp_path, monkeypatch, read, assert_resumes):
    """All of it, or nothing, would be exercises for as long as it lasts."""
    monkeypatch.setattr("tercet.data.exercises.LONG_DOCUMENT", 20_000)
    for name, size in (("a", 50_000), ("b", 3_000), ("c", 60_000), ("d", 2_000)):
        (tmp_path / f"{name}.txt").write_text(f"line of {name}\n" * (size // 10))
    data = DataConfig(
        source="text", path=(str(tmp_path),), tokenizer="byte", seq_len=512, retrieval=0.5, validation_fraction=0.0,
        prefetch=0, exhaustion="stop",
    )  # fmt: skip
    counts = [batch.stats.exercises for batch in read(data, 200, sequences=1)]
    assert 15 < counts[49] < 35
    assert 70 < counts[-1] < 130
    plain = np.concatenate([b.tokens.flatten() for b in read(data.model_copy(update={"retrieval": 0.0}))])
    written = np.concatenate([b.tokens.flatten() for b in read(data)])
    assert is_inside([t for t in plain.tolist() if t], written.tolist())
    assert_resumes(data, 60, sequences=3)


@pytest.mark.usefixtures("one_wording")
def test_prompts_stay_out_of_the_loss_and_lines_are_in_it(tmp_path, read):
    records = [{"p": "PROMPT ", "text": f"number {i}\n" * 30} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = DataConfig(source="jsonl", path=str(tmp_path), prompt_field="p", seq_len=600, retrieval=1.0, prefetch=0)
    for batch in read(data, 4):
        text = bytes(batch.tokens.flatten().tolist())
        targets = batch.targets.flatten().tolist()
        for prompt in re.finditer(b"PROMPT ", text):
            assert set(targets[prompt.start() : prompt.end() - 1]) == {-100}
        lines = list(re.finditer(rb"\n[SG]ET [^\n]*\n", text))
        assert lines
        for line in lines:
            assert -100 not in targets[line.start() : line.end() - 1]


def test_sequences_too_short_for_an_exercise_are_refused():
    flags = {"data.retrieval": 0.3, "train.tokens_per_step": 800, "train.micro_batch": 4}
    with pytest.raises(ConfigError, match=r"data.retrieval=0.3 with data.seq_len=200: .* at least 256 tokens; raise"):
        load("tiny", flags=flags | {"data.seq_len": 200})
    longer = {"train.stages": ["200:5", "512:5"], "train.tokens_per_step": 25600, "train.micro_batch": 1}
    assert load("tiny", flags={"data.retrieval": 0.3} | longer).config.data.retrieval == 0.3


@pytest.fixture(scope="module")
def training_lines():
    return [line.text for n in range(300) for item in write_lines(Draws(5, n), 8000) for line in item]


def test_nothing_of_the_evaluation_is_in_the_training_lines(training_lines):
    assert not set(TRAINING_WORDS.words) & set(HELD_OUT_WORDS.words)
    assert not set(TRAINING_WORDINGS.whats) & set(HELD_OUT_WORDINGS.whats)
    assert not set(re.findall(r"[a-z]+", " ".join(training_lines))) & set(HELD_OUT_WORDS.words)
    numbers = [int(n) for n in re.findall(r"(?<![\w-])[1-9](?:\d{4}|\d{6})(?![\w-])", " ".join(training_lines))]
    assert len(numbers) > 500
    assert not any(n % MODULUS == REMAINDER for n in numbers)


def templates(wordings) -> set[str]:
    """Every template, with plain fields."""
    w = wordings
    found = {*w.pairs, *w.values, *w.keys, *w.chains, *w.lists, *w.ranked_lists}
    return {text.replace("!r}", "}") for part in found for text in part} | set(wordings.filler)


def words_of(texts) -> set[str]:
    return {word for text in texts for word in re.findall("[a-z]+", re.sub(r"{\w+}", "", text).lower())}


def test_no_held_out_wording_is_trained(training_lines):
    training, held_out = templates(TRAINING_WORDINGS), templates(HELD_OUT_WORDINGS)
    usual = "a and are as by each first has is its more most name of on out s that the they to"
    assert not words_of(training) & words_of(held_out) - set(usual.split())
    assert not any(sign in text for text in training for sign in ("/*", "=>", ":="))
    plain = [text for text in held_out if re.search("[a-z]", re.sub(r"{\w+}", "", text), re.I) or "=>" in text]
    forms = [re.sub(r"\\{\w+\\}", r"\\S.*", re.escape(text.strip())) for text in plain]
    written = "\n".join(training_lines)
    assert not [form for form in forms if re.search(form, written)]


@pytest.mark.parametrize("draw", ["number", "uuid", "coined"])
def test_made_up_values_are_on_one_side_of_the_split(draw):
    sides = [
        {getattr(words, draw)(draws) for _ in range(3000)}
        for words, draws in ((TRAINING_WORDS, Draws(1)), (HELD_OUT_WORDS, Draws(1)))
    ]
    assert not sides[0] & sides[1]
    assert min(map(len, sides)) > 1500
