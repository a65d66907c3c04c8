"""`tercet bench decode` on a CPU: the whole model, keys read, ratios, and one JSON line at the end."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.bench import decode as bench
from tercet.bench.commands import decode
from tercet.config.load import load


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_both_kinds_are_measured_and_their_keys_counted(capsys) -> None:
    assert decode(preset="tiny", contexts=(96, 200), batches=(1, 2), steps=4) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["kind"], row["context"], row["batch"]): row for row in result["results"]}
    assert set(rows) == {(kind, n, b) for kind in ("nsa", "dense") for n in (96, 200) for b in (1, 2)}
    model = load(preset="tiny").config.model
    # the last of 8 tokens (4 warm-up, 4 timed), after as many for each earlier batch size
    for (kind, context, batch), row in rows.items():
        t = context + 8 * batch - 1
        selected = 3 * 32 + t % 32 + 1 if t // 32 >= 4 else t + 1
        nsa = model.nsa.num_compressed(t + 1) + selected + min(64, t + 1)
        assert row["keys_per_token"] == model.layers * model.kv_heads * (nsa if kind == "nsa" else t + 1)
        assert row["first_token_s"] > 0
        dense = rows["dense", context, batch]
        assert row["times_dense"] == (row["tokens_per_s"] / dense["tokens_per_s"] if kind == "nsa" else None)
    one = rows["dense", 200, 1]["cache_bytes_per_token"]
    assert 1 <= rows["nsa", 200, 1]["cache_bytes_per_token"] / one < 2


def test_a_wrong_step_gets_no_ratio() -> None:
    dense = {"kind": "dense", "context": 96, "batch": 1, "tokens_per_s": 100.0}
    row = {"kind": "nsa", "context": 96, "batch": 1, "tokens_per_s": 50.0, "error": 0.1}
    assert bench._times_dense({**row, "correct": True}, [dense]) == 0.5
    assert bench._times_dense({**row, "correct": False}, [dense]) is None


def test_a_pattern_of_layers_is_measured_as_it_is(capsys) -> None:
    caches = {}
    for pattern in ("nsa", "window,nsa"):
        settings = f"model.attention={pattern}"
        for steps in (1, 4):  # one step, too, has room in the cache
            assert decode(preset="tiny", contexts=(96,), batches=(1,), steps=steps, settings=settings) == 0
        _, sparse = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        caches[pattern] = sparse["cache_bytes_per_token"]
    assert caches["window,nsa"] < caches["nsa"]


@pytest.mark.parametrize(("contexts", "read"), [((32, 96), [32, 32, 32, 32, 96]), ((96, 128), [16, 96, 128])])
def test_the_first_token_is_timed_after_a_warm_up(monkeypatch, contexts, read) -> None:
    prompts: dict[int, list[int]] = {}

    class Recorder(bench.CachedDecoder):
        def prefill(self, given):
            prompts.setdefault(id(self.model), []).append(len(given[0]))
            return super().prefill(given)

    monkeypatch.setattr(bench, "CachedDecoder", Recorder)
    monkeypatch.setattr(bench, "_LONG", 64)
    monkeypatch.setattr(bench, "_WARM", 16)
    assert decode(preset="tiny", contexts=contexts, batches=(1,), steps=4) == 0
    assert list(prompts.values()) == [read, read]  # NSA and dense


@pytest.mark.parametrize(("failing", "lost"), [("take_rows", {2}), ("prefill", {1, 2})])
def test_a_cell_out_of_memory_is_reported_and_the_others_are_measured(capsys, monkeypatch, failing, lost) -> None:
    whole = getattr(bench.CachedDecoder, failing)

    def short(self, given):
        dense = self.cache[0].spec.dense
        if dense and (failing == "prefill" or len(given) == 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, given)

    monkeypatch.setattr(bench.CachedDecoder, failing, short)
    assert decode(preset="tiny", contexts=(96,), batches=(1, 2), steps=4) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {(r["kind"], r["batch"]) for r in rows if "out_of_memory" in r} == {("dense", batch) for batch in lost}
    assert {r["batch"] for r in rows if "tokens_per_s" in r and r["kind"] == "nsa"} == {1, 2}
