"""Read a run folder, whether the run finished, crashed or is still running.

Bad lines and missing files never raise: they are collected in `Run.problems`. Only a folder without events is an error.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import math
import re
import statistics
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from tercet.config.keys import flatten, flatten_table
from tercet.config.schema import RunConfig
from tercet.errors import UsageError
from tercet.model.config import NSA_ONLY, is_all_dense, layer_kinds
from tercet.parse import parse_json, parse_toml
from tercet.telemetry.event_log import last_heartbeat, rank_files
from tercet.telemetry.events import (
    Event,
    HealthFired,
    LayersObserved,
    ResourcesObserved,
    RouteKey,
    RunEnded,
    RunStarted,
    StageStarted,
    StepLogged,
    Validated,
    decode,
)
from tercet.telemetry.hardware import usable_cores
from tercet.telemetry.health import DATA_WAIT_SHARE, HealthMonitor, health_findings
from tercet.telemetry.sinks import route_totals
from tercet.telemetry.units import plural

E = TypeVar("E", bound=Event)

LARGE_LOGS = 2**28  # bytes
BINS = 150  # of the layer statistics of a long run
LAYER_SERIES = (
    "gate_share_compressed", "gate_share_selected", "gate_share_window", "gate_entropy", "gate_collapse",
    "selected_forced", "selected_overlap",
)  # fmt: skip
# The starts of lines that a long run has many of, as events.encode writes them.
ROUTES, _LAYERS = b'{"kind": "routes"', b'{"kind": "layers"'
_SAME_ON_ALL_RANKS = (_LAYERS, b'{"kind": "selectors"', b'{"kind": "resources"')  # or not reported by rank
MEASUREMENTS = (*_SAME_ON_ALL_RANKS, b'{"kind": "step"')
_NUMBER = rb'([-+.\de]+|"-?inf"|"nan"), '
_STEP = re.compile(
    rb'{"kind": "step", "step": (\d+), (?:[^,]+, ){7}"step_seconds": %b"data_seconds": %b[^,]+, "memory_gib": %b'
    % ((_NUMBER,) * 3)
)
_SHARED_RULES = {"loss_spike", "nonfinite", "zero_grad", "throughput_drop"}
# A heartbeat is stale after this long, or after six of its own intervals if that is longer.
FRESH_SECONDS = 60.0
# The routes that nothing faster replaces: by branch, otherwise the kernels.
_FASTEST = {"dense": ("cudnn", "sdpa", "varlen")}
_KERNELS = ("triton",)


@dataclass(frozen=True)
class Run:
    """The contents of a run folder."""

    folder: Path
    events: Mapping[int, list[Event]]  # by rank
    problems: tuple[str, ...]  # what could not be read
    config: Mapping[str, Any]  # dotted key -> value
    origins: Mapping[str, str]
    environment: Mapping[str, Any]
    memory: Mapping[str, Mapping[str, Any]]  # boot, step1, … -> mem_*.json
    heartbeats: Mapping[int, Mapping[str, Any]]  # the last one of each rank
    dtypes: Mapping[str, str]
    files: tuple[str, ...]
    logs: Mapping[int, RankLog]  # by rank; empty if the events do not come from a folder
    state: str  # ended, running, silent (alive, but its heartbeat is stale) or gone
    read_at: float = field(default_factory=time.time)

    @cached_property
    def _by_kind(self) -> dict[tuple[int, type[Event]], list[Any]]:
        kinds: dict[tuple[int, type[Event]], list[Any]] = defaultdict(list)
        for rank, stream in self.events.items():
            for event in stream:
                kinds[rank, type(event)].append(event)
        return kinds

    def of(self, kind: type[E], rank: int = 0) -> list[E]:
        """Events of one type that a rank wrote, in order."""
        return self._by_kind.get((rank, kind), [])

    @cached_property
    def findings(self) -> list[HealthFired]:
        """What the health rules find with their default thresholds."""
        if self.logs:
            return [finding for _, log in sorted(self.logs.items()) for finding in log.findings]
        return health_findings(self.events.get(0, []), self.config.get("train.init_from"))

    @property
    def event_count(self) -> int:
        return sum(log.count for log in self.logs.values())

    @cached_property
    def steps(self) -> list[StepLogged]:
        return self.of(StepLogged)

    @cached_property
    def layers(self) -> list[LayersObserved]:
        return self.of(LayersObserved)

    @cached_property
    def resources(self) -> list[ResourcesObserved]:
        return self.of(ResourcesObserved)

    @cached_property
    def validations(self) -> list[Validated]:
        return self.of(Validated)

    @cached_property
    def started(self) -> list[RunStarted]:
        return self.of(RunStarted)

    @cached_property
    def losses(self) -> list[float]:
        """Of all logged steps."""
        return [loss for e in self.steps for loss in e.losses]

    @cached_property
    def stages(self) -> list[StageStarted]:
        """The stages so far, in order; empty for a run without stages. A resumed run may have moved them: an event
        replaces earlier ones of its stage or of later ones."""
        stages: list[StageStarted] = []
        for event in self.of(StageStarted):
            stages = [*(e for e in stages if e.stage < event.stage and e.step < event.step), event]
        return stages

    @cached_property
    def last_stage_steps(self) -> list[StepLogged]:
        """Log intervals of the last stage; all of them without stages."""
        return [e for e in self.steps if not self.stages or e.step > self.stages[-1].step]

    @property
    def name(self) -> str:
        return self.started[-1].name if self.started else str(self.config.get("run.name", self.folder.name))

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.steps[-1].step if self.steps else 0

    @property
    def ended(self) -> RunEnded | None:
        """The end event of the newest process; None if it is running or died without writing one."""
        last = next((e for e in reversed(self.events.get(0, [])) if isinstance(e, RunStarted | RunEnded)), None)
        return last if isinstance(last, RunEnded) else None

    @property
    def on_gpu(self) -> bool:
        return bool(self.started) and not self.started[-1].device.startswith("CPU")

    @property
    def world_size(self) -> int:
        return self.started[-1].world_size if self.started else 1

    @property
    def device_total_gib(self) -> float | None:
        """Memory of the GPU, as recorded in mem_*.json."""
        return next((m["device_total_gib"] for m in self.memory.values() if "device_total_gib" in m), None)

    @property
    def attention(self) -> list[str]:
        """The configured attention of each layer: nsa, dense or window. Empty if config.toml could not be read."""
        attention, layers = self.config.get("model.attention", "nsa"), self.config.get("model.layers", 0)
        if isinstance(attention, list):
            return [str(kind) for kind in attention]
        try:
            return list(layer_kinds(attention, layers))
        except (TypeError, ValueError, AttributeError):
            return []

    @property
    def selectors_only(self) -> bool:
        """Whether the run trains nothing but learned selectors (train.selector.only)."""
        return self.config.get("train.selector.only") is True

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Median over log intervals, of the last stage that has any. The first interval of each process and stage is
        warm-up and does not count."""
        speeds: dict[int, list[float]] = {}  # by stage
        stage, warm = 0, False
        for event in self.events.get(0, []):
            if isinstance(event, RunStarted):
                warm = False
            elif isinstance(event, StageStarted):
                stage, warm = event.stage, False
            elif isinstance(event, StepLogged):
                if warm:
                    speeds.setdefault(stage, []).append(event.tokens_per_s)
                warm = True
        return statistics.median(speeds[max(speeds)]) if speeds else None

    @cached_property
    def route_counts(self) -> Counter[RouteKey]:
        """Forward passes of rank 0 by (layer, branch, route, reason, is a fallback)."""
        return route_totals(self.events.get(0, []))

    @cached_property
    def slow_routes(self) -> list[tuple[int, str, str, str]]:
        """(layer, branch, route, reason) of passes for which a faster route exists."""
        return [
            (layer, branch, route, reason or "no reason given")
            for (layer, branch, route, reason, _), calls in sorted(self.route_counts.items())
            if calls and route not in _FASTEST.get(branch, _KERNELS)
        ]


