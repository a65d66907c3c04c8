"""On each rank: training under each strategy against the same training in one process, in numbers."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import tempfile
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel.world import GPUS, report
from runs import GPU_SIZES, small
from tercet.data.loader import build_loader
from tercet.parallel.launch import Launch, join
from tercet.parallel.strategy import Single, build_strategy
from tercet.train.optim import learning_rate
from tercet.train.state import build_state
from tercet.train.step import StepBatches, to_device, train_step

# name: (settings of the strategy, activation checkpointing, accumulation)
CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "ddp": ({"strategy": "ddp"}, "none", 1),
    "ddp, accumulated, recomputed": ({"strategy": "ddp", "mixed": True}, "full", 2),
    "ddp, bf16 gradients": ({"strategy": "ddp", "gradient_compression": "bf16"}, "none", 1),
    "fsdp, bf16 gradients": ({"strategy": "fsdp", "gradient_compression": "bf16"}, "none", 1),
    "ddp, bf16": ({"strategy": "ddp", "precision": "bf16"}, "none", 1), "fsdp": ({"strategy": "fsdp"}, "full", 1),
    "fsdp, accumulated": ({"strategy": "fsdp", "mixed": True}, "none", 3),
    "fsdp, grad_op": ({"strategy": "fsdp", "sharding": "grad_op"}, "selective", 2),
    "fsdp, bf16": ({"strategy": "fsdp", "precision": "bf16"}, "none", 1),
    "fsdp, untied": ({"strategy": "fsdp", "tie": False}, "none", 1),
    "ddp, learned selector": ({"strategy": "ddp", "selector": "learned"}, "selective", 3),
    "fsdp, learned selector": ({"strategy": "fsdp", "selector": "learned"}, "full", 1),
    "cp, learned selector": ({"strategy": "cp", "selector": "learned"}, "selective", 1),
    "ddp, selectors only": ({"strategy": "ddp", "selector": "only"}, "selective", 3),
    "fsdp, selectors only": ({"strategy": "fsdp", "selector": "only"}, "full", 2),
    "cp, selectors only": ({"strategy": "cp", "selector": "only"}, "none", 1),
    "ddp, muon": ({"strategy": "ddp", "optimizer": "muon"}, "none", 1),
    "fsdp, muon": ({"strategy": "fsdp", "optimizer": "muon"}, "none", 1),
    "cp, muon": ({"strategy": "cp", "optimizer": "muon"}, "none", 1),
    "hsdp, muon": ({"strategy": "hsdp", "shard_ranks": 2, "optimizer": "muon"}, "none", 1),
    "cp": ({"strategy": "cp"}, "none", 1), "cp, accumulated, recomputed": ({"strategy": "cp"}, "full", 3),
    "cp, whole rows": ({"strategy": "cp", "cross_document": True, "mixed": True}, "none", 1),
    "cp, bf16": ({"strategy": "cp", "precision": "bf16"}, "none", 1),
    "hsdp": ({"strategy": "hsdp", "shard_ranks": 2}, "full", 3),
    "hsdp, plain": ({"strategy": "hsdp", "shard_ranks": 2}, "none", 1),
    "cp with data": ({"strategy": "cp", "context_ranks": 2}, "none", 1),
    "cp with data, muon": ({"strategy": "cp", "context_ranks": 2, "optimizer": "muon"}, "none", 1),
}  # fmt: skip
# Forms of attention besides NSA with its three branches.
# at the usual init_std teacher and student are uniform, and the gradient is what rounding leaves of it
LEARNED = {
    "model__selector": "learned",
    "model__selector_rotary": 8,
    "train__selector__every": 8,
    "model__init_std": 0.3,
}
FORMS: dict[str, dict[str, Any]] = {
    "two-branch": {"model__branches": ("selected", "window"), **LEARNED},
    "own": {"model__gate": "none", "model__selector": "own"},
    "learned": {"model__gate": "none", **LEARNED},
    "dense": {"model__attention": "dense"},
}
for _strategy in ("ddp", "fsdp", "cp"):
    for _form in FORMS:
        CASES[f"{_strategy}, form {_form}"] = ({"strategy": _strategy, "form": _form}, "none", 1)
    CASES[f"{_strategy}, compiled"] = ({"strategy": _strategy, "compile": True}, "none", 1)
for _strategy in ("ddp", "fsdp", "cp"):
    for _mode in ("none", "selective", "full"):
        for _accumulation in (1, 3):
            CASES[f"{_strategy} {_mode} {_accumulation}"] = ({"strategy": _strategy}, _mode, _accumulation)


# On a GPU the model has sizes that the kernels support.
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % GPUS) if "--cuda" in sys.argv else torch.device("cpu")
LENGTH = 512 if DEVICE.type == "cuda" else 64


def main() -> int:
    limit = [int(a.removeprefix("--limit=")) for a in sys.argv if a.startswith("--limit=")]
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit[0] if limit else 1200, exit=True)
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    code = run_cases()
    dist.destroy_process_group() if dist.is_initialized() else None
    return code


def run_cases() -> int:
    asked = [argument.split(":") for argument in sys.argv[1:] if not argument.startswith("--")]  # STEPS:CASE
    steps_of = {name: int(steps) for steps, name in asked}
    launch = Launch.from_environment()
    configs = {name: configure(name, steps, launch.world_size) for name, steps in steps_of.items()}
    first = next(iter(configs.values()))
    folder = tempfile.mkdtemp() if launch.rank == 0 else ""
    world = join(launch, first.parallel, DEVICE, {}, lambda _: folder)  # type: ignore[arg-type,return-value]
    failed = 0
    expectations: dict[str, dict[str, Any]] = {}  # by configuration: several cases train the same in one process
    for name, config in configs.items():
        steps, began = steps_of[name], time.monotonic()
        try:
            # only rank 0 computes the expected values; the others wait
            expected = None
            if launch.rank == 0:
                single = as_single(config)
                key = single.model_dump_json()
                expected = expectations[key] = expectations.get(key) or run(single, Single(), steps)
            dist.barrier(group=world.control)
            alone = time.monotonic() - began
            strategy = build_strategy(config.parallel, config.train, world)
            got = run(config, strategy, steps)
            strategy._monitor.close()
            sums: list[Any] = [None] * launch.world_size
            dist.all_gather_object(sums, digest(got["parameters"]), group=world.control)
            result = compare(got, expected) if expected is not None else {}
        except Exception:  # report it and continue with the other cases
            traceback.print_exc()
            failed = 1
            continue
        if launch.rank == 0:
            seconds = {"alone_s": round(alone, 1), "together_s": round(time.monotonic() - began - alone, 1)}
            report(case=name, routes=got["routes"], equal=len(set(sums)) == 1, **result, **seconds)
    world.close()
    return failed


def configure(name: str, steps: int, ranks: int):  # type: ignore[no-untyped-def]
    settings, mode, accumulation = CASES[name]
    settings = dict(settings)
    precision, cross = settings.pop("precision", "fp32"), settings.pop("cross_document", False)
    attention, tie = "nsa,window,dense,nsa" if settings.pop("mixed", False) else "nsa", settings.pop("tie", True)
    kind = settings.pop("selector", None)
    selector = {**LEARNED, "train__selector__only": kind == "only"} if kind else {}
    form, compiled = FORMS.get(settings.pop("form", ""), {}), settings.pop("compile", False)
    optimizer = settings.pop("optimizer", "adamw")
    context = settings.get("context_ranks", ranks) if settings["strategy"] == "cp" else 1
    parallel = {f"parallel__{key}": value for key, value in settings.items()}
    on_gpu = {**GPU_SIZES, "parallel__share_gpus": ranks > GPUS} if DEVICE.type == "cuda" else {}
    return small(
        **parallel,
        **on_gpu,
        **selector,
        **{"model__attention": attention, **form},
        parallel__world_size=ranks,
        model__layers=4 if attention != "nsa" else 3,
        model__tie_embeddings=tie,
        train__activation_checkpointing=mode,
        train__tokens_per_step=2 * LENGTH * accumulation * ranks // context,
        train__steps=steps,
        train__precision=precision,
        train__optimizer=optimizer,
        train__clip=0,
        # At the kernels' sizes training is unstable at 1e-2: weights that differ in the last bit end 2e-3 apart after
        # 20 steps even in one process, so no tolerance on the losses would mean anything.
        train__lr=3e-3 if DEVICE.type == "cuda" else 1e-2,
        train__compile="on" if compiled else "off",
        data__source="text",
        data__path=str(Path(__file__).parent / "*.py"),
        data__cross_document_attention=cross,
    )


def as_single(config):  # type: ignore[no-untyped-def]
    """The same training in one process, without activation checkpointing, which changes no bit.

    On a CPU a micro-batch costs about the same whatever its size, so without accumulation one holds the whole step.
    """
    train: dict[str, Any] = {"activation_checkpointing": "none"}
    if DEVICE.type == "cpu" and config.accumulation == 1:
        train["micro_batch"] = config.train.tokens_per_step // config.data.seq_len
    return config.model_copy(
        update={"parallel": type(config.parallel)(), "train": config.train.model_copy(update=train)}
    )


def unwrapped(model: torch.nn.Module) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def run(config, strategy, steps: int) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    device = DEVICE
    state = build_state(config, device, strategy, None)
    layers = unwrapped(state.model).attention_layers()
    nsa = [layer for layer in layers if layer.spec.sparse]
    for layer in nsa:
        layer.stats.enabled = True
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            for name, p in unwrapped(state.model).named_parameters():
                assert (p.grad is not None) == p.requires_grad, name
                if p.grad is None:
                    continue
                gradients[name] = whole(p.grad).detach().clone()

    state.optimizer.register_step_pre_hook(keep)
    losses, norms, stats = [], [], []
    with build_loader(
        config.data,
        seed=config.run.seed,
        batch_sequences=config.train.micro_batch * strategy.data_ranks,
        rank=strategy.data_rank,
        world_size=strategy.data_ranks,
    ) as loader:
        batches = StepBatches(loader, config.accumulation, None)
        for step in range(1, steps + 1):
            result = train_step(
                state.model, state.optimizer, [to_device(b, device, strategy) for b in batches.next_step()], step=step,
                lr=learning_rate(config.train, step), clip=config.train.clip, precision=config.train.precision,
                guard=state.guard, strategy=strategy,
            )  # fmt: skip
            losses.append(result.loss.item())
            norms.append(result.grad_norm.item())
            if step == 1 and nsa:
                sums = strategy.all_sum(torch.stack([layer.stats.sums(device) for layer in nsa]))
                stats = [layer.stats.means(row) for layer, row in zip(nsa, sums.tolist(), strict=True)]
                for layer in nsa:
                    layer.stats.enabled = False
    routes = sorted({str(route) for layer in nsa for route in layer.routes.values()})
    parameters = {name: whole(p).detach().cpu() for name, p in unwrapped(state.model).named_parameters()}
    return {
        "parameters": parameters,
        "routes": routes,
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "stats": stats,
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()


def whole(sharded: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered on the host: full_tensor() of GPU shards segfaults under gloo (torch 2.11)."""
    if not isinstance(sharded, DTensor):
        return sharded
    mesh = host_mesh(tuple(sharded.device_mesh.shape))
    here = DTensor.from_local(
        sharded.to_local().cpu(), mesh, sharded.placements, run_check=False, shape=sharded.shape,
        stride=sharded.stride(),
    )  # fmt: skip
    return here.full_tensor().to(DEVICE)


