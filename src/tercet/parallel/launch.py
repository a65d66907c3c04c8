"""Startup of a run on several ranks: compare the processes that torchrun started and create the process groups.

All checks go through torchrun's key-value store before the first collective, because a collective among ranks that
disagree does not fail: it hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tercet import hints
from tercet.config.sections import ParallelConfig
from tercet.errors import TercetError, UsageError, first_few
from tercet.parse import launch_number
from tercet.version import __version__

FIRST_STEP_SECONDS = 1800  # for other ranks: compilation and loading may take unequal times
NCCL_SHARES = (2, 30)  # the first NCCL that lets several ranks use one GPU, on request
# NCCL's watchdog ends a process without saying which rank is to blame: the failure monitor comes first.
_WATCHDOG_LATER = 30
_FOLDER_KEY = "tercet/run_folder"


class LaunchError(TercetError):
    """The ranks cannot start."""


class WrongLaunch(LaunchError, UsageError):
    """The launch does not fit the configuration or the machine, and the same command would fail again."""


@dataclass(frozen=True)
class Launch:
    """This process as torchrun describes it; without torchrun, a world of one rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restarts: int = 0
    by_torchrun: bool = False

    @property
    def on_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    @classmethod
    def from_environment(cls) -> Launch:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        world_size = launch_number("WORLD_SIZE", os.environ["WORLD_SIZE"], least=1)
        if "MASTER_PORT" in os.environ:
            launch_number("MASTER_PORT", os.environ["MASTER_PORT"], most=65535)
        return cls(
            rank=launch_number("RANK", os.environ["RANK"], most=world_size - 1),
            local_rank=launch_number("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0")),
            world_size=world_size,
            local_world_size=launch_number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"), least=1),
            restarts=launch_number("TORCHELASTIC_RESTART_COUNT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            by_torchrun=True,
        )


def check_launch(parallel: ParallelConfig, launch: Launch, device: str, gpus: int) -> list[str]:
    """Refuse a launch that would leave GPUs idle or ranks without a GPU. Returns warnings."""
    if launch.world_size != parallel.world_size:
        local = min(parallel.world_size, gpus or parallel.world_size)
        raise WrongLaunch(
            f"parallel.world_size={parallel.world_size}, but {launch.world_size} rank"
            f"{'s were' if launch.world_size > 1 else ' was'} launched: start with\n"
            f"  {torchrun_command(parallel.world_size, local, parallel.strategy)}"
        )
    if parallel.strategy != "single" and not launch.by_torchrun:
        ranks = gpus if gpus > 1 else 0
        raise WrongLaunch(
            f"parallel.strategy={parallel.strategy} needs torchrun, which starts one process per rank: start with\n"
            f"  {torchrun_command(ranks, ranks, parallel.strategy)}"
        )
    if device != "cuda":
        return []
    counts = f"{launch.local_world_size} ranks on a machine with {gpus} GPU{'s' * (gpus > 1)}"
    if launch.local_world_size > gpus and not parallel.share_gpus:
        raise WrongLaunch(
            f"{counts}: each rank needs its own GPU; start {gpus}, or share GPUs (slow, for tests) with "
            "--parallel.share_gpus"
        )
    if parallel.share_gpus and launch.local_world_size <= gpus:
        raise WrongLaunch(f"parallel.share_gpus=true with {counts}: every rank has its own GPU, drop the flag")
    if parallel.share_gpus:
        how = f"over NCCL {_dotted(nccl_version())}, and their speed means nothing"
        if backend_of(parallel, device) == "gloo":
            how = f"through the host (gloo), which is slow; NCCL {_dotted(NCCL_SHARES)} or newer could share"
        return [f"{counts} share GPUs (parallel.share_gpus): they communicate {how}"]
    if launch.world_size > 1 and not dist.is_nccl_available():
        raise WrongLaunch(f"several GPUs communicate over NCCL, and torch {torch.__version__} was built without it")
    if launch.world_size > 1 or gpus < 2 or parallel.allow_single_rank:
        return []
    problem = f"this machine has {gpus} GPUs but one process was started: {gpus - 1} would be idle"
    if os.environ.get("CI"):
        return [f"{problem} (only a warning because CI is set)"]
    raise WrongLaunch(
        f"{problem}; start with\n  {torchrun_command(gpus, gpus, parallel.strategy)}\n"
        "or pass --parallel.allow_single_rank to use one GPU on purpose"
    )


def torchrun_command(ranks: int, local_ranks: int, strategy: str) -> str:
    """The torchrun command that repeats this one on `ranks` ranks; with 0, it says N for the user to replace."""
    return hints.relaunch(sys.argv[1:], ranks=ranks, per_machine=local_ranks, strategy=strategy)


def backend_of(parallel: ParallelConfig, device: str) -> str:
    shared = parallel.share_gpus and nccl_version() < NCCL_SHARES
    return "gloo" if device != "cuda" or shared else "nccl"


