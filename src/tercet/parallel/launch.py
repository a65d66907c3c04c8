"""From processes that torchrun started to ranks that know each other: who is here, and whether they may begin.

Everything is said through torchrun's key-value store before any collective is made, because a collective among ranks
that disagree does not fail: it hangs.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tercet.config.sections import ParallelConfig
from tercet.errors import TercetError, UsageError
from tercet.parallel import flight_recorder
from tercet.typed import typed
from tercet.version import __version__

_FOLDER_KEY = "tercet/run_folder"


class LaunchError(TercetError):
    """Ranks that may not begin. `told`: another rank prints it."""

    told = False


class WrongLaunch(LaunchError, UsageError):
    """A launch that does not fit the configuration or the machine: it must be started in another way."""


@dataclass(frozen=True)
class Launch:
    """What torchrun says this process is; one process without it is a world of its own."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restarts: int = 0
    by_torchrun: bool = False

    @classmethod
    def here(cls) -> Launch:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            by_torchrun=True,
        )


def check_launch(parallel: ParallelConfig, launch: Launch, device: str, gpus: int) -> list[str]:
    """Refuse a launch that would leave GPUs idle or ranks without one. Returns warnings."""
    if launch.world_size != parallel.world_size:
        local = min(parallel.world_size, gpus or parallel.world_size)
        raise WrongLaunch(
            f"parallel.world_size={parallel.world_size}, but {launch.world_size} rank"
            f"{'s were' if launch.world_size > 1 else ' was'} launched: start with\n"
            f"  {torchrun_line(parallel.world_size, local, parallel.strategy)}"
        )
    if parallel.strategy != "single" and not launch.by_torchrun:
        ranks = gpus if gpus > 1 else 0
        raise WrongLaunch(
            f"parallel.strategy={parallel.strategy} needs torchrun, which starts a process for each rank: start with\n"
            f"  {torchrun_line(ranks, ranks, parallel.strategy)}"
        )
    if device != "cuda":
        return []
    here = f"{launch.local_world_size} ranks on a machine with {gpus} GPU{'s' * (gpus > 1)}"
    if launch.local_world_size > gpus and not parallel.share_gpus:
        raise WrongLaunch(
            f"{here}: each needs its own; start {gpus}, or share GPUs (slowly, through gloo) with --parallel.share_gpus"
        )
    if parallel.share_gpus and launch.local_world_size <= gpus:
        raise WrongLaunch(f"parallel.share_gpus=true, but there are {here}: nothing is to be shared, drop it")
    if parallel.share_gpus:
        return [f"{here} share it (parallel.share_gpus): what they exchange goes through the host, slowly"]
    if launch.world_size > 1 or gpus < 2 or parallel.allow_single_rank:
        return []
    sentence = f"this machine has {gpus} GPUs and one process was started: {gpus - 1} would stand idle"
    if os.environ.get("CI"):
        return [f"{sentence} (a warning only, since CI is set)"]
    raise WrongLaunch(
        f"{sentence}; start with\n  {torchrun_line(gpus, gpus, parallel.strategy)}\n"
        "or pass --allow-single-rank to use one on purpose"
    )


def torchrun_line(ranks: int, local: int, strategy: str) -> str:
    """The command that would have started this one on so many ranks; 0: on N, for a person to fill in."""
    arguments = [a for a in sys.argv[1:] if a != "--allow-single-rank"]
    said = strategy != "single" or any(a.startswith("--parallel.strategy") for a in arguments)
    added = [] if said else ["--parallel.strategy", "ddp"]
    nodes = ["--standalone"] if ranks == local else [f"--nnodes={-(-ranks // local)}"]
    words = [*nodes, f"--nproc-per-node={local or 'N'}", "-m", "tercet", *arguments, *added]
    return f"{typed('torchrun')} {shlex.join(words)}"


def backend_of(parallel: ParallelConfig, device: str) -> str:
    if parallel.backend != "auto":
        return parallel.backend
    return "nccl" if device == "cuda" and not parallel.share_gpus else "gloo"


@dataclass
class World:
    """The process groups of a run, and what its ranks know of each other."""

    launch: Launch
    device: torch.device
    call: str  # this meeting's name in the store, which may have seen others
    control: dist.ProcessGroup  # flags and objects, on the host, never mixed with training's own collectives
    checkpoint: dist.ProcessGroup  # for the saving thread alone
    folder: str | None
    members: list[dict[str, Any]]  # what every rank said of itself

    def settle(self, seconds: float) -> None:
        """After the first step: from now on a rank that is late is stuck."""
        for group in (dist.group.WORLD, self.control):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def close(self) -> None:
        dist.destroy_process_group()


