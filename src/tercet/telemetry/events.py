"""Events: the record of a run, as typed JSON lines in events_rank{r}.jsonl. Logs, CSV files and reports read them.

Each line is a single `write` to a file opened for appending, so a killed process loses at most the line it was writing.
A full disk does not end a run: what cannot be written waits in memory (AppendedFile) and follows when there is space.
When a run resumes from step k, measurements of later steps move to `superseded_rank{r}.jsonl`: each step appears once
in the stream, and nothing is deleted. No torch at import: reports read this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tercet.errors import UsageError
from tercet.parse import parse_json


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields of all events. `step` is the last completed optimizer update."""

    kind: ClassVar[str] = ""
    # Measurements are superseded when a run resumes from an earlier step; what happened to the process is not.
    measured: ClassVar[bool] = False

    step: int
    rank: int = 0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A process started the run or resumed it."""

    kind: ClassVar[str] = "run_started"
    name: str
    steps: int
    world_size: int
    strategy: str
    device: str
    parameters: int
    tokens_per_step: int
    accumulation: int
    resumed_from: str | None = None
    superseded: int = 0  # measurements of later steps, moved aside


@dataclass(frozen=True, kw_only=True)
class StageStarted(Event):
    """A stage of train.stages, which begins after `step`: when it starts, and when a process resumes in it."""

    kind: ClassVar[str] = "stage"
    measured: ClassVar[bool] = True
    stage: int  # from 1
    stages: int
    last_step: int
    seq_len: int
    micro_batch: int
    tokens_per_step: int
    accumulation: int
    rope_theta: float
    later_steps: float  # estimated work of the later stages, in steps of this one


@dataclass(frozen=True, kw_only=True)
class StepLogged(Event):
    """A log interval: the values of its last step, and the losses and gradient norms of all its steps."""

    kind: ClassVar[str] = "step"
    measured: ClassVar[bool] = True
    loss: float  # of this step; mean over its target tokens
    lr: float
    grad_norm: float  # global, before clipping
    tokens: int  # since the start of the run
    tokens_per_s: float  # over the interval, all ranks, without saves and validations
    step_seconds: float  # mean over the interval
    data_seconds: float  # of which waiting for data
    mfu: float | None  # fraction of the device's peak; None if the peak is unknown
    memory_gib: float  # peak so far on this rank's device (resident memory on a CPU)
    skipped: int  # non-finite steps since the start of the run
    epoch: int
    bad_records: int = 0  # skipped since the start of the run
    first_step: int  # of the interval
    losses: list[float]
    grad_norms: list[float]


@dataclass(frozen=True, kw_only=True)
class Validated(Event):
    kind: ClassVar[str] = "validation"
    measured: ClassVar[bool] = True
    loss: float
    tokens: int  # target tokens in the mean
    seconds: float
    bytes: int | None = None  # UTF-8 bytes of those tokens' text; None in logs of early versions
    seq_len: int | None = None  # with train.stages: that of the stage

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in a unit that does not depend on the tokenizer."""
        return self.loss * self.tokens / self.bytes / math.log(2) if self.bytes else None


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    kind: ClassVar[str] = "sample"
    measured: ClassVar[bool] = True
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class StepsSkipped(Event):
    """Updates skipped because loss or gradients were not finite."""

    kind: ClassVar[str] = "skipped"
    measured: ClassVar[bool] = True
    steps: list[int]
    total: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint of `step` was written."""

    kind: ClassVar[str] = "checkpoint"
    measured: ClassVar[bool] = True
    path: str
    bytes: int
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    kind: ClassVar[str] = "checkpoint_failed"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """A line of text for the log."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class GraphChosen(Event):
    """With train.cuda_graph=auto: whether steps of `shape` run as CUDA graphs from here on, and the measured times."""

    kind: ClassVar[str] = "graph_choice"
    graph: bool
    shape: str
    host_seconds: float  # to launch forward and backward of a step
    behind_seconds: float  # how much later the GPU has run them

    @property
    def sentence(self) -> str:
        host, behind = 1e3 * self.host_seconds, 1e3 * self.behind_seconds
        times = f"launching takes {host:.2f} ms, the GPU is done {behind:.2f} ms later"
        which = "replay a CUDA graph" if self.graph else "run eagerly"
        return f"train.cuda_graph=auto: steps of {self.shape} {which} ({times})"


