"""The examples run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_train_evaluate_generate_export_transformers_and_lm_eval(tmp_path):
    results = module("everything").main(tmp_path, steps=12)
    assert results["loss"] < 5.0  # ln 256 is 5.55
    assert 0 <= results["accuracy"] <= 1


def test_the_layer_in_a_plain_loop_learns():
    losses = module("layer_in_a_loop").main(steps=25)
    assert losses[-1] < 0.5 * losses[0]


def test_the_layer_in_a_transformers_model_learns():
    losses = module("layer_in_transformers").main(steps=8)
    assert losses[-1] < losses[0]


def test_lora_adapters_of_a_block_sparse_model_learn():
    pytest.importorskip("peft")
    losses = module("lora_block_sparse").main(dense_steps=4, lora_steps=4)
    assert losses[-1] < losses[0]
