"""Files whose SHA-256 is known when they have been written, without reading them again."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from tercet.atomic_io import sync, write_json
from tercet.config.sections import CheckpointConfig
from tercet.train import manifest
from tercet.train.manifest import CheckpointError
from tercet.version import __version__


class HashedFile(io.FileIO):
    """Written front to back, unbuffered. A thread hashes what another hands to the system: neither waits for the other
    but at the end of each write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "w")
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        hashing = threading.Thread(target=self._digest.update, args=(whole,))
        hashing.start()
        try:
            done = 0
            while done < len(whole):  # the system may take less than all: at most 2 GiB at a time
                done += self._take(whole[done:])
        finally:
            hashing.join()
        self.bytes += done
        return done

    def _take(self, part: memoryview) -> int:
        return super().write(part)

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("a file that is hashed while it is written is written front to back")

    def record(self) -> dict[str, Any]:
        """Size and SHA-256, as in a manifest."""
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


class HashedFileSystem(FileSystem):
    """DCP's file system, where every file that is written is hashed on the way."""

    def __init__(self) -> None:
        self._records: dict[Path, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path) as stream:
            yield stream
        self._records[Path(path)] = stream.record()

    def record(self, path: Path) -> dict[str, Any]:
        """Of a file that has been written and closed."""
        return self._records[path]


# ------------------------------------------------------------------------------------------------
# Saving: torch's distributed checkpoint, in safetensors, committed by one rename after all ranks have written.
#
# No pickle is written, and none is read. DCP's usual `.metadata` is a pickle, and its non-tensor entries are pickles too;
# so only tensors go through DCP, in its safetensors storage, whose index is the JSON header of each file, and the rest
# is JSON of our own. DCP's protocol (every rank writes, then the coordinator finishes) is also our commit protocol.

MODEL, OPTIMIZER = "model.", "optimizer."
# Optimizer state by parameter name, so that it reloads under any sharding and any grouping.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

# One process without a process group is what most runs are, not a mistake to warn of. (The warning comes from
# the saving thread, where catch_warnings cannot be used.)
warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")


def tensors_to_save(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Weights and optimizer moments by name; the tensors are the live ones. Collective under sharding."""
    named: dict[str, Any] = {MODEL + k: v for k, v in get_model_state_dict(model).items()}
    if optimizer is not None:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
        # The rest are the groups' hyper-parameters: they follow from the config, which is saved as such.
        named |= {OPTIMIZER + k: v for k, v in state.items() if isinstance(v, Tensor) and k.startswith("state.")}
    return named


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete and on the disk."""

    path: Path
    step: int
    bytes: int
    seconds: float  # from the order to save until it was complete
    blocked_seconds: float  # of these, how long training stood still


class Checkpointer:
    """Saves the run, in the background, one save at a time, and keeps the newest ones."""

    def __init__(
        self,
        checkpoints: Path,
        config: CheckpointConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        process_group: Any = None,
    ) -> None:
        self.checkpoints, self.config = checkpoints, config
        self.rank, self.world_size = rank, world_size
        # Not the one that training uses: two threads in one group would take each other's messages.
        self.process_group = process_group
        self._future: Future[Any] | None = None
        self._writer: _CommittingWriter | None = None
        self._ordered = self._blocked = 0.0

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run_state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
    ) -> None:
        """Copy everything now, write it in the background. An earlier save must have been collected."""
        assert self._future is None
        self._ordered = time.perf_counter()
        tensors = tensors_to_save(model, optimizer)
        self._writer = _CommittingWriter(
            self.checkpoints, step, list(tensors), run_state, rank_state, self.config, self.rank, self.world_size
        )
        saved = dcp.async_save(
            dict(tensors),
            storage_writer=self._writer,
            process_group=self.process_group,
            no_dist=self.world_size == 1,
        )
        assert isinstance(saved, Future)
        self._future = saved
        self._blocked = time.perf_counter() - self._ordered

    @property
    def saving(self) -> bool:
        """Whether an earlier save has not been collected yet."""
        return self._future is not None

    def collect(self, *, wait: bool) -> Saved | None:
        """The save under way, if it is complete (or after waiting for it). A failed one is an error here."""
        if self._future is None or not (wait or self._future.done()):
            return None
        assert self._writer is not None
        future, writer, self._future = self._future, self._writer, None
        waited = time.perf_counter()
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            writer.discard()
            raise CheckpointError(_explain(error, writer)) from error
        now = time.perf_counter()
        return Saved(writer.final, writer.step, writer.bytes, now - self._ordered, self._blocked + now - waited)


