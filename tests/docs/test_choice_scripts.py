"""Scripts about the choice of blocks: the toy measures what it says, and the words of a variant are known ones."""

from __future__ import annotations

import csv
import io
import os
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tercet
from tercet.config.load import differences, load
from tercet.config.schema import RunConfig
from tercet.inference.selection_map import record_selections

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs" / "results" / "block-settings" / "choice"


@pytest.fixture(scope="module")
def toy() -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    yield runpy.run_path(str(ROOT / "scripts" / "choice_toy.py"))
    torch.set_num_threads(threads)  # its runs take one


def test_a_row_for_every_variant_and_seed(toy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["dense", "tie+mean+small", "sparse+learned"]
    assert toy["main"]([*variants, "--seeds", "1", "2", "--steps", "1", "1", "--held-out", "4"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["variant"], row["seed"]) for row in rows] == [(name, seed) for name in variants for seed in ("1", "2")]
    for row in rows:
        assert float(row["copied"]) == pytest.approx(np.log(64), abs=0.5)  # nothing is learnt yet
        assert (row["hit_far"] == "") is (row["variant"] == "dense")


def test_a_word_that_the_toy_does_not_know_is_named(toy: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        toy["main"](["tie+men"])
    assert "variant tie+men: men is unknown" in capsys.readouterr().err


def test_copied_tokens_are_where_the_stream_says(toy: dict[str, Any]) -> None:
    tokens, sources = toy["streams"](np.random.default_rng(0), 3, 256)
    copied, found = toy["places"](tokens, sources)
    assert copied.any(-1).all()
    for row, t in copied.nonzero().tolist():
        places = found[row, t].nonzero()[:, 0].tolist()
        assert sources[row, t + 1] in places
        for place in places:
            assert place <= t
            assert tokens[row, place - 3 : place + 1].tolist() == tokens[row, t - 2 : t + 2].tolist()


def test_means_of_the_selected_keys_choose_as_a_layer_with_tied_keys_does(toy: dict[str, Any]) -> None:
    tokens, _ = toy["streams"](np.random.default_rng(0), 1, 512)
    for variant in ("base", "tie"):  # untrained, φ is the mean
        model = toy["build"]([variant], seed=1, layers=1).eval()
        block = model.blocks[0]
        with torch.no_grad():
            by_means = toy["by_means"](block.attention, block.attention_norm(model.embedding(tokens[:, :-1])))
        (layer,) = record_selections(model, tokens[0, :-1].tolist())
        assert torch.equal(by_means["mean_8"][0], layer.blocks[:, 0]) is (variant == "tie")


def test_chance_is_what_random_scores_hit(toy: dict[str, Any]) -> None:
    nsa = toy["NSA"]
    tokens, sources = toy["streams"](np.random.default_rng(0), 8, 512)
    copied, found = toy["places"](tokens, sources)
    wanted = found.unflatten(-1, (-1, nsa.select_block)).any(-1)
    copied[:, : nsa.select_count * nsa.select_block] = False
    torch.manual_seed(0)
    hits = []
    for _ in range(20):
        blocks = tercet.select_blocks(torch.rand(8, 512, 1, 32), config=nsa)[:, :, 0].long()
        hits.append(wanted[copied].gather(-1, blocks[copied]).any(-1).double().mean().item())
    assert np.mean(hits) == pytest.approx(toy["by_chance"](wanted, nsa)[copied].mean().item(), abs=0.01)


@pytest.mark.parametrize("file", ["toy-512.csv", "toy-2048.csv"])
def test_rows_of_the_retrieval_page_are_what_the_toy_prints(toy: dict[str, Any], file: str) -> None:
    with (RECORDED.parents[1] / "retrieval" / file).open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == toy["COLUMNS"]
    assert {word for row in rows for word in row["variant"].split("+")} <= toy["WORDS"].keys()
    chose = {row["variant"] for row in rows if row["hit_far"]}
    assert {row["variant"] for row in rows if row["correct_far"]} - chose <= {"dense", "base+all"}


@pytest.mark.parametrize("file", ["toy.csv", "toy-option.csv"])
def test_recorded_rows_have_the_columns_that_the_toy_prints(toy: dict[str, Any], file: str) -> None:
    with (RECORDED / file).open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == toy["COLUMNS"]
    later = ("correct_", "mean_") if file == "toy.csv" else ("correct_",)  # columns that these runs did not measure yet
    measured = [name for name in toy["COLUMNS"] if not name.startswith(later)]
    chose = [row for row in rows if row["hit_far"]]
    assert chose
    assert [row["variant"] for row in chose if not all(row[name] for name in measured)] == []
    assert {word for row in rows for word in row["variant"].split("+")} <= toy["WORDS"].keys()


def test_choice_of_blocks_refuses_a_word_that_it_does_not_know(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = ["bash", str(ROOT / "scripts" / "choice_of_blocks.sh"), "corpus", str(runs), "1", "base", "base+l17"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "the word l17 is unknown" in ran.stderr
    assert not runs.exists()  # nor has the first one begun


def configured(arguments: list[str]) -> RunConfig:
    """What `tercet train` makes of flags with one value or none; its own reader takes half a second for each line."""
    flags: dict[str, Any] = {}
    for word in arguments:
        if word.startswith("--"):
            name = word.removeprefix("--").replace(".no_", ".")
            flags[name] = ".no_" not in word
        else:
            flags[name] = word
    return load(preset=flags.pop("preset"), flags=flags).config


def test_choice_of_blocks_trains_every_recorded_variant_as_it_was_recorded(tmp_path: Path) -> None:
    files = {file.name.removesuffix("-config.toml"): file for file in RECORDED.glob("*-config.toml")}
    assert {"base", "l16+mean", "tie+l16+mean", "tie+l16+mean+s32", "l16+s32", "dense"} <= files.keys()
    listener = tmp_path / "python"  # instead of Python: writes down what it is asked for, and does nothing
    listener.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/$$.call\n')
    listener.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "choice_of_blocks.sh"), "corpus/linux", str(tmp_path), "1", *files]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHON": str(listener)})
    calls = [file.read_text().splitlines()[2:] for file in tmp_path.glob("*.call")]
    runs = [configured(call[1:]) for call in calls if call[0] == "train"]
    made = {Path(run.run.dir or "").name: run for run in runs}
    patched = {"tie", "tie+l16", "tie+l16+free"}  # before there was the option: their files say nothing of it
    for variant, file in files.items():
        kept = {"model.compress_selected_keys"} if variant in patched else set()
        found = differences(made[f"{variant}-1"], load(file=file).config)
        learnt = {key for key in found if key == "run.seed" or key.startswith(("model.", "data.", "train."))}
        assert learnt - {"train.sample_prompt"} == kept, variant  # samples of the recorded runs began with "def "
