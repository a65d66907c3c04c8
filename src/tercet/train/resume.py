"""Starting and resuming a run: which checkpoint it starts from, and whether it may.

`find_start` picks the checkpoint, `check_config` compares its configuration with the current one, `check_requirements`
refuses what would fail later. Nothing here imports torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tercet import hints
from tercet.atomic_io import unused
from tercet.config.keys import flatten_table
from tercet.config.load import read_stored
from tercet.config.retired import refused
from tercet.config.schema import RunConfig
from tercet.config.sections import StageConfig
from tercet.data.paths import check_paths
from tercet.data.stream import DataError
from tercet.data.synthetic import make_task
from tercet.data.tokenizers import LibraryTokenizer, Tokenizer, load_tokenizer
from tercet.errors import UsageError, first_few
from tercet.model.config import ModelConfig
from tercet.parse import describe, first_problem, parse_toml
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import RunStarted
from tercet.telemetry.sinks import import_tensorboard, import_wandb
from tercet.terminal import plural
from tercet.train import manifest
from tercet.train.manifest import CheckpointError, WrongCheckpoint
from tercet.train.run_folder import RunFolder, locate

# The order of the data depends on these, and with it a checkpoint's position in it.
DATA_ORDER = {
    "run.seed", "data.source", "data.tokenizer", "data.validation_fraction", "data.shuffle", "data.retrieval",
}  # fmt: skip
# Settings that may differ on resume: they do not change what the run learns, or people change them on purpose.
MAY_CHANGE = (
    "run.name", "run.dir", "run.device", "run.threads", "log.", "health.", "profile.", "checkpoint.", "parallel.",
    "data.prefetch", "data.bad_records", "data.accept_changes", "data.max_lost_text", "train.steps",
    "train.micro_batch", "train.compile", "train.cuda_graph", "train.activation_checkpointing", "train.val_",
    "train.sample_", "train.max_skipped", "train.init_",
)  # fmt: skip


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to load, its run state, and messages about how it was chosen."""

    path: Path
    run_state: dict[str, Any]
    messages: list[str]

    def is_in(self, checkpoints: Path) -> bool:
        """Whether it belongs to this run. Starting from another run's checkpoint is a fork."""
        return self.path.parent.resolve() == checkpoints.resolve()


# Where a run starts


def check_start(config: RunConfig, resume: str | None) -> None:
    """Raise before torch is loaded for a wrong folder, checkpoint, setting or data path of a run in a single process.

    `find_start` is called again by the run itself, which locks the folder and verifies the checkpoint.
    """
    check_paths([path for part in (config.data, *config.data.mixture) for path in part.path])
    source = config.train.init_from
    if resume is None and source is not None and not source.endswith(".safetensors"):
        find_initial(Path(source), verify=False)
    unverified = config.checkpoint.model_copy(update={"verify": False})
    with closing(RunFolder(locate(config.run, resume))) as folder:
        find_start(config.with_absolute_paths().model_copy(update={"checkpoint": unverified}), resume, folder)


