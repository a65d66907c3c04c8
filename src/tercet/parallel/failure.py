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
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tercet.errors import TercetError
from tercet.parallel.launch import World

HEARTBEAT_SECONDS = 1.0
# Errors of failed collectives that are not a DistError contain one of these.
_COLLECTIVE_ERRORS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
_GONE = "is gone (killed, or out of memory: see dmesg)"


class PeerFailed(TercetError):
    """Another rank failed."""

    def __init__(self, message: str, *, reported_elsewhere: bool = False) -> None:
        super().__init__(message)
        self.reported_elsewhere = reported_elsewhere


class FailureMonitor:
    """Publishes this rank's heartbeat; after a failed collective, finds the rank that caused it."""

    def __init__(self, world: World, status: Callable[[], tuple[int, str]]) -> None:
        """`status` returns this rank's step and activity."""
        self._world, self.status = world, status
        self._rank, self._ranks = world.launch.rank, range(world.launch.world_size)
        self._stop = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._publish, name="beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def explain(self, error: BaseException) -> BaseException:
        """The error to exit with: `error` if this rank caused it, else a PeerFailed that names the other rank."""
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
            # The store lives in torchrun's first agent, or in rank 0 if agents do not share theirs.
            cause = f"{self._describe_silent(0, None)}, and with it the store that ranks communicate through"
        return self._peer_failed(cause, _summary(error), reported_elsewhere=reported_elsewhere)

    def wait_for(self, done: Callable[[float], bool], limit: float) -> None:
        """Wait until `done(seconds)`, which waits up to that long, is true. Raises PeerFailed if the heartbeat of
        another rank stops for `limit` seconds: a slow disk does not stop it, a frozen process does."""
        store: dist.Store | None = None
        before: dict[int, Any] = {}
        silent: Counter[int] = Counter()
        try:
            while not done(HEARTBEAT_SECONDS):
                store = store or self._connect()
                beats = self._read(store, "beat")
                for rank in self._others:
                    # Counted in polls, not by the clock, which runs on while this process itself is suspended.
                    silent[rank] = silent[rank] + 1 if before.get(rank) == beats.get(rank) else 0
                before = beats
                if frozen := [r for r, polls in silent.items() if polls * HEARTBEAT_SECONDS >= limit]:
                    cause = "; ".join(self._describe_silent(r, beats.get(r)) for r in frozen[:4])
                    raise self._peer_failed(cause, f"{limit:g} s", reported_elsewhere=store.add("reported", 1) > 1)
        except (dist.DistError, RuntimeError, OSError):  # without a store there are no heartbeats to read
            while not done(HEARTBEAT_SECONDS):
                pass

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._rank]

    def _peer_failed(self, cause: str, waited: str, *, reported_elsewhere: bool) -> PeerFailed:
        step, activity = self.status()
        own = f"rank {self._rank} waited for it in step {step} ({activity}: {waited})"
        return PeerFailed(f"{cause}; {own}; all ranks stop", reported_elsewhere=reported_elsewhere)

    def _connect(self) -> dist.Store:
        """A new connection: a wait on a shared one would block the heartbeat."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        return dist.PrefixStore(f"tercet/{self._world.id}", store)

    def _publish(self) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError, OSError):
            store = self._connect()
            while not self._stop.is_set():
                self._count += 1
                step, activity = self.status()
                beat = {"count": self._count, "step": step, "doing": activity}
                store.set(f"beat/{self._rank}", json.dumps(beat))
                self._stop.wait(HEARTBEAT_SECONDS)

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
