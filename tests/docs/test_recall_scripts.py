"""The recall recipes of the manual: they can be run, and ask what windows cannot answer."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tercet.config.load import load
from tercet.data.loader import build_loader
from tercet.inference.load import LanguageModel
from tercet.inference.recall import recall_by_distance, window_reach

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_most_facts_of_the_small_recipe_lie_beyond_the_windows() -> None:
    config = load(file=SCRIPTS / "recall.toml", flags={"run.device": "cpu"}).config
    model = LanguageModel(config).eval()
    asked = recall_by_distance(model, length=config.data.seq_len, documents=32, batch=16)
    far = sum(r.asked for r in asked if r.last > window_reach(model))
    assert far > sum(r.asked for r in asked) / 2


def test_every_stage_of_every_scale_has_documents_and_more_than_windows_reach() -> None:
    script = runpy.run_path(str(SCRIPTS / "recall_beyond_windows.py"))
    for scale in script["SCALES"].values():
        for stage in scale.stages:
            run = script["config"](scale, stage, ("window",))
            with build_loader(run.data, seed=0, batch_sequences=1) as loader:
                assert next(iter(loader)).tokens.shape == (1, stage.length)
        reach = run.model.layers * (run.model.nsa.window - 1)
        assert scale.stages[-1].length > 4 * reach


def test_curves_of_two_files_make_one_picture(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPTS / "recall_beyond_windows.py"))
    files = []
    for kind, accuracy in (("NSA", 1.0), ("window only", 0.0)):
        found = [{"last": 127, "asked": 64, "accuracy": accuracy}, {"last": 255, "asked": 9, "accuracy": accuracy}]
        files.append(tmp_path / f"{kind}.json")
        files[-1].write_text(json.dumps({"reach": 30, "models": {kind: {"by_distance": found}}}))
    script["draw"](files, tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert "<svg" in drawn
