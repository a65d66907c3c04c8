"""Save checkpoints in the background and load them, with torch's distributed checkpoint (DCP), in safetensors.

No pickle is written or read. DCP's usual `.metadata` and its non-tensor entries are pickles, so only tensors go through
DCP, in its safetensors storage, whose index is the JSON header of each file; everything else is our own JSON. DCP's
protocol (every rank writes, then the coordinator finishes) is also the commit protocol. Files are hashed while they
are written, so that the manifest does not have to read them again.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from tercet.atomic_io import sync, write_json, write_text
from tercet.config.sections import CheckpointConfig
from tercet.errors import first_few
from tercet.telemetry.events import CheckpointSaved
from tercet.train import manifest
from tercet.train.manifest import CheckpointError, WrongCheckpoint
from tercet.train.optim import own_shard
from tercet.version import __version__

MODEL, OPTIMIZER = "model.", "optimizer."
# Optimizer state by parameter name, so that it loads under any sharding and grouping.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

# Saving without a process group is normal here. The warning comes from the saving thread, where catch_warnings does
# not work.
warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")


def tensors_to_save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Weights and optimizer moments by name; the live tensors, not copies. Collective under sharding."""
    named: dict[str, Any] = {MODEL + k: v for k, v in get_model_state_dict(model).items()}
    if optimizer is not None:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
        # The other entries are hyper-parameters of the groups; they follow from the saved config.
        named |= {OPTIMIZER + k: v for k, v in state.items() if isinstance(v, Tensor) and k.startswith("state.")}
    return named


