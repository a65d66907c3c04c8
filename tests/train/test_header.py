"""What a run prints before it starts."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runs import small
from tercet.config.load import load
from tercet.doctor import memory
from tercet.errors import TercetError, UsageError
from tercet.parallel.strategy import Single
from tercet.telemetry.hardware import GIB
from tercet.train import console, trainer

CPU = torch.device("cpu")


def lines(device=CPU, step=0, vocab_size=256, **changes):
    state = SimpleNamespace(step=step, tokens=128 * step, parent=None)
    return dict(console.header_lines(small(**changes), state, device, Single(), "runs/x", vocab_size))


def test_settings_are_those_that_differ_from_the_preset():
    loaded = load("tiny", flags={"train.lr": 0.5})
    first, *changes, last = console.config_lines(loaded.config, loaded.origins, Path("runs/x"))
    assert "preset tiny with these changes" in first
    assert "config show runs/x" in first
    assert changes == ["  train.lr = 0.5  # flag"]
    assert last.endswith("watch runs/x")
    unchanged = load("tiny")
    assert len(console.config_lines(unchanged.config, unchanged.origins, Path("runs/x"))) == 2
    assert "the defaults" in console.config_lines(load().config, load().origins, Path("runs/x"))[0]


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ({"attention": "dense", "branches": "selected,window"}, [r"model.branches has no .*no layer is nsa .*dense"]),
        (
            {"selector": "learned", "branches": "selected,window", "compression": "mean", "nsa.compress_block": 8},
            [r"model.compression, model.nsa.compress_block have no effect: no layer reads compressed tokens"],
        ),
        ({"selector": "learned", "compression": "mean", "nsa.window": 8, "selector_dim": 16}, []),
        ({"compress_selected_keys": False, "selector": "learned", "branches": "selected,window"}, []),
    ],
)
def test_flags_without_effect_are_named_with_the_reason(flags, messages):
    values = {f"model.{name}": value.split(",") if name == "branches" else value for name, value in flags.items()}
    loaded = load("tiny", flags=values)
    found = console.no_effect_lines(loaded.config, loaded.origins)
    assert len(found) == len(messages)
    assert all(map(re.match, messages, found))


@pytest.mark.parametrize(("asked", "passes"), [(1, 1), (128, 1), (129, 2), (256, 2)])
def test_validation_is_rounded_up_to_whole_batches(asked, passes):
    assert small(train__val_tokens=asked).validation_passes == passes


SELECTOR = {"model__selector": "learned", "train__tokens_per_step": 1024, "train__selector__every": 16}


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        *(({**SELECTOR, "model__nsa__select_count": n}, "nothing to choose") for n in (3, 8)),  # 3 forced, of 8 blocks
        *(({**SELECTOR, "model__nsa__select_count": n}, "") for n in (4, 7)),
        ({"model__nsa__select_count": 3}, ""),  # scored by compressed keys
        ({"train__warmup_steps": 6}, "covers all 6 steps"),
    ],
)
def test_settings_that_are_probably_not_meant_so_are_noted(changes, note):
    found = lines(**changes).get("note", "")
    assert re.search(note, found) if note else not found


def test_a_step_that_does_not_fit_in_memory_is_warned_about(monkeypatch):
    assert "warning" not in lines()
    monkeypatch.setattr(memory, "host_memory", lambda: 2 * GIB)
    large = {"train__micro_batch": 2**12, "train__tokens_per_step": 2**18}
    told = lines(**large)["warning"]
    assert "GiB of 2.0 GiB are usable" in told
    assert "--train.micro_batch" in told
    assert "--train.activation_checkpointing" in told
    assert "torchrun" not in told  # ranks on one CPU share its memory
    larger = {"train__micro_batch": 2**15, "train__tokens_per_step": 2**21}
    assert "activation_checkpointing" not in lines(**larger, train__activation_checkpointing="full")["warning"]


def test_a_large_shuffle_buffer_is_warned_about(monkeypatch):
    monkeypatch.setattr(console, "host_memory", lambda: 64 * GIB)
    assert "warning" not in lines(data__shuffle_sequences=2**24)  # 64 tokens of 4 bytes each: 4 GiB
    told = lines(data__shuffle_sequences=2**25)["warning"]
    assert "data.shuffle_sequences=33554432 at data.seq_len=64 holds 8.0 GiB" in told
    assert "per process: --data.shuffle_sequences 16777216 holds 4.0 GiB" in told


GPU_ERROR = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.50 GiB …"
)
CPU_ERROR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 bytes."


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (torch.OutOfMemoryError(GPU_ERROR), " (tried to allocate 20.00 GiB)"),
        (RuntimeError(CPU_ERROR), " (tried to allocate 4096.0 GiB)"),
        (MemoryError(), ""),
    ],
)
def test_out_of_memory_names_three_settings_and_what_they_save(error, amount, tmp_path, monkeypatch):
    def step(*_, **__):
        raise error

    monkeypatch.setattr(trainer, "train_step", step)
    with pytest.raises(TercetError) as caught:
        trainer.train(small(run__dir=str(tmp_path / "run"), train__micro_batch=2))
    text = str(caught.value)
    assert text.startswith(f"out of memory on cpu{amount}: a step needs about ")
    for flag in ("--train.micro_batch 1", "--train.activation_checkpointing full", "--data.seq_len 32"):
        assert f"; {flag} saves about " in text
    assert "\n" not in text
    assert caught.value.__cause__ is error


LONG = {"data__seq_len": 65536, "train__micro_batch": 16, "train__tokens_per_step": 16 * 65536}


@pytest.mark.parametrize(
    ("gib", "changes", "refusal"),
    [
        (8.0, {}, None),
        (8.0, {"model__vocab_size": 2**24, "model__dim": 2048}, "gradients and optimizer state take .* has 8.0 GiB"),
        (2.0, LONG, "no GPU was found, and on this CPU a step needs about .* would make it fit"),
        (3.0, LONG, None),  # close: the estimate may be wrong
    ],
)
def test_what_cannot_fit_in_memory_is_refused_before_it_is_built(monkeypatch, gib, changes, refusal):
    monkeypatch.setattr(memory, "host_memory", lambda: round(gib * GIB))
    with pytest.raises(UsageError, match=refusal) if refusal else nullcontext():
        console.check_memory(small(**changes), CPU)


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError, match="shape"), console.memory_errors(small(), torch.device("cpu")):
        raise RuntimeError("shape mismatch")