def join(
    launch: Launch,
    parallel: ParallelConfig,
    device: torch.device,
    config: Mapping[str, Any],
    folder: Callable[[str | None], Path],
) -> World:
    """Meet the other ranks, compare notes, and make the process groups. `folder` is asked on rank 0 for the run folder,
    with that of an earlier attempt of the same torchrun."""
    about = describe(launch, device, config)
    print(
        f"rank {launch.rank} of {launch.world_size} (local rank {launch.local_rank}) on {about['host']}, "
        f"pid {about['pid']}, {about['device']}" + (f", restart {launch.restarts}" if launch.restarts else ""),
        file=sys.stderr,
        flush=True,
    )
    limit = timedelta(seconds=parallel.arrival_seconds)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = _store(launch, limit)
    except (dist.DistError, OSError, ValueError, KeyError) as error:
        raise LaunchError(f"rank {launch.rank} cannot reach the store of rank 0 at {address}: {error}") from None
    if launch.rank == 0:
        verdict = _roll_call(store, launch, about, parallel.arrival_seconds, folder)
    else:
        try:
            verdict = _answer_call(store, about, limit + timedelta(seconds=30))
        except dist.DistStoreError:
            raise LaunchError(
                f"rank 0 did not arrive at {address} within {parallel.arrival_seconds:g} s: see its own output"
            ) from None
    if verdict["error"]:
        problem = (WrongLaunch if verdict.get("wrong") else LaunchError)(verdict["error"])
        problem.told = launch.rank != 0
        time.sleep(0.5 if launch.rank == 0 else 0.0)  # the store must live until all have read the verdict
        raise problem
    os.environ.update(flight_recorder.settings(Path(verdict["folder"]), launch.rank))
    nccl = device.type == "cuda" and backend_of(parallel, "cuda") == "nccl"
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=dist.PrefixStore(f"tercet/{verdict['call']}/group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=parallel.first_step_seconds),
        device_id=device if nccl else None,
    )
    long = timedelta(seconds=max(parallel.first_step_seconds, 1800))
    control, checkpoint = (dist.new_group(backend="gloo", timeout=long) for _ in range(2))
    assert control is not None
    assert checkpoint is not None
    return World(launch, device, verdict["call"], control, checkpoint, verdict["folder"], verdict["members"])


def _store(launch: Launch, limit: timedelta) -> dist.Store:
    """Torchrun's own store; without torchrun, rank 0 keeps one. Nobody is waited for here: the roll call does that."""
    from torch.distributed.rendezvous import _torchelastic_use_agent_store

    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        launch.world_size,
        is_master=launch.rank == 0 and not _torchelastic_use_agent_store(),
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
    )


def describe(launch: Launch, device: torch.device, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank says of itself."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        **asdict(launch),
        "name": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"{device} ({name})" if device.type == "cuda" else name,
        "versions": {"tercet": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "config": dict(config),
    }


def _answer_call(store: dist.Store, about: dict[str, Any], limit: timedelta) -> dict[str, Any]:
    """On the other ranks: say who one is, that one is alive, and read the verdict."""
    name = about["name"]
    store.set(f"tercet/here/{about['rank']}", json.dumps(about))
    store.wait([f"tercet/ask/{name}"], limit)
    call = store.get(f"tercet/ask/{name}").decode()
    store.set(f"tercet/alive/{call}/{name}", "")
    store.wait([f"tercet/verdict/{name}"], limit)
    verdict: dict[str, Any] = json.loads(store.get(f"tercet/verdict/{name}"))
    return verdict


def _roll_call(
    store: dist.Store,
    launch: Launch,
    about: dict[str, Any],
    seconds: float,
    folder: Callable[[str | None], Path],
) -> dict[str, Any]:
    """On rank 0: wait for all, compare, decide; every rank reads the verdict.

    The store may hold what ranks of an earlier attempt wrote, now dead: only one that answers has arrived.
    """
    members = {0: about}
    path, wrong = None, False  # wrong: the same command would be refused again
    error = _missing(store, launch.world_size, seconds, members)
    if error is None:
        error = disagreement(members)
        wrong = error is not None
    if error is None:
        try:
            earlier = store.get(_FOLDER_KEY).decode() if launch.restarts and store.check([_FOLDER_KEY]) else None
            path = str(folder(earlier))
            store.set(_FOLDER_KEY, path)
        except TercetError as problem:
            error, wrong = str(problem), isinstance(problem, UsageError)
    people = [{k: v for k, v in members[r].items() if k not in ("config", "versions")} for r in sorted(members)]
    verdict = {"error": error, "wrong": wrong, "folder": path, "members": people, "call": about["name"]}
    for member in members.values():
        store.set(f"tercet/verdict/{member['name']}", json.dumps(verdict))
    return verdict


def _missing(store: dist.Store, ranks: int, seconds: float, members: dict[int, Any]) -> str | None:
    begun = spoken = time.monotonic()
    call = members[0]["name"]
    while len(members) < ranks:
        for rank in range(1, ranks):
            if rank in members or not store.check([f"tercet/here/{rank}"]):
                continue
            member = json.loads(store.get(f"tercet/here/{rank}"))
            store.set(f"tercet/ask/{member['name']}", call)
            if store.check([f"tercet/alive/{call}/{member['name']}"]):
                members[rank] = member
        absent = [str(r) for r in range(ranks) if r not in members]
        now = time.monotonic()
        if absent and now - begun > seconds:
            present = ", ".join(sorted({m["host"] for m in members.values()}))
            some = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
            return (
                f"rank {some} did not arrive within {seconds:g} s ({len(members)} of {ranks} are here, on {present}): "
                "see the output of the machine that should have started it"
            )
        if absent and now - spoken > 10:
            spoken = now
            print(f"waiting for rank {', '.join(absent[:8])}: {now - begun:.0f} s", file=sys.stderr, flush=True)
        time.sleep(0.02)
    return None


def disagreement(members: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first thing in which a rank differs from rank 0, with both values."""
    first = members[0]
    for rank in sorted(members):
        other = members[rank]
        if other["world_size"] != first["world_size"]:
            return f"rank {rank} was told of {other['world_size']} ranks and rank 0 of {first['world_size']}"
        for name, version in first["versions"].items():
            if other["versions"].get(name) != version:
                return (
                    f"rank {rank} on {other['host']} has {name} {other['versions'].get(name)} and rank 0 on "
                    f"{first['host']} {version}: install the same everywhere"
                )
        mine, theirs = first["config"], other["config"]
        keys = [k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)]
        if keys:
            told = "; ".join(f"{k} is {theirs.get(k)!r} there, {mine.get(k)!r} on rank 0" for k in keys)
            return f"rank {rank} on {other['host']} has another configuration: {told}: start all with the same command"
    return None