@cache
def nccl_version() -> tuple[int, ...]:
    """Of the loaded library: torch.cuda.nccl.version() is the one that torch was built with."""
    try:
        library, number = ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW), ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except OSError:  # torch holds NCCL itself, or has none
        return torch.cuda.nccl.version()[:3] if dist.is_nccl_available() else (0,)
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass
class World:
    """The process groups of a run and what its ranks know about each other."""

    launch: Launch
    device: torch.device
    id: str  # unique per start: the store may still hold keys of an earlier one
    control: dist.ProcessGroup  # flags and objects, on the host; separate from the collectives of training
    checkpoint: dist.ProcessGroup  # for the saving thread only
    folder: str  # of the run
    members: list[dict[str, Any]]  # every rank's description of itself, by rank
    nccl: bool = False

    def set_timeout(self, seconds: float) -> None:
        """Timeout of training and control collectives from now on, in all groups made so far."""
        for group in dist.distributed_c10d._world.pg_map:
            if group is not self.checkpoint:
                later = _WATCHDOG_LATER if self.nccl and group is not self.control else 0
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds + later), group)

    def close(self) -> None:
        dist.destroy_process_group()


def join(
    launch: Launch, parallel: ParallelConfig, device: torch.device, config: Mapping[str, Any],
    folder: Callable[[str | None], Path],
) -> World:  # fmt: skip
    """Wait for all ranks, compare versions and configuration, and create the process groups.

    Rank 0 calls `folder` for the run folder, with the folder of an earlier attempt under the same torchrun, if any.
    """
    nccl = backend_of(parallel, device.type) == "nccl"
    member = _describe(launch, device, config, own_gpu=nccl and not parallel.share_gpus)
    restart = f", restart {launch.restarts}" if launch.restarts else ""
    _say(
        f"rank {launch.rank} of {launch.world_size} (local rank {launch.local_rank}) on {member['host']}, "
        f"pid {member['pid']}, {member['device']}{restart}"
    )
    limit = timedelta(seconds=parallel.timeout_seconds)
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store = _connect(launch, limit)
    except (dist.DistError, OSError, ValueError, KeyError) as error:
        raise LaunchError(f"rank {launch.rank} cannot reach rank 0's store at {address}: {error}") from None
    if launch.rank == 0:
        verdict = _admit_ranks(store, launch, member, parallel.timeout_seconds, folder)
    else:
        try:
            verdict = _register(store, member, limit + timedelta(seconds=30))
        except dist.DistStoreError:
            raise LaunchError(
                f"rank 0 did not arrive at {address} within {parallel.timeout_seconds:g} s: see its output"
            ) from None
    if verdict["error"]:
        problem = (WrongLaunch if verdict["wrong"] else LaunchError)(verdict["error"])
        problem.reported_elsewhere = launch.rank != 0
        time.sleep(0.5 if launch.rank == 0 else 0.0)  # the store must live until all ranks have read the verdict
        raise problem
    os.environ.update(_flight_recorder(Path(verdict["folder"]), verdict["call"]))
    if launch.on_one_machine:
        _use_loopback()
    first_step = timedelta(seconds=max(parallel.timeout_seconds, FIRST_STEP_SECONDS))
    if nccl and parallel.share_gpus:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo", store=dist.PrefixStore(f"tercet/{verdict['call']}/group", store),
        rank=launch.rank, world_size=launch.world_size, timeout=first_step, device_id=device if nccl else None,
    )  # fmt: skip
    control: Any = dist.new_group(backend="gloo", timeout=first_step)
    checkpoint: Any = dist.new_group(backend="gloo", timeout=first_step)
    return World(launch, device, verdict["call"], control, checkpoint, verdict["folder"], verdict["members"], nccl)


def flight_record(run: Path, start: str, rank: int | str) -> Path:
    """The file of a rank's last collectives; `start` is World.id."""
    return run / "flight_recorder" / f"{start[:8]}_rank_{rank}"


def _flight_recorder(run: Path, start: str) -> dict[str, str]:
    """Environment variables of PyTorch's flight recorder, which it reads when process groups are created: when a
    collective times out, NCCL's watchdog writes the last ones to START_rank_N, for torchfrtrace."""
    prefix = flight_record(run, start, "")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # 2000 collectives cover the last steps, at about a kilobyte each
    files = dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(prefix))
    return {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **files}


def _use_loopback() -> None:
    """Collectives listen on the loopback interface only, unless the user chose another one."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _connect(launch: Launch, limit: timedelta) -> dist.Store:
    """Torchrun's store, or rank 0's own without torchrun. Does not wait for the other ranks."""
    from torch.distributed.rendezvous import _torchelastic_use_agent_store

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = launch.rank == 0 and not _torchelastic_use_agent_store()
    listener = None
    if is_master and launch.on_one_machine and host in ("localhost", "127.0.0.1"):
        # The store would listen on all interfaces.
        listener = socket.create_server((host, port)).detach()
    return dist.TCPStore(
        host, port, launch.world_size, is_master=is_master, timeout=limit, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener,
    )  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _describe(launch: Launch, device: torch.device, config: Mapping[str, Any], *, own_gpu: bool) -> dict[str, Any]:
    """What a rank publishes about itself. `own_gpu`: no other rank may use its GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    versions = {"tercet": f"{__version__} (code {code.hexdigest()[:8]})", "torch": torch.__version__}
    if device.type == "cuda":
        versions["nccl"] = _dotted(nccl_version())
    return {
        **asdict(launch),
        "name": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"{device} ({name})" if device.type == "cuda" else name,
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if own_gpu else None,
        "versions": versions | {"python": platform.python_version(), "device": name},
        "config": dict(config),
    }


