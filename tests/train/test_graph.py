"""CUDA graph steps with a fake capturer that recomputes instead of replaying: buffers, documents, gradients,
statistics, messages. What needs a GPU is in test_graph_gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runs
from runs import events_of, losses, small
from stepping import SteppedModel
from tercet.config.schema import uses_cuda_graph
from tercet.errors import TercetError
from tercet.model.attention import Attention
from tercet.model.loss import IGNORED
from tercet.model.transformer import Transformer
from tercet.report.attention_gates import fallback_gate
from tercet.report.read import read_run
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import (
    GraphCaptureFailed,
    HealthFired,
    Noted,
    ResourcesObserved,
    RoutesCounted,
)
from tercet.train import console, state
from tercet.train import cuda_graph as graph
from tercet.train import trainer as loop
from tercet.train.cuda_graph import StepGraph, fill_bounds
from tercet.train.state import uses_compile
from tercet.train.step import MicroBatch
from tercet.train.trainer import train

# one layer: steps are compared layer by layer in the tests without a run
one_layer, train_small = (partial(make, model__layers=1) for make in (runs.small, runs.train_small))


class FakeCapturer:
    """Behaves like CUDA graphs: capturing computes nothing, a replay writes to the captured addresses."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = list(model.parameters())
        self.layers = [m for m in model.modules() if isinstance(m, Attention)]
        self.warmed = self.resets = 0
        self.held_bytes = self.pool_bytes = 0

    def warm_up(self, act: Callable[[], None]) -> None:
        self.warmed += 1
        act()

    def capture(self, act: Callable[[], None]) -> FakeCapturer.Captured:
        given = [p.grad for p in self.trained]
        values = [None if g is None else g.clone() for g in given]
        act()
        self.held_bytes += 1
        for p, was, value in zip(self.trained, given, values, strict=True):
            if was is not None and value is not None:
                was.copy_(value)
            elif p.grad is not None:
                p.grad.fill_(torch.nan)
        grads, adds = [p.grad for p in self.trained], any(g is not None for g in given)
        return FakeCapturer.Captured(act, self.trained, grads, adds, self.layers)

    def borrow(self, made: Tensor) -> Tensor:
        return made

    def reset(self) -> None:
        self.resets += 1
        self.held_bytes = 0

    @dataclass
    class Captured:
        act: Callable[[], None]
        trained: list[nn.Parameter]
        grads: list[Tensor | None]
        adds: bool
        layers: list[Attention]

        def replay(self) -> None:
            routes = [layer.routes for layer in self.layers]
            for p, g in zip(self.trained, self.grads, strict=True):
                p.grad = g if self.adds else None
            self.act()
            for p, g in zip(self.trained, self.grads, strict=True):
                if g is not None and p.grad is not g:
                    assert p.grad is not None
                    g.copy_(p.grad)
                p.grad = None  # a replay sets no attribute
            for layer, was in zip(self.layers, routes, strict=True):
                layer.routes = was


class FailingCapturer(FakeCapturer):
    """Fails after a given number of captures."""

    def __init__(self, model: nn.Module, last: int = 0, error: Exception | None = None) -> None:
        super().__init__(model)
        self.left, self.error = last, error or TercetError("a step could not be captured (RuntimeError: no)")

    def capture(self, act: Callable[[], None]) -> FakeCapturer.Captured:
        self.left -= 1
        if self.left < 0:
            act()  # a real capture may fail halfway
            raise self.error
        return super().capture(act)


def on_cpu(*, graphs: bool) -> SteppedModel:
    run = SteppedModel(small(train__lr=1e-2, train__precision="fp32"), seed=3)
    if graphs:
        run.use_graphs(FakeCapturer(run.model))
    return run


def packed(seed: int, documents: int, length: int = 128) -> MicroBatch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 256, (1, length + 1), generator=draw)
    inner = torch.randperm(length - 1, generator=draw)[: documents - 1].sort().values + 1
    bounds = torch.cat((torch.tensor([0]), inner, torch.tensor([length]))).to(torch.int32)
    targets = tokens[:, 1:].clone()
    targets[0, inner - 1] = IGNORED
    return MicroBatch(tokens[:, :-1].contiguous(), targets, bounds, length)