class _CommittingWriter(HuggingFaceStorageWriter):
    """DCP's safetensors writer, with checksums, a manifest, fsync and the rename that makes it a checkpoint."""

    def __init__(
        self,
        checkpoints: Path,
        step: int,
        names: list[str],
        run_state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        config: CheckpointConfig,
        rank: int,
        world_size: int,
    ) -> None:
        self.step, self.bytes = step, 0
        self.final = checkpoints / manifest.folder_name(step)
        self.writing = checkpoints / (manifest.WRITING + manifest.folder_name(step))
        self._run_state, self._rank_state, self._config = run_state, rank_state, config
        self._rank, self._world_size = rank, world_size
        kinds = sorted({_file_of(name) for name in names})
        super().__init__(
            path=str(self.writing),
            fqn_to_index_mapping={name: 1 + kinds.index(_file_of(name)) for name in names},
            save_distributed=True,
        )
        self.fs = self._files = HashedFileSystem()
        # What is written is on the host already: DCP's way of copying ahead would wait for the device's stream.
        self.per_thread_copy_ahead = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """This rank's tensors, then its own state with the checksums of its files.

        Two files at a time: serialising, hashing and writing all let other threads run; but each file under way is
        serialised in memory as a whole, and all at once would be a second copy of everything. DCP's own threads would
        do the same, but an error in one of them (a full disk) is lost there.
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
        write_json(self.writing / manifest.rank_file(self._rank), {"files": files, "state": dict(self._rank_state)})
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after every rank has written: complete the folder and give it its name."""
        files: dict[str, Any] = {}
        for rank in range(self._world_size):
            path = self.writing / manifest.rank_file(rank)
            files |= manifest.read_json(path)["files"]
            files[path.name] = manifest.file_record(path)
        write_json(self.writing / manifest.RUN_STATE, dict(self._run_state))
        files[manifest.RUN_STATE] = manifest.file_record(self.writing / manifest.RUN_STATE)
        self.bytes = sum(record["bytes"] for record in files.values())
        content = {
            "format": manifest.FORMAT,
            "step": self.step,
            "tokens": self._run_state.get("tokens"),
            "world_size": self._world_size,
            "tercet": __version__,
            "torch": torch.__version__,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": files,
        }
        write_json(self.writing / manifest.MANIFEST, content)
        manifest.publish(self.writing, self.step)
        manifest.retain(self.final.parent, self._config.keep, self._config.keep_every)

    def discard(self) -> None:
        """Free what a failed save took, so that a full disk is not kept full."""
        manifest.sweep(self.writing.parent)


def _file_of(name: str) -> str:
    """Which of a checkpoint's files a tensor goes to: the weights', or that of its kind of moment. Weights have one of
    their own, which sorts first: whoever wants only them reads only that. Files of equal size are written at once."""
    return MODEL if name.startswith(MODEL) else OPTIMIZER + name.rsplit(".", 1)[-1]


def _is_full_disk(error: BaseException | None) -> bool:
    """Whether it is, or came of, a disk or a quota that is full."""
    while error is not None:
        # safetensors' errors have the system's words, and no number.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            return True
        error = error.__cause__
    return False


def _explain(error: BaseException, writer: _CommittingWriter) -> str:
    """One sentence for a failed save: the root cause, what is still safe, and what to do."""
    cause: BaseException = error
    if isinstance(error, CheckpointException):
        cause = next((e for e, _ in error.failures.values()), error)
    kept = manifest.complete_checkpoints(writer.final.parent)
    safe = f"the newest complete checkpoint is {kept[-1]}" if kept else "no complete checkpoint exists yet"
    mend = "free space there" if _is_full_disk(cause) else "see that the folder can be written"
    return f"checkpoint of step {writer.step} could not be written to {writer.final.parent} ({cause}); {safe}: {mend}"