def find_start(config: RunConfig, resume: str | None, folder: RunFolder) -> tuple[FoundCheckpoint | None, list[str]]:
    """The checkpoint to start from, or None for step 0, and messages to print. Refuses to overwrite a run."""
    threads, cores = config.run.threads, os.cpu_count()
    if threads is not None and cores is not None and threads > cores:  # torch may crash
        raise UsageError(
            f"run.threads={threads} is more than the {plural(cores, 'core')} of this machine: use at most {cores}, or "
            "leave it out"
        )
    # The event files of all ranks: each rank opens its own only after rank 0 has started to write.
    for path in (events_file(folder.path, rank) for rank in range(config.parallel.world_size)):
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            problem = "is not writable" if path.is_file() else "is not a file"
            raise UsageError(f"event log {path} {problem}: pick another --run.dir, or fix it")
    if others := folder.other_files:
        raise UsageError(
            f"{folder.path} holds {first_few(others)}, which a run does not write: pick a new or empty folder as "
            "--run.dir"
        )
    if resume is None:
        if folder.has_run:
            raise UsageError(
                f"{folder.path} already holds a run: pick another --run.dir, or resume with: "
                f"{hints.resume(folder.path, config.parallel.world_size)}"
            )
        return None, []
    manifest.remove_leftovers(folder.checkpoints)
    try:
        start = find_checkpoint(resume, folder.checkpoints, verify=config.checkpoint.verify)
    except manifest.CheckpointError as error:
        if resume == "auto":
            raise
        raise type(error)(f"--resume {resume}: {error}; or use --resume auto") from None
    if start is None:
        for source in _start_history(folder):
            if source is not None and source.parent != folder.checkpoints.resolve():
                raise UsageError(
                    f"{folder.path} was forked from {source} and has no checkpoint of its own: resume with "
                    f"--resume {source} --run.dir {shlex.quote(str(folder.path))}"
                )
        return None, [f"--resume auto: no complete checkpoint in {folder.checkpoints}, starting at step 0"]
    # attempts at this same fork that ended before their first save may be repeated
    same_fork = not manifest.complete_checkpoints(folder.checkpoints) and all(
        source == start.path.resolve() for source in _start_history(folder)
    )
    if not start.is_in(folder.checkpoints) and folder.has_run and not same_fork:
        raise UsageError(
            f"{folder.path} already holds a run, and --resume {resume} belongs to another one: pick another "
            f"--run.dir, or resume the run in this folder with: {hints.resume(folder.path, config.parallel.world_size)}"
        )
    if (done := start.run_state["step"]) > config.train.steps:
        raise UsageError(
            f"--train.steps {config.train.steps} is less than the {done} steps that {start.path} has: give at least "
            f"{done}, or resume an earlier checkpoint"
        )
    if not config.checkpoint.allow_config_change and (problems := refused(flatten_table(start.run_state["config"]))):
        raise WrongCheckpoint(
            f"{start.path}: {problems[0]}; or pass --checkpoint.allow_config_change to continue without it"
        )
    saved, now = (c.model_dump(mode="json") for c in (saved_config(start).with_absolute_paths(), config))
    changes = check_config(saved, now, allow_change=config.checkpoint.allow_config_change)
    complete = done == config.train.steps and start.is_in(folder.checkpoints)
    resuming = [] if complete else [f"resuming from {start.path}"]
    return start, [*start.messages, *resuming, *(f"changed since: {c}" for c in changes)]


def _start_history(folder: RunFolder) -> list[Path | None]:
    """The checkpoint that each earlier process of this run started from."""
    path = events_file(folder.path)
    started = [e for e in read_events(path) if isinstance(e, RunStarted)] if path.exists() else []
    return [Path(e.resumed_from).resolve() if e.resumed_from else None for e in started]


def find_checkpoint(resume: str, checkpoints: Path, *, verify: bool) -> FoundCheckpoint | None:
    """`auto`: the newest intact checkpoint of this run, None if it has none. Otherwise: the named one.

    `auto` skips damaged checkpoints with a message; naming a damaged one is an error.
    """
    check = manifest.verify if verify else manifest.read_manifest
    if resume != "auto":
        path = _resolve(Path(resume))
        check(path)
        return FoundCheckpoint(path, _read_run_state(path), [])
    messages: list[str] = []
    for path in reversed(manifest.complete_checkpoints(checkpoints)):
        try:
            check(path)
            return FoundCheckpoint(path, _read_run_state(path), messages)
        except CheckpointError as error:
            messages.append(f"skipping a damaged checkpoint: {error}")
    if messages:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} is intact, nothing was changed: {'; '.join(messages)}; "
            "restore one from a backup, or start over with another --run.dir"
        )
    return None


