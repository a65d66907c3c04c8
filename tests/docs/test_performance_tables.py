"""The performance page, the README's table and their plots are what scripts/performance_tables.py generates."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("performance_tables")


@pytest.fixture
def results(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder, from which the script reads its results."""
    monkeypatch.setattr(script.results, "RESULTS", tmp_path)
    return tmp_path


def save(folder: Path, name: str, results: list[dict[str, Any]], **about: Any) -> None:
    told = {"date": "2026-11-16", "device": "a GPU", "torch": "2", "triton": "3", "tercet": "0"}
    told |= {"quick": False, "complete": True}
    (folder / f"{name}.json").write_text(json.dumps({"part": name, **told, **about, "results": results}))


def cell(kind: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "batch": 32, "length": 2048, "checkpointing": "none", "packed": kind == "nsa", "outcome": "ok",
        "tokens_per_s": speed, "ms": 1.0, "peak_gib": 2.0, "first_loss": 5.5, **more,
    }  # fmt: skip


def test_pages_and_plots_are_up_to_date(script: ModuleType) -> None:
    stale = [str(file.relative_to(ROOT)) for file in script.outdated()]
    assert stale == [], "run python scripts/performance_tables.py"


def test_every_table_is_on_a_page(script: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in script.PAGES)
    assert set(re.findall(r"<!-- table:([\w-]+) -->", text)) == script.TABLES.keys()


def test_lines_fit_the_line_length() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if len(line) > 120] == []


def test_missing_results_give_no_numbers(script: ModuleType, results: Path) -> None:
    for name, make in script.TABLES.items():
        optional = name in ("million", "batches", "shapes", "large", "blocks", "fp8")
        assert make() == "" if optional else "not measured" in make()
    assert "not measured" in script.headline()


def test_results_of_two_versions_are_not_mixed(script: ModuleType, results: Path) -> None:
    save(results, "train", [])
    save(results, "decode", [], torch="3")
    with pytest.raises(ValueError, match="mixes 2 devices or versions"):
        script.measured()


def test_the_date_of_every_part_is_stated(script: ModuleType, results: Path) -> None:
    save(results, "train", [])
    save(results, "operator", [])
    save(results, "decode", [], date="2026-11-17")
    when = "Measured on 16 November 2026 (training steps, operator); 17 November 2026 (attention of a decode step)."
    assert when in " ".join(script.measured().split())


def test_dry_runs_are_rejected(script: ModuleType, results: Path) -> None:
    save(results, "train", [], quick=True)
    with pytest.raises(ValueError, match="--quick"):
        script.train.train()


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "dense attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<int>", "optimizer, gradient norm"),
        ("triton_red_fused_add_mul_3", "elementwise, norms, SwiGLU, loss"),
        ("hopper_selected_dkv", "NSA, selected branch"),
        ("kv_major_forward", "NSA, selected branch"),
        ("hopper_forward", "NSA, compressed and window branches"),
        ("scores_kernel", "NSA, scores and block selection"),
        ("delta_kernel", "NSA, gates, delta, QKV split"),
    ],
)
def test_kernels_are_grouped_by_name(script: ModuleType, kernel: str, group: str) -> None:
    assert script.steps.group(kernel) == group


def test_recorded_inputs_get_their_columns_once_they_are_measured(script: ModuleType, results: Path) -> None:

    def measured(kind: str, speedup: float) -> dict[str, Any]:
        times = {"nsa_forward_ms": 1.0, "nsa_both_ms": 3.0, "cudnn_forward_ms": 2.0, "cudnn_both_ms": 9.0}
        return {"shape": "P64k", "inputs": kind, "speedup": speedup, **times}

    save(results, "operator", [measured("random", 4.0), measured("smooth", 5.0)])
    assert "recorded" not in script.operator.operator()
    save(results, "operator", [measured("random", 4.0), measured("smooth", 5.0), measured("recorded", 4.5)])
    head, _, row = script.operator.operator().splitlines()
    assert "| × dense, recorded |" in head
    assert row.startswith("| P 1×64k | 4.00 | 4.50 | 5.00 |")
    assert len(head) <= 120


def shape_row(head: int, length: int, ms: float, **more: Any) -> dict[str, Any]:
    return {
        "heads": 8, "kv_heads": 1, "head": head, "value": min(head, 128), "length": length, "correct": True,
        "ms_per_1k_tokens": ms, "nsa_both_ms": ms, **more,
    }  # fmt: skip


def test_shapes_off_their_neighbours_are_listed(script: ModuleType, results: Path) -> None:
    # time ~ length^0.5 × size: nothing is off
    smooth = [shape_row(h, n, n**0.5 * (h + min(h, 128)) / 2) for h in (64, 96, 128, 192) for n in (1024, 3001, 8192)]
    save(results, "shapes", smooth)
    last = " ".join(script.operator.shapes().split("\n\n")[-1].split())
    assert "No cell is more than 15% off" in last
    assert "Time against head 128: head 64 0.50 to 0.50×, head 96 0.75 to 0.75×" in last
    slow = [dict(row, ms_per_1k_tokens=1.2 * row["ms_per_1k_tokens"]) if row is smooth[4] else row for row in smooth]
    save(results, "shapes", slow)
    last = " ".join(script.operator.shapes().split("\n\n")[-1].split())
    assert "sequences predict: 8/1, head 96, 3,001 (+20%)." in last


def test_larger_models_are_compared_with_dense(script: ModuleType, results: Path) -> None:
    sizes = {"length": 8192, "batch": 8, "peak_gib": 100.0, "ms": 900.0}
    nsa, dense = cell("nsa", 70e3, preset="1b", **sizes), cell("dense", 60e3, preset="1b-dense", **sizes)
    save(results, "large", [{"parity": 0.003, "correct": True}, nsa, dense])
    row = script.steps.large().splitlines()[-1]
    assert row == "| `1b` | 8k | 70k | 60k | **1.17** | 900 / 900 | 100 / 100 |"


