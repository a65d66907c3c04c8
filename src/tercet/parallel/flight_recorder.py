"""PyTorch's flight recorder: the last collectives of every rank, kept in memory, written down when one fails, and read
by `tercet flight RUN`: which rank is where, and who keeps whom waiting.

Ranks write JSON when a collective fails. NCCL's own watchdog, which may end a process before that, writes pickles:
those are read by an unpickler that makes nothing but lists, dictionaries, tuples and numbers. No torch is needed here
to read.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tercet.atomic_io import write_text
from tercet.errors import TercetError, UsageError

FOLDER = "flight_recorder"
EARLIER = "earlier-"
# Collectives that are kept. At a few hundred a step this covers the last steps; a record takes about a kilobyte.
KEPT = 2000


def settings(run: Path, rank: int) -> dict[str, str]:
    """What PyTorch asks the environment for before process groups are made. Records of earlier processes go aside:
    ranks of then and now must not be told as one."""
    path = run / FOLDER
    path.mkdir(parents=True, exist_ok=True)
    # Nobody is past a first collective without rank 0: only old ones are there.
    if rank == 0 and (old := _records(path)):
        newest = max(record.stat().st_mtime for record in old)
        aside = path / (EARLIER + time.strftime("%Y%m%d-%H%M%S", time.gmtime(newest)))
        aside.mkdir(exist_ok=True)
        for record in old:
            record.replace(aside / record.name)
    return {
        "TORCH_FR_BUFFER_SIZE": str(KEPT),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(path / "rank_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(path / "rank_"),
    }


def write(run: Path, rank: int, world_size: int) -> Path | None:
    """This rank's record, as JSON; None where this PyTorch keeps none. NCCL's collectives are kept apart from those of
    other transports, and a run on GPUs has both."""
    import torch._C._distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    records = [json.loads(dump(True, False)) for dump in dumps if dump is not None]
    if not records:
        return None
    # without any collective there is no "entries"
    entries = [entry for record in records for entry in record.get("entries", [])]
    path = run / FOLDER / f"rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**records[0], "entries": entries, "world_size": world_size}))
    return path


def flight(run: str) -> int:
    """Read the flight recorder of a run that failed: which rank was in which collective.

    Args:
        run: Run folder.
    """
    if not Path(run).is_dir():
        raise UsageError(f"{run} does not exist: name the folder of a run")
    folder = Path(run) / FOLDER
    earlier = sorted(folder.glob(f"{EARLIER}*"))
    if earlier and not _records(folder):
        print(f"nothing has failed since the run was last started; before that ({earlier[-1].name}):")
        folder = earlier[-1]
    print("\n".join(tell(*read(folder))))
    return 0


def read(folder: Path) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Every rank's newest record that can be read, and a sentence for each that cannot."""
    found: dict[int, dict[str, Any]] = {}
    damaged: dict[int, str] = {}
    paths = _records(folder)
    # A rank may leave NCCL's own and ours, of two moments.
    for path in sorted(paths, key=lambda p: (-p.stat().st_mtime_ns, p.name)):
        rank = paths[path]
        if rank in found:
            continue
        try:
            found[rank] = _load(path)
        except _DAMAGE as error:
            damaged[rank] = f"{path} is no record of collectives: {error}"
    if not found:
        none = f"{folder} has no records: they are written when a collective fails or times out"
        raise TercetError("; ".join(damaged.values()) or none)
    return found, damaged


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, pickle.UnpicklingError)


def _records(folder: Path) -> dict[Path, int]:
    """Files that hold one, and whose."""
    named = {path: re.fullmatch(r"rank_(\d+)(\.json)?", path.name) for path in sorted(folder.glob("rank_*"))}
    return {path: int(name[1]) for path, name in named.items() if name is not None}


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        record: dict[str, Any] = json.load(stream) if path.suffix else PlainUnpickler(stream).load()
    if not isinstance(record["entries"], list):
        raise TypeError("its entries are no list")
    for entry in record["entries"]:
        _number(entry), _what(entry), [*entry["process_group"]]  # what is told of each
    return record


class PlainUnpickler(pickle.Unpickler):
    """Lists, dictionaries, tuples, texts and numbers, which need no class to be made; anything else is refused."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a record has no use for")


def tell(found: Mapping[int, Mapping[str, Any]], damaged: Mapping[int, str] = {}) -> list[str]:
    """Group by group: where each rank is, and who has not come."""
    lines = [*damaged.values(), f"records of rank {', '.join(map(str, sorted(found)))}"]
    ranks = max(int(record.get("world_size", 0)) for record in found.values())
    absent = [str(rank) for rank in range(ranks) if rank not in found and rank not in damaged]
    if absent:
        lines.append(f"no record of rank {', '.join(absent)}: gone before it could write one")
    groups: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for rank, record in found.items():
        for entry in record["entries"]:
            name, about = (*entry["process_group"], "")[:2]
            # each transport of a group counts for itself
            key = f"group {name} ({about})", str(entry["profiling_name"]).rpartition(":")[0]
            groups.setdefault(key, {}).setdefault(rank, []).append(entry)
    waiting = False
    for (group, transport), by_rank in sorted(groups.items()):
        if len([name for name, _ in groups if name == group]) > 1:
            group += f" on {transport}"
        told = _group(by_rank, bool(absent or damaged))
        waiting = waiting or bool(told)
        lines += [f"{group}: {sentence}" for sentence in told]
    if not waiting:
        lines.append("no rank waits in a collective")
    return lines


def _group(by_rank: Mapping[int, list[dict[str, Any]]], lost: bool) -> list[str]:
    lines = []
    last = {rank: max(entries, key=_number) for rank, entries in by_rank.items()}
    at = {rank: {_number(e): e for e in entries} for rank, entries in by_rank.items()}
    shared = sorted(set.intersection(*(set(entries) for entries in at.values())))
    for number in shared:
        kinds = {rank: _what(entries[number]) for rank, entries in at.items()}
        # sizes may differ by rank in other collectives; in these they may not
        if len({k if k.startswith("all_reduce") else k.split(" of ")[0] for k in kinds.values()}) > 1:
            differ = ", ".join(f"rank {rank} {kind}" for rank, kind in sorted(kinds.items()))
            return [f"ranks parted ways at collective {number}: {differ}"]
    furthest = max(_number(entry) for entry in last.values())
    behind = [rank for rank, entry in last.items() if _number(entry) < furthest]
    for rank, entry in sorted(last.items()):
        what = _what(entry) + _where(entry)
        if rank in behind:
            state = "done" if _done(entry) else "not done"
            lines.append(f"rank {rank} came no further than collective {_number(entry)} ({what}), which is {state}")
        elif behind:
            missing = ", ".join(f"rank {r}" for r in sorted(behind))
            lines.append(f"rank {rank} waits in collective {furthest} ({what}) for {missing}")
        elif not _done(entry):
            lines.append(f"rank {rank} is in collective {furthest} ({what})")
        elif lost:  # one that failed counts as ended
            lines.append(f"rank {rank} came as far as collective {furthest} ({what})")
    return lines


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["collective_seq_id"])


def _done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _what(entry: Mapping[str, Any]) -> str:
    sizes = "+".join("×".join(map(str, size)) or "1" for size in entry.get("input_sizes", []))
    return f"{str(entry['profiling_name']).split(':')[-1]} of {sizes or 'nothing'}"


def _where(entry: Mapping[str, Any]) -> str:
    ours = [f for f in entry.get("frames", []) if "tercet" in str(f.get("filename"))]
    return f" at {Path(ours[0]['filename']).name}:{ours[0]['line']}" if ours else ""
