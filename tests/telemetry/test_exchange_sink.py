"""exchange_rank0.csv over several processes of a run."""

from __future__ import annotations

import pytest

from tercet.telemetry.events import StepLogged
from tercet.telemetry.sinks import EXCHANGE_COLUMNS, ExchangeSink


def logged(step):
    return StepLogged(
        step=step, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, tokens_per_s=1.0, step_seconds=1.0, data_seconds=0.0,
        mfu=None, memory_gib=0.0, skipped=0, epoch=0, bad_records=0, first_step=step, losses=[1.0], grad_norms=[1.0],
    )  # fmt: skip


def test_a_resumed_run_drops_superseded_rows_and_loses_none_on_a_full_disk(tmp_path, monkeypatch):
    path, traffic = tmp_path / "exchange_rank0.csv", dict.fromkeys(EXCHANGE_COLUMNS, 0)
    sink = ExchangeSink(path, traffic, 0)
    for step in (2, 4):
        traffic["window"] += 20
        sink(logged(step))
    rows = ["step," + ",".join(EXCHANGE_COLUMNS), "2,0,0,10,0,0,0", "4,0,0,10,0,0,0"]
    assert path.read_text().splitlines() == rows

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tercet.atomic_io.sync", full)
        with pytest.raises(OSError, match="No space"):
            ExchangeSink(path, traffic, 2)
    assert path.read_text().splitlines() == rows
    ExchangeSink(path, traffic, 2)
    assert path.read_text().splitlines() == rows[:2]
