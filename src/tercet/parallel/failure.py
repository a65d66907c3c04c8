"""When a rank dies, hangs or fails, the others stop too, and one of them says who and where in one sentence.

Every rank leaves a beat in torchrun's store each second, with its step and what it is doing. A collective that fails
tells nothing but "connection closed" or "timed out"; the beats tell the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tercet.errors import TercetError
from tercet.parallel import flight_recorder
from tercet.parallel.launch import World

BEAT_SECONDS = 1.0
_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "timed out")


class PeerFailed(TercetError):
    """Another rank is the reason. `told`: a third one says it. `abandon`: leave at once, groups cannot be closed."""

    abandon = True

    def __init__(self, sentence: str, *, told: bool = False) -> None:
        super().__init__(sentence)
        self.told = told


class Watch:
    """This rank's beat, and the question why a collective failed."""

    def __init__(self, world: World, where: Callable[[], tuple[int, str]]) -> None:
        self._launch, self._members, self._call, self.where = world.launch, world.members, world.call, where
        self._folder = world.folder
        self._stop = threading.Event()
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def explain(self, error: BaseException) -> BaseException:
        """The error to leave with: `error` itself if it is this rank's own, else what happened elsewhere."""
        rank, told = self._launch.rank, False
        step, doing = self.where()
        try:
            store = self._connect()
            if not _of_another(error):
                store.set(f"failed/{rank}", json.dumps({"step": step, "doing": doing, "error": _short(error)}))
                return error
            sentence = self._who(store)
            told = store.add("told", 1) > 1
        except (dist.DistError, RuntimeError, OSError):
            if not _of_another(error):
                return error
            # torchrun's first agent keeps the store, or rank 0 where agents are told not to share theirs
            sentence = f"{self._silent(0, None)}, and with it the store that ranks speak through"
        here = f"rank {rank} waited for it in step {step} ({doing}: {_short(error)})"
        self._record()
        return PeerFailed(f"{sentence}; {here}; all ranks stop", told=told)

    def _record(self) -> None:
        """What this rank was waiting for, for `tercet flight`; no trouble of its own may hide why the run failed."""
        if self._folder is not None:
            with contextlib.suppress(Exception):
                flight_recorder.write(Path(self._folder), self._launch.rank, self._launch.world_size)

    # ------------------------------------------------------------ the beat

    def _connect(self) -> dist.Store:
        """A connection of its own: a wait on a shared one would stop the beat."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        return dist.PrefixStore(f"tercet/{self._call}", store)

    def _run(self) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError, OSError):
            store = self._connect()
            while not self._stop.is_set():
                self._count += 1
                step, doing = self.where()
                beat = {"count": self._count, "step": step, "doing": doing}
                store.set(f"beat/{self._launch.rank}", json.dumps(beat))
                self._stop.wait(BEAT_SECONDS)

    # ------------------------------------------------------------ who it was

    def _who(self, store: dist.Store) -> str:
        """A rank that failed by its own error, or one whose beat has stopped, or whoever is furthest behind."""
        before = dict(self._read(store, "beat"))
        for _ in range(6):
            failed = dict(self._read(store, "failed"))
            if failed:
                rank = min(failed)
                about = failed[rank]
                return f"{self._name(rank)} failed in step {about['step']} ({about['doing']}): {about['error']}"
            time.sleep(BEAT_SECONDS / 2)
        after = dict(self._read(store, "beat"))
        others = [r for r in range(self._launch.world_size) if r != self._launch.rank]
        still = [r for r in others if after.get(r, {}).get("count") == before.get(r, {}).get("count")]
        if still:
            return "; ".join(self._silent(r, after.get(r)) for r in still[:4])
        behind = min(after, key=lambda r: after[r]["step"], default=None)
        if behind is None:
            return "no rank can be asked"
        where = f"step {after[behind]['step']} ({after[behind]['doing']})"
        return f"all ranks are alive; {self._name(behind)} is furthest behind, in {where}"

    def _silent(self, rank: int, beat: dict[str, Any] | None) -> str:
        where = f", last seen in step {beat['step']} ({beat['doing']})" if beat else ""
        return f"{self._name(rank)} {self._fate(rank)}{where}"

    def _fate(self, rank: int) -> str:
        member = self._members[rank]
        if member["host"] != socket.gethostname():
            return "does not answer"
        try:
            status = Path(f"/proc/{member['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "is gone (killed, or out of memory: see dmesg)"
        return {"T": "is stopped (SIGSTOP)", "Z": "is gone (killed, or out of memory: see dmesg)"}.get(
            status, "is stuck: its threads do not run"
        )

    def _name(self, rank: int) -> str:
        member = self._members[rank]
        return f"rank {rank} (pid {member['pid']} on {member['host']}, {member['device']})"

    def _read(self, store: dist.Store, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for rank in range(self._launch.world_size):
            if store.check([f"{what}/{rank}"]):
                yield rank, json.loads(store.get(f"{what}/{rank}"))


def _of_another(error: BaseException | None) -> bool:
    """Whether a collective failed, here or in the saving thread, rather than this rank's own work."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, dist.DistError) or (
            isinstance(error, (RuntimeError, TercetError)) and any(sign in text for sign in _SIGNS)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _short(error: BaseException) -> str:
    text = (str(error).strip() or "no words").splitlines()[0]
    text = re.sub(r"^\[[^]]*\] *", "", text)  # gloo begins with the place in its own sources
    return f"{type(error).__name__}: {text[:160]}"
