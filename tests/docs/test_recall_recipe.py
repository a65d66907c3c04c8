"""The recall recipe of the manual asks what windows cannot answer."""

from __future__ import annotations

from pathlib import Path

from tercet.config.load import load
from tercet.inference.load import LanguageModel
from tercet.inference.recall import recall_by_distance, window_reach

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_most_facts_of_the_small_recipe_lie_beyond_the_windows() -> None:
    config = load(file=SCRIPTS / "recall.toml", flags={"run.device": "cpu"}).config
    model = LanguageModel(config).eval()
    asked = recall_by_distance(model, length=config.data.seq_len, documents=32, batch=16)
    reach = window_reach(config.model)
    assert reach is not None
    far = sum(r.asked for r in asked if r.last > reach)
    assert far > sum(r.asked for r in asked) / 2
