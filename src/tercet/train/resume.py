"""Loading: which checkpoint to resume from, whether it may be, and putting it into a live model and optimizer."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tercet.config.keys import flatten_table
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.config import NSA_ONLY
from tercet.model.cost import parameters
from tercet.telemetry.events import RunStarted, events_file, read_events
from tercet.telemetry.sinks import tensorboard, wandb
from tercet.train import manifest
from tercet.train.checkpoint import MODEL, OPTIMIZER, OPTIONS, tensors_to_save
from tercet.train.manifest import CheckpointError
from tercet.train.run_folder import RunFolder, go_on

# Settings that may change between the parts of one run without changing what it learns, or that people mean to change.
FREE = (
    "run.name",
    "run.dir",
    "run.device",
    "run.threads",
    "log.",
    "health.",
    "profile.",
    "checkpoint.",
    "parallel.",
    "data.prefetch",
    "train.steps",
    "train.micro_batch",
    "train.compile",
    "train.cuda_graph",
    "train.activation_checkpointing",
    "train.val_",
    "train.sample_",
    "train.max_skipped",
    "train.init_",
)


class WrongCheckpoint(CheckpointError, UsageError):
    """One that is not there, or is none of this run's or this model's: asked for again, it is refused again."""


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, its run state, and what there is to say about the choice."""

    path: Path
    run_state: dict[str, Any]
    said: list[str]

    def is_in(self, checkpoints: Path) -> bool:
        """Whether it is the run's own: one of another run is where a fork begins."""
        return self.path.parent.resolve() == checkpoints.resolve()


def choose(resume: str, checkpoints: Path, *, verify: bool) -> Found | None:
    """`auto`: the newest intact checkpoint of this run, None if it has none at all. Otherwise: that very one.

    A damaged checkpoint is passed over under `auto`, and said; named outright, it is an error.
    """
    check = manifest.verify if verify else manifest.read_manifest
    if resume != "auto":
        path = _resolve(Path(resume))
        check(path)
        return Found(path, manifest.read_json(path / manifest.RUN_STATE), [])
    said: list[str] = []
    for path in reversed(manifest.complete_checkpoints(checkpoints)):
        try:
            check(path)
            return Found(path, manifest.read_json(path / manifest.RUN_STATE), said)
        except CheckpointError as error:
            said.append(f"passing over a damaged checkpoint: {error}")
    if said:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} is intact, nothing was changed: {'; '.join(said)}; "
            "restore one from a copy, or start anew with another --run.dir"
        )
    return None


def _resolve(path: Path) -> Path:
    """A checkpoint folder, or the newest one of a run folder or of its checkpoints/."""
    if manifest.step_of(path) is not None or (path / manifest.MANIFEST).is_file():
        if not path.is_dir():
            raise WrongCheckpoint(f"{path} does not exist: name a checkpoint folder, or a run folder that has one")
        return path.resolve()
    for folder in (path / "checkpoints", path):
        found = manifest.complete_checkpoints(folder)
        if found:
            return found[-1]
    raise WrongCheckpoint(
        f"{path} is neither a checkpoint folder (with {manifest.MANIFEST}) nor a run folder that has one: name one"
    )