def plain(seed: int) -> MicroBatch:
    tokens = torch.randint(1, 256, (2, 65), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_empty_documents_at_the_end_change_nothing() -> None:
    config = small()
    for attention in ("nsa", "dense", "window"):
        found = []
        for room in (None, 16):
            torch.manual_seed(0)
            model = Transformer(config.model.model_copy(update={"attention": attention}))
            batch = packed(1, 5)
            bounds = batch.cu_seqlens
            if room is not None:
                bounds = torch.zeros(room + 1, dtype=torch.int32)
                fill_bounds(bounds, batch.cu_seqlens, 128)
                assert bounds.tolist() == [*batch.cu_seqlens.tolist(), *[128] * 11]
            loss = model(batch.tokens, bounds, batch.targets, max_seqlen=128).total
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), attention


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [("packed", 2), ("plain", 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("packed", 1), ("plain", 2)))],
)
def test_graph_steps_equal_eager_steps_to_the_last_bit(kind: str, accumulation: int) -> None:
    """The document count varies and exceeds the capacity in the fourth batch; two steps collect statistics."""
    documents = [3, 9, 2, 40, 5, 33]
    told = []
    for graphs in (False, True):
        run, seen = on_cpu(graphs=graphs), []
        for i, count in enumerate(documents):
            batches = [
                plain(10 * i + j) if kind == "plain" else packed(10 * i + j, count + j) for j in range(accumulation)
            ]
            result = run.step(batches, with_stats=i in (2, 4))
            seen += [result.loss, result.grad_norm]
            if i in (2, 4):
                seen += [s.sums().nan_to_num() for s in run.stats]
                for stats in run.stats:
                    stats.reset()
        told.append([*seen, *bits(run.model)])
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def test_stale_gradients_do_not_reach_the_next_step() -> None:
    """Overwrites the gradient buffers between two steps: a step must clear them."""
    run = on_cpu(graphs=True)
    run.step([packed(1, 3), packed(2, 3)])
    assert run.graph is not None
    expected = on_cpu(graphs=False)
    expected.step([packed(1, 3), packed(2, 3)])
    for g in run.graph._grads[False]:
        assert g is not None
        g.fill_(7.0)
    for each in (run, expected):
        each.step([packed(3, 3), packed(4, 3)])
    assert all(torch.equal(a, b) for a, b in zip(bits(run.model), bits(expected.model), strict=True))


def test_graphs_are_captured_again_only_when_batches_do_not_fit() -> None:
    run = on_cpu(graphs=True)
    assert run.graph is not None
    for i in range(4):
        run.step([packed(i, 3 + i)])
    assert len(run.logged("text")) == 1
    assert run.capturer.resets == 1
    run.step([packed(9, 3)], with_stats=True)  # first step with statistics: both variants are captured, in one pool
    assert run.capturer.held_bytes == 2
    run.step([packed(9, 17)])  # more documents than the capacity
    both, more = run.logged("text")
    assert "up to 16 documents" in both
    assert "up to 32 documents" in more
    assert run.capturer.held_bytes == 2
    run.step([packed(9, 3)], with_stats=True)
    run.step([packed(8, 30)])
    assert not run.logged("text")
    run.step([packed(7, 3), packed(8, 3)])  # gradients now accumulate
    run.step([packed(7, 3)])
    assert len(run.logged("text")) == 1
    run.step([packed(7, 3, length=64)])
    assert "1 × 64 tokens" in run.logged("text")[0]


def test_parameters_without_a_gradient_stay_unchanged() -> None:
    for accumulation in (1, 2):
        run = on_cpu(graphs=True)
        unused = nn.Parameter(torch.ones(3))
        run.model.register_parameter("unused", unused)
        run.use_graphs(FakeCapturer(run.model))
        run.optimizer.add_param_group({"params": [unused], "weight_decay": 0.5})
        run.step([packed(i, 3) for i in range(accumulation)])
        assert torch.equal(unused.detach(), torch.ones(3))


def test_routes_are_those_of_the_captured_pass() -> None:
    run = on_cpu(graphs=True)
    run.step([packed(1, 3)])
    wanted = [layer.routes for layer in run.model.attention_layers()]
    for layer in run.model.attention_layers():
        layer.routes = {}  # as if a sample had run
    run.step([packed(2, 3)])
    assert [layer.routes for layer in run.model.attention_layers()] == wanted != [{}, {}]


