"""`tercet bench layer` runs on any device and gives no ratio for a wrong result."""

from __future__ import annotations

import json

import pytest

from tercet.bench import layer


@pytest.mark.parametrize("error", [None, 0.5])
def test_both_layers_are_timed_and_a_wrong_one_gets_no_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: float | None
) -> None:
    monkeypatch.setattr(layer, "reference_error", lambda *_: error)  # None: the reference ran
    code = layer.main([80], 80, compile=False, budget=0.0)
    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    (row,) = last["results"]
    if error is None:
        assert (code, last["correct"], row["times_dense"]) == (0, None, row["dense_ms"] / row["nsa_ms"])
    else:
        assert (code, last["correct"], row["times_dense"], "WRONG" in said) == (1, False, None, True)