def set_aside(checkpoints: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps (damaged, or of a path left) so that none is taken for this run's."""
    moved = []
    for path in manifest.complete_checkpoints(checkpoints):
        if (manifest.step_of(path) or 0) > step:
            target, n = path.with_name(f"abandoned-{path.name}"), 1
            while target.exists():
                n += 1
                target = path.with_name(f"abandoned-{path.name}-{n}")
            moved.append(path.rename(target))
    return moved


def saved_config(found: Found) -> dict[str, Any]:
    """The config of a checkpoint; keys that came to be since have their defaults."""
    try:
        return RunConfig.model_validate(found.run_state["config"]).model_dump(mode="json")
    except KeyError as error:
        raise CheckpointError(f"{found.path}: {manifest.RUN_STATE} lacks {error}: restore it from a copy") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise WrongCheckpoint(
            f"{found.path}: its config is not one of this Tercet ({key}: {first['msg']}): use the version of Tercet "
            "that wrote it, or take over its weights with train.init_from"
        ) from None


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow_change: bool) -> list[str]:
    """What differs from the saved config, one sentence each; an error where it would be another run."""
    before, after = flatten_table(saved), flatten_table(now)
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    told = {k: f"{k} was {before.get(k)!r}, now {after.get(k)!r}" for k in changed}
    # A preset whose sparse attention has changed since is no other model to its dense twin.
    nsa_only = NSA_ONLY if _all_dense(before) and _all_dense(after) else ()
    unread = {f"model.{key}" for key in ("backend", *nsa_only)}
    idle = [k for k in changed if ".".join(k.split(".")[:2]) in unread]
    shape = [k for k in changed if k.startswith("model.") and k not in (*idle, "model.rope_scaling")]
    if shape:
        raise WrongCheckpoint(
            f"the checkpoint is of another model: {'; '.join(told[k] for k in shape)}: put these back (without "
            "--preset and --config a run goes on with the settings in its own folder), or take over the weights that "
            "fit a changed model with train.init_from"
        )
    path = [k for k in changed if not k.startswith(FREE) and k not in idle]
    if path and not allow_change:
        raise WrongCheckpoint(
            f"the config has changed since the checkpoint: {'; '.join(told[k] for k in path)}: put these back, or pass "
            "--checkpoint.allow-config-change to go on with the new values"
        )
    return [told[k] for k in changed if k in path or k in (*idle, "train.steps")]


def _all_dense(config: Mapping[str, Any]) -> bool:
    kinds = config.get("model.attention")
    return kinds == "dense" or (isinstance(kinds, list) and set(kinds) == {"dense"})


def load_tensors(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Read weights (and optimizer moments) from a checkpoint folder into the live model, resharding as needed."""
    live = tensors_to_save(model, optimizer)
    reader = HuggingFaceStorageReader(str(path))
    _check_shapes(path, live, reader)
    try:
        dcp.load(dict(live), storage_reader=reader)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{path}: cannot be loaded ({causes})") from error
    set_model_state_dict(model, {k.removeprefix(MODEL): v for k, v in live.items() if k.startswith(MODEL)})
    if optimizer is not None:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
        state |= {k.removeprefix(OPTIMIZER): v for k, v in live.items() if k.startswith(OPTIMIZER)}
        set_optimizer_state_dict(model, optimizer, state, options=OPTIONS)


def load_weights_file(path: Path, model: nn.Module) -> None:
    """Read weights alone from a .safetensors file; every name and shape must fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except OSError as error:
        raise WrongCheckpoint(f"train.init_from={path}: cannot be read ({error}): name a file that is there") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"train.init_from={path}: cannot be read ({error}): it is damaged, copy it anew"
        ) from None
    weights = {k.removeprefix(MODEL): v for k, v in weights.items() if not k.startswith(OPTIMIZER)}
    live = {k.removeprefix(MODEL): v for k, v in tensors_to_save(model, None).items()}
    _compare(path, {k: v.shape for k, v in live.items()}, {k: v.shape for k, v in weights.items()})
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])


