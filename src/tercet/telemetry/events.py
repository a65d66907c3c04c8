"""Events: the record of a run as typed lines of JSON, which logs, CSV files and reports read. Files: event_log.py

No torch at import: reports read this module.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, dataclass_transform

from pydantic import TypeAdapter

from tercet.parse import parse_json
from tercet.terminal import plural, quantity

KINDS: dict[str, type[Event]] = {}
"""Every event class by the `kind` of its lines."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields of all events. `step` is the last completed optimizer update. Subclasses are dataclasses too.

    kind      name of the class in the file
    measured  a measurement, superseded when a run resumes from an earlier step; what happened to the process is not
    table     lists are the columns of a table and have equal lengths
    """

    kind: ClassVar[str]
    measured: ClassVar[bool]
    table: ClassVar[bool]

    step: int
    rank: int = 0
    time: float = field(default_factory=time.time)

    def __init_subclass__(cls, *, kind: str, measured: bool = False, table: bool = False) -> None:
        cls.kind, cls.measured, cls.table = kind, measured, table
        KINDS[kind] = dataclass(frozen=True, kw_only=True)(cls)


class RunStarted(Event, kind="run_started"):
    """A process started the run or resumed it."""

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


class StageStarted(Event, kind="stage", measured=True):
    """A stage of train.stages, which begins after `step`: when it starts, and when a process resumes in it."""

    stage: int  # from 1
    stages: int
    last_step: int
    seq_len: int
    micro_batch: int
    tokens_per_step: int
    accumulation: int
    rope_theta: float
    later_steps: float  # estimated work of the later stages, in steps of this one


class StepLogged(Event, kind="step", measured=True):
    """A log interval: the values of its last step, and the losses and gradient norms of all its steps."""

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
    bad_records: int = 0  # skipped since the start of the run, in every epoch again
    muon_lr: float | None = None  # Muon's, before train.muon.adjust_lr_fn; None with AdamW
    first_step: int  # of the interval
    losses: list[float]
    grad_norms: list[float]


class Validated(Event, kind="validation", measured=True):
    loss: float
    tokens: int  # target tokens in the mean
    seconds: float
    bytes: int | None = None  # UTF-8 bytes of those tokens' text; None in logs of early versions
    seq_len: int | None = None  # with train.stages: that of the stage

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in a unit that does not depend on the tokenizer."""
        return self.loss * self.tokens / self.bytes / math.log(2) if self.bytes else None


class Sampled(Event, kind="sample", measured=True):
    prompt: str
    text: str


class StepsSkipped(Event, kind="skipped", measured=True):
    """Updates skipped because loss or gradients were not finite."""

    steps: list[int]
    total: int


class CheckpointSaved(Event, kind="checkpoint", measured=True):
    """A checkpoint of `step` was written."""

    path: str
    bytes: int
    seconds: float
    blocked_seconds: float


class CheckpointFailed(Event, kind="checkpoint_failed"):
    reason: str


class Noted(Event, kind="note"):
    """A line of text for the log."""

    text: str


class GraphCaptureFailed(Event, kind="recording_failed"):
    """With train.cuda_graph=auto, capture failed: this process continues with eager execution."""

    reason: str


class RunEnded(Event, kind="run_ended"):
    """How the process ended: completed, interrupted, halted (by a rule) or failed."""

    outcome: str
    reason: str
    seconds: float


class LayersObserved(Event, kind="layers", measured=True, table=True):
    """Gates and selection of every attention layer in one step. Lists are over layers; None: not applicable."""

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


class SelectorsObserved(Event, kind="selectors", measured=True, table=True):
    """How well blocks are chosen, in one step, on sampled queries. Lists are over the layers that choose."""

    layer: list[int]
    kl: list[float | None]  # divergence from the teacher; None: the selector is not learned
    mass: list[float]  # share of the teacher's attention to free blocks that the chosen ones receive
    best: list[float]  # what the best choice would receive
    random: list[float]  # what a random choice would receive


RouteKey = tuple[int, str, str, str, bool]  # layer, branch, route, reason, fallback


