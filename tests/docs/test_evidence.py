"""The scripts behind docs/results/evidence.md: kinds of runs, tables, near-copies, text of manuals."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.config.load import load
from tercet.data.order import document_hash, validation_threshold
from tercet.model.cost import parameters

SCRIPTS = Path(__file__).parents[2] / "scripts"
NEAR: dict[str, Any] = runpy.run_path(str(SCRIPTS / "near_copies.py"))
TEXT: dict[str, Any] = runpy.run_path(str(SCRIPTS / "manuals_text.py"))


def test_the_matched_dense_model_has_the_parameters_of_two_branch() -> None:
    (width,) = re.findall(
        r"dense-matched\) .* --model.ffn_dim (\d+)", (SCRIPTS / "kinds.sh").read_text(encoding="utf-8")
    )
    dense = parameters(load(preset="m7c-dense", flags={"model.ffn_dim": width}).config.model).total
    for kind in ({"preset": "m7c", "flags": {"model.selector": "compressed"}}, {"preset": "m7c-two-branch"}):
        assert abs(dense / parameters(load(**kind).config.model).total - 1) < 0.005


def test_a_kind_that_does_not_exist_is_refused() -> None:
    command = ["bash", str(SCRIPTS / "retrieval.sh"), "train", "sparse", "corpus", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert "kind sparse is unknown" in done.stderr


def test_kept_files_do_not_name_folders_of_the_machine(tmp_path: Path) -> None:
    scripts, kept, runs = tmp_path / "scripts", tmp_path / "docs" / "results" / "evidence", tmp_path / "runs-2"
    kept.mkdir(parents=True)
    (runs / "dense").mkdir(parents=True)
    scripts.mkdir()
    for name in ("retrieval.sh", "kinds.sh"):
        (scripts / name).write_bytes((SCRIPTS / name).read_bytes())
    (runs / "dense" / "config.toml").write_text('path = ["/data/linux"]  # flag\n')
    (runs / "dense" / "val.csv").write_text("step,loss\n1700,0.5\n")
    (runs / "dense" / "training.csv").write_text("step,loss,lr\n10,4.0,1e-3\n")
    for name in ("perplexity.txt", "needle.txt", "ruler.json"):
        (runs / f"dense-{name}").write_text(json.dumps({"run": f"{runs}/dense"}))
    subprocess.run(["bash", str(scripts / "retrieval.sh"), "keep", "dense", str(runs), "2"], check=True)
    assert (kept / "dense-2-config.toml").read_text() == 'path = ["corpus/linux"]  # flag\n'
    assert (kept / "dense-2-training.csv").read_text() == "step,loss\n10,4.0\n"
    assert json.loads((kept / "dense-2-ruler.json").read_text()) == {"run": "runs/dense"}
    assert len(list(kept.iterdir())) == 6


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    """evidence_tables.py with runs of seeds 1 and 2 of its own, and with no others."""
    module: dict[str, Any] = runpy.run_path(str(SCRIPTS / "evidence_tables.py"))
    module["found"].__globals__.update(FOLDER=tmp_path, OWN={})
    losses = {"dense-2": 2.0, "two-branch-2": 1.9, "dense-1": 2.5, "two-branch-1": 2.0, "random-1": 3.0}
    for name, loss in losses.items():
        (tmp_path / f"{name}-validation.csv").write_text(f"step,loss\n1300,9.0\n1700,{loss}\n")
    return module


def test_runs_are_compared_with_dense_of_the_same_seed(tables: dict[str, Any]) -> None:
    assert tables["against_dense"]("two-branch") == pytest.approx([2.0 / 2.5, 1.9 / 2.0])
    assert tables["against_dense"]("random") == pytest.approx([3.0 / 2.5])
    assert tables["against_dense"]("all") == []


def test_losses_on_other_text_are_not_compared(tables: dict[str, Any], tmp_path: Path) -> None:
    for kind, tokens in (("dense", 10), ("two-branch", 11)):
        row = {"first": 8, "last": 15, "tokens": tokens, "loss": 1.0}
        (tmp_path / f"{kind}-2-perplexity.txt").write_text(json.dumps({"by_position": [row]}))
    for path in tmp_path.glob("*-1-validation.csv"):
        path.unlink()
    with pytest.raises(ValueError, match="seed 2: the models were evaluated on different text"):
        tables["positions"]()


def test_learning_rates_are_compared_by_the_seeds_that_all_of_them_have(tables: dict[str, Any], tmp_path: Path) -> None:
    losses = {("nsa", 1, 1e-3): 1.0, ("nsa", 1, 2e-3): 2.0, ("dense", 1, 1e-3): 4.0, ("dense", 1, 2e-3): 2.5}
    alone = {("nsa", 2, 1e-3): 9.0, ("dense", 2, 1e-3): 9.0}  # no other rate with this seed
    lines = [f"linux,{kind},{seed},{rate},800,{loss}" for (kind, seed, rate), loss in (losses | alone).items()]
    (tmp_path / "tiny-seeds.csv").write_text(
        "\n".join(["corpus,kind,seed,learning_rate,steps,validation_loss", *lines])
    )
    *_, low, high, best = tables["tiny_rates"]().splitlines()
    assert low == "| 0.001 | **1.000** | 4.000 | −75.0% |"
    assert high == "| 0.002 | 2.000 | **2.500** | −20.0% |"
    assert best == "| best of each | 1.000 | 2.500 | −60.0% |"


def words(seed: int, count: int = 400) -> str:
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(0, 5000, count))


def test_shingles_measure_how_much_of_a_text_occurs_elsewhere() -> None:
    shingles, covered = NEAR["shingles"], NEAR["covered"]
    text = words(1, 4000)
    half = " ".join(text.split()[:2000])
    assert covered(shingles(half), shingles(text)) == 1.0
    assert covered(shingles(text), shingles(half)) == pytest.approx(0.5, abs=0.08)
    assert covered(shingles(text), shingles(words(2, 4000))) == 0.0


def test_near_copies_are_removed_and_held_out_text_is_not_in_training(tmp_path: Path) -> None:
    originals = [words(seed) for seed in range(60)]
    changed = [text.replace(text.split()[200], "new") for text in originals[:20]]  # near-copies
    mixed = [originals[40] + " " + words(100 + i, 900) for i in range(20)]  # a third of it is in training text
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in originals + changed + mixed))
    result = NEAR["remove"](source, target, 0.3)
    kept = [json.loads(line)["text"] for line in target.read_text().splitlines()]
    assert result["removed_documents"] == 20 + (originals[40] not in kept)
    for original, copy in zip(originals, changed, strict=False):
        assert (original in kept) + (copy in kept) <= 1
    held_out = [text for text in kept if document_hash(text.encode()) < validation_threshold(0.3)]
    assert held_out
    training = NEAR["union"]([NEAR["shingles"](text) for text in kept if text not in held_out])
    assert all(NEAR["covered"](NEAR["shingles"](text), training) < 0.2 for text in held_out)
    assert result["near_copies"] == 0


def test_text_of_html_and_of_man_pages() -> None:
    page = (
        "<head><title>x</title></head><nav>menu</nav><main><h1>Title</h1><p>One &amp;\n two</p><pre>a\n  b</pre></main>"
    )
    assert TEXT["squeeze"](TEXT["html_text"](page)) == "Title\n\nOne & two\n\na\n  b"
    page = '.de XX\n..\n.TH LS 1\n.SH NAME\nls \\- list\n.\\" note\n.B \\fBls\\fR "file"\n'
    assert TEXT["squeeze"](TEXT["roff_text"](page)) == "NAME\nls - list\nls file"
