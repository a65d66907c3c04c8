"""On a GPU: recorded steps are the steps, nothing waits, and memory is not taken twice.

Bits are compared under deterministic algorithms, which a recording holds like any other. Some sums are divided by the
number of documents all the same: FlashAttention-2's dQ by documents times heads against the GPU's processors, the
compressed keys' gradients by whether there are four. A recording has the number that there is room for, so where that
changes the division, recorded steps are held against steps with the same empty documents at the end.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runs import losses, small, train_small
from stepping import SteppedModel
from tercet.model.loss import IGNORED
from tercet.train.cuda_graph import GraphCapturer, capacity_for, fill_bounds
from tercet.train.device import set_arithmetic
from tercet.train.state import capture_rng
from tercet.train.step import MicroBatch
from tercet.train.trainer import train

pytestmark = pytest.mark.gpu

SEQUENCES, LENGTH = 2, 2048
# M7C's heads and blocks: kernels that other tests and benches compile as well.
SIZES: dict[str, Any] = {
    "model__dim": 768, "model__layers": 2, "model__heads": 12, "model__kv_heads": 2, "model__head_dim": 64,
    "model__ffn_dim": 2048, "model__nsa__compress_block": 32, "model__nsa__compress_stride": 16,
    "model__nsa__select_block": 64, "model__nsa__select_count": 16, "model__nsa__window": 128,
    "data__seq_len": LENGTH, "run__device": "cuda",
}  # fmt: skip


@pytest.fixture(autouse=True)
def same_bits() -> Iterator[None]:
    set_arithmetic(deterministic=True, threads=None)
    yield
    set_arithmetic(deterministic=False, threads=None)


def on_gpu(*, graphs: bool, compiled: bool = True, mode: str = "none", attention: str = "nsa") -> SteppedModel:
    config = small(
        **SIZES, model__attention=attention, train__tokens_per_step=SEQUENCES * LENGTH,
        train__activation_checkpointing=mode, train__lr=1e-3, train__precision="bf16",
    )  # fmt: skip
    run = SteppedModel(config, seed=0, compiled=compiled)
    if graphs:
        run.use_graphs()
    return run


def validated(run: SteppedModel, batch: MicroBatch) -> Tensor:
    """Eager, between two steps, as in a run."""
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        return run.model(batch.tokens, batch.cu_seqlens, batch.targets, max_seqlen=batch.max_seqlen).total


def packed(seed: int, documents: int, sequences: int = SEQUENCES) -> MicroBatch:
    """Documents end within sequences and at their ends."""
    draw = torch.Generator().manual_seed(seed)
    total = sequences * LENGTH
    tokens = torch.randint(1, 256, (1, total + 1), generator=draw)
    inner = torch.randperm(total - 1, generator=draw)[:documents] + 1
    bounds = torch.cat((inner, torch.arange(0, total + 1, LENGTH))).unique().to(torch.int32)
    targets = tokens[:, 1:].clone()
    targets[0, bounds[1:].long() - 1] = IGNORED
    device = torch.device("cuda")
    return MicroBatch(tokens[:, :-1].contiguous().to(device), targets.to(device), bounds.to(device), LENGTH)


def with_room(batch: MicroBatch, least: int = 0) -> MicroBatch:
    """Padded with the empty documents that a graph has."""
    room = max(least, capacity_for(batch.cu_seqlens.shape[0] - 1))
    bounds = torch.zeros(room + 1, dtype=torch.int32, device=batch.tokens.device)
    fill_bounds(bounds, batch.cu_seqlens, batch.tokens.numel())
    return replace(batch, cu_seqlens=bounds)


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"compiled": False}),
        (1, {"attention": "dense"}),
        (1, {"attention": "window,nsa"}),
        (1, {"mode": "full"}),
        (1, {"mode": "selective"}),
    ],
    ids=["one", "accumulated", "uncompiled", "dense", "window", "full", "selective"],
)
def test_graph_steps_equal_eager_steps_to_the_last_bit(accumulation: int, options: dict[str, Any]) -> None:
    """The document count varies and exceeds the capacity in the fifth batch; one step collects statistics, and a
    validation runs in between."""
    told: list[list[Tensor]] = []
    padded = options.get("attention") == "dense"
    for graphs in (False, True):
        run, seen = on_gpu(graphs=graphs, **options), []
        for i, documents in enumerate((3, 11, 2, 7, 60, 5)):
            batches = [packed(10 * i + j, documents + j) for j in range(accumulation)]
            if padded and not graphs:
                batches = [with_room(b, 16 if i < 4 else 64) for b in batches]
            result = run.step(batches, with_stats=i == 2)
            seen += [result.loss, result.grad_norm]
            if i == 2:
                seen += [torch.tensor(list(s.read().values())) for s in run.stats]
                for stats in run.stats:
                    stats.enabled = False
                    stats.reset()
            if i == 3:
                seen.append(validated(run, packed(99, 20)))
        assert run.guard.total() == 0
        told.append([x.cpu() for x in (*seen, *(p.detach() for p in run.model.parameters()))])
        if run.graph is not None:
            assert len(run.logged("text")) == (3 if run.stats else 2)  # at first, for statistics, for more documents
    for i, (a, b) in enumerate(zip(*told, strict=True)):
        assert torch.equal(a, b), f"value {i}: {(a.double() - b.double()).abs().max():.3e}"


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_empty_documents_only_change_the_order_of_sums(attention: str) -> None:
    """Two documents, so that both kinds of sums are divided in another way than with sixteen. Of all gradients
    together: those that must come out as zero (what is added to every key) are nothing but rounding."""
    found = []
    for batch in (packed(1, 0), with_room(packed(1, 0))):
        model = on_gpu(graphs=False, compiled=False, attention=attention).model
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch.tokens, batch.cu_seqlens, batch.targets, max_seqlen=batch.max_seqlen).total
        (loss / LENGTH).backward()
        gradients = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
        found.append((loss.detach(), gradients))
    (loss, wanted), (same, gradients) = found
    assert torch.equal(loss, same)
    # a sum in another order flips a bf16 number's last bit (2^-8 of it) here and there
    assert (gradients - wanted).norm() < 2**-10 * wanted.norm()


@pytest.mark.serial
def test_outputs_are_borrowed_and_their_memory_is_reused() -> None:
    gc.collect()  # otherwise tensors of earlier tests may be freed below
    device = torch.device("cuda", torch.cuda.current_device())
    capturer, x = GraphCapturer(device), torch.ones(16 << 20, device=device)
    before = torch.cuda.memory_allocated()
    made: list[Tensor] = []
    recorded: list[tuple[torch.cuda.CUDAGraph, Tensor, int]] = []
    for factor in (2.0, 3.0):
        replays = capturer.capture(lambda factor=factor: made.append(x * factor))
        recorded.append((replays, capturer.borrow(made.pop()), capturer.pool_bytes))
    # one tensor for both recordings, and the few bytes that CUDA's generator keeps from its first capture on
    generator = 4096
    assert x.nbytes <= capturer.held_bytes <= x.nbytes + generator
    assert recorded[0][2] == recorded[1][2] >= x.nbytes
    assert before <= torch.cuda.memory_allocated() <= before + generator
    for order in (0, 1, 0):
        recorded[order][0].replay()
        assert (recorded[order][1] == 2.0 + order).all()
    capturer.reset()


@pytest.mark.serial
def test_steps_fall_back_to_eager_after_a_failed_capture() -> None:
    """In a separate process: after a capture that CUDA aborted, PyTorch's device generator is unusable."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, __file__], env=paths, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]


