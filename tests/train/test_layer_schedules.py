"""A model whose layers differ (window, nsa, dense) trains, resumes, reports, generates and exports."""

from __future__ import annotations

import json

import pytest
import torch

import tercet
from inference.models import greedy_without_cache, trained
from runs import train_small
from tercet.interop.huggingface.export import as_transformers_model, export
from tercet.interop.huggingface.import_hf import import_model
from tercet.report.read import read_run
from tercet.telemetry.events import LayersObserved

MIXED = {"model__layers": 3, "model__attention": "window,nsa,dense", "model__nsa__window": 9, "log__every": 1}
PROMPT = [(37 * i * i + 11) % 251 for i in range(40)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = trained(tmp_path_factory.mktemp("mixed") / "run", **MIXED, train__steps=2)
    assert train_small(folder, checkpoint__async_save=False, **MIXED, train__steps=3, resume="auto") == 0
    return folder


def test_the_record_names_each_layers_kind_and_has_statistics_of_sparse_layers_only(run):
    record = read_run(run)
    assert record.attention == ["window", "nsa", "dense"]
    observed = [e for e in record.events[0] if isinstance(e, LayersObserved)][-1]
    assert observed.attention == ["window", "nsa", "dense"]
    assert [share is None for share in observed.gate_share_window] == [True, False, True]
    assert {(layer, branch) for layer, branch, *_ in record.route_counts} == {
        (0, "window"), (1, "compressed"), (1, "selected"), (1, "window"), (2, "dense")
    }  # fmt: skip


def test_it_generates_the_same_tokens_from_run_and_export_with_and_without_cache(run, tmp_path):
    model = tercet.load_model(run)
    options = {"max_new_tokens": 12, "temperature": 0, "eos_id": -1}
    tokens = greedy_without_cache(model, PROMPT, 12)
    assert tercet.generate(model, PROMPT, **options).tokens == tokens
    theirs = as_transformers_model(model)
    theirs.generation_config.eos_token_id = None
    assert theirs.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, 40:].tolist() == tokens
    folder = export(run, tmp_path / "hf")
    assert json.loads((folder / "config.json").read_text())["tercet"]["attention"] == "window,nsa,dense"
    import_model(folder, tmp_path / "back")
    assert tercet.generate(tercet.load_model(tmp_path / "back"), PROMPT, **options).tokens == tokens
