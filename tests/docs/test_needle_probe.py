"""The script behind the retrieval page: the probe of needle questions."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.models import language_model
from tercet.attention.config import NSAConfig
from tercet.inference.ruler import QuestionWriter

PROBE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "needle_probe.py"))


def test_a_layer_that_attends_to_the_needle_alone_has_all_mass_there() -> None:
    config = NSAConfig(select_block=64, select_count=4, select_initial=1, select_local=1)
    rows, needle = torch.tensor([1000, 1001]), 5
    q, k = torch.zeros(1024, 2, 16), torch.zeros(1024, 1, 16)
    q[rows], k[needle * 64 + 7] = 10.0, 10.0
    block_indices = torch.tensor([[0, 2, 3, 15], [0, needle, 6, 15]]).repeat_interleave(512, 0)[:, None]
    block_indices[1000] = block_indices[0]
    (found,) = PROBE["measure"](PROBE["Attended"](q, k, block_indices), rows, [needle], config)
    assert found["mass"] == pytest.approx([1.0, 1.0])
    assert found["rank"] == [1, 1]
    assert found["chosen"] == [False, True]
    (elsewhere,) = PROBE["measure"](PROBE["Attended"](q, k, block_indices), rows, [3], config)
    assert elsewhere["mass"] == pytest.approx([0.0, 0.0])
    assert min(elsewhere["rank"]) > 1
    (forced,) = PROBE["measure"](PROBE["Attended"](q, k, block_indices), rows, [0], config)
    assert forced["rank"] == [None, None]


@pytest.mark.parametrize("kind", ["learned", "compressed", "block-sparse"])
def test_the_probe_measures_every_layer_and_kv_head(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of a text without any needles in it\n" for i in range(2000)))
    own = {"model__gate": "none", "model__branches": ["selected"], "model__shared_kv": True}
    model = language_model(
        data__source="text", data__path=str(file), data__validation_fraction=0.5, data__seq_len=128,
        **(own if kind == "block-sparse" else {"model__selector": kind}),
    )  # fmt: skip
    found = PROBE["probe"](model, QuestionWriter(model, "training", 512, 0), 512, 3)
    assert (found["length"], found["questions"]) == (512, 3)
    places = [(cell["layer"], cell["kv_head"]) for cell in found["cells"]]
    assert places == [(i, g) for i in range(model.config.layers) for g in range(model.config.kv_heads)]
    for cell in found["cells"]:
        assert 0 < cell["mass"] < 1
        assert 0 <= cell["chosen"] <= 1
        assert cell["rank"] >= 1
