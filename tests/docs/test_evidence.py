"""The scripts behind docs/results/evidence.md: kinds of runs, tables from run folders, near-copies, text of manuals."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import small, train_small
from tercet.config.load import load
from tercet.data.order import document_hash, validation_threshold
from tercet.model.cost import parameters

SCRIPTS = Path(__file__).parents[2] / "scripts"
NEAR: dict[str, Any] = runpy.run_path(str(SCRIPTS / "near_copies.py"))
TEXT: dict[str, Any] = runpy.run_path(str(SCRIPTS / "manuals_text.py"))


def test_the_matched_dense_model_has_the_parameters_of_nsa() -> None:
    script = (SCRIPTS / "evidence.sh").read_text(encoding="utf-8")
    (width,) = re.findall(r"MATCHED:-(\d+)", script)
    (learned,) = re.findall(r"MATCHED=(\d+) for learned", script)
    for selector, ffn in (("compressed", width), ("learned", learned)):
        nsa = parameters(load(preset="m7c", flags={"model.selector": selector}).config.model).total
        dense = parameters(load(preset="m7c-dense", flags={"model.ffn_dim": ffn}).config.model).total
        assert abs(dense / nsa - 1) < 0.005
        assert int(ffn) % 16 == 0  # for the tensor cores


def test_a_kind_that_does_not_exist_is_refused() -> None:
    command = ["bash", str(SCRIPTS / "evidence.sh"), "train", "sparse", "corpus", "runs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "STEPS": "1"})
    assert done.returncode == 2
    assert "kind sparse is unknown" in done.stderr


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """evidence_tables.py, with the results of two seeds of NSA and of dense, and of other runs, all by the trainer."""
    folder = tmp_path_factory.mktemp("evidence")
    module: dict[str, Any] = runpy.run_path(str(SCRIPTS / "evidence_tables.py"))
    module["runs"].__globals__["FOLDER"] = folder / "results"
    train_small(folder / "linux-nsa-1", train__val_tokens=256, train__steps=3)
    made = module["collect"](folder / "linux-nsa-1")
    module["save"](made, folder / "linux-nsa-1")
    losses = {"linux-nsa-2": 2.0, "linux-dense-1": 2.5, "linux-dense-2": 3.0, "linux-random-blocks-2": 4.0}
    others = {"linux-nsa-small-2e-3": 3.5, "linux-nsa-small-1e-3": 3.0, "linux-dense-8192-600s": 1.5}
    for name, loss in (losses | others | {"linux-nsa-1": 1.0}).items():
        run = made | module["NAME"].fullmatch(name).groupdict() | {"name": name, "validation": [[2, 5.0], [3, loss]]}
        run |= {"step_seconds": 0.5, "needles": [[1024, 0.0, 10, 16], [1024, 1.0, 3, 16]]}
        run |= {"by_position": [[0, 7, 8, 9.0], [8, 15, 8, loss]], "learning_rate": float(run["rate"] or 1e-3)}
        module["save"](run, folder / "linux-nsa-1")
    return module | {"folder": folder}


def test_a_run_folder_is_collected(script: dict[str, Any]) -> None:
    (run,) = script["runs"](corpus="linux", kind="random-blocks", seed="2")
    assert run["steps"] == 3
    assert run["parameters"] == parameters(small().model).total
    assert [step for step, _ in run["training"]] == [1, 2, 3]
    assert run["versions"]["torch"]


def test_tables_show_means_and_ranges_over_seeds(script: dict[str, Any]) -> None:
    table = script["controls"]()
    count = f"{parameters(small().model).total:,}"
    assert f"| NSA (`m7c`) | 2 | {count} | 1.5000 (1.0000–2.0000) | −45.5% | 0.500 |" in table
    assert f"| dense | 2 | {count} | 2.7500 (2.5000–3.0000) | | 0.500 |" in table
    assert f"| NSA, random blocks | 1 | {count} | 4.0000 | +45.5% | 0.500 |" in table


def test_seeds_are_compared_with_the_same_seed(script: dict[str, Any]) -> None:
    assert "| linux | NSA (`m7c`) | −60.00%, −33.33% |" in script["seeds"]()


def test_other_tables(script: dict[str, Any]) -> None:
    assert "| 8–15 | 1.5000 | 4.0000 | 2.7500 |" in script["context"]()
    assert "| dense | 13 of 32 |" in script["needles"]()
    assert "| NSA (`m7c`) | **3.0000** | 3.5000 |" in script["rates"]()
    assert "| 8,192 | dense | 2 | 0M | 1.5000 |" in script["equal_time"]()


def test_pictures_are_drawn(script: dict[str, Any]) -> None:
    assert [path.name for path in script["draw"]()] == ["linux-tokens.svg", "seconds-8192.svg"]


def test_an_unfinished_run_is_refused(script: dict[str, Any], tmp_path: Path) -> None:
    run = shutil.copytree(script["folder"] / "linux-nsa-1", tmp_path / "linux-nsa-3")
    logged = (run / "training.csv").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "training.csv").write_text("".join(logged[:-1]), encoding="utf-8")
    with pytest.raises(ValueError, match="2 of 3 steps"):
        script["collect"](run)


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
