"""`tercet eval lm-eval`: the scores that lm-eval reads off a model are those of the model."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

import tercet
from inference.models import language_model
from tercet.cli import main
from tercet.config.load import write_config

pytest.importorskip("lm_eval")

from tercet.inference.harness import HarnessModel


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def model():
    return language_model()


def log_probabilities(model, tokens):
    """Of each token after the first, given those before it."""
    with torch.no_grad():
        logs = model(torch.tensor([tokens]))[0].log_softmax(-1)
    return [float(logs[i, token]) for i, token in enumerate(tokens[1:])]


def test_continuations_are_scored_in_any_batch(model):
    pairs = [("the quick", " fox"), ("a", "b"), ("", "alone"), ("x" * 300, "after a long context")]
    expected = []
    for context, continuation in pairs:
        tokens = ([*context.encode()] or [0]) + [*continuation.encode()]
        logs = log_probabilities(model, tokens[-model.context - 1 :])
        expected.append(sum(logs[-len(continuation) :]))
    for batch in (1, 3):
        found = HarnessModel(model, batch).loglikelihood(requests(*pairs), disable_tqdm=True)
        assert [score for score, _ in found] == pytest.approx(expected, abs=1e-3)
        assert not any(greedy for _, greedy in found)
    made = tercet.generate(model, "abc", max_new_tokens=4, temperature=0, eos_id=-1)
    if made.text.isascii() and "\0" not in made.text:
        assert HarnessModel(model, 1).loglikelihood(requests(("abc", made.text)), disable_tqdm=True)[0][1]


def test_long_texts_are_scored_in_windows(model):
    text = "def f(x):\n    return x\n" * 12
    assert len(text) > 2 * model.context
    (found,) = HarnessModel(model, 2).loglikelihood_rolling(requests((text,)))
    tokens, expected = [0, *text.encode()], 0.0
    for first in range(0, len(text), model.context):
        end = min(first + model.context, len(text))
        logs = log_probabilities(model, tokens[max(0, end - model.context) : end + 1])
        expected += sum(logs[first - end :])  # the last window sees a full context too
    assert found == pytest.approx(expected, rel=1e-4)


def test_generation_stops_where_the_task_says(model):
    options = {"max_gen_toks": 12, "do_sample": False}
    whole = tercet.generate(model, "abc", max_new_tokens=12, temperature=0).text
    found = HarnessModel(model, 2).generate_until(
        requests(("abc", options), ("abc", options | {"until": [whole[3:5]]}), ("y" * 500, options))
    )
    assert found[0] == whole
    assert found[1] == whole[: whole.index(whole[3:5])]


TASK = """\
task: little_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/texts.jsonl
  cache_dir: {folder}/cache
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def test_the_command_runs_a_task_and_prints_its_results(tmp_path, capsys, model):
    from safetensors.torch import save_file

    texts = ["import os\n", "print(1)\n"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "little_text.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "run").mkdir()
    write_config(model.run, {}, tmp_path / "run")
    save_file(model.state_dict(), tmp_path / "run" / "model.safetensors")
    flags = {"--include": tmp_path, "--out": tmp_path / "all.json", "--tasks": "little_text"}
    command = ["eval", "lm-eval", str(tmp_path / "run"), *(str(word) for pair in flags.items() for word in pair)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    out = out.splitlines()
    assert err.startswith("loading lm-eval …\n")  # before seconds of silence
    nats = -sum(sum(log_probabilities(model, [0, *text.encode()])) for text in texts)
    expected = nats / math.log(2) / sum(map(len, texts))
    assert json.loads(out[-1])["results"]["little_text"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)
    assert any(line.startswith("| little_text | bits_per_byte | ") for line in out)
    assert json.loads((tmp_path / "all.json").read_text())["results"]
