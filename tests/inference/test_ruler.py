"""`tercet eval ruler`: questions are as RULER's tasks ask for, and scores count what they should."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from inference.models import language_model, trained
from tercet.cli import main
from tercet.data.exercises import HELD_OUT_WORDINGS, HELD_OUT_WORDS, TRAINING_WORDS
from tercet.data.tokenizers import load_tokenizer
from tercet.inference.ruler import SINGLE, TASKS, QuestionWriter, RulerResult, ask


class Peeking(torch.nn.Module):
    """A model that predicts every next token, except those in `wrong` (bytes)."""

    def __init__(self, model, wrong=b""):
        super().__init__()
        self.run, self.config, self.tokenizer, self.context = model.run, model.config, model.tokenizer, model.context
        self.embedding = torch.nn.Embedding(1, 1)
        self.wrong, self.asked = list(wrong), 0

    def hidden(self, tokens):
        return F.pad(tokens[:, 1:], (0, 1)).unsqueeze(-1)

    def logits(self, following):
        self.asked += len(following)
        guesses = [0 if token in self.wrong else token for (token,) in following.tolist()]
        return F.one_hot(torch.tensor(guesses), 256).float()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Settings of a source whose second half is for validation."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i} of a text without any needles in it\n" for i in range(8000)))
    return {"data__source": "text", "data__path": str(file), "data__validation_fraction": 0.5, "data__seq_len": 128}


@pytest.fixture(scope="module")
def model(text):
    return language_model(**text)


@pytest.fixture(scope="module")
def writers(model):
    return {wording: QuestionWriter(model, wording, 8192, 0) for wording in ("held-out", "training")}


@pytest.fixture(scope="module")
def writer(writers):
    return writers["held-out"]


def text_of(writer, question) -> tuple[str, str, list[str]]:
    """(text before the question, the question up to its first answer, answers)."""
    text = writer._tokenizer.decode
    tokens, spans = question.tokens.tolist(), question.answers
    before = text(tokens[: spans[0][0]])
    at = before.rindex("\n")
    return before[: at + 1], before[at + 1 :], [text(tokens[a:b]).strip(" ,") for a, b in spans]


def test_a_model_that_knows_everything_scores_100(model):
    peeking = Peeking(model)
    results = list(ask(peeking, lengths=(1024, 4096), questions=3, depths=3))
    assert [(r[0].length, r[0].task) for r in results] == [(n, task) for n in (1024, 4096) for task in TASKS]
    for overall, *by_depth in results:
        assert (overall.score, overall.right, overall.questions, overall.depth) == (1.0, 3, 3, None)
        assert [r.depth for r in by_depth] == ([0.0, 0.5, 1.0] if overall.task in SINGLE else [])


def test_fewer_questions_than_depths_still_reach_from_the_beginning_to_the_end(model):
    for questions, depths in ((1, [0.5]), (2, [0.0, 1.0]), (3, [0.0, 0.5, 1.0])):
        ((_, *found),) = ask(Peeking(model), lengths=(1024,), tasks=("niah_single_1",), questions=questions)
        assert [(r.depth, r.questions) for r in found] == [(depth, 1) for depth in depths]


def test_only_answers_go_through_the_head(model):
    peeking = Peeking(model)
    list(ask(peeking, lengths=(1024,), tasks=("niah_single_2",), questions=4))
    assert peeking.asked == 4 * 7, "seven digits of four questions"


def test_a_wrong_token_costs_its_answer_only(model):
    (found,) = list(ask(Peeking(model, b"7"), lengths=(1024,), tasks=("niah_multivalue",), questions=40))
    writer = QuestionWriter(model, "held-out", 1024, 0)
    answers = [text_of(writer, writer.question("niah_multivalue", 1024, n))[2] for n in range(40)]
    shares = [sum("7" not in answer for answer in four) / 4 for four in answers]
    assert found[0].score == pytest.approx(sum(shares) / 40)
    assert found[0].right == shares.count(1.0)
    assert 0 < found[0].score < 1


@pytest.mark.parametrize("wording", ["held-out", "training"])
@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_needles_have_the_facts_that_are_asked_for(task, wording, writers):
    writer = writers[wording]
    for number in range(6):
        question = writer.question(task, 2048, number)
        text, asked, answers = text_of(writer, question)
        assert len(question.tokens) <= 2048
        assert len(answers) == (4 if task in ("niah_multivalue", "niah_multiquery") else 1)
        for answer in answers:
            assert text.count(answer) == 1
            assert answer not in asked
        assert answers == sorted(answers, key=text.index) or task == "niah_multiquery"
        pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if task.endswith("_3") else r"\d{7}"
        assert all(re.fullmatch(pattern, answer) for answer in answers)
        words = set(re.findall(r"[a-z]+", asked)) & {*TRAINING_WORDS.words, *HELD_OUT_WORDS.words}
        keys = [] if task == "niah_multikey_3" else re.findall(r"[a-z]+-[a-z]+", asked)
        assert words <= set(HELD_OUT_WORDS.words) or wording == "training"
        assert all(word in HELD_OUT_WORDS.words for key in keys for word in key.split("-"))
        assert len(set(keys)) == {"niah_multiquery": 4, "niah_multikey_3": 0}.get(task, 1)


def test_the_depth_is_where_the_fact_is(writer):
    for depth in (0.0, 0.25, 0.5, 1.0):
        text, _, (answer,) = text_of(writer, writer.question("niah_single_1", 8192, 1, depth))
        assert text.index(answer) / len(text) == pytest.approx(depth, abs=0.03)


def test_chains_have_one_value_and_four_copies(writer):
    text, asked, names = text_of(writer, writer.question("vt", 2048, 0))
    assert len(set(names)) == 5
    value = re.search(r"\d{5}", asked).group()
    assert text.index(value) > text.index(names[0]) > 0
    assert [text.count(name) for name in names] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("length", "common", "uncommon"), [(1024, 6, 1), (4096, 30, 3), (8192, 30, 3)])
def test_common_words_are_as_common_as_in_ruler(writer, length, common, uncommon):
    for number in range(3):
        question = writer.question("cwe", length, number)
        text, _, answers = text_of(writer, question)
        counts = Counter(re.findall(r"\b[a-z]{5}\b", text.partition("\n")[0].split(". ", 1)[-1].split("*/ ")[-1]))
        assert sorted(answers, key=text.index) == answers
        assert {counts.pop(answer) for answer in answers} == {common}
        assert set(counts.values()) == {uncommon}
        assert 0.9 * length < len(question.tokens) <= length


def test_frequent_words_fall_off_with_the_square_of_their_rank(writer):
    text, _, answers = text_of(writer, writer.question("fwe", 8192, 0))
    counts = Counter(text.split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *answers]
    assert [round(counts["..."] / counts[word]) for word in answers] == [4, 9, 16]


def test_other_tokenizers_score_exactly_the_answers(model, tmp_path):
    from tercet.config.data import DataConfig
    from tercet.data.prepare import train_bpe

    (tmp_path / "corpus.txt").write_text("\n".join(text for pair in HELD_OUT_WORDINGS.pairs for text in pair) * 99)
    train_bpe(DataConfig(source="text", path=str(tmp_path)), tmp_path / "tokenizer.json", vocab_size=350)
    plain, bpe = (QuestionWriter(model, "held-out", 512, 0) for _ in range(2))
    bpe._tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for prompt, answers, end in (
        ("The seal assigned to harp-dune reads ", ["4820113"], "."),
        ("lookup('kelp-oboe') -> '", ["9910021"], "'"),
        ("Everything stored under kiln-elk, first to last: ", ["1234567", "7654321", "7777777"], "."),
    ):
        for writer in (plain, bpe):
            question = writer._question(prompt, answers, end)
            spans = [writer._tokenizer.decode(question.tokens[a:b].tolist()) for a, b in question.answers]
            assert [span.strip(" ,.'") for span in spans] == answers
            assert all(a < b <= c for (a, b), (c, _) in zip(question.answers, question.answers[1:], strict=False))


def test_questions_do_not_depend_on_the_other_tasks(model):
    one, other = (QuestionWriter(model, "held-out", 4096, 3) for _ in range(2))
    one.question("cwe", 4096, 0)
    for task in TASKS[:-2]:
        assert one.question(task, 1024, 5).tokens.tolist() == other.question(task, 1024, 5).tokens.tolist()
    seeds = (QuestionWriter(model, "held-out", 1024, seed).question("vt", 1024, 0).tokens.tolist() for seed in (3, 4))
    assert next(seeds) != next(seeds)


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"), [(0, 400, 0.0, 0.0095), (380, 400, 0.9241, 0.9674), (400, 400, 0.9905, 1.0)]
)
def test_intervals_are_wilsons(right, asked, low, high):
    result = RulerResult(1024, "vt", None, asked, right, right / asked, 0.0)
    assert result.interval == pytest.approx((low, high), abs=1e-4)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("ruler"), train__steps=1, train__tokens_per_step=256, **text)


def test_the_command_prints_a_table(run, capsys):
    flags = ["--tasks", "niah_single_2,vt", "cwe", "--questions", "3", "--depths", "3", "--device", "cpu"]
    assert main(["eval", "ruler", str(run), "--lengths", "256,512", *flags]) == 0
    lines = capsys.readouterr()
    found = json.loads(lines.out.splitlines()[-1])
    assert [(f["length"], f["task"]) for f in found["found"] if f["depth"] is None] == [
        (n, task) for n in (256, 512) for task in ("niah_single_2", "vt")
    ]
    assert "not comparable with published" in lines.out
    assert "skipped: cwe does not fit in 256 tokens" in lines.err
    assert len(found["skipped"]) == 2
    assert len(found["found"]) == 10


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "qa_1"], "tasks=qa_1 (flag): entry 1: must be 'niah_single_1'"),
        (["--questions", "0"], "questions=0 must be at least 1"),
        *(
            (["--lengths", "64", "--tasks", task], f"{task} does not fit in 64 tokens")
            for task in ("cwe", "fwe", "niah_multikey_2", "vt")
        ),
        (["--lengths", "9999999"], "validation tokens for texts of 9,999,999"),
    ],
)
def test_invalid_options_are_refused(flags, said, run, capsys):
    assert main(["eval", "ruler", str(run), "--device", "cpu", *flags]) != 0
    assert said in capsys.readouterr().err