def _check_shapes(path: Path, live: Mapping[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    stored = reader.read_metadata().state_dict_metadata
    parts = {k.split(".", 1)[0] for k in live}  # weights alone may be taken from a checkpoint that has more
    sizes = {k: v.size for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
    _compare(
        path, {k: v.shape for k, v in live.items()}, {k: v for k, v in sizes.items() if k.split(".", 1)[0] in parts}
    )


def _compare(path: Path, live: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    missing, surplus = sorted(live.keys() - stored.keys()), sorted(stored.keys() - live.keys())
    differ = [
        f"{k} {list(stored[k])}, the model has {list(live[k])}" for k in live.keys() & stored if live[k] != stored[k]
    ]
    for what, names in (("lacks", missing), ("has a surplus of", surplus), ("differs in shape:", sorted(differ))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WrongCheckpoint(f"{path} does not fit the model: it {what} {', '.join(names[:3])}{more}")


# ------------------------------------------------------------------------------------------------
# Where a run begins: at a checkpoint or at step 0, and whether it may.


def find_start(config: RunConfig, resume: str | None, folder: RunFolder) -> tuple[Found | None, list[str]]:
    """The checkpoint to go on from, if any, and what there is to say about it. Refuses to train over a run."""
    _check_events(folder, config.parallel.world_size)
    if resume is None:
        if folder.holds_a_run:
            raise UsageError(
                f"{folder.path} already holds a run: pick another --run.dir, or go on with: {go_on(folder.path)}"
            )
        return None, []
    manifest.sweep(folder.checkpoints)
    try:
        start = choose(resume, folder.checkpoints, verify=config.checkpoint.verify)
    except manifest.CheckpointError as error:
        if resume == "auto":
            raise
        raise type(error)(f"--resume {resume}: {error}; or use --resume auto") from None
    if start is None:
        for other in _forked_from(folder):
            if other is not None and other.parent != folder.checkpoints.resolve():
                raise UsageError(
                    f"{folder.path} began with {other} and has saved nothing of its own: go on with --resume {other} "
                    f"--run.dir {shlex.quote(str(folder.path))}"
                )
        return None, [f"--resume auto: {folder.checkpoints} has no complete checkpoint, starting at step 0"]
    if not start.is_in(folder.checkpoints) and folder.holds_a_run and not _is_same_fork(folder, start):
        raise UsageError(
            f"{folder.path} already holds a run, and --resume {resume} is another's: pick another --run.dir, or go on "
            f"with the run that is there: {go_on(folder.path)}"
        )
    now = config.model_dump(mode="json")
    allow = config.checkpoint.allow_config_change
    changes = check_config(saved_config(start), now, allow_change=allow)
    return start, [*start.said, f"resuming from {start.path}", *(f"changed since: {c}" for c in changes)]


def _check_events(folder: RunFolder, ranks: int) -> None:
    """Of all ranks at once: each opens its own only when rank 0 has begun to write."""
    for path in (events_file(folder.path, rank) for rank in range(ranks)):
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            why = "may not be written" if path.is_file() else "is not a file"
            raise UsageError(f"{path}, where events are told, {why}: pick another --run.dir, or mend it")


def abandon_later(start: Found | None, folder: RunFolder) -> list[str]:
    """Checkpoints of steps after the one gone on from are set aside, once nothing can be refused any more."""
    if start is None or not start.is_in(folder.checkpoints):
        return []
    aside = set_aside(folder.checkpoints, int(start.run_state["step"]))
    return [f"an abandoned checkpoint is kept as {p}" for p in aside]


def _is_same_fork(folder: RunFolder, start: Found) -> bool:
    """Whether the folder holds nothing but attempts at this very fork that ended before their first save."""
    saved = manifest.complete_checkpoints(folder.checkpoints)
    return not saved and all(other == start.path.resolve() for other in _forked_from(folder))


def _forked_from(folder: RunFolder) -> list[Path | None]:
    """What each process that took up this run went on from."""
    path = events_file(folder.path)
    started = [e for e in read_events(path) if isinstance(e, RunStarted)] if path.exists() else []
    return [Path(e.resumed_from).resolve() if e.resumed_from else None for e in started]


def check_fit(config: RunConfig, tokenizer: Tokenizer, folder: RunFolder) -> None:
    """What would fail later, refused now."""
    if config.log.tensorboard:
        tensorboard()
    if config.log.wandb:
        wandb()
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"pass --model.vocab-size {-(-tokenizer.vocab_size // 64) * 64}"
        )
    needed = 12 * parameters(config.model).total  # fp32 weights and two moments
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise UsageError(
            f"one checkpoint takes about {needed / 2**30:.2f} GiB, {folder.path} has {free / 2**30:.2f} GiB free: "
            "free some, or pick another --run.dir"
        )