@lru_cache
def host_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def compare(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    assert got["gradients"].keys() == expected["gradients"].keys()
    gradients = {
        name: ((got["gradients"][name] - g).norm() / g.norm().clamp(min=1e-12)).item()
        for name, g in expected["gradients"].items()
        if g.norm() > 0
    }
    assert len(gradients) > (20 if "embedding.weight" in gradients else 5)  # 5: selectors only
    stats = [
        abs(a[key] - b[key]) / max(1.0, abs(b[key]))
        for a, b in zip(got["stats"], expected["stats"], strict=True)
        for key in b
        if not key.startswith("selector_")
    ]
    # made of fp32 logits, which a split sequence rounds differently
    choice = [
        abs(a[key] - b[key])
        for a, b in zip(got["stats"], expected["stats"], strict=True)
        for key in b
        if key.startswith("selector_") and key in a  # cp measures the choice of learned selectors only
    ]
    assert all("selector_kl" in a for a, b in zip(got["stats"], expected["stats"], strict=True) if "selector_kl" in b)
    return {
        "loss": abs(got["losses"][0] - expected["losses"][0]),
        "norm": abs(got["norms"][0] - expected["norms"][0]) / expected["norms"][0],
        "gradient": max(gradients.values()),
        "worst": max(gradients, key=lambda name: gradients[name]),
        "losses": max(abs(a - b) for a, b in zip(got["losses"], expected["losses"], strict=True)),
        "relative": max(abs(a - b) / b for a, b in zip(got["losses"], expected["losses"], strict=True)),
        "parameter": max(
            ((got["parameters"][name] - p).norm() / p.norm().clamp(min=1e-12)).item()
            for name, p in expected["parameters"].items()
        ),
        "fell": expected["losses"][0] - expected["losses"][-1],
        "steps": len(got["losses"]),
        "stats": max(stats, default=0.0),
        "choice": max(choice, default=0.0),
        "numbers": len(stats),
    }


if __name__ == "__main__":
    sys.exit(main())