def load_tensors(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load weights (and optimizer moments) from a checkpoint folder, resharding as needed."""
    live = tensors_to_save(model, optimizer)
    reader = HuggingFaceStorageReader(str(path))
    _check_stored_shapes(path, live, reader)
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
    """Load weights from a .safetensors file. Every name and shape must match."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except OSError as error:
        raise WrongCheckpoint(f"train.init_from={path}: cannot be read ({error}): check the path") from None
    except SafetensorError as error:
        raise CheckpointError(f"train.init_from={path}: cannot be read ({error}): damaged, copy it again") from None
    weights = {k.removeprefix(MODEL): v for k, v in weights.items() if not k.startswith(OPTIMIZER)}
    live = {k.removeprefix(MODEL): v for k, v in tensors_to_save(model, None).items()}
    compare_shapes(path, {k: v.shape for k, v in live.items()}, {k: v.shape for k, v in weights.items()})
    with torch.no_grad():
        for name, tensor in live.items():
            own, new = own_shard(tensor, weights[name])
            own.copy_(new)


def _check_stored_shapes(path: Path, live: Mapping[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    metadata = reader.read_metadata().state_dict_metadata
    parts = {k.split(".", 1)[0] for k in live}  # loading weights only ignores the moments
    stored = {
        k: v.size for k, v in metadata.items() if isinstance(v, TensorStorageMetadata) and k.split(".", 1)[0] in parts
    }
    compare_shapes(path, {k: v.shape for k, v in live.items()}, stored)


def compare_shapes(path: Path, live: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    """Raise if the names and shapes of stored weights are not those of the model."""
    missing, extra = sorted(live.keys() - stored.keys()), sorted(stored.keys() - live.keys())
    differ = [
        f"{k} {list(stored[k])}, the model has {list(live[k])}" for k in live.keys() & stored if live[k] != stored[k]
    ]
    for problem, names in (("lacks", missing), ("has extra", extra), ("differs in shape:", sorted(differ))):
        if names:
            raise WrongCheckpoint(f"{path} does not fit the model: it {problem} {first_few(names)}: {_fix(names)}")


def _fix(names: Sequence[str]) -> str:
    """What to do about weights that do not fit, as far as their names tell."""
    if all(name.startswith(OPTIMIZER) for name in names):
        return (
            "it was saved by a run with another optimizer, or one that trained other parameters: take its weights "
            "only, in a new run with train.init_from"
        )
    if all(".selector." in name for name in names):
        return "only one of the two has learned selectors: change model.selector"
    return "use the model settings of these weights, in config.toml of their run"


@dataclass
class Checkpointer:
    """Saves in the background, one save at a time, and deletes old checkpoints."""

    checkpoints: Path
    config: CheckpointConfig
    rank: int = 0
    world_size: int = 1
    process_group: Any = None  # not training's: two threads in one group would receive each other's messages
    wait_for: Callable[[Callable[[float], bool]], None] = lambda done: None  # Strategy's: notices ranks that stop
    files: Mapping[str, str] = field(default_factory=dict)  # text to save with each checkpoint, by name
    keep_steps: Collection[int] = ()  # checkpoints that are never deleted
    _future: Future[Any] | None = None
    _writer: _CommittingWriter | None = None
    _started: float = 0.0
    _blocked: float = 0.0

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run_state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Copy the state now and write it in the background. The previous save must have been collected."""
        assert self._future is None
        self._started = time.perf_counter()
        tensors = tensors_to_save(model, optimizer)
        self._writer = _CommittingWriter(self, step, list(tensors), run_state, rank_state)
        future = dcp.async_save(
            dict(tensors), storage_writer=self._writer, process_group=self.process_group, no_dist=self.world_size == 1
        )
        assert isinstance(future, Future)
        self._future = future
        self._blocked = time.perf_counter() - self._started

    def collect(self, *, wait: bool) -> CheckpointSaved | None:
        """The save in progress if it is complete, or after waiting for it. Raises if it failed."""
        if self._future is None or not (wait or self._future.done()):
            return None
        assert self._writer is not None
        future, writer, self._future = self._future, self._writer, None
        wait_started = time.perf_counter()
        self.wait_for(lambda seconds: bool(wait_for_futures([future], seconds).done))
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            writer.discard()
            problem = CheckpointError(_describe_failure(error, writer, self.world_size))
            problem.reported_elsewhere = isinstance(error, CheckpointException) and self.rank > 0  # all ranks get it
            raise problem from error
        now = time.perf_counter()
        return CheckpointSaved(
            step=writer.step, path=str(writer.final), bytes=writer.bytes, seconds=now - self._started,
            blocked_seconds=self._blocked + now - wait_started,
        )  # fmt: skip


class _CommittingWriter(HuggingFaceStorageWriter):
    """DCP's safetensors writer with checksums, a manifest, fsync and the final rename."""

    def __init__(
        self, owner: Checkpointer, step: int, names: list[str], run_state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.step, self.bytes = step, 0
        self.final = owner.checkpoints / manifest.folder_name(step)
        self.writing = owner.checkpoints / (manifest.WRITING + manifest.folder_name(step))
        self._owner, self._run_state, self._rank_state = owner, run_state, rank_state
        kinds = sorted({_file_kind(name) for name in names})
        super().__init__(
            path=str(self.writing),
            fqn_to_index_mapping={name: 1 + kinds.index(_file_kind(name)) for name in names},
            save_distributed=True,
        )
        self.fs = self._files = HashingFileSystem()
        # The tensors are already on the host: copying ahead would wait for the device's stream.
        self.per_thread_copy_ahead = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's tensors, then its state with the checksums of its files.

        Two files at a time: serialising, hashing and writing release the GIL, but a file in progress is serialised in
        memory as a whole, so all at once would be a second copy of everything. DCP's own threads would lose an error
        such as a full disk.
        """
        assert self.fqn_to_index_mapping is not None
        items: dict[int, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            items[self.fqn_to_index_mapping[item.index.fqn]].append(item)
        parts = [replace(plan, items=of_file) for of_file in items.values()]

        def write(part: SavePlan) -> list[WriteResult]:
            written: list[WriteResult] = super(_CommittingWriter, self).write_data(part, planner).wait()
            sync(self.writing / written[0].storage_data.relative_path)
            return written

        with ThreadPoolExecutor(2, "tercet-save") as threads:
            results = [result for written in threads.map(write, parts) for result in written]
        names = sorted({result.storage_data.relative_path for result in results})
        files = {name: self._files.record(self.writing / name) for name in names}
        record = {"files": files, "state": dict(self._rank_state)}
        write_json(self.writing / manifest.rank_file(self._owner.rank), record)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after every rank has written: write the manifest and rename the folder."""
        files: dict[str, Any] = {}
        for rank in range(self._owner.world_size):
            path = self.writing / manifest.rank_file(rank)
            files |= manifest.read_json(path)["files"]
            files[path.name] = manifest.file_record(path)
        write_json(self.writing / manifest.RUN_STATE, dict(self._run_state))
        files[manifest.RUN_STATE] = manifest.file_record(self.writing / manifest.RUN_STATE)
        for name, text in self._owner.files.items():
            write_text(self.writing / name, text)
            files[name] = manifest.file_record(self.writing / name)
        self.bytes = sum(record["bytes"] for record in files.values())
        content = {
            "format": manifest.FORMAT,
            "step": self.step,
            "tokens": self._run_state.get("tokens"),
            "world_size": self._owner.world_size,
            "tercet": __version__,
            "torch": torch.__version__,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": files,
        }
        write_json(self.writing / manifest.MANIFEST, content)
        manifest.publish(self.writing, self.step)
        config = self._owner.config
        manifest.prune(self.final.parent, config.keep, config.keep_every, self._owner.keep_steps)

    def discard(self) -> None:
        """Delete what a failed save wrote, so that a full disk does not stay full."""
        manifest.remove_leftovers(self.writing.parent)


def _file_kind(name: str) -> str:
    """Which file a tensor goes to: weights, or one file per kind of moment.

    Weights sort first and have their own file, so that loading weights reads nothing else.
    """
    return MODEL if name.startswith(MODEL) else OPTIMIZER + name.rsplit(".", 1)[-1]


class HashingFile(io.FileIO):
    """A file that is written front to back, unbuffered, and hashed by a second thread during each write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "w")
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        hashing = threading.Thread(target=self._digest.update, args=(content,))
        hashing.start()
        try:
            done = 0
            while done < len(content):  # one call writes at most 2 GiB
                done += self._write_part(content[done:])
        finally:
            hashing.join()
        self.bytes += done
        return done

    def _write_part(self, part: memoryview) -> int:
        return super().write(part)

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("a file that is hashed while it is written cannot seek")

    def record(self) -> dict[str, Any]:
        """Size and SHA-256, as in the manifest."""
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


class HashingFileSystem(FileSystem):
    """DCP's file system; hashes every file that is written."""

    def __init__(self) -> None:
        self._records: dict[Path, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashingFile(path) as stream:
            yield stream
        self._records[Path(path)] = stream.record()

    def record(self, path: Path) -> dict[str, Any]:
        """Size and SHA-256 of a file that was written and closed."""
        return self._records[path]


def _describe_failure(error: BaseException, writer: _CommittingWriter, ranks: int) -> str:
    """Error message of a failed save: the cause, what is still safe, and what to do."""
    cause: object = error
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause = f"rank {rank}: {cause}" if ranks > 1 else cause
    newest = manifest.describe_newest(writer.final.parent)
    return (
        f"checkpoint of step {writer.step} could not be written to {writer.final.parent} ({cause}); {newest}: free "
        "some space there, or check that the folder is writable"
    )
