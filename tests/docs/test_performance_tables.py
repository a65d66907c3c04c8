"""The performance page, the README's table and their plots are what scripts/performance_tables.py generates."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("performance_tables", ROOT / "scripts" / "performance_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(folder: Path, name: str, results: list[dict[str, Any]], **about: Any) -> None:
    told = {"date": "2026-11-16", "device": "a GPU", "torch": "2", "triton": "3", "tercet": "0", "quick": False}
    (folder / f"{name}.json").write_text(json.dumps({"part": name, **told, **about, "results": results}))


def cell(kind: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "batch": 32, "length": 2048, "checkpointing": "none", "packed": False, "outcome": "ok",
        "tokens_per_s": speed, "ms": 1.0, "peak_gib": 2.0, "first_loss": 5.5, **more,
    }  # fmt: skip


def test_pages_and_plots_are_up_to_date(script: ModuleType) -> None:
    stale = [str(file.relative_to(ROOT)) for file in script.outdated()]
    assert stale == [], "run python scripts/performance_tables.py"


def test_every_table_is_on_a_page(script: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in script.PAGES)
    assert set(re.findall(r"<!-- table:([\w-]+) -->", text)) == script.TABLES.keys()


def test_lines_fit_the_line_length(script: ModuleType) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if len(line) > 120] == []


def test_missing_results_give_no_numbers(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    for name, make in script.TABLES.items():
        assert make() == "" if name == "million" else "not measured" in make()
    assert "not measured" in script.headline()


@pytest.mark.parametrize(("correct", "loss", "ratio"), [(True, 5.5, "0.80"), (False, 5.5, "–"), (True, 4.0, "–")])
def test_a_wrong_result_gets_no_ratio(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, correct: bool, loss: float, ratio: str
) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    check = {"parity": 0.003, "correct": correct}
    save(tmp_path, "train", [check, cell("nsa", 80e3, first_loss=loss), cell("dense", 100e3)])
    row = script.train().splitlines()[-1].split(" | ")
    assert row[:3] == ["| 2k", "80k", "100k"]
    assert row[3] == f"**{ratio}**"


def test_results_of_two_runs_are_not_mixed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    save(tmp_path, "train", [])
    save(tmp_path, "decode", [], date="2026-11-17")
    with pytest.raises(ValueError, match="mixes runs"):
        script.measured()


def test_dry_runs_are_rejected(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    save(tmp_path, "train", [], quick=True)
    with pytest.raises(ValueError, match="--quick"):
        script.train()


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
    assert script.group(kernel) == group
