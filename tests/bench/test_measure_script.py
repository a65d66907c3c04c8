"""scripts/measure.py: every part runs, saves its rows, and keeps them when it is cut off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import pytest
from measurements import fp8, operator, shapes, steps, train

from tercet.bench import train_cell
from tercet.bench.train_cell import configured
from tercet.config.load import load
from tercet.doctor.memory import fits, step_memory
from tercet.interop.options import attention_options
from tercet.model.config import ModelConfig
from tercet.model.selector import BlockSelector

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure.py"


def test_finished_rows_are_kept_when_a_part_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(quick: bool) -> Iterator[dict[str, Any]]:
        yield {"shape": "first"}
        raise RuntimeError("out of memory")

    monkeypatch.setattr(operator, "operator", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure.run_part("operator", tmp_path, True, {"device": "CPU"})
    saved = json.loads((tmp_path / "operator.json").read_text())
    assert (saved["results"], saved["complete"]) == ([{"shape": "first"}], False)


def test_a_dry_run_does_not_replace_measured_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "decode.json"
    file.write_text(json.dumps({"quick": False, "results": [1]}))
    monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path), "--quick", "--parts", "decode"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "give another folder" in capsys.readouterr().err
    assert json.loads(file.read_text())["results"] == [1]


def test_arguments_are_parsed_before_torch_is_imported() -> None:
    code = "import measure, sys; sys.argv[1:] = ['--wrong']; print('torch' in sys.modules); measure.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert all(callable(measure.imported(part.measure)) for part in measure.PARTS.values())


def test_a_dry_run_names_the_parts_that_need_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = json.dumps({"device": "CPU", "torch": "", "triton": "", "tercet": ""})
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=about))
    monkeypatch.setattr(sys, "argv", ["measure.py", str(tmp_path), "--quick", "--parts", "decode,kernels"])
    assert measure.main() == 0
    assert re.findall(r"^(\S+) +skipped: needs a GPU", capsys.readouterr().out, re.M) == ["decode", "kernels"] * 2


def test_a_failing_subprocess_fails_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernels")

    monkeypatch.setattr("tercet.bench.train.measured", broken)
    with pytest.raises(RuntimeError, match="no kernels"):
        list(train.train(True))


def test_larger_models_fit_one_gpu_as_their_presets_are() -> None:
    cells = steps.large_cells(False)
    presets = {
        f"{size}{length}{dense}" for size in ("350m", "1b") for length in ("", "-64k") for dense in ("", "-dense")
    }
    assert {cell["preset"] for cell in cells} == presets
    available = round(139.8 * 2**30)
    for cell in cells:
        config, preset = configured(cell, 2), load(preset=cell["preset"]).config
        assert config.train.activation_checkpointing == preset.train.activation_checkpointing
        assert config.data.seq_len == preset.data.seq_len
        assert fits(step_memory(config, "bf16").total, available), cell["preset"]


def test_blocks_of_every_size_read_as_many_tokens() -> None:
    for size, cells in steps.block_cells(False).items():
        for cell in cells:
            nsa = configured(cell, 2).model.nsa
            assert (nsa.select_block, nsa.select_block * nsa.select_count) == (size, 1024)


def test_modes_of_a_length_are_measured_in_a_row_by_importance() -> None:
    cells = train.mode_cells(False)
    assert list(dict.fromkeys(cell["length"] for cell in cells)) == [8192, 65536, 2048, 32768, 4096, 16384]
    modes = [*train.MODES, "dense packed"]
    assert [cell["mode"] for cell in cells] == 6 * modes
    assert {cell["batch"] * cell["length"] for cell in cells} == {65536}
    assert all(cell["packed"] == (cell["mode"] != "dense") for cell in cells)


@pytest.mark.parametrize("selector", ["compressed", "learned"])
def test_the_block_sparse_mode_is_what_an_import_gives(selector: str) -> None:
    name = "block-sparse" if selector == "compressed" else "block-sparse learned"
    cell = next(cell for cell in train.mode_cells(False) if cell["mode"] == name)
    dense = load(preset="m7c-dense", flags={"model.compress_selected_keys": False}).config.model.model_dump()
    own = set(attention_options("block-sparse", 0, selector)) | {"shared_kv", "branches"}
    imported = {key: value for key, value in dense.items() if key not in own}
    wanted = ModelConfig.model_validate(imported | attention_options("block-sparse", 0, selector))
    assert configured(cell, 2).model == wanted


def test_steps_with_a_learned_selector_include_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    whole = BlockSelector.loss_of_rows
    monkeypatch.setattr(
        BlockSelector, "loss_of_rows", lambda *given, **more: computed.append(1) or whole(*given, **more)
    )
    for cell in train.mode_cells(True)[: len(train.MODES)]:
        computed.clear()
        train_cell.measure(cell | {"flags": cell["flags"] | {"train.compile": "off"}}, 1, 0)
        assert bool(computed) == cell["mode"].endswith("learned"), cell["mode"]


def test_the_warm_up_of_modes_runs_every_cell() -> None:
    asked = [json.loads(job.argv[-1]) for job in train.warmups() if "--compile" not in job.argv]
    compiled = [(cell["mode"], cell["length"]) for job in asked for cell in job["cells"]]
    wanted = [(cell["mode"], cell["length"]) for cell in train.mode_cells(False)]
    assert sorted(compiled) == sorted(wanted)


def test_the_warm_up_compiles_what_the_chosen_parts_run() -> None:
    assert {job.name.split()[0] for job in measure.warmups(["shapes", "fp8"])} == {"shapes", "fp8"}
    for job in measure.warmups(list(measure.PARTS)):
        if "--compile" in job.argv:
            assert callable(measure.imported(measure.PARTS[job.argv[-1].partition(":")[0]].compile))
    assert [job.seconds for job in measure.warmups(["train"])] == sorted(
        (job.seconds for job in measure.warmups(["train"])), reverse=True
    )


def test_shapes_are_timed_and_a_shape_that_fails_does_not_end_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shapes._times

    def failing(shape: Any, dense: bool) -> dict[str, float]:
        if shape.T == 200:
            raise RuntimeError("out of memory\nat some address")
        return whole(shape, dense)

    monkeypatch.setattr(shapes, "_times", failing)
    rows = list(shapes.shapes(True))
    assert [row.get("failed") for row in rows] == [None, "out of memory", None] * 2
    assert {(row["head"], row["value"]) for row in rows} == {(16, 16), (24, 16)}
    for row in rows:
        assert row["correct"]
        if "failed" not in row:
            assert row["ms_per_1k_tokens"] == pytest.approx(1000 * row["nsa_both_ms"] / row["tokens"])


def test_float8_layers_compute_what_bf16_computes() -> None:
    (row,) = fp8.fp8(True)
    assert 0 < row["row_error"] < row["tensor_error"] < 0.08  # e4m3 has 3 bits of mantissa, e5m2 has 2
    assert {"bf16_ms", "tensor_ms", "tensor_matmul_ms", "row_ms", "row_matmul_ms"} <= row.keys()
    assert set(fp8.layers().values()) == {(2048, 11264), (5632, 2048), (2048, 4656), (2048, 2048)}


def test_recorded_blocks_are_timed_before_smooth_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(name: str, kind: str, _: Any, options: Any, known: Any) -> dict[str, Any]:
        return {"shape": name, "inputs": kind, "graph": options.graph, "layers": []}

    monkeypatch.setattr("tercet.bench.attention.bench", bench)
    monkeypatch.setattr(operator, "free", lambda: None)
    rows = list(operator.operator(False))
    kinds = list(dict.fromkeys((row["inputs"], row["graph"]) for row in rows))
    assert kinds == [("random", True), ("recorded", False), ("smooth", False)]


@pytest.mark.slow
def test_a_dry_run_completes_every_part(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--quick", "--parts", ",".join(measure.PARTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in (name for name, part in measure.PARTS.items() if not part.gpu_only):
        assert json.loads((tmp_path / f"{file}.json").read_text())["complete"], file