def read_run(folder: Path | str) -> Run:
    """Read everything a run folder holds. Raises UsageError if there is not a single event."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: pass a run folder, such as runs/NAME-DATE-TIME")
    problems: list[str] = []
    config = read_config(folder, problems)
    init_from = config.get("train.init_from")
    collects = gc.isenabled()
    gc.disable()  # it would walk all events again and again; none are in cycles
    try:
        logs = _read_logs(folder, init_from)
    finally:
        if collects:
            gc.enable()
    if not any(log.events for log in logs.values()):
        hint = "the first event is written when training starts" if logs else "events_rank0.jsonl is missing"
        raise UsageError(f"{folder} has no events to report ({hint}): is it a run folder?")
    beats = {rank: last_heartbeat(path) for rank, path in rank_files(folder, "heartbeat").items()}
    run = Run(
        folder=folder,
        events={rank: log.events for rank, log in logs.items()},
        logs=logs,
        problems=tuple(problems + [problem for log in logs.values() for problem in log.problems]),
        config=config,
        origins={k: str(v) for k, v in _json(folder / "origins.json").items()},
        environment=_json(folder / "env.json"),
        memory={p.stem.removeprefix("mem_"): _json(p) for p in sorted(folder.glob("mem_*.json"))},
        heartbeats={rank: beat for rank, beat in beats.items() if beat},
        dtypes=_dtypes(folder / "dtypes_report.txt"),
        files=tuple(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())),
        state="gone",
    )
    return dataclasses.replace(run, state=_state(run))


def _read_logs(folder: Path, init_from: str | None) -> dict[int, RankLog]:
    """The logs of all ranks. Processes of their own read large ones, except that of rank 0, which keeps most events."""
    paths = rank_files(folder, "events")
    if sum(path.stat().st_size for path in paths.values()) < LARGE_LOGS:
        return {rank: RankLog(path, rank, init_from) for rank, path in paths.items()}
    with ProcessPoolExecutor(usable_cores(), mp_context=get_context("fork")) as pool:
        others = {rank: pool.submit(RankLog, path, rank, init_from) for rank, path in paths.items() if rank}
        return {rank: others[rank].result() if rank else RankLog(path, 0, init_from) for rank, path in paths.items()}


class RankLog:
    """The events of one rank, read from its file in bounded memory.

    Of the layer statistics of a long run, the first of each of BINS bins is kept, and those with an extreme value; of
    the route counts, which are totals, the last before another kind of event; of the intervals of other ranks than 0,
    only `steps` and `memory_gib`. The health rules see every event.
    """

    def __init__(self, path: Path, rank: int, init_from: str | None) -> None:
        self.events: list[Event] = []
        self.findings: list[HealthFired] = []
        self.problems: list[str] = []
        self.count = 0
        self.steps, self.memory_gib = array("q"), 0.0
        self._rank, self._monitor = rank, HealthMonitor(init_from=init_from)
        self._bin: list[Any] = []
        self._unreadable: list[int] = []
        self._unknown = 0
        routes, starving = b"", False
        skipped = _SAME_ON_ALL_RANKS if rank else ()
        with path.open("rb") as stream:
            self._bin_size = 1 if rank else max(1, sum(line.startswith(_LAYERS) for line in stream) // BINS)
            stream.seek(0)
            for line in stream:  # ends at \n only: text samples have other line ends
                if not line.endswith(b"\n"):
                    self.problems.append(f"{path.name}: the last line is cut off")
                    break
                self.count += 1
                if line.startswith(skipped):
                    continue
                if line.startswith(ROUTES) and b"true" not in line:  # no fallback
                    routes = line
                elif rank and not starving and (match := _STEP.match(line)) and line.endswith(b"}\n"):
                    step, *numbers = match.groups()
                    seconds, waiting, memory = (float(n.strip(b'"')) for n in numbers)
                    starving = waiting > DATA_WAIT_SHARE * seconds
                    if starving:
                        self._decode(line)
                    else:
                        self._add(int(step), memory)
                else:
                    starving = False
                    if not line.startswith(MEASUREMENTS):  # pending events come before one of another kind
                        self._keep_extremes()
                        routes = self._decode(routes)
                    self._decode(line)
        self._keep_extremes()
        self._decode(routes)
        if self._unreadable:
            where = ", ".join(map(str, self._unreadable[:5])) + (" …" if len(self._unreadable) > 5 else "")
            count = plural(len(self._unreadable), "unreadable line")
            self.problems.append(f"{path.name}: {count} (line {where})")
        if self._unknown:
            self.problems.append(f"{path.name}: {self._unknown} events of a kind unknown to this version")

    def _add(self, step: int, memory_gib: float) -> None:
        self.steps.append(step)
        self.memory_gib = max(self.memory_gib, memory_gib)

    def _decode(self, line: bytes) -> bytes:
        """Keep the event of a line, if there is one; returns an empty line."""
        try:
            event = decode(line) if line else None
        except ValueError:
            self._unreadable.append(self.count)
            return b""
        if event is None:
            self._unknown += bool(line)
            return b""
        # Losses, gradients and speed are the same on every rank: their findings count once, from rank 0.
        self.findings += [f for f in self._monitor.observe(event) if not self._rank or f.rule not in _SHARED_RULES]
        if isinstance(event, LayersObserved) and self._bin_size > 1:
            self._bin.append(event)
            if len(self._bin) == self._bin_size:
                self._keep_extremes()
        elif self._rank and isinstance(event, StepLogged):
            self._add(event.step, event.memory_gib)
        else:
            self.events.append(event)
        return b""

    def _keep_extremes(self) -> None:
        if not self._bin:
            return
        kept = {0, len(self._bin) - 1}
        for name in LAYER_SERIES:
            values = [(v, i) for i, e in enumerate(self._bin) for v in getattr(e, name) if v is not None] or [(0.0, 0)]
            kept |= {min(values)[1], max(values)[1], *(i for v, i in values if not math.isfinite(v))}
        self.events += [self._bin[i] for i in sorted(kept)]
        self._bin = []


def read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return flatten_table(parse_toml((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problems.append(f"config.toml cannot be read ({type(error).__name__})")
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _dtypes(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, ValueError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _state(run: Run) -> str:
    if run.ended is not None:
        return "ended"
    if not _locked(run.folder):
        return "gone"
    last = run.heartbeats.get(0, {}).get("time", 0.0)
    return "running" if run.read_at - last < stale_after(run.config) else "silent"


def stale_after(config: Mapping[str, Any]) -> float:
    """Seconds without a heartbeat after which a process counts as frozen. config: flat keys, as in `Run.config`."""
    interval = config.get("log.heartbeat_seconds", 10.0)
    return max(FRESH_SECONDS, 6 * interval if isinstance(interval, (int, float)) else 0)


def _locked(folder: Path) -> bool:
    """Whether a process holds the run folder's lock. The kernel releases it however the process dies."""
    try:
        with (folder / "lock").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def with_defaults(run: Run) -> dict[str, Any]:
    """The configuration of a run; one of an older version behaved as the defaults of newer keys."""
    defaults = {key: _as_in_toml(value) for key, value in flatten(RunConfig()).items()}
    return {**defaults, **run.config} if run.config else {}