def _fall_back() -> None:
    """The model syncs with the device, which a capture cannot contain."""
    set_arithmetic(deterministic=True, threads=None)
    told = []
    for graphs in (False, True):
        run = on_gpu(graphs=False, compiled=False)
        if graphs:
            run.use_graphs(auto=True)
            run.model.register_forward_hook(
                lambda model, given, out: out.total.item() if torch.cuda.is_current_stream_capturing() else None
            )
        here = torch.cuda.current_stream()
        seen = [run.step([packed(i, 5)], with_stats=i == 1).loss for i in range(3)]
        assert torch.cuda.current_stream() == here
        capture_rng(run.device)  # as a save does
        if run.graph is not None:
            (failure,) = run.logged("reason")
            assert "could not be captured as a CUDA graph" in failure, failure
        told.append([*seen, *(p.detach() for p in run.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def test_a_replay_never_syncs_with_the_device() -> None:
    run = on_gpu(graphs=True)
    for with_stats in (False, True):
        run.step([packed(1, 5)], with_stats=with_stats)
    batches = [packed(2, 8), packed(3, 4)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step(batches[:1])
        run.step(batches[1:], with_stats=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.guard.total() == 0


@pytest.mark.serial
def test_graphs_do_not_double_the_memory() -> None:
    """Reserved memory with both variants, after capturing again, compared with eager steps."""
    taken = {}
    for graphs in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        run = on_gpu(graphs=graphs)
        for i, documents in enumerate((5, 5, 60, 5)):
            run.step([packed(i, documents)], with_stats=i == 1)
        torch.cuda.synchronize()
        taken[graphs] = torch.cuda.max_memory_reserved() - before
        if run.graph is not None:
            assert run.graph.held_bytes > 0
        del run
    assert taken[True] < 1.3 * taken[False] + (64 << 20), taken


def test_a_run_with_graphs_resumes_to_the_same_losses(tmp_path: Path) -> None:
    """One document per sequence: four, so that empty documents do not change how sums are split."""
    sizes = SIZES | {
        "train__tokens_per_step": 2 * 4 * LENGTH, "train__micro_batch": 4, "train__val_tokens": 4 * LENGTH,
        "train__val_every": 3, "log__every": 2, "run__deterministic": True,
    }  # fmt: skip
    told = {}
    for name, how in (("off", "off"), ("on", "on"), ("resumed", "on")):
        folder = tmp_path / name
        begin = {"resume": str(tmp_path / "on" / "checkpoints" / "step-00000004")} if name == "resumed" else {}
        assert train(small(run__dir=str(folder), train__cuda_graph=how, **sizes), origins={}, **begin) == 0
        told[name] = losses(folder)
    assert told["on"] == told["off"]
    assert told["resumed"][6] == told["off"][6]


@pytest.mark.parametrize("how", ["off", "on"])
def test_a_run_with_stages_resumes_between_them_to_the_same_losses(tmp_path: Path, how: str) -> None:
    """At a stage's start blocks are compiled and graphs captured as in a new process."""
    sizes = SIZES | {
        "train__stages": f"{LENGTH // 2}:3,{LENGTH}:3:rope_theta=50000", "train__tokens_per_step": 2 * 4 * LENGTH,
        "train__micro_batch": 4, "train__val_tokens": 4 * LENGTH, "train__cuda_graph": how,
        "data__shuffle_sequences": 10, "run__deterministic": True,
    }  # fmt: skip
    assert train_small(tmp_path / "straight", **sizes) == 0
    between = tmp_path / "straight" / "checkpoints" / "step-00000003"
    assert train_small(tmp_path / "resumed", **sizes, resume=str(between)) == 0
    told = [losses(tmp_path / name) for name in ("straight", "resumed")]
    assert told[1] == {step: loss for step, loss in told[0].items() if step > 3}


if __name__ == "__main__":
    _fall_back()
