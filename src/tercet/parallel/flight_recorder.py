"""PyTorch's flight recorder: the last collectives of every rank, written to RUN/flight_recorder when one fails.

`torchfrtrace RUN/flight_recorder` shows which rank was in which collective. NCCL's watchdog may end a process before
Tercet writes; it writes the same file. Importing this module does not load torch.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

from tercet.atomic_io import atomic_write

FOLDER = "flight_recorder"
PREFIX = "rank_"
# Collectives kept per rank. At a few hundred per step this covers the last steps, at about a kilobyte each.
BUFFER_SIZE = 2000


def settings(run: Path, rank: int) -> dict[str, str]:
    """Environment variables that PyTorch reads when process groups are created.

    Moves the records of earlier processes aside. torchfrtrace reads subfolders too, so they go next to the folder.
    """
    folder = run / FOLDER
    # No rank gets past its first collective without rank 0, so all records here are old.
    if rank == 0 and (records := list(folder.glob(f"{PREFIX}*"))):
        newest = max(record.stat().st_mtime for record in records)
        aside = run / f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(newest))}"
        aside.mkdir(exist_ok=True)
        for record in records:
            record.replace(aside / record.name)
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "TORCH_FR_BUFFER_SIZE": str(BUFFER_SIZE),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / PREFIX),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / PREFIX),
    }


def write(run: Path, rank: int) -> Path | None:
    """Write this rank's record as torchfrtrace reads it. Returns None if this PyTorch keeps none.

    PyTorch records NCCL's collectives separately from those of other backends; a run on GPUs uses both.
    """
    import torch._C._distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    records: list[dict[str, Any]] = [pickle.loads(dump()) for dump in dumps if dump is not None]
    if not records:
        return None
    # "entries" is missing if there was no collective
    entries = [entry for record in records for entry in record.get("entries", [])]
    path = run / FOLDER / f"{PREFIX}{rank}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(pickle.dumps({**records[0], "entries": entries, "pg_config": _process_groups()}))
    return path


def _process_groups() -> dict[str, dict[str, str]]:
    """The ranks of each process group; gloo's record does not have them."""
    import torch.distributed as dist

    names = dist.distributed_c10d._world.pg_names if dist.is_initialized() else {}
    return {
        name: {"name": name, "desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
        for group, name in names.items()
    }
