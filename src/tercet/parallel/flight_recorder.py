"""PyTorch's flight recorder: the last collectives of every rank, written when one fails and read by `tercet flight RUN`
to show which rank is where and which ranks wait for it.

Ranks write JSON when a collective fails. NCCL's watchdog may end a process before that and writes pickles; those are
read by an unpickler that refuses everything but plain values. Reading needs no torch.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.atomic_io import write_text
from tercet.errors import TercetError, UsageError
from tercet.parse import WRONG_VALUE, one_line_errors, parse_json
from tercet.terminal import printable

FOLDER = "flight_recorder"
EARLIER = "earlier-"
# Collectives kept per rank. At a few hundred per step this covers the last steps, at about a kilobyte each.
BUFFER_SIZE = 2000
_READ_ERRORS = (*WRONG_VALUE, EOFError, MemoryError, OSError, pickle.UnpicklingError)


def settings(run: Path, rank: int) -> dict[str, str]:
    """Environment variables that PyTorch reads when process groups are created.

    Moves the records of earlier processes aside, so that they are not mixed with new ones.
    """
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # No rank gets past its first collective without rank 0, so all records found here are old.
    if rank == 0 and (old := _find_records(folder)):
        newest = max(record.stat().st_mtime for record in old)
        aside = folder / (EARLIER + time.strftime("%Y%m%d-%H%M%S", time.gmtime(newest)))
        aside.mkdir(exist_ok=True)
        for record in old:
            record.replace(aside / record.name)
    return {
        "TORCH_FR_BUFFER_SIZE": str(BUFFER_SIZE),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "rank_"),
    }


def write(run: Path, rank: int, world_size: int) -> Path | None:
    """Write this rank's record as JSON. Returns None if this PyTorch keeps none.

    PyTorch records NCCL's collectives separately from those of other backends; a run on GPUs uses both.
    """
    import torch._C._distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    records = [json.loads(dump(True, False)) for dump in dumps if dump is not None]
    if not records:
        return None
    # "entries" is missing if there was no collective
    entries = [entry for record in records for entry in record.get("entries", [])]
    path = run / FOLDER / f"rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**records[0], "entries": entries, "world_size": world_size}))
    return path


def flight(run: str) -> int:
    """Show which rank was in which collective when a run failed.

    Args:
        run: Run folder.
    """
    if not Path(run).is_dir():
        raise UsageError(f"{run} does not exist: expected a run folder")
    folder = Path(run) / FOLDER
    earlier = sorted(folder.glob(f"{EARLIER}*"))
    if earlier and not _find_records(folder):
        print(f"no failure since the run was last started; the one before that ({earlier[-1].name}):")
        folder = earlier[-1]
    records, damaged = read(folder)
    with one_line_errors(TercetError, f"{folder} has records with a value of the wrong type"):
        print(printable("\n".join(summarize(records, damaged))))
    return 0


def read(folder: Path) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Every rank's newest readable record, and an error message for each rank without one."""
    records: dict[int, dict[str, Any]] = {}
    damaged: dict[int, str] = {}
    paths = _find_records(folder)
    # A rank may leave two records: NCCL's and ours.
    for path in sorted(paths, key=lambda p: (-p.stat().st_mtime_ns, p.name)):
        rank = paths[path]
        if rank in records:
            continue
        try:
            records[rank] = _load(path)
        except _READ_ERRORS as error:
            damaged[rank] = f"{path} is not a flight record: {error}"
    if not records:
        empty = f"{folder} has no records: they are written when a collective fails or times out"
        raise TercetError("; ".join(damaged.values()) or empty)
    return records, damaged


def _find_records(folder: Path) -> dict[Path, int]:
    """Record files and their ranks."""
    names = {path: re.fullmatch(r"rank_(\d+)(\.json)?", path.name) for path in sorted(folder.glob("rank_*"))}
    return {path: int(name[1]) for path, name in names.items() if name is not None}


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        record: dict[str, Any] = parse_json(stream.read()) if path.suffix else PlainUnpickler(stream).load()
    if not isinstance(record["entries"], list):
        raise TypeError("its entries are not a list")
    for entry in record["entries"]:
        _number(entry), _operation(entry), [*entry["process_group"]]  # raises if a field is missing
    return record


class PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, tuples, strings and numbers; refuses anything that needs a class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no record needs")


def summarize(records: Mapping[int, Mapping[str, Any]], damaged: Mapping[int, str] = {}) -> list[str]:
    """For each process group: where each rank is, and which ranks the others wait for."""
    lines = [*damaged.values(), f"records of rank {', '.join(map(str, sorted(records)))}"]
    ranks = max(int(record.get("world_size", 0)) for record in records.values())
    missing = [str(rank) for rank in range(min(ranks, 100_000)) if rank not in records and rank not in damaged]
    if missing:
        lines.append(f"no record of rank {', '.join(missing)}: it died before it could write one")
    groups: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for rank, record in records.items():
        for entry in record["entries"]:
            name, description = (*entry["process_group"], "")[:2]
            # each backend of a group numbers its own collectives
            key = f"group {name} ({description})", str(entry["profiling_name"]).rpartition(":")[0]
            groups.setdefault(key, {}).setdefault(rank, []).append(entry)
    findings = []
    for (group, backend), by_rank in sorted(groups.items()):
        if len([name for name, _ in groups if name == group]) > 1:
            group += f" on {backend}"
        findings += [f"{group}: {line}" for line in _summarize_group(by_rank, bool(missing or damaged))]
    return lines + (findings or ["no rank is waiting in a collective"])


def _summarize_group(by_rank: Mapping[int, list[dict[str, Any]]], incomplete: bool) -> list[str]:
    """Where the ranks of a group diverged or, if they did not, which of them wait for which others.

    incomplete: the records of some ranks are missing.
    """
    if divergence := _divergence(by_rank):
        return [divergence]
    last = {rank: max(entries, key=_number) for rank, entries in by_rank.items()}
    furthest = max(_number(entry) for entry in last.values())
    behind = [rank for rank, entry in last.items() if _number(entry) < furthest]
    lines = []
    for rank, entry in sorted(last.items()):
        operation = _operation(entry) + _location(entry)
        if rank in behind:
            state = "completed" if _done(entry) else "not completed"
            lines.append(f"rank {rank} got no further than collective {_number(entry)} ({operation}), {state}")
        elif behind:
            waited_for = ", ".join(f"rank {r}" for r in sorted(behind))
            lines.append(f"rank {rank} waits in collective {furthest} ({operation}) for {waited_for}")
        elif not _done(entry):
            lines.append(f"rank {rank} is in collective {furthest} ({operation})")
        elif incomplete:  # a failed collective counts as completed
            lines.append(f"rank {rank} got as far as collective {furthest} ({operation})")
    return lines


def _divergence(by_rank: Mapping[int, list[dict[str, Any]]]) -> str | None:
    by_number = {rank: {_number(e): e for e in entries} for rank, entries in by_rank.items()}
    shared = sorted(set.intersection(*(set(entries) for entries in by_number.values())))
    for number in shared:
        operations = {rank: _operation(entries[number]) for rank, entries in by_number.items()}
        # sizes must agree in an all_reduce; in other collectives they may differ by rank
        if len({op if op.startswith("all_reduce") else op.split(" of ")[0] for op in operations.values()}) > 1:
            differ = ", ".join(f"rank {rank} {op}" for rank, op in sorted(operations.items()))
            return f"ranks diverged at collective {number}: {differ}"
    return None


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _operation(entry: Mapping[str, Any]) -> str:
    sizes = "+".join("×".join(map(str, size)) or "1" for size in entry.get("input_sizes", []))
    return f"{str(entry['profiling_name']).split(':')[-1]} of {sizes or 'nothing'}"


def _location(entry: Mapping[str, Any]) -> str:
    ours = [f for f in entry.get("frames", []) if "tercet" in str(f.get("filename"))]
    return f" at {Path(ours[0]['filename']).name}:{ours[0]['line']}" if ours else ""
