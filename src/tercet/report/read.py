"""A run folder, read as it is: whole, cut short, still growing or tampered with. Nothing here raises for a bad line."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tercet.config.keys import flatten_table
from tercet.errors import UsageError
from tercet.telemetry.events import (
    DoctorReported,
    Event,
    LayersObserved,
    ResourcesObserved,
    RoutesCounted,
    RunEnded,
    RunStarted,
    StepLogged,
    Validated,
    decode,
)
from tercet.telemetry.sinks import last_counts

E = TypeVar("E", bound=Event)

# Events whose lists are the columns of a table.
TABLES = (LayersObserved, RoutesCounted, DoctorReported)

# A heartbeat older than this, or than six times its own rhythm, is an old one.
FRESH_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """What is known of a run. `problems` are ways in which its record is not whole, found while reading."""

    folder: Path
    events: Mapping[int, list[Event]]  # by rank
    problems: tuple[str, ...]
    config: Mapping[str, Any]  # dotted key -> value
    origins: Mapping[str, str]
    environment: Mapping[str, Any]
    memory: Mapping[str, Mapping[str, Any]]  # boot, step1, … -> mem_*.json
    heartbeats: Mapping[int, Mapping[str, Any]]  # the last of each rank
    dtypes: Mapping[str, str]
    metrics: Mapping[str, Any]
    files: tuple[str, ...]
    state: str  # ended, running, silent (alive, but it does not speak) or gone
    read_at: float = field(default_factory=time.time)

    def of(self, kind: type[E], rank: int = 0) -> list[E]:
        """Events of one kind, in order."""
        return [e for e in self.events.get(rank, []) if isinstance(e, kind)]

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
    def routes(self) -> list[RoutesCounted]:
        """The last count of each process."""
        return last_counts(self.events.get(0, []))

    @property
    def name(self) -> str:
        return self.started[-1].name if self.started else str(self.config.get("run.name", self.folder.name))

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.steps[-1].step if self.steps else 0

    @property
    def ended(self) -> RunEnded | None:
        """How the newest process left, if it said so."""
        return next((e for e in reversed(self._last_process) if isinstance(e, RunEnded)), None)

    @property
    def _last_process(self) -> list[Event]:
        stream = self.events.get(0, [])
        begin = max((i for i, e in enumerate(stream) if isinstance(e, RunStarted)), default=0)
        return stream[begin:]

    @property
    def on_gpu(self) -> bool:
        return bool(self.started) and not self.started[-1].device.startswith("CPU")

    @property
    def world_size(self) -> int:
        return self.started[-1].world_size if self.started else 1


def read_run(folder: Path | str) -> Run:
    """Everything a folder holds. A folder without a single event is an error."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give the run folder, such as runs/NAME-DATE-TIME")
    problems: list[str] = []
    streams = {}
    for path in sorted(folder.glob("events_rank*.jsonl")):
        if found := re.fullmatch(r"events_rank(\d+)\.jsonl", path.name):
            streams[int(found[1])] = _stream(path, problems)
    if not any(streams.values()):
        hint = "its first event is written when training starts" if streams else "it holds no events_rank0.jsonl"
        raise UsageError(f"{folder} has no events, so there is nothing to report: {hint}; is it a run folder?")
    config, origins = _config(folder, problems)
    heartbeats = _heartbeats(folder)
    run = Run(
        folder=folder,
        events=streams,
        problems=tuple(problems),
        config=config,
        origins=origins,
        environment=_json(folder / "env.json"),
        memory={p.stem.removeprefix("mem_"): _json(p) for p in sorted(folder.glob("mem_*.json"))},
        heartbeats=heartbeats,
        dtypes=_dtypes(folder / "dtypes_report.txt"),
        metrics=_json(folder / "metrics.json"),
        files=tuple(sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())),
        state="gone",
    )
    return dataclasses.replace(run, state=_state(run))