def find_initial(source: Path, *, verify: bool) -> FoundCheckpoint:
    """The checkpoint that train.init_from names."""
    try:
        found = find_checkpoint(str(source), source, verify=verify)
    except CheckpointError as error:
        raise type(error)(f"train.init_from={source}: {error}") from None
    assert found is not None
    return found


def _read_run_state(path: Path) -> dict[str, Any]:
    state = manifest.read_json(path / manifest.RUN_STATE)
    if not isinstance(state.get("step"), int):
        raise CheckpointError(f"{path}: {manifest.RUN_STATE} is damaged: its step is not an integer")
    return state


def _resolve(path: Path) -> Path:
    """A checkpoint folder, or the newest one in a run folder or its checkpoints/."""
    if manifest.step_of(path) is not None or (path / manifest.MANIFEST).is_file():
        if not path.is_dir():
            raise WrongCheckpoint(f"{path} does not exist: expected a checkpoint folder, or a run folder that has one")
        return path.resolve()
    for folder in (path / "checkpoints", path):
        found = manifest.complete_checkpoints(folder)
        if found:
            return found[-1]
    if (path / "config.json").is_file():
        command = hints.tercet("import", "hf", path, "OUT")
        raise WrongCheckpoint(
            f"{path} is a model folder of transformers, not a run: convert it with `{command}`, then train with "
            "--config OUT/config.toml"
        )
    if (path / "config.toml").is_file() and (path / "model.safetensors").is_file():
        raise WrongCheckpoint(
            f"{path} holds imported weights, not a run: train with --config {path}/config.toml, or start from "
            f"--train.init_from {path}/model.safetensors"
        )
    raise WrongCheckpoint(
        f"{path} is neither a checkpoint folder (with {manifest.MANIFEST}) nor a run folder that has one"
    )


def abandon_later(start: FoundCheckpoint | None, folder: RunFolder) -> list[str]:
    """Rename checkpoints of later steps than `start`, damaged or abandoned, so that this run does not pick them up
    again. Call once the run can no longer be refused."""
    if start is None or not start.is_in(folder.checkpoints):
        return []
    saved = manifest.complete_checkpoints(folder.checkpoints)
    later = [path for path in saved if (manifest.step_of(path) or 0) > start.run_state["step"]]
    moved = [path.rename(unused(path.with_name(f"abandoned-{path.name}"))) for path in later]
    return [f"a later checkpoint was renamed to {path}" for path in moved]


# The configuration


def saved_config(found: FoundCheckpoint) -> RunConfig:
    """The configuration saved in a checkpoint; newer keys get their defaults."""
    try:
        return read_stored(found.run_state["config"])
    except KeyError as error:
        raise CheckpointError(f"{found.path}: {manifest.RUN_STATE} lacks {error}: restore it from a backup") from None
    except ValidationError as error:
        raise WrongCheckpoint(
            f"{found.path}: this Tercet cannot read its config ({first_problem(error)}): use the version of Tercet "
            "that wrote it, or start from its weights with train.init_from"
        ) from None


def load_run_tokenizer(config: RunConfig, start: FoundCheckpoint | None) -> Tokenizer:
    """The tokenizer that the checkpoint holds, wherever the original is now; for a new run, the configured one."""
    now = config.data
    if start is not None:
        before = saved_config(start).with_absolute_paths().data
        if (before.tokenizer, before.eos_token) == (now.tokenizer, now.eos_token):
            return load_tokenizer(str(manifest.saved_tokenizer(start.path) or now.tokenizer), now.eos_token)
    return load_tokenizer(now.tokenizer, now.eos_token)


def tokenizer_files(tokenizer: Tokenizer) -> Mapping[str, str]:
    """Files of the tokenizer that a run and its checkpoints carry, by name. Bytes need none."""
    return tokenizer.files if isinstance(tokenizer, LibraryTokenizer) else {}