class RoutesCounted(Event, kind="routes", measured=True, table=True):
    """Forward passes by layer, branch and backend since this process started. Lists are columns."""

    layer: list[int]
    branch: list[str]
    route: list[str]
    reason: list[str]
    fallback: list[bool]  # slower than this device allows, and not requested
    calls: list[int]

    def by_route(self) -> Counter[RouteKey]:
        """The calls of each row."""
        counts: Counter[RouteKey] = Counter()
        for *key, calls in zip(
            self.layer, self.branch, self.route, self.reason, self.fallback, self.calls, strict=True
        ):
            counts[tuple(key)] += calls
        return counts


class ResourcesObserved(Event, kind="resources", measured=True):
    """Time and memory of the interval on this rank."""

    # Seconds per step, in device time on a GPU.
    data_seconds: float
    forward_seconds: float | None  # None with CUDA graphs: see passes_seconds
    backward_seconds: float | None
    optimizer_seconds: float
    communication_seconds: float  # collectives not overlapped with compute
    other_seconds: float
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


class HealthFired(Event, kind="health"):
    """A health rule fired."""

    rule: str
    action: str  # warn or halt
    sentence: str
    value: float
    threshold: float
    layer: int | None = None


class Stalled(Event, kind="stall"):
    """No progress for much longer than this run's steps take."""

    doing: str
    for_seconds: float
    limit_seconds: float
    dump: str
    over: bool = False  # progress resumed


class DoctorReported(Event, kind="doctor", table=True):
    """Findings of `tercet doctor` before training. Lists are columns; verdicts: ok, warning, failed, not tested."""

    check: list[str]
    verdict: list[str]
    finding: list[str]
    fix: list[str]


def describe(event: Event) -> tuple[str, str] | None:
    """(severity, sentence) of an event that people should read; None for others. severity: failure, warning or none."""
    match event:
        case HealthFired(action="halt"):
            return "failure", f"halting: {event.rule}: {event.sentence}"
        case HealthFired():
            return "warning", f"warning: {event.rule}: {event.sentence}"
        case StepsSkipped():
            where = f"step {', '.join(map(str, event.steps))}: skipped the update ({event.total} so far)"
            return "failure", f"warning: loss or gradients were not finite in {where}"
        case Stalled(over=True):
            return "", f"progress again after {event.for_seconds:.0f} s"
        case Stalled():
            return (
                "failure",
                f"stalled: no progress for {event.for_seconds:.0f} s while {event.doing}; see {event.dump}",
            )
        case CheckpointFailed():
            return "failure", f"warning: {event.reason}"
        case CheckpointSaved():
            cost = f"{event.bytes / 2**20:.1f} MiB, training blocked for {event.blocked_seconds:.2f} s"
            return "", f"checkpoint of step {event.step}: {event.path} ({cost})"
        case Validated():
            bits = "" if event.bits_per_byte is None else f" ({event.bits_per_byte:.4f} bits per byte)"
            sequences = "" if event.seq_len is None else f" in sequences of {event.seq_len}"
            over = f"over {quantity(event.tokens)} tokens{sequences}"
            return "", f"validation after step {event.step}: loss {event.loss:.4f}{bits} {over}"
        case RunStarted():
            moved = f"; {plural(event.superseded, 'later event')} superseded" if event.superseded else ""
            begin = f"resumed from {event.resumed_from}" if event.resumed_from else "started"
            return "", f"{begin}: {event.steps:,} steps on {event.device}{moved}"
        case RunEnded():
            return "failure" * (event.outcome in ("failed", "halted")), f"{event.outcome}: {event.reason}"
        case Noted():
            return "", event.text
    return None


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
    record = parse_record(line)
    kind = record.pop("kind")
    if "mend" in record:  # in logs of 0.1 and 0.2
        record["fix"] = record.pop("mend")
    if kind == "graph_choice":  # in logs of 0.2, which timed steps to decide
        how = "replay a CUDA graph" if record.get("graph") else "run eagerly"
        kind, record["text"] = "note", f"train.cuda_graph=auto: steps of {record.get('shape')} {how}"
    if kind not in KINDS:
        return None
    event = _validator(kind).validate_python(record)
    if event.table and len({len(value) for value in vars(event).values() if type(value) is list}) != 1:
        raise ValueError("the columns of a table have unequal lengths")
    return event


@cache
def _validator(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(KINDS[kind])


def parse_record(line: str | bytes) -> dict[str, Any]:
    record = parse_json(line)
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int):
        raise ValueError("not a JSON object with kind and step")
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
