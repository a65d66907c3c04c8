"""Prefetched batches are neither lost nor repeated, also when the reader is killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import Batch, build_loader
from tercet.data.stream import BadRecordError, Prefetcher, StoppedWaiting


def digest(batch: Batch) -> str:
    return hashlib.sha256(batch.tokens.numpy().tobytes() + batch.targets.numpy().tobytes()).hexdigest()


def read_until_killed(data: DataConfig, state: dict | None, log: Path) -> None:
    with open(log, "a") as out:
        for batch in build_loader(data, seed=7, batch_sequences=4, state=state):
            out.write(json.dumps([digest(batch), batch.state]) + "\n")
            out.flush()


def test_a_killed_reader_resumes_without_losing_or_repeating_a_batch(configs, read, tmp_path):
    data = configs["mixture"].model_copy(update={"prefetch": 16})
    log, state = tmp_path / "log", None
    log.touch()
    kept: list[str] = []
    for kill in range(5):
        reader = os.fork()  # a new interpreter would spend most of the test importing torch
        if reader == 0:
            try:
                read_until_killed(data, state, log)
            finally:
                os._exit(1)
        wanted = log.stat().st_size + 7000 * (kill + 1)
        deadline = time.monotonic() + 60
        while log.stat().st_size < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
        kept = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        log.write_text("".join(kept))
        state = json.loads(kept[-1])[1]
    seen = [json.loads(line)[0] for line in kept]
    straight = read(data.model_copy(update={"prefetch": 0}), len(seen))
    assert len(seen) > 30
    assert seen == [digest(batch) for batch in straight]


def test_an_error_is_raised_at_its_batch_and_on_every_later_request(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "aaaaaaaaa"}\n' * 5 + "broken\n")
    data = DataConfig(source="jsonl", path=str(path), seq_len=10, validation_fraction=0, shuffle=False, shuffle_block=5)
    with build_loader(data, seed=0, batch_sequences=5) as loader:
        assert next(loader).tokens.shape == (5, 10)
        for _ in range(2):
            with pytest.raises(BadRecordError, match=r"record 6 of .*a.jsonl: is not JSON"):
                next(loader)


def _data_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tercet-data"]


def test_closing_or_dropping_a_loader_ends_its_threads(configs):
    before = len(_data_threads())
    for drop in (False, True):
        loader = build_loader(configs["mixture"], seed=1, batch_sequences=4)
        next(loader)
        assert len(_data_threads()) > before
        if drop:
            del loader
        else:
            loader.close()
        deadline = time.monotonic() + 10
        while len(_data_threads()) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(_data_threads()) == before


def test_a_stop_request_ends_waiting_for_data_that_hangs(monkeypatch):
    monkeypatch.setattr("tercet.data.stream.POLL_SECONDS", 0.01)
    monkeypatch.setattr("tercet.data.stream.GRACE_SECONDS", 0.05)
    release, stop = threading.Event(), threading.Event()

    def hanging():
        yield 1
        release.wait()
        yield 2

    prefetcher = Prefetcher(hanging(), depth=2, stop=stop.is_set)
    stop.set()
    assert next(prefetcher) == 1  # ready items are still delivered
    with pytest.raises(StoppedWaiting):
        next(prefetcher)
    release.set()
    assert next(prefetcher) == 2
    prefetcher.close()


def test_a_slow_batch_gets_a_grace_period_after_the_stop_request(monkeypatch):
    """Counted from the stop request, not from the start of the wait."""
    monkeypatch.setattr("tercet.data.stream.POLL_SECONDS", 0.01)
    monkeypatch.setattr("tercet.data.stream.GRACE_SECONDS", 20.0)
    stop = threading.Event()

    def slow():
        time.sleep(0.2)
        stop.set()
        time.sleep(0.2)
        yield 1

    prefetcher = Prefetcher(slow(), depth=2, stop=stop.is_set)
    assert next(prefetcher) == 1
    prefetcher.close()


@pytest.mark.gpu
def test_batches_are_pinned_if_the_process_uses_a_gpu(read):
    import torch

    torch.cuda.init()
    batch = read(DataConfig(source="synthetic", seq_len=64), 1)[0]
    assert batch.tokens.is_pinned()
    assert batch.targets.is_pinned()
    assert batch.cu_seqlens.is_pinned()


def test_shapes_and_types_of_a_batch(configs, read):
    import torch

    batch = read(configs["jsonl"], 1, rank=1, world_size=2)[0]
    assert batch.tokens.shape == batch.targets.shape == (2, 64)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == 128
    assert (batch.cu_seqlens.diff() > 0).all()
    assert batch.tokens.is_contiguous()
    assert json.loads(json.dumps(batch.state)) == batch.state
    crossing_config = configs["jsonl"].model_copy(update={"cross_document_attention": True})
    crossing = read(crossing_config, 1, rank=1, world_size=2)[0]
    assert crossing.cu_seqlens is None
    assert np.array_equal(crossing.targets, batch.targets)