def tail(path: Path, size: int = 65536) -> list[str]:
    """The last lines of a file that may be long."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - size))
            return stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _stream(path: Path, problems: list[str]) -> list[Event]:
    events: list[Event] = []
    bad: list[int] = []
    unknown = 0
    # Only \n ends a line: a text sample may hold any of the other characters that Python calls line ends.
    *lines, rest = path.read_bytes().split(b"\n")
    if rest:
        problems.append(f"{path.name}: its last line is cut off")
    for number, line in enumerate(lines, 1):
        try:
            event = decode(line.decode("utf-8"))
            if event is not None and not _well_typed(event):
                raise ValueError("wrong types")
        except (ValueError, KeyError, TypeError, AttributeError):
            bad.append(number)
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    if bad:
        where = ", ".join(map(str, bad[:5])) + (" …" if len(bad) > 5 else "")
        problems.append(f"{path.name}: {len(bad)} unreadable line{'s' * (len(bad) > 1)} (line {where})")
    if unknown:
        problems.append(f"{path.name}: {unknown} events of kinds that this version does not know")
    return events


def _well_typed(event: Event) -> bool:
    """Whether plain fields hold what they are declared to hold; a log that says otherwise was not written by us."""
    for f in dataclasses.fields(event):
        value, declared = getattr(event, f.name), str(f.type)
        if declared.startswith("list"):
            good = isinstance(value, list) and all(
                _fits(v, declared.removeprefix("list[").removesuffix("]")) for v in value
            )
        else:
            good = _fits(value, declared)
        if not good:
            return False
    columns = {len(getattr(event, f.name)) for f in dataclasses.fields(event) if str(f.type).startswith("list")}
    return not isinstance(event, TABLES) or len(columns) == 1


def _fits(value: Any, declared: str) -> bool:
    if value is None:
        return "None" in declared
    if declared.startswith("list"):
        return isinstance(value, list)
    kind = declared.split(" ")[0]
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"str": str, "bool": bool}.get(kind, object))


def _config(folder: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        config = flatten_table(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problems.append(f"config.toml cannot be read ({type(error).__name__})")
        config = {}
    return config, {k: str(v) for k, v in _json(folder / "origins.json").items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _dtypes(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, ValueError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    beats = {}
    for path in sorted(folder.glob("heartbeat_rank*.jsonl")):
        if found := re.fullmatch(r"heartbeat_rank(\d+)\.jsonl", path.name):
            for line in reversed(tail(path)):
                with contextlib.suppress(ValueError):
                    beat = json.loads(line)
                    if isinstance(beat, dict) and isinstance(beat.get("time"), (int, float)):
                        beats[int(found[1])] = beat
                        break
    return beats


def _state(run: Run) -> str:
    if run.ended is not None:
        return "ended"
    rhythm = run.config.get("log.heartbeat_seconds", 10.0)
    limit = max(FRESH_SECONDS, 6 * rhythm if isinstance(rhythm, (int, float)) else 0)
    beat = run.heartbeats.get(0, {}).get("time", 0.0)
    if run.read_at - beat < limit and _locked(run.folder):
        return "running"
    return "silent" if _locked(run.folder) else "gone"


def _locked(folder: Path) -> bool:
    """Whether a process holds the run folder; the kernel lets go of the lock when it dies, however it dies."""
    try:
        with (folder / "lock").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


# ------------------------------------------------------------------------------------------------
# Whether a checkpoint folder is complete, from its manifest alone: no torch, and no loading.


def incomplete(folder: Path) -> str:
    """What is missing or of the wrong size; empty if nothing is."""
    manifest = folder / "manifest.json"
    if not folder.is_dir():
        return "the folder is not there"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        sizes = {name: int(record["bytes"]) for name, record in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return "" if sizes else "its manifest lists no files"


# ------------------------------------------------------------------------------------------------
# What the passes of a run ran on.

# What a layer runs where nothing holds it back.
_FASTEST = {"dense": ("cudnn", "sdpa", "varlen")}
_KERNELS = ("triton",)


def fastest(branch: str, route: str) -> bool:
    """Whether a branch has nothing quicker than this route."""
    return route in _FASTEST.get(branch, _KERNELS)


def route_counts(run: Run) -> Counter[tuple[int, str, str, str, bool]]:
    """Passes by (layer, branch, route, reason, fallback) over all processes and ranks that were read."""
    counts: Counter[tuple[int, str, str, str, bool]] = Counter()
    for event in run.routes:
        rows = zip(event.layer, event.branch, event.route, event.reason, event.fallback, event.calls, strict=True)
        for layer, branch, route, reason, fallback, calls in rows:
            counts[layer, branch, route, reason, fallback] += calls
    return counts


def uncounted(run: Run) -> str:
    """That not all passes of the run's steps are in its log, in words; empty if all are.

    Versions that counted at log lines alone left out what a process did between the last of them and the save from
    which the next one went on.
    """
    logged, made = sum(route_counts(run).values()), passes_made(run)
    if logged >= made:
        return ""
    return f"{logged:,} passes logged of {made:,}, and what the other {made - logged:,} ran on is not known"


def passes_made(run: Run) -> int:
    """Passes that the run's steps take, over all layers and branches that were counted at all."""
    last = 0  # step of the newest process that is known to have been made
    started: list[RunStarted] = []
    for event in run.events.get(0, []):
        if isinstance(event, RunStarted):
            started.append(event)
            last = event.step
        elif isinstance(event, (StepLogged, RoutesCounted, RunEnded)):
            last = max(last, event.step)
    made, end = 0, last
    for process in reversed(started):  # of its steps only those count that no later process has made again
        made += max(0, end - process.step) * process.accumulation
        end = min(end, process.step)
    return made * len({(layer, branch) for layer, branch, *_ in route_counts(run)})