def check_initial_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Raise if train.init_from names weights trained with a tokenizer that gives texts other tokens. Returns a message
    if that is not known."""
    source = config.train.init_from
    if source is None or config.checkpoint.allow_config_change:
        return []
    path = Path(source)
    try:
        if path.suffix == ".safetensors":
            data = parse_toml((path.parent / "config.toml").read_text(encoding="utf-8"))["data"]
            copy = path.parent / manifest.TOKENIZER if (path.parent / manifest.TOKENIZER).is_file() else None
        else:
            found = find_initial(path, verify=False)
            data, copy = found.run_state["config"]["data"], manifest.saved_tokenizer(found.path)
        name = data["tokenizer"]
        before = load_tokenizer(str(copy) if copy and name != "byte" else name, data.get("eos_token", ""))
    except (OSError, DataError, KeyError, TypeError, ValueError) as error:
        return [f"train.init_from={source}: its tokenizer was not compared with data.tokenizer ({describe(error)})"]
    if tokenizer.fingerprint == before.fingerprint or (
        isinstance(before, LibraryTokenizer) and before.same_tokens(tokenizer)
    ):
        return []
    raise UsageError(
        f"train.init_from={source} was trained with the tokenizer {name}, and data.tokenizer={config.data.tokenizer} "
        f"gives a text other tokens, which mean nothing to its weights: use --data.tokenizer {before.name}, or "
        "--checkpoint.allow_config_change to change it on purpose"
    )


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow_change: bool) -> list[str]:
    """Differences from the saved configuration, one message each. An error if it would be a different run."""
    before, after = _comparable(saved), _comparable(now)
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    messages = {k: f"{k} was {before.get(k)!r}, now {after.get(k)!r}" for k in changed}

    def listed(keys: list[str]) -> str:
        return first_few([messages[k] for k in keys], separator="; ")

    models = [ModelConfig.model_validate(config.get("model", {})) for config in (saved, now)]
    without_effect = set.intersection(*(set(chain(*model.unused_keys.values())) for model in models))
    unused = [k for k in changed if k in {f"model.{key}" for key in ("backend", *without_effect)}]
    extension = ("model.rope_scaling", "model.rope.")  # these extend a model to longer sequences
    model_keys = [k for k in changed if k.startswith("model.") and k not in unused and not k.startswith(extension)]
    data_keys = [k for k in changed if k in DATA_ORDER or k.startswith("data.mixture")]
    for what, keys in (("a different model", model_keys), ("different data", data_keys)):
        if keys:
            raise WrongCheckpoint(
                f"the checkpoint has {what}: {listed(keys)}: leave out --preset and --config, and the run "
                "resumes with its own settings, or start a new run, from the weights with train.init_from"
            )
    restricted = [k for k in changed if not k.startswith(MAY_CHANGE) and k not in unused]
    if restricted and not allow_change:
        raise WrongCheckpoint(
            f"the config has changed since the checkpoint: {listed(restricted)}: change these "
            "back, or pass --checkpoint.allow_config_change to continue with the new values"
        )
    return [messages[k] for k in changed if k in restricted or k in (*unused, "train.steps", "data.bad_records")]


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name. Stages are in their compact form, without the micro-batches, which may change."""
    flat = flatten_table(config)
    stages = [StageConfig.model_validate(stage | {"micro_batch": None}) for stage in flat.get("train.stages", ())]
    return flat | {"train.stages": " ".join(map(str, stages))}


def check_requirements(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise now for what would fail later: a missing package of logs, a small vocabulary, synthetic documents that do
    not fit a later stage."""
    if config.log.tensorboard is True:
        import_tensorboard()
    if config.log.wandb:
        import_wandb()
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"pass --model.vocab_size {-(-tokenizer.vocab_size // 64) * 64}"
        )
    for stage in config.stages:
        for part in (stage.data, *stage.data.mixture):
            if part.source == "synthetic":
                length = part.synthetic.length or stage.data.seq_len
                make_task(part.synthetic, length, tokenizer.vocab_size, tokenizer.eos_id)
