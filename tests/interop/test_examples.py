"""The examples run, and lm-eval scores what they export."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_model_from_scratch_and_lm_eval_on_its_export(tmp_path):
    assert module("from_scratch").main(tmp_path, train__steps=12, model__layers=2) < 5.0  # ln 256 is 5.55
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "import os\n"
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "little_text.yaml").write_text(TASK.format(folder=tmp_path))
    model, tokenizer = (each.from_pretrained(tmp_path / "exported") for each in (AutoModelForCausalLM, AutoTokenizer))
    scored = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu"), tasks=["little_text"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    tokens = torch.tensor([[tokenizer.eos_token_id, *text.encode()]])
    with torch.no_grad():
        logs = model(tokens).logits[0, :-1].log_softmax(-1)
    nats = -float(logs.gather(1, tokens[0, 1:, None]).sum())
    found = scored["results"]["little_text"]["bits_per_byte,none"]
    assert found == pytest.approx(nats / math.log(2) / len(text), rel=1e-4)


def test_the_operator_alone_equals_dense_where_it_reads_everything():
    example = module("operator_alone")
    assert example.operator() < 1e-5
    losses = example.layer(steps=25)
    assert losses[-1] < 0.5 * losses[0]


def test_lora_adapters_of_a_block_sparse_model_learn():
    pytest.importorskip("peft")
    losses = module("lora").main(steps=8)
    assert losses[-1] < losses[0]