@dataclass(frozen=True, kw_only=True)
class GraphCaptureFailed(Event):
    """With train.cuda_graph=auto, capture failed: this process continues with eager execution."""

    kind: ClassVar[str] = "recording_failed"
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """How the process ended: completed, interrupted, halted (by a rule) or failed."""

    kind: ClassVar[str] = "run_ended"
    outcome: str
    reason: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LayersObserved(Event):
    """Gates and selection of every attention layer in one step. Lists are over layers; None: not applicable."""

    kind: ClassVar[str] = "layers"
    measured: ClassVar[bool] = True
    attention: list[str]
    gate_share_compressed: list[float | None]
    gate_share_selected: list[float | None]
    gate_share_window: list[float | None]
    gate_entropy: list[float | None]
    gate_max_share: list[float | None]
    gate_collapse: list[float | None]
    selected_blocks: list[float | None]
    selected_distance: list[float | None]
    selected_forced: list[float | None]
    selected_overlap: list[float | None]
    distances: list[list[int]]  # histogram of selected blocks 0, 1, 2-3, 4-7, … blocks back


@dataclass(frozen=True, kw_only=True)
class SelectorsObserved(Event):
    """How well blocks are chosen, in one step, on sampled queries. Lists are over the layers that choose."""

    kind: ClassVar[str] = "selectors"
    measured: ClassVar[bool] = True
    layer: list[int]
    kl: list[float | None]  # divergence from the teacher; None: the selector is not learned
    mass: list[float]  # share of the teacher's attention to free blocks that the chosen ones receive
    best: list[float]  # what the best choice would receive
    random: list[float]  # what a random choice would receive


@dataclass(frozen=True, kw_only=True)
class RoutesCounted(Event):
    """Forward passes by layer, branch and backend since this process started. Lists are columns."""

    kind: ClassVar[str] = "routes"
    measured: ClassVar[bool] = True
    layer: list[int]
    branch: list[str]
    route: list[str]
    reason: list[str]
    fallback: list[bool]  # slower than this device allows, and not requested
    calls: list[int]


@dataclass(frozen=True, kw_only=True)
class ResourcesObserved(Event):
    """Time and memory of the interval on this rank."""

    kind: ClassVar[str] = "resources"
    measured: ClassVar[bool] = True
    # Seconds per step, in device time on a GPU.
    data_seconds: float
    forward_seconds: float | None  # None with CUDA graphs: see passes_seconds
    backward_seconds: float | None
    optimizer_seconds: float
    communication_seconds: float  # collectives not overlapped with compute
    other_seconds: float
    # Total seconds in the interval.
    checkpoint_seconds: float
    validation_seconds: float
    allocated_gib: float  # on the device; on a CPU, resident memory of the process
    reserved_gib: float
    peak_gib: float
    host_gib: float
    # Since the start of the run, over all ranks.
    documents: int
    real_tokens: int
    padding: int
    bad_records: int
    left_out: int
    exercises: int = 0  # of data.retrieval
    # Seconds per step of forward and backward together, with CUDA graphs; None otherwise.
    passes_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class HealthFired(Event):
    """A health rule fired."""

    kind: ClassVar[str] = "health"
    rule: str
    action: str  # warn or halt
    sentence: str
    value: float
    threshold: float
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """No progress for much longer than this run's steps take."""

    kind: ClassVar[str] = "stall"
    doing: str
    for_seconds: float
    limit_seconds: float
    dump: str
    over: bool = False  # progress resumed


@dataclass(frozen=True, kw_only=True)
class DoctorReported(Event):
    """Findings of `tercet doctor` before training. Lists are columns; verdicts: ok, warning, failed, not tested."""

    kind: ClassVar[str] = "doctor"
    check: list[str]
    verdict: list[str]
    finding: list[str]
    mend: list[str]  # the fix; the name is part of the file format


KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RunStarted,
        StageStarted,
        StepLogged,
        Validated,
        Sampled,
        StepsSkipped,
        CheckpointSaved,
        CheckpointFailed,
        Noted,
        GraphChosen,
        GraphCaptureFailed,
        RunEnded,
        LayersObserved,
        SelectorsObserved,
        RoutesCounted,
        ResourcesObserved,
        HealthFired,
        Stalled,
        DoctorReported,
    )
}


# Events whose lists are the columns of one table and must have equal lengths.
TABLES = (LayersObserved, SelectorsObserved, RoutesCounted, DoctorReported)


def events_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"events_rank{rank}.jsonl"


def is_disk_full(error: OSError) -> bool:
    """Whether the disk is full or a quota is exceeded: space may be freed while the run continues."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_disk_allowed() -> Iterator[None]:
    """For files that a run can do without."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise


