"""`tercet sweep`: the grid, results of runs, throughput cliffs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tercet.bench.sweep import Cell, Point, cliffs, command, heat_maps, judge, points, render, sweep
from tercet.telemetry.events import StepLogged

POINT = Point("single", 256, 2, "none")


def logged(step: int, seconds: float) -> StepLogged:
    values = {f.name: 0 for f in dataclasses.fields(StepLogged) if f.default is dataclasses.MISSING}
    return StepLogged(
        **values | {"step": step, "step_seconds": seconds, "tokens_per_s": 512 / seconds, "memory_gib": step}
    )


def test_bucket_sizes_apply_to_ddp_only():
    grid = points([256, 512], [1, 2], ["none", "full"], ["ddp", "fsdp"], [1.0, 25.0, 100.0])
    assert len(grid) == 2 * 2 * 2 * (3 + 1)
    assert {p.bucket_mb for p in grid if p.strategy == "fsdp"} == {None}


def test_a_cell_turns_the_shuffle_buffer_off(tmp_path):
    """tiny's shuffle buffer holds 8M tokens at its own length, 2G at 65,536."""
    words = command(dataclasses.replace(POINT, length=65536), "tiny", 1, 3, "cpu", tmp_path)
    assert words[words.index("--data.shuffle_sequences") + 1] == "0"


def test_the_first_step_is_ignored_and_memory_is_the_peak():
    cell = judge(POINT, [logged(1, 9.0), logged(2, 0.5), logged(3, 0.5), logged(4, 0.6)], 0, "", None)
    assert (cell.outcome, cell.tokens_per_s, cell.step_seconds, cell.memory_gib) == ("ok", 1024.0, 0.5, 4)


@pytest.mark.parametrize(
    ("code", "text", "late", "outcome"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to", None, "out of memory"),
        (-9, "", None, "out of memory"),
        (
            1,
            "rank 0\nerror: data.path=x does not exist\nTraceback of torchrun",
            None,
            "error: data.path=x does not exist",
        ),
        (-15, "", 300.4, "too slow (300 s)"),
        (3, "", None, "exit code 3"),
    ],
)
def test_a_failed_cell_reports_the_reason(code, text, late, outcome):
    cell = judge(POINT, [], code, text, late)
    assert cell.outcome == outcome
    assert cell.tokens_per_s is None


def test_a_cell_whose_data_ended_early_is_reported():
    assert "data ended after 1 steps" in judge(POINT, [logged(1, 9.0)], 0, "", None).outcome


def test_cliffs_are_found_along_batch_and_length():
    def cell(length: int, batch: int, speed: float | None) -> Cell:
        point = Point("ddp", length, batch, "none", 25.0)
        return Cell(point, "ok" if speed else "out of memory", speed, 1.0, 1.0, 4)

    cells = [cell(256, 1, 1000), cell(256, 2, 500), cell(256, 4, None), cell(512, 1, 900), cell(512, 2, 880)]
    found = cliffs(cells)
    assert len(found) == 1
    assert "batch 1 → 2 drops from 1000 to 500 tokens/s (50%)" in found[0]
    assert cliffs([cell(256, 1, 1000), cell(512, 1, 100)])[0].startswith(
        "ddp, checkpointing none, buckets of 25 MB: length"
    )
    table = "\n".join(render(cells))
    assert "| 256 | 1000 tokens/s, 1.00 GiB | 500 tokens/s, 1.00 GiB | out of memory |" in table
    assert "warning: ddp" in table


def test_heat_maps_include_failed_cells(tmp_path):
    cells = [Cell(POINT, "ok", 10.0, 1.0, 1.0, 3), Cell(dataclasses.replace(POINT, batch=4), "out of memory")]
    (path,) = heat_maps(cells, tmp_path)
    assert "<svg" in path.read_text()


@pytest.mark.slow
def test_a_sweep_continues_after_a_cell_that_cannot_run(tmp_path, capsys):
    code = sweep(
        "tiny",
        (64, 96),
        (1,),
        steps=3,
        seconds=200,
        out=str(tmp_path),
        device="cpu",
        strategies=("single", "cp"),
        ranks=5,
    )  # five ranks cannot share sequences of these lengths
    assert code == 0
    cells = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [c["outcome"] == "ok" for c in cells] == [True, True, False, False]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] == 2


@pytest.mark.slow
def test_a_sweep_over_strategies_and_bucket_sizes(tmp_path, capsys):
    code = sweep(
        lengths=(128,), batches=(2,), strategies=("ddp", "fsdp"), bucket_mb=(0.05, 25.0), ranks=2, steps=3,
        seconds=200, out=str(tmp_path), device="cpu",
    )  # fmt: skip
    assert code == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["cells"], summary["ok"]) == (3, 3)
    table = (tmp_path / "sweep.md").read_text()
    for label in ("ddp, checkpointing none, buckets of 0.05 MB", "buckets of 25 MB", "fsdp, checkpointing none"):
        assert label in table
