"""`tercet bench layer` runs on any device and gives no ratio for a wrong result; telemetry costs little."""

from __future__ import annotations

import json

import pytest

from runs import small
from tercet.bench import layer, telemetry


def bench(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object], str]:
    code = layer.main([80], 80, compile=False, repeats=1)
    said = capsys.readouterr().out
    return code, json.loads(said.splitlines()[-1]), said


def test_both_layers_are_timed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    code, last, said = bench(capsys)
    assert "1 shape: 1 x 80 tokens" in said.splitlines()[1]
    (row,) = last["results"]  # type: ignore[misc]
    assert (code, last["correct"], row["error"]) == (0, None, None)  # the reference ran: nothing to compare it with
    assert row["times_dense"] == row["dense_ms"] / row["nsa_ms"] > 0


def test_a_layer_that_differs_from_the_reference_gets_no_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "_error", lambda *_: 0.5)
    code, last, said = bench(capsys)
    (row,) = last["results"]  # type: ignore[misc]
    assert (code, last["correct"], row["times_dense"]) == (1, False, None)
    assert "WRONG" in said


def test_the_cost_of_telemetry_is_measured():
    result = telemetry.measure(small(log__every=2, train__steps=1000), pairs=2)
    assert result["step_ms_without"] > 0
    assert result["step_ms_with"] > 0
    assert result["extra_percent"] == pytest.approx(100 * result["extra_ms"] / result["step_ms_without"])
    assert result["pairs"] == 2


@pytest.mark.serial
@pytest.mark.gpu
def test_telemetry_costs_less_than_one_percent_of_a_step_on_a_gpu():
    assert telemetry.main(["--preset", "m7c", "--pairs", "20"]) == 0
