"""Read a run folder, whether the run finished, crashed or is still running.

Bad lines and missing files never raise: they are collected in `Run.problems`. Only a folder without events is an error.
"""

from __future__ import annotations

import dataclasses
import fcntl
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
    RoutesCounted,
    RunEnded,
    RunStarted,
    StageStarted,
    StepLogged,
    Validated,
    decode,
)
from tercet.telemetry.health import HealthMonitor, health_findings
from tercet.telemetry.sinks import route_totals
from tercet.terminal import plural

E = TypeVar("E", bound=Event)

LAYER_SAMPLES = 1000  # kept of a long run
# The starts of lines, as events.encode writes them.
_LAYERS = b'{"kind": "layers"'
_SAME_ON_ALL_RANKS = (_LAYERS, b'{"kind": "selectors"', b'{"kind": "resources"')  # or not reported by rank
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
    dtypes: Mapping[str, str]
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

    @property
    def name(self) -> str:
        return self.started[-1].name if self.started else str(self.config.get("run.name", self.folder.name))

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.steps[-1].step if self.steps else 0

    @property
    def planned(self) -> int:
        """Steps that the newest process was asked for."""
        return self.started[-1].steps if self.started else 0

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
    def capacity_gib(self) -> float | None:
        """Memory of the GPU, on a CPU that of the machine, as recorded in mem_*.json."""
        total = "device_total_gib" if self.on_gpu else "host_total_gib"
        return next((record[total] for record in self.memory.values() if record.get(total)), None)

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
    paths = rank_files(folder, "events")
    logs = {rank: RankLog(path, rank, config.get("train.init_from")) for rank, path in paths.items()}
    if not any(log.events for log in logs.values()):
        hint = "the first event is written when training starts" if logs else "events_rank0.jsonl is missing"
        raise UsageError(f"{folder} has no events to report ({hint}): is it a run folder?")
    run = Run(
        folder=folder,
        events={rank: log.events for rank, log in logs.items()},
        logs=logs,
        problems=tuple(problems + [problem for log in logs.values() for problem in log.problems]),
        config=config,
        origins={k: str(v) for k, v in _json(folder / "origins.json").items()},
        environment=_json(folder / "env.json"),
        memory={p.stem.removeprefix("mem_"): _json(p) for p in sorted(folder.glob("mem_*.json"))},
        dtypes=_dtypes(folder / "dtypes_report.txt"),
        state="gone",
    )
    return dataclasses.replace(run, state=_state(run))


class RankLog:
    """The events of one rank, read from its file in bounded memory.

    Of the layer statistics of a long run, LAYER_SAMPLES are kept; of the route counts, which are totals, the last of
    each process; of the intervals of other ranks than 0, only `steps` and `memory_gib`. The health rules see every
    event.
    """

    def __init__(self, path: Path, rank: int, init_from: str | None) -> None:
        self.events: list[Event] = []
        self.findings: list[HealthFired] = []
        self.problems: list[str] = []
        self.count = 0
        self.steps: list[int] = []
        self.memory_gib = 0.0
        self._rank, self._monitor = rank, HealthMonitor(init_from=init_from)
        self._routes: RoutesCounted | None = None
        self._layers = 0  # samples so far
        unreadable, unknown = [], 0
        with path.open("rb") as stream:
            self._stride = 1 + sum(line.startswith(_LAYERS) for line in stream) // LAYER_SAMPLES
            stream.seek(0)
            for line in stream:  # ends at \n only: text samples have other line ends
                if not line.endswith(b"\n"):
                    self.problems.append(f"{path.name}: the last line is cut off")
                    break
                self.count += 1
                if rank and line.startswith(_SAME_ON_ALL_RANKS):
                    continue
                try:
                    event = decode(line)
                    unknown += event is None
                    self._add(event)
                except (ValueError, ArithmeticError):
                    unreadable.append(self.count)
        self._add_routes()
        if unreadable:
            where = ", ".join(map(str, unreadable[:5])) + (" …" if len(unreadable) > 5 else "")
            self.problems.append(f"{path.name}: {plural(len(unreadable), 'unreadable line')} (line {where})")
        if unknown:
            self.problems.append(f"{path.name}: {unknown} events of a kind unknown to this version")

    def _add(self, event: Event | None) -> None:
        if event is None:
            return
        # Losses, gradients and speed are the same on every rank: their findings count once, from rank 0.
        self.findings += [f for f in self._monitor.observe(event) if not self._rank or f.rule not in _SHARED_RULES]
        if isinstance(event, RoutesCounted):
            self._routes = event
        elif isinstance(event, StepLogged) and self._rank:
            self.steps.append(event.step)
            self.memory_gib = max(self.memory_gib, event.memory_gib)
        elif isinstance(event, LayersObserved):
            if self._layers % self._stride == 0:
                self.events.append(event)
            self._layers += 1
        else:
            if isinstance(event, RunStarted | RunEnded):
                self._add_routes()
            self.events.append(event)

    def _add_routes(self) -> None:
        if self._routes is not None:
            self.events.append(self._routes)
        self._routes = None


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
    last = last_heartbeat(run.folder / "heartbeat_rank0.jsonl").get("time", 0.0)
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


def baseline_mismatch(run: Run, baseline: Run) -> str:
    """Why `baseline` is not `run` with dense attention; empty if it is."""
    attention = baseline.config.get("model.attention")
    if not is_all_dense(attention):
        return f"its model.attention is {attention}"
    if not run.started or not baseline.started or run.started[-1].device != baseline.started[-1].device:
        return "it ran on another device"
    if run.world_size != baseline.world_size:
        return "it ran on another number of ranks"
    ours, theirs = with_defaults(run), with_defaults(baseline)
    for key in sorted(ours.keys() | theirs.keys()):
        compared = key.startswith(_SAME_MODEL) and not key.startswith(_ATTENTION_ONLY)
        if compared and ours.get(key) != theirs.get(key):
            return f"{key} is {theirs.get(key)} instead of {ours.get(key)}"
    return ""
