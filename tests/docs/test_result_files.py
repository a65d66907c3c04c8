"""The committed result files are of the runs that the results pages describe."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tercet.config.load import differences, load

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SETTINGS = RESULTS / "block-settings"
BLOCK_SETTINGS = {"model.nsa.compress_block", "model.compression", "model.compress_selected_keys"}


def flags_of(command: str) -> dict[str, str]:
    words = command.split()
    return dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))


@pytest.mark.parametrize("name", ["nsa", "dense"])
def test_documented_commands_give_the_recorded_configuration(name: str) -> None:
    page = (RESULTS / "block-settings.md").read_text(encoding="utf-8")
    common = page.split('FLAGS="', 1)[1].split('"', 1)[0]
    (command,) = re.findall(rf"^tercet train (.* --run.dir runs/settings-{name}) \$FLAGS$", page, re.MULTILINE)
    given = flags_of(f"{command} {common}")
    assert given.pop("resume") == "auto"
    recorded = load(file=SETTINGS / f"{name}-config.toml").config
    found = differences(load(preset=given.pop("preset"), flags=given).config, recorded).keys()
    # Dense attention does not read the block settings, and its preset has other values than the recorded run.
    # When they ran, the defaults of log.tensorboard and train.cuda_graph were true and off, and samples began with def.
    changed = {"run.dir", "log.tensorboard", "train.cuda_graph", "train.sample_prompt"}
    assert found - (BLOCK_SETTINGS if name == "dense" else set()) == changed


def test_runs_with_other_block_settings_differ_in_those_only() -> None:
    nsa, paper, dense = (load(file=SETTINGS / f"{name}-config.toml").config for name in ("nsa", "paper", "dense"))
    assert differences(nsa, paper).keys() == BLOCK_SETTINGS
    assert differences(paper, dense).keys() == {"run.name", "model.attention"}


def test_the_window_runs_differ_in_the_documented_settings_only() -> None:
    kinds = ("w128", "w512", "w512-shared", "dense")
    w128, w512, shared, dense = (load(file=SETTINGS / "windows" / f"{kind}-config.toml").config for kind in kinds)
    names = {"run.name", "run.dir"}
    assert differences(w128, w512).keys() - names == {"model.nsa.window"}
    assert differences(w512, shared).keys() - names == {"model.shared_kv"}
    assert differences(w512, dense).keys() - names == {"model.attention"}  # dense does not read the window


@pytest.mark.parametrize(
    ("run", "selector", "others"),
    [
        ("dense-matched-1", "compressed", {"model.attention", "model.ffn_dim"}),  # dense does not read the selector
        ("all-1", "compressed", {"model.nsa.select_count"}),
        ("random-1", "random", set()),
        ("compressed-1", "compressed", set()),
        *((f"dense-{seed}", "compressed", {"model.attention"}) for seed in (1, 2)),
        *((f"dense-{rate}-1", "learned", {"model.attention", "train.lr"}) for rate in ("5e-4", "2e-3")),
        *((f"learned-{seed}", "learned", set()) for seed in (1, 2)),
        *((f"two-branch-{seed}", "learned", {"model.branches"}) for seed in (1, 2)),
    ],
)
def test_controls_differ_from_nsa_in_the_documented_settings_only(run: str, selector: str, others: set[str]) -> None:
    config = load(file=RESULTS / "evidence" / f"{run}-config.toml").config
    nsa = load(file=RESULTS / "retrieval" / "learned-config.toml").config
    here = {"run.name", "run.dir", "run.seed", "log.tensorboard", "train.sample_tokens", "checkpoint.keep"}
    assert differences(config, nsa).keys() - here - {"model.selector"} == others
    assert (config.run.seed, config.model.selector) == (int(run[-1]), selector)


def test_the_production_run_and_its_baseline_differ_in_attention_only() -> None:
    names = ("production", "production-dense")
    two_branch, dense = (load(file=RESULTS / "production" / f"{name}-config.toml").config for name in names)
    assert differences(two_branch, dense).keys() == {"run.name", "model.attention", "model.branches"}


def test_the_production_run_repeated_the_steps_that_a_kill_had_cost() -> None:
    with (RESULTS / "production" / "repeated.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 34
    assert all(row["before"] == row["after"] for row in rows)


@pytest.mark.parametrize("folder", ["evidence", "production", "retrieval", "conversion"])
def test_no_result_names_a_path_of_the_machine_that_wrote_it(folder: str) -> None:
    for file in (RESULTS / folder).rglob("*.*"):
        assert not re.search(r"(?<![\w.])/(tmp|work|root|home)/", file.read_text(encoding="utf-8")), file