class AppendedFile:
    """A file that is only appended to. On a full disk, what was not written waits in memory for the next write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()  # the watchdog writes too
        self.waiting = b""

    def write(self, data: bytes) -> None:
        with self._lock, full_disk_allowed():
            self.waiting += data
            while self.waiting:  # a nearly full disk takes a part
                self.waiting = self.waiting[os.write(self._file, self.waiting) :]

    def sync(self) -> None:
        """fsync everything written so far."""
        with full_disk_allowed():
            os.fsync(self._file)

    def close(self) -> None:
        self.write(b"")
        os.close(self._file)


class EventLog:
    """Appends events to this rank's file and passes each to its readers."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path, self.rank = events_file(folder, rank), rank
        self.readers: list[Callable[[Event], None]] = []
        try:
            self._file = AppendedFile(self.path)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): pick another --run.dir") from None

    @property
    def waiting(self) -> int:
        """Events that the disk had no space for."""
        return self._file.waiting.count(b"\n")

    def emit(self, event: Event) -> None:
        """Write one line, then call the readers. Notes when the disk becomes full and when it has space again."""
        event, late = dataclasses.replace(event, rank=self.rank), self.waiting
        # Names of files may hold bytes that are not UTF-8; backslashreplace writes them as JSON escapes.
        self._file.write(encode(event).encode(errors="backslashreplace"))
        for reader in self.readers:
            reader(event)
        if self.waiting and not late:
            text = f"warning: {self.path}: no space left; events wait in memory and the run continues: free some space"
            self.emit(Noted(step=event.step, text=text))
        elif late and not self.waiting:
            self.emit(Noted(step=event.step, text=f"{self.path} is complete again: {late} events were written late"))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def encode(event: Event) -> str:
    """One line of JSON. Non-finite numbers are written as strings: "nan", "inf", "-inf"."""
    record = {"kind": event.kind, **{f.name: getattr(event, f.name) for f in dataclasses.fields(event)}}
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:  # checking every number first would cost more than the rest
        plain = {k: _plain(v) for k, v in record.items()}
        return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"


def decode(line: str | bytes) -> Event | None:
    """Parse a line; None for a kind that this version does not know.

    Raises ValueError on a damaged line, and if a value does not have its declared type.
    """
    record = _parse(line)
    cls = KINDS.get(record.pop("kind"))
    if cls is None:
        return None
    known = {f.name: f for f in dataclasses.fields(cls)}
    numbers = {k for k, f in known.items() if "float" in str(f.type)}
    values = {k: _number(v) if k in numbers else v for k, v in record.items() if k in known}
    try:
        event = cls(**values)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not _well_typed(event):
        raise ValueError("a value has the wrong type")
    return event


def _well_typed(event: Event) -> bool:
    """Whether every field has its declared type, and tables have columns of equal length."""
    lengths = set()
    for f in dataclasses.fields(event):
        value, declared = getattr(event, f.name), str(f.type)
        if not declared.startswith("list"):
            if not has_type(value, declared):
                return False
            continue
        item = declared.removeprefix("list[").removesuffix("]")
        if not isinstance(value, list) or not all(has_type(v, item) for v in value):
            return False
        lengths.add(len(value))
    return not isinstance(event, TABLES) or len(lengths) == 1


def has_type(value: Any, declared: str) -> bool:
    """Whether a value has the type of an annotation, such as `float | None`. Integers have 64 bits."""
    if value is None:
        return "None" in declared
    if declared.startswith("list"):
        return isinstance(value, list)
    kind = declared.split(" ")[0]
    if kind in ("int", "float"):
        return (kind == "float" and isinstance(value, float)) or (type(value) is int and abs(value) < 2**63)
    return isinstance(value, {"str": str, "bool": bool}.get(kind, object))


def _parse(line: str | bytes) -> dict[str, Any]:
    record = parse_json(line)
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)):
        raise ValueError("not a JSON object with kind and step")
    return record


def read_events(path: Path) -> Iterator[Event]:
    """Events of a file in order, without damaged lines and an incomplete last line (from a crash)."""
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                event = decode(line)
            except ValueError:
                continue
            if event is not None:
                yield event


def rewind(folder: Path, rank: int, step: int) -> tuple[int, list[int]]:
    """Move measurements after `step` to superseded_rank{r}.jsonl. Call before opening the log.

    Returns how many were moved, and the numbers of damaged lines, which stay in the file.
    """
    path = events_file(folder, rank)
    if not path.exists():
        return 0, []
    kept: list[bytes] = []
    moved: list[bytes] = []
    damaged: list[int] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # drop an incomplete last line
        try:
            record = _parse(line)
        except ValueError:
            damaged.append(number)
            kept.append(line + b"\n")
            continue
        cls = KINDS.get(record["kind"])
        # Unknown kinds, from a newer version, count as measurements.
        stale = record["step"] > step and (cls is None or cls.measured)
        (moved if stale else kept).append(line + b"\n")
    if moved:
        with (folder / f"superseded_rank{rank}.jsonl").open("ab") as stream:
            stream.writelines(moved)
    # Replaced by one rename: a crash leaves the old stream or the new one.
    fresh = path.with_suffix(".tmp")
    with fresh.open("wb") as stream:
        stream.writelines(kept)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)
    return len(moved), damaged


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return float(value)
    return [_number(v) for v in value] if isinstance(value, list) else value