@pytest.fixture
def graphs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU."""
    for module in (state, console):
        monkeypatch.setattr(module, "uses_cuda_graph", lambda config, device: config.train.cuda_graph != "off")
    built = StepGraph.__init__
    monkeypatch.setattr(
        graph.StepGraph,
        "__init__",
        lambda self, model, precision, **how: built(self, model, precision, FakeCapturer(model), **how),
    )


def test_a_run_with_graphs_equals_an_eager_run_and_resumes(tmp_path: Path, graphs_anywhere: None) -> None:
    """With statistics, validation, samples and saves in between; the resumed process captures again."""
    several = {
        "train__tokens_per_step": 256, "train__val_tokens": 128, "train__val_every": 2, "train__sample_tokens": 4,
        "train__sample_every": 3, "log__every": 2,
    }  # fmt: skip
    told = {}
    for how in ("off", "on"):
        train_small(tmp_path / how, train__cuda_graph=how, **several)
        told[how] = losses(tmp_path / how)
    forked, fourth = tmp_path / "resumed", tmp_path / "off" / "checkpoints" / "step-00000004"
    train_small(forked, train__cuda_graph="on", **several, resume=str(fourth))
    assert len(told["off"]) == 3
    assert told["on"] == told["off"]
    assert losses(forked)[6] == told["off"][6]
    events = {how: list(read_events(events_file(tmp_path / how))) for how in told}
    used = [e for e in events["on"] if isinstance(e, ResourcesObserved)]
    assert all(e.forward_seconds is None and e.backward_seconds is None and (e.passes_seconds or 0) > 0 for e in used)
    eager = [e for e in events["off"] if isinstance(e, ResourcesObserved)]
    assert all(e.passes_seconds is None and (e.forward_seconds or 0) > 0 for e in eager)
    counted = {how: [(e.route, e.calls) for e in events[how] if isinstance(e, RoutesCounted)] for how in told}
    assert counted["on"] == counted["off"]  # sampling does not count
    assert any("CUDA graph: captured passes of 1 × 128 tokens" in e.text for e in events["on"] if isinstance(e, Noted))


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "accumulation"),
    [(None, 2), (NO_MEMORY, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((None, 1), (NO_MEMORY, 2)))],
    ids=["broken-2", "memory-1", "broken-1", "memory-2"],
)
def test_steps_fall_back_to_eager_if_a_capture_may_fail(error: Exception | None, accumulation: int) -> None:
    """The third step collects statistics, so both variants are captured again, and the second capture fails."""
    told = []
    for graphs in (False, True):
        run = on_cpu(graphs=False)
        if graphs:
            run.use_graphs(FailingCapturer(run.model, 2, error), auto=True)
        results = []
        for i in range(5):
            result = run.step([packed(10 * i + j, 3) for j in range(accumulation)], with_stats=i == 2)
            results += [result.loss, result.grad_norm]
            if i == 2:
                results += [torch.tensor(list(s.read().values())) for s in run.stats]
            if run.graph is not None:
                said = run.logged("reason")
                assert len(said) == (1 if i == 2 else 0)
                assert not said or ("out of memory" if error else "could not be captured") in said[0]
        told.append([*results, *bits(run.model)])
    assert run.capturer.held_bytes == 0  # the memory is freed
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


def test_micro_batches_of_different_shapes_fall_back_to_eager_if_capture_may_fail() -> None:
    told = []
    for graphs in (False, True):
        run = on_cpu(graphs=False)
        if graphs:
            run.use_graphs(FakeCapturer(run.model), auto=True)
        run.step([packed(1, 3), packed(2, 3, length=64)])
        told.append(bits(run.model))
    assert run.graph is not None
    assert "micro-batches of [1, 64] and [1, 128] tokens" in run.logged("reason")[0]
    assert all(torch.equal(a, b) for a, b in zip(*told, strict=True))


@pytest.mark.parametrize("action", ["warn", "halt"])
def test_a_run_falls_back_to_eager_and_its_report_counts_it(
    tmp_path: Path, graphs_anywhere: None, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    def capture(self: FakeCapturer, act: Callable[[], None]) -> FakeCapturer.Captured:
        raise TercetError("a step could not be captured as a CUDA graph (ValueError: no)")

    monkeypatch.setattr(FakeCapturer, "capture", capture)
    halt = ("fallback",) if action == "halt" else ()
    runs = {
        how: one_layer(run__dir=str(tmp_path / how), train__cuda_graph=how, health__halt=halt)
        for how in ("off", "auto")
    }
    if action == "halt":
        with pytest.raises(TercetError, match=r"stopped by health.halt=fallback after step 1: .*ValueError: no"):
            train(runs["auto"])
        return
    told = {}
    for how, run in runs.items():
        assert train(run) == 0
        told[how] = losses(tmp_path / how)
    assert told["auto"] == told["off"]
    events = list(read_events(events_file(tmp_path / "auto")))
    assert [e.step for e in events if isinstance(e, GraphCaptureFailed)] == [1]
    fired = [e.sentence for e in events if isinstance(e, HealthFired) and e.rule == "fallback"]
    assert len(fired) == 1
    assert "train.cuda_graph=auto fell back to eager execution" in fired[0]
    evidence = {how: dict(fallback_gate(read_run(tmp_path / how)).evidence) for how in ("auto", "off")}
    assert evidence["auto"]["failed CUDA graph captures"] == "1"
    assert "failed CUDA graph captures" not in evidence["off"]
    with pytest.raises(TercetError, match="ValueError: no"):
        train_small(tmp_path / "on", train__cuda_graph="on")


def test_a_resumed_run_keeps_its_document_capacity(tmp_path: Path, graphs_anywhere: None) -> None:
    """Bits may depend on the capacity, and a resumed run must equal an uninterrupted one."""
    made: list[StepGraph] = []
    several = {"train__cuda_graph": "on", "run__dir": str(tmp_path / "run")}
    built = state.build_state

    def build(*given: object) -> state.TrainState:
        found = built(*given)  # type: ignore[arg-type]
        assert found.graph is not None
        if not made:
            found.graph.capacity = 64  # as if a batch had that many documents
        made.append(found.graph)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "build_state", build)
        train(one_layer(**several, train__steps=2))
        train(one_layer(**several, train__steps=4), origins={}, resume="auto")
    assert [g.capacity for g in made] == [64, 64]
    assert made[1]._shape is not None
    assert made[1]._shape.capacity == 64


@pytest.mark.parametrize(
    ("device", "changes", "refusal"),
    [
        ("cpu", {}, "on a cpu"),
        ("cuda", {"parallel__strategy": "ddp"}, "with parallel.strategy=ddp"),
        ("cuda", {"parallel__strategy": "fsdp"}, "with parallel.strategy=fsdp"),
        ("cuda", {}, None),
    ],
)
def test_graphs_are_refused_without_a_gpu_or_with_several_ranks(device: str, changes: Any, refusal: str | None) -> None:
    on = small(train__cuda_graph="on", **changes)
    if refusal is None:
        assert uses_cuda_graph(on, device)
    else:
        with pytest.raises(TercetError, match=f"train.cuda_graph=on {refusal}.*--train.cuda_graph off"):
            uses_cuda_graph(on, device)
    assert uses_cuda_graph(small(**changes), device) == (refusal is None)  # auto is the default
    assert not uses_cuda_graph(small(train__cuda_graph="off", **changes), device)


def test_blocks_that_exchange_keys_are_not_compiled() -> None:
    gpu, shared = torch.device("cuda"), {"parallel__strategy": "cp", "parallel__world_size": 2}
    assert uses_compile(small(), gpu)
    assert not uses_compile(small(), torch.device("cpu"))
    assert not uses_compile(small(**shared), gpu)
    with pytest.raises(TercetError, match="cannot be compiled"):
        uses_compile(small(train__compile="on", **shared), gpu)


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({"train__micro_batch": 16}, True),
        ({"train__micro_batch": 32}, False),
        ({"train__micro_batch": 32, "train__cuda_graph": "on"}, True),
        ({"train__micro_batch": 32, "train__stages": "1024:3:micro_batch=32,2048:3"}, True),
        ({"train__micro_batch": 16, "run__deterministic": True}, False),
        ({"train__micro_batch": 16, "run__deterministic": True, "train__cuda_graph": "on"}, True),
    ],
)
def test_auto_captures_micro_batches_of_at_most_32_768_tokens(changes: Any, captured: bool) -> None:
    run = small(data__seq_len=2048, train__tokens_per_step=2**16, **changes)
    assert uses_cuda_graph(run, "cuda") == captured


def test_every_stage_with_small_micro_batches_captures_its_own_graphs(
    tmp_path: Path, graphs_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds the RoPE base of its stage, so that an equal shape is no reason to keep it."""
    monkeypatch.setattr(graph, "AUTO_GRAPH_TOKENS", 128)
    told, stages = {}, "64:2,64:2:rope_theta=50000,128:2:micro_batch=2:tokens_per_step=256,32:1"
    for how in ("off", "auto"):
        train_small(tmp_path / how, train__stages=stages, train__steps=7, train__cuda_graph=how, log__every=10)
        told[how] = losses(tmp_path / how)
    assert told["auto"] == told["off"]
    captured = {e.step for e in events_of(tmp_path / "auto", Noted) if "captured passes" in e.text}
    assert captured >= {1, 3, 7}
    assert not captured & {5, 6}


def test_steps_with_another_teacher_are_not_captured(tmp_path: Path, graphs_anywhere: None) -> None:
    """Until train.selector.all_until every block teaches. A graph of such a step would go on teaching that way."""
    selector = {"model__selector": "learned", "train__selector__teacher": "selected", "train__selector__every": 4}
    told = {}
    for how in ("off", "auto"):
        train_small(
            tmp_path / how, train__cuda_graph=how, train__steps=14, train__selector__all_until=12,
            checkpoint__every=0, log__every=9, **selector,
        )  # fmt: skip
        told[how] = losses(tmp_path / how)
    captured = [e.step for e in events_of(tmp_path / "auto", Noted) if "captured passes" in e.text]
    assert captured[0] == 12
    assert told["auto"] == told["off"]
