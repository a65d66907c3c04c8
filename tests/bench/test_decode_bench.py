"""`tercet bench decode` on a CPU: the whole model, keys read, and one JSON line at the end."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tercet.bench import decode as attention_step
from tercet.bench import decode_model
from tercet.bench.commands import decode
from tercet.config.load import load
from tercet.errors import TercetError


def test_both_kinds_are_measured_and_their_keys_counted(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert decode(preset="tiny", model_contexts=(96, 200), model_batches=(1, 2), steps=4) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "contexts 96, 200 with batches 1, 2" in lines[1]
    assert any("attention step skipped" in line for line in lines)
    result = json.loads(lines[-1])
    rows = {(row["kind"], row["context"], row["batch"]): row for row in result["model"]}
    assert set(rows) == {(kind, n, b) for kind in ("nsa", "dense") for n in (96, 200) for b in (1, 2)}
    model = load(preset="tiny").config.model
    # the last of 8 tokens (4 warm-up, 4 timed), after as many for each earlier batch size
    for (kind, context, batch), row in rows.items():
        t = context + 8 * batch - 1
        selected = 3 * 32 + t % 32 + 1 if t // 32 >= 4 else t + 1
        nsa = model.nsa.num_compressed(t + 1) + selected + min(64, t + 1)
        assert row["keys_per_token"] == model.layers * model.kv_heads * (nsa if kind == "nsa" else t + 1)
        assert row["tokens_per_s"] > 0
        assert row["first_token_s"] > 0
    one = rows["dense", 200, 1]["cache_bytes_per_token"]
    assert 1 <= rows["nsa", 200, 1]["cache_bytes_per_token"] / one < 2


def test_a_pattern_of_layers_is_measured_as_it_is(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    caches = {}
    for pattern in ("nsa", "window,nsa"):
        settings = f"model.attention={pattern}"
        for steps in (1, 4):  # one step, too, has room in the cache
            assert decode(preset="tiny", model_contexts=(96,), model_batches=(1,), steps=steps, settings=settings) == 0
        sparse, _ = json.loads(capsys.readouterr().out.splitlines()[-1])["model"]
        caches[pattern] = sparse["cache_bytes_per_token"]
    assert caches["window,nsa"] < caches["nsa"]


def test_a_learned_selector_is_measured_if_asked_for(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert decode(preset="tiny", model_contexts=(96,), model_batches=(1,), steps=4, selector="learned") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("selector learned" in line for line in lines)
    assert json.loads(lines[-1])["selector"] == "learned"


@pytest.mark.parametrize(("contexts", "read"), [((32, 96), [32, 32, 32, 32, 96]), ((96, 128), [16, 96, 128])])
def test_the_first_token_is_timed_after_a_warm_up(capsys, monkeypatch, contexts, read) -> None:
    prompts: dict[int, list[int]] = {}

    class Recorder(decode_model.CachedDecoder):
        def prefill(self, given):
            prompts.setdefault(id(self.model), []).append(len(given[0]))
            return super().prefill(given)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(decode_model, "CachedDecoder", Recorder)
    monkeypatch.setattr(decode_model, "_LONG", 64)
    monkeypatch.setattr(decode_model, "_WARM", 16)
    assert decode(preset="tiny", model_contexts=contexts, model_batches=(1,), steps=4) == 0
    assert list(prompts.values()) == [read, read]  # NSA and dense


@pytest.mark.parametrize(("failing", "lost"), [("take_rows", {2}), ("prefill", {1, 2})])
def test_a_cell_out_of_memory_is_reported_and_the_others_are_measured(capsys, monkeypatch, failing, lost) -> None:
    whole = getattr(decode_model.CachedDecoder, failing)

    def short(self, given):
        dense = "DenseCache" in type(self.cache[0]).__name__
        if dense and (failing == "prefill" or len(given) == 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, given)

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(decode_model.CachedDecoder, failing, short)
    assert decode(preset="tiny", model_contexts=(96,), model_batches=(1, 2), steps=4) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["model"]
    assert {(r["kind"], r["batch"]) for r in rows if "out_of_memory" in r} == {("dense", batch) for batch in lost}
    assert {(r["kind"], r["batch"]) for r in rows if "tokens_per_s" in r} == {
        (kind, batch) for kind in ("nsa", "dense") for batch in (1, 2) if kind == "nsa" or batch not in lost
    }
    assert sum("out of memory" in line for line in lines[:-1]) == len(lost)


def test_a_context_too_short_for_the_measurement_fails(capsys) -> None:
    with pytest.raises(TercetError, match=r"--contexts 200 is too short.*give at least 201"):
        decode(contexts=(4096, 200), model_contexts=())
    assert capsys.readouterr().out == ""
    model = {"preset": "tiny", "model_contexts": (64,), "model_batches": (1,), "steps": 4}
    assert decode(contexts=(200,), attention=False, **model) == 0  # read by the attention step only


def test_the_attention_step_never_writes_past_its_caches(capsys, monkeypatch) -> None:
    context, copies = 512, 3
    caches = [
        SimpleNamespace(lengths=torch.full((2,), context - attention_step._MARGIN), reads=torch.ones(2))
        for _ in range(copies)
    ]

    def step(made, i):
        def token() -> None:
            assert int(made.caches[i].lengths.max()) < context
            made.caches[i].lengths += 1

        return token

    def replayed(steps) -> float:  # like a graph: warmed up, captured (which runs nothing), replayed
        for _ in range(1 + attention_step._REPLAYS * (attention_step._REPEATS + 1)):
            for one in steps:
                one()
        return 1.0

    def printed(one) -> None:
        for _ in range(17):
            one()

    monkeypatch.setattr(
        attention_step, "_make", lambda *_: SimpleNamespace(caches=caches, layer=SimpleNamespace(selector=None))
    )
    monkeypatch.setattr(attention_step, "step_error", lambda *_: 0.0)
    monkeypatch.setattr(attention_step, "_nsa", step)
    monkeypatch.setattr(attention_step, "_dense", step)
    monkeypatch.setattr(attention_step, "_sdpa_ms", lambda *_: {})
    monkeypatch.setattr(attention_step, "_graph_ms", replayed)
    monkeypatch.setattr(attention_step, "_print_kernels", printed)
    row = attention_step._attention_at((4, 2, 16), 2, context, profile=True)
    assert row["correct"]
    assert int(caches[0].lengths.max()) == context - attention_step._MARGIN + 17
