"""`tercet bench decode` on a CPU: the whole model, keys counted beside the times, and one line of JSON at the end."""

from __future__ import annotations

import json

from tercet.bench.commands import decode
from tercet.config.load import load


def test_both_kinds_are_measured_and_their_keys_counted(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert decode(preset="tiny", model_contexts="96,200", model_batches="1,2", steps=4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the attention step is measured on a GPU: none is here" in lines
    result = json.loads(lines[-1])
    rows = {(row["kind"], row["context"], row["batch"]): row for row in result["model"]}
    assert set(rows) == {(kind, n, b) for kind in ("nsa", "dense") for n in (96, 200) for b in (1, 2)}
    model = load(preset="tiny").config.model
    # the last of 8 tokens (4 to warm up, 4 timed), after as many for every batch before
    for (kind, context, batch), row in rows.items():
        t = context + 8 * batch - 1
        selected = 3 * 32 + t % 32 + 1 if t // 32 >= 4 else t + 1
        nsa = model.nsa.num_compressed(t + 1) + selected + min(64, t + 1)
        assert row["keys_per_token"] == model.layers * model.kv_heads * (nsa if kind == "nsa" else t + 1)
        assert row["tokens_per_s"] > 0
        assert row["first_token_s"] > 0
    one = rows["dense", 200, 1]["cache_bytes_per_token"]
    assert 1 <= rows["nsa", 200, 1]["cache_bytes_per_token"] / one < 2
