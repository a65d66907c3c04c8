"""Save a non-finite step, and replay it with `python -m tercet.train.dump FOLDER`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tercet.config.load import read_stored
from tercet.model.loss import IGNORED
from tercet.train.device import pick_device
from tercet.train.optim import global_norm
from tercet.train.state import configure_selectors, freeze_all_but_selectors, set_teacher
from tercet.train.step import MicroBatch, autocast, loss_sum


def write_dump(
    folder: Path, step: int, model: nn.Module, batches: Sequence[MicroBatch], config: Mapping[str, Any], rank: int
) -> Path:
    """Write the current weights and the batches of `step`, which other ranks may have, to nonfinite/step-N in the run
    folder. Call on every rank."""
    target = folder / "nonfinite" / f"step-{step:08d}"
    target.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        save_file({k: v.contiguous().clone() for k, v in weights.items()}, target / "weights.safetensors")
    tensors: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        tensors |= {f"{i}.tokens": batch.tokens, f"{i}.targets": batch.targets}
        if batch.cu_seqlens is not None:
            tensors[f"{i}.cu_seqlens"] = batch.cu_seqlens
    if batches:
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, target / f"batches_rank{rank}.safetensors")
    if rank == 0:
        about = {"step": step, "micro_batches": len(batches), "config": config}
        (target / "dump.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return target


def replay(folder: Path, device_name: str = "auto") -> dict[str, Any]:
    """Rerun forward and backward of a dumped step and list the weights and gradients that are not finite."""
    from tercet.model.transformer import Transformer

    about = json.loads((folder / "dump.json").read_text(encoding="utf-8"))
    config = read_stored(about["config"])
    device = pick_device(device_name)
    model = Transformer(config.model)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    model.to(device)
    if config.train.selector.only:
        freeze_all_but_selectors(model)
    configure_selectors(model, config)
    set_teacher(model, config.train.selector, about["step"])
    batches = []
    for path in sorted(folder.glob("batches_rank*.safetensors")):
        tensors = load_file(path, device=str(device))
        for i in range(about["micro_batches"]):
            documents = tensors.get(f"{i}.cu_seqlens")
            max_seqlen = None if documents is None else config.data.seq_len
            batches.append(MicroBatch(tensors[f"{i}.tokens"], tensors[f"{i}.targets"], documents, max_seqlen))
    targets = sum(int((b.targets != IGNORED).sum()) for b in batches)
    losses = []
    for batch in batches:
        with autocast(device, config.train.precision):
            loss = loss_sum(model, batch)
        (loss / max(1, targets)).backward()
        losses.append(float(loss.detach()) / max(1, targets))
    named = list(model.named_parameters())
    return {
        "step": about["step"],
        "loss": sum(losses),
        "grad_norm": float(global_norm(model.parameters())),
        "nonfinite_weights": [n for n, p in named if not bool(p.isfinite().all())],
        "nonfinite_gradients": [n for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tercet.train.dump", description=replay.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    arguments = parser.parse_args()
    json.dump(replay(arguments.folder, arguments.device), sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