def _as_in_toml(value: object) -> object:
    """TOML has no tuples and no null."""
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


# A dense baseline must have the same values for these keys …
_SAME_MODEL = ("model.", "data.seq_len", "train.tokens_per_step", "train.micro_batch", "train.stages",
               "train.precision", "train.compile", "train.activation_checkpointing", "train.selector.only",
               "train.optimizer", "train.cuda_graph", "run.deterministic", "parallel.")  # fmt: skip
# … except for these, which only concern sparse attention.
_ATTENTION_ONLY = ("model.attention", *(f"model.{key}" for key in NSA_ONLY))
# To compare losses, everything that influences learning must be the same too.
_SAME_LEARNING = ("data.", "train.", "run.seed")
_NOT_LEARNING = ("data.prefetch", "train.val_every", "train.sample_", "train.max_skipped")


def baseline_mismatch(run: Run, baseline: Run) -> str:
    """Why `baseline` is not `run` with dense attention; empty if it is."""
    attention = baseline.config.get("model.attention")
    if not is_all_dense(attention):
        return f"its model.attention is {attention}"
    if not run.started or not baseline.started or run.started[-1].device != baseline.started[-1].device:
        return "it ran on another device"
    if run.world_size != baseline.world_size:
        return "it ran on another number of ranks"
    return _config_difference(run, baseline, _SAME_MODEL, _ATTENTION_ONLY)


def loss_mismatch(run: Run, baseline: Run) -> str:
    """Why the losses of a run and its baseline cannot be compared; empty if they can."""
    return baseline_mismatch(run, baseline) or _config_difference(run, baseline, _SAME_LEARNING, _NOT_LEARNING)


def _config_difference(run: Run, baseline: Run, same: tuple[str, ...], except_for: tuple[str, ...]) -> str:
    first, second = with_defaults(run), with_defaults(baseline)
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key), second.get(key)
        if key.startswith(same) and not key.startswith(except_for) and ours != theirs:
            return f"{key} is {theirs} instead of {ours}"
    return ""
