"""When one rank dies, hangs or fails, all ranks stop and one of them reports which rank and where.

A failed collective only says "connection closed" or "timed out". To find the cause, every rank writes a heartbeat with
its step and activity to torchrun's store once a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tercet.errors import EXIT_FAILURE, TercetError
from tercet.parallel.launch import World, flight_record
from tercet.terminal import printable

HEARTBEAT_SECONDS = 1.0
GRACE_SECONDS = 6.0  # for the main thread to raise once a failure is known
CLOSING_SECONDS = 90.0  # and then to end in order: more than sinks take (telemetry.sinks)
# Errors of failed collectives that are not a DistError contain one of these.
_COLLECTIVE_ERRORS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
_GONE = "is gone (killed, or out of memory: see dmesg)"


class PeerFailed(TercetError):
    """Another rank failed."""

    def __init__(self, message: str, *, reported_elsewhere: bool = False) -> None:
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


class FailureMonitor:
    """Publishes this rank's heartbeat, watches the next rank's, and names the rank that failed.

    A rank that fails says why. One that is gone, or silent for `limit` seconds, is noticed by the rank before it, which
    publishes the cause. The main thread then raises PeerFailed, if it can: in a collective over NCCL it waits for the
    device, forever, and then the monitor's thread ends the process.
    """

    def __init__(self, world: World, status: Callable[[], tuple[int, str]], limit: float) -> None:
        """`status` returns this rank's step and activity."""
        self._world, self.status, self._limit = world, status, limit
        self._rank, self._ranks = world.launch.rank, range(world.launch.world_size)
        self._stop, self._explaining = threading.Event(), threading.Event()
        self._cause: str | None = None
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """At the end of a run that all ranks completed. Rank 0, which may hold the store, leaves last."""
        self._stop.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(dist.DistError, RuntimeError, OSError):
            store = self._connect()
            store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                store.wait([f"left/{rank}" for rank in self._others], timedelta(seconds=min(self._limit, 30.0)))

    def explain(self, error: BaseException) -> BaseException:
        """The error to exit with: `error` if this rank caused it, else a PeerFailed that names the other rank."""
        self._explaining.set()
        if isinstance(error, PeerFailed):
            return error
        reported_elsewhere = False
        try:
            store = self._connect()
            if not _is_collective_error(error):
                step, activity = self.status()
                failure = {"step": step, "doing": activity, "error": _summary(error)}
                store.set(f"failed/{self._rank}", json.dumps(failure))
                return error
            cause = self._find_cause(store)
            reported_elsewhere = store.add("reported", 1) > 1
        except (dist.DistError, RuntimeError, OSError):
            if not _is_collective_error(error):
                return error
            cause = self._describe_lost_store()
        return self._peer_failed(cause, _summary(error), reported_elsewhere=reported_elsewhere)

    def wait_for(self, done: Callable[[float], bool]) -> None:
        """Wait until `done(seconds)`, which waits up to that long, is true. Raises PeerFailed once a rank has failed: a
        slow disk does not stop its heartbeat, a frozen process does."""
        while not done(HEARTBEAT_SECONDS):
            if (cause := self._cause) is not None:
                self._explaining.set()
                raise self._peer_failed(cause, "its heartbeat", reported_elsewhere=self._reported_elsewhere())

    def _run(self) -> None:
        try:
            self._watch(self._connect())
        except (dist.DistError, RuntimeError, OSError):
            return  # without a store nothing can be known: healthy ranks save and end by themselves
        began = time.monotonic()
        while time.monotonic() - began < (CLOSING_SECONDS if self._explaining.is_set() else GRACE_SECONDS):
            if self._stop.wait(HEARTBEAT_SECONDS):
                return
        if not self._explaining.is_set() and not self._reported_elsewhere():
            failure = self._peer_failed(self._cause or "", "a collective that never ended", reported_elsewhere=False)
            print(f"error: {printable(str(failure))}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILURE)

    def _watch(self, store: dist.Store) -> None:
        """Publish heartbeats and watch the next rank, until this rank leaves or a failure is known."""
        watched = (self._rank + 1) % len(self._ranks)
        beat, silent, visible = None, 0, False
        while not self._stop.is_set():
            self._count += 1
            step, activity = self.status()
            store.set(f"beat/{self._rank}", json.dumps({"count": self._count, "step": step, "doing": activity}))
            if store.check(["cause"]):
                self._cause = store.get("cause").decode()
                return
            new = store.get(f"beat/{watched}") if store.check([f"beat/{watched}"]) else None
            # Counted in polls, not by the clock, which runs on while this process itself is suspended.
            silent, beat = silent + 1 if new == beat else 0, new
            gone = self._process_state(watched) == _GONE
            visible = visible or not gone  # in another container, it never is
            frozen = beat is not None and silent * HEARTBEAT_SECONDS >= self._limit
            failed = frozen or (visible and gone and silent > 1) or store.check([f"failed/{watched}"])
            if failed and not store.check([f"left/{watched}"]):
                store.set("cause", self._find_cause(store))
                continue
            self._stop.wait(HEARTBEAT_SECONDS)

    def _reported_elsewhere(self) -> bool:
        try:
            return self._connect().add("reported", 1) > 1
        except (dist.DistError, RuntimeError, OSError):
            return False

    def _describe_lost_store(self) -> str:
        # The store lives in torchrun's first agent, or in rank 0 if agents do not share theirs.
        what = "torchrun is gone" if self._rank == 0 else self._describe_silent(0, None)
        return f"{what}, and with it the store that ranks communicate through"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._rank]

    def _peer_failed(self, cause: str, waited: str, *, reported_elsewhere: bool) -> PeerFailed:
        step, activity = self.status()
        own = f"rank {self._rank} waited for it in step {step} ({activity}: {waited})"
        record = self._flight_record()
        return PeerFailed(f"{cause}; {own}{record}; all ranks stop", reported_elsewhere=reported_elsewhere)

    def _flight_record(self) -> str:
        """Write NCCL's last collectives where its watchdog would; in a thread, because NCCL itself may hang."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if dump is None or not self._world.nccl:
            return ""
        path = flight_record(Path(self._world.folder), self._world.id, self._rank)
        writer = threading.Thread(target=lambda: path.write_bytes(dump()), name="flight record", daemon=True)
        writer.start()
        writer.join(timeout=3)
        return f" (its last collectives: {path})" if path.exists() else ""

    def _connect(self) -> dist.Store:
        """A new connection: a wait on a shared one would block the heartbeat."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        return dist.PrefixStore(f"tercet/{self._world.id}", store)

    def _find_cause(self, store: dist.Store) -> str:
        """A rank that failed with its own error, else those whose heartbeat stopped, else the one furthest behind."""
        before = self._read(store, "beat")
        for _ in range(6):
            if failed := self._read(store, "failed"):
                rank, failure = min(failed.items())
                where = f"step {failure['step']} ({failure['doing']})"
                return f"{self._describe(rank)} failed in {where}: {failure['error']}"
            time.sleep(HEARTBEAT_SECONDS / 2)
        after = self._read(store, "beat")
        if silent := [r for r in self._others if after.get(r) == before.get(r)]:
            return "; ".join(self._describe_silent(r, after.get(r)) for r in silent[:4])
        behind = min(after, key=lambda r: after[r]["step"], default=None)
        if behind is None:
            return "no rank answers"
        where = f"step {after[behind]['step']} ({after[behind]['doing']})"
        return f"all ranks are alive; {self._describe(behind)} is furthest behind, in {where}"

    def _describe_silent(self, rank: int, beat: dict[str, Any] | None) -> str:
        where = f", last seen in step {beat['step']} ({beat['doing']})" if beat else ""
        state = self._process_state(rank)
        network = "" if "SIGSTOP" in state else ", or its network is down"
        return f"{self._describe(rank)} {state}{where}{network}"

    def _process_state(self, rank: int) -> str:
        member = self._world.members[rank]
        if member["host"] != socket.gethostname():
            return "does not answer"
        try:
            state = Path(f"/proc/{member['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return _GONE
        return {"T": "is stopped (SIGSTOP)", "Z": _GONE}.get(state, "is stuck: it sends no heartbeat")

    def _describe(self, rank: int) -> str:
        member = self._world.members[rank]
        return f"rank {rank} (pid {member['pid']} on {member['host']}, {member['device']})"

    def _read(self, store: dist.Store, key: str) -> dict[int, dict[str, Any]]:
        """What the ranks have published under this key, by rank."""
        return {r: json.loads(store.get(f"{key}/{r}")) for r in self._ranks if store.check([f"{key}/{r}"])}


def _is_collective_error(error: BaseException | None) -> bool:
    """Whether a collective failed, here or in the saving thread, as opposed to this rank's own work."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, (RuntimeError, TercetError)) and any(part in text for part in _COLLECTIVE_ERRORS)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _summary(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    text = re.sub(r"^\[[^]]*\] *", "", text)  # gloo starts with the location in its own sources
    return f"{type(error).__name__}: {text[:160]}"