def _register(store: dist.Store, member: dict[str, Any], limit: timedelta) -> dict[str, Any]:
    """On every other rank: publish the description, answer rank 0's liveness check, read the verdict."""
    name = member["name"]
    store.set(f"tercet/here/{member['rank']}", json.dumps(member))
    store.wait([f"tercet/ask/{name}"], limit)
    call = store.get(f"tercet/ask/{name}").decode()
    store.set(f"tercet/alive/{call}/{name}", "")
    store.wait([f"tercet/verdict/{name}"], limit)
    verdict: dict[str, Any] = json.loads(store.get(f"tercet/verdict/{name}"))
    return verdict


def _admit_ranks(
    store: dist.Store, launch: Launch, member: dict[str, Any], seconds: float, folder: Callable[[str | None], Path]
) -> dict[str, Any]:
    """On rank 0: wait for all ranks, compare them, and publish the verdict that every rank reads."""
    members = {0: member}
    path = error = None
    wrong = False  # whether the same command would fail again
    try:
        _wait_for_ranks(store, launch.world_size, seconds, members)
        if (difference := disagreement(members)) is not None:
            raise WrongLaunch(difference)
        earlier = store.get(_FOLDER_KEY).decode() if launch.restarts and store.check([_FOLDER_KEY]) else None
        path = str(folder(earlier))
        store.set(_FOLDER_KEY, path)
    except TercetError as problem:
        error, wrong = str(problem), isinstance(problem, UsageError)
    public = [{k: v for k, v in members[r].items() if k not in ("config", "versions")} for r in sorted(members)]
    verdict = {"error": error, "wrong": wrong, "folder": path, "members": public, "call": member["name"]}
    for other in members.values():
        store.set(f"tercet/verdict/{other['name']}", json.dumps(verdict))
    return verdict


def _wait_for_ranks(store: dist.Store, ranks: int, seconds: float, members: dict[int, Any]) -> None:
    """Fill `members`. Raises if some rank does not arrive in time.

    The store may hold descriptions that ranks of an earlier attempt left, so a rank counts only once it answers.
    """
    started = last_report = time.monotonic()
    call = members[0]["name"]
    while len(members) < ranks:
        for rank in range(1, ranks):
            if rank in members or not store.check([f"tercet/here/{rank}"]):
                continue
            member = json.loads(store.get(f"tercet/here/{rank}"))
            store.set(f"tercet/ask/{member['name']}", call)
            if store.check([f"tercet/alive/{call}/{member['name']}"]):
                members[rank] = member
        missing = [str(r) for r in range(ranks) if r not in members]
        now = time.monotonic()
        if missing and now - started > seconds:
            hosts = ", ".join(sorted({m["host"] for m in members.values()}))
            raise LaunchError(
                f"rank {first_few(missing, 8)} did not arrive within {seconds:g} s ({len(members)} of {ranks} are "
                f"here, on {hosts}): see the output of the machine that should have started it"
            )
        if missing and now - last_report > 10:
            last_report = now
            _say(f"waiting for rank {', '.join(missing[:8])}: {now - started:.0f} s")
        time.sleep(0.02)


def disagreement(members: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The first difference between a rank and rank 0, with both values."""
    first = members[0]
    for rank, other in sorted(members.items()):
        if other["world_size"] != first["world_size"]:
            return f"rank {rank} was started with {other['world_size']} ranks and rank 0 with {first['world_size']}"
        for name, version in first["versions"].items():
            if other["versions"].get(name) != version:
                fix = "use equal devices" if name == "device" else "install the same version"
                return (
                    f"rank {rank} on {other['host']} has {name} {other['versions'].get(name)} and rank 0 on "
                    f"{first['host']} {version}: {fix} everywhere"
                )
        for earlier in range(rank):
            if other.get("gpu") and other["gpu"] == members[earlier]["gpu"]:
                return (
                    f"ranks {earlier} and {rank} on {other['host']} use the same GPU, {other['device']}: "
                    "let CUDA_VISIBLE_DEVICES name one GPU per rank"
                )
        mine, theirs = first["config"], other["config"]
        keys = [k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k)]
        if keys:
            differences = "; ".join(f"{k} is {theirs.get(k)!r} there, {mine.get(k)!r} on rank 0" for k in keys)
            return (
                f"rank {rank} on {other['host']} has a different configuration: {differences}: "
                "start all ranks with the same command"
            )
    return None
