"""What a run prints before it starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from runs import small
from tercet.parallel.strategy import Single
from tercet.train import console

CPU = torch.device("cpu")


def lines(device=CPU, step=0, vocab_size=256, **changes):
    state = SimpleNamespace(step=step, tokens=128 * step, parent=None)
    return dict(console.header_lines(small(**changes), state, device, Single(), "runs/x", vocab_size))


@pytest.mark.parametrize(("asked", "passes"), [(1, 1), (128, 1), (129, 2), (256, 2)])
def test_validation_is_rounded_up_to_whole_batches(asked, passes):
    assert small(train__val_tokens=asked).validation_passes == passes
    told = lines(train__val_tokens=asked, train__val_every=5)["validation"]
    assert told.startswith(f"{128 * passes} tokens")
    assert (f"val_tokens={asked} rounded up" in told) == (asked % 128 != 0)
    assert "validation" not in lines(train__val_tokens=0)


def test_the_time_is_estimated_for_known_devices(monkeypatch):
    assert lines()["time"] == "estimated after the first log lines"
    monkeypatch.setattr(console, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(console, "_device_memory", lambda device: 139 << 30)
    gpu = torch.device("cuda")
    whole, half = (lines(gpu, step, train__steps=10**9)["time"] for step in (0, 5 * 10**8))
    assert "if steps reach 30% of the device's peak" in whole
    assert whole != half
    assert lines(gpu, train__precision="bf16", train__steps=10**9)["time"] == whole
    assert lines(gpu, train__precision="fp32")["time"] == "estimated after the first log lines"  # no peak for it


def test_a_step_that_does_not_fit_in_memory_is_warned_about(monkeypatch):
    assert "warning" not in lines()
    monkeypatch.setattr(console, "host_total_gib", lambda: 2)
    large = {"train__micro_batch": 2**12, "train__tokens_per_step": 2**18}
    told = lines(**large)["warning"]
    assert "GiB of 2.0 GiB are usable" in told
    assert "--train.micro_batch" in told
    assert "--train.activation_checkpointing" in told
    larger = {"train__micro_batch": 2**15, "train__tokens_per_step": 2**21}
    assert "activation_checkpointing" not in lines(**larger, train__activation_checkpointing="full")["warning"]


def test_a_large_shuffle_buffer_is_warned_about(monkeypatch):
    monkeypatch.setattr(console, "host_total_gib", lambda: 64)
    assert "warning" not in lines(data__shuffle_sequences=2**24)  # 64 tokens of 4 bytes each: 4 GiB
    told = lines(data__shuffle_sequences=2**25)["warning"]
    assert "data.shuffle_sequences=33554432 at data.seq_len=64 holds 8.0 GiB" in told
    assert "(of 64.0 GiB): --data.shuffle_sequences 16777216 holds 4.0 GiB" in told
    narrow, wide = ({"vocab_size": n, "data__tokenizer": "of-another-name"} for n in (256, 257))
    assert lines(data__shuffle_sequences=2**25, **narrow)["warning"] == told
    assert "holds 16.0 GiB" in lines(data__shuffle_sequences=2**25, **wide)["warning"]
    monkeypatch.setattr(console, "host_total_gib", lambda: 4)
    assert lines(data__shuffle_sequences=2**24)["warning"].endswith("--data.shuffle_sequences 8388608 holds 2.0 GiB")
    monkeypatch.setattr(console, "host_total_gib", lambda: None)
    assert "(of" not in lines(data__shuffle_sequences=2**25)["warning"]