def test_what_float8_saves_is_a_share_of_a_measured_step(script: ModuleType, results: Path) -> None:
    layer = {"layer": "FFN up", "preset": "1b", "inputs": 2048, "outputs": 11264, "bf16_ms": 12.0, "bf16_tflops": 755.0}
    save(results, "fp8", [layer | {"tensor_ms": 7.0, "tensor_matmul_ms": 6.0, "tensor_error": 0.05}])
    assert "| 1.71 | 2.00 | – | – | 5.0% / – |" in script.steps.fp8()
    assert "saves" not in script.steps.fp8()
    save(results, "large", [cell("nsa", 70e3, preset="1b", length=8192, batch=8, ms=900.0)])
    assert "saves 90.0 of the 900 ms of a step of `1b` at 8k: 10%." in script.steps.fp8()  # 18 layers


def test_sizes_of_blocks_are_compared_with_64(script: ModuleType, results: Path) -> None:
    speeds = {64: 400e3, 32: 300e3, 128: 440e3}
    save(results, "blocks", [cell("nsa", speed, select_block=size) for size, speed in speeds.items()])
    assert script.steps.blocks().splitlines()[-1] == "| 2k | 400k | 300k | 440k | 0.75 | 1.10 |"


def mode_cells(length: int, speeds: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    return [
        cell("dense" if mode == "dense" else "nsa", speed, mode=mode, length=length, batch=65536 // length, **more)
        for mode, speed in speeds.items()
    ]


def checks(block_sparse: bool = True) -> list[dict[str, Any]]:
    verdicts = {"nsa": True, "block-sparse": block_sparse}
    return [{"mode": mode, "parity": 0.003, "correct": correct} for mode, correct in verdicts.items()]


def test_packed_dense_steps_have_a_column_and_no_ratio(script: ModuleType, results: Path) -> None:
    packed = cell("dense", 300e3, mode="dense packed", length=8192, batch=8, packed=True)
    save(results, "train", [*checks(), *mode_cells(8192, {"dense": 400e3, "nsa": 500e3}), packed])
    lines = script.train.train().splitlines()
    assert (lines[0], lines[2]) == ("| length | dense | dense, packed | NSA |", "| 8k | 400k | 300k | 500k (1.25) |")


def test_modes_are_compared_with_dense_of_the_same_length(script: ModuleType, results: Path) -> None:
    steps = [
        *mode_cells(8192, {"dense": 400e3, "nsa": 500e3, "block-sparse": 600e3}),
        *mode_cells(2048, {"dense": 700e3, "nsa": 560e3, "block-sparse": 770e3}),
        *mode_cells(4096, {"dense": 600e3, "nsa": 660e3, "block-sparse": 540e3}),
    ]
    save(results, "train", [*checks(), *steps])
    lines = script.train.train().splitlines()
    assert lines[0] == "| length | dense | NSA | block-sparse |"
    assert lines[2:] == [
        "| 2k | 700k | 560k (0.80) | 770k (1.10) |",
        "| 4k | 600k | 660k (1.10) | 540k (0.90) |",
        "| 8k | 400k | 500k (1.25) | 600k (1.50) |",
        "| peak, GiB | 2.00 | 2.00 | 2.00 |",
        "",
        "At least as fast as dense: NSA from 4k; block-sparse from 8k.",
    ]


@pytest.mark.parametrize("complete", [True, False])
def test_modes_state_their_spread_and_whether_they_were_cut_short(
    script: ModuleType, results: Path, complete: bool
) -> None:
    steps = [*mode_cells(8192, {"dense": 400e3}, spread=0.01), *mode_cells(8192, {"nsa": 500e3}, spread=0.047)]
    save(results, "train", [*checks(), *steps], complete=complete)
    text = " ".join(script.train.train().split())
    assert "differ by up to 5%" in text
    assert ("cut short" in text) is not complete


@pytest.mark.parametrize("mode", ["block-sparse", "block-sparse learned"])
@pytest.mark.parametrize(("correct", "loss", "ratio"), [(True, 5.5, " (1.50)"), (False, 5.5, ""), (True, 4.0, "")])
def test_a_wrong_mode_gets_no_ratio(
    script: ModuleType, results: Path, mode: str, correct: bool, loss: float, ratio: str
) -> None:
    steps = [*mode_cells(8192, {"dense": 400e3}), *mode_cells(8192, {mode: 600e3}, first_loss=loss)]
    save(results, "train", [*checks(correct), *steps])
    text = script.train.train()
    assert f"| 8k | 400k | 600k{ratio} |" in text


@pytest.mark.parametrize("correct", [True, False])
def test_modes_that_decode_stand_beside_dense(script: ModuleType, results: Path, correct: bool) -> None:
    row = {"context": 16384, "batch": 16, "cache_bytes_per_token": 6500.0}
    speeds = {"dense": 16000.0, "block-sparse": 20000.0}
    decoded = [row | {"mode": mode, "tokens_per_s": speed} for mode, speed in speeds.items()]
    decoded[1]["correct"] = correct
    save(results, "decode-model", [*decoded, row | {"mode": "nsa", "out_of_memory": True}])
    assert script.decode.decode_model().splitlines() == [
        "| context | batch | dense | NSA | block-sparse |",
        "|---|---|---|---|---|",
        f"| 16k | 16 | 16,000 | out of memory | 20,000{' (1.25)' * correct} |",
        "| cache, B/token | | 6,500 | 6,500 | 6,500 |",
    ]
