"""On each rank: rank 0 starts a collective that rank 1 does not join; both write their flight records."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tercet.parallel.failure import write_flight_record
from tercet.parallel.launch import flight_recorder_settings


def main() -> int:
    run, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    os.environ.update(flight_recorder_settings(run, rank))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))
    if rank == 0:
        dist.all_reduce(torch.ones(9), async_op=True)
    write_flight_record(run, rank)
    os._exit(0)  # rank 0's collective never ends
