"""The run folder: made or taken up again, locked, and described (config.toml, origins.json, env.json)."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tercet.atomic_io import write_json
from tercet.config.load import write_config
from tercet.config.schema import RunConfig
from tercet.errors import TercetError, UsageError
from tercet.telemetry.events import events_file
from tercet.train import manifest
from tercet.typed import typed
from tercet.version import __version__

LOCK = "lock"


class RunFolder:
    """A folder that this process, and no other, writes a run into."""

    def __init__(self, path: Path, *, lock: bool = True) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        try:
            self._before = {p.name for p in path.iterdir()} if path.is_dir() else set()
            # Innermost first, the order in which a refused run takes them away again.
            self._made = [p for p in (path / LOCK, self.checkpoints, path, *path.parents) if not p.exists()]
            self._lock = self._take(lock)
        except OSError as error:
            raise UsageError(
                f"run folder {path} cannot be written ({error.strerror}): pick another --run.dir, or mend its rights"
            ) from None

    def _take(self, lock: bool) -> int:
        """The lock's open file; only rank 0 locks it, for all."""
        while True:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            if not lock:
                return handle
            try:
                # Held by the kernel, so a killed process leaves no stale lock.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                raise TercetError(
                    f"run folder {self.path} is in use by another process: wait for it, or pick another --run.dir"
                ) from None
            try:
                if os.path.samestat(os.fstat(handle), os.stat(self.path / LOCK)):
                    return handle
            except FileNotFoundError:
                pass
            os.close(handle)  # a refused run took this file away since it was opened: the lock is another one now

    @property
    def holds_a_run(self) -> bool:
        """Whether something was trained here before."""
        events = events_file(self.path)
        told = events.exists() and events.stat().st_size > 0  # made, but not written to: refused before it began
        return told or bool(manifest.complete_checkpoints(self.checkpoints))

    def describe(self, config: RunConfig, origins: Mapping[str, str], environment: Mapping[str, Any]) -> None:
        """Write what is needed to repeat the run. A process killed meanwhile leaves each file as it was before."""
        write_config(config, origins, self.path)
        write_json(self.path / "env.json", environment)

    def close(self) -> None:
        """Let go of the folder. Of a run that was refused before it wrote anything, nothing stays behind."""
        now = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        if now - self._before <= {LOCK, self.checkpoints.name}:
            for made in self._made:
                try:
                    made.unlink() if made == self.path / LOCK else made.rmdir()
                except FileNotFoundError:
                    continue  # another rank was quicker
                except OSError:
                    break  # not empty: somebody else's
        os.close(self._lock)


def go_on(path: Path) -> str:
    """The command that takes the run in this folder up again; its config comes with it."""
    return f"{typed()} train --resume auto --run.dir {shlex.quote(str(path))}"


def locate(config: RunConfig, resume: str | None) -> Path:
    """run.dir; else the folder that `resume` speaks of; else a new one under runs/."""
    if config.run.dir is not None:
        return Path(config.run.dir)
    if resume not in (None, "auto"):
        return manifest.run_of(Path(str(resume)))
    runs = Path("runs")
    if resume == "auto":
        # Whole names: tiny's runs are not tiny-dense's.
        stamped = re.compile(re.escape(config.run.name) + r"-\d{8}-\d{6}(-\d+)?")
        named = [p for p in (runs.iterdir() if runs.is_dir() else ()) if stamped.fullmatch(p.name)]
        earlier = [p for p in named if manifest.complete_checkpoints(p / "checkpoints")]
        if earlier:
            return max(earlier, key=lambda p: (p / "checkpoints").stat().st_mtime)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, extra = runs / f"{config.run.name}-{stamp}", 1
    while path.exists():
        extra += 1
        path = runs / f"{config.run.name}-{stamp}-{extra}"
    return path


def environment(device: torch.device, name: str) -> dict[str, Any]:
    """Machine and versions. No environment variables: they are not part of a run, and may hold secrets."""
    packages = ("torch", "triton", "numpy", "pydantic", "safetensors", "tokenizers", "datasets")
    found = {p: _version(p) for p in packages}
    env: dict[str, Any] = {
        "tercet": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: v for p, v in found.items() if v},
        "command": sys.argv,
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": name,
        "cuda": torch.version.cuda,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        env["gpu"] = {
            "memory_gib": properties.total_memory / 2**30,
            "capability": f"{properties.major}.{properties.minor}",
            "count": torch.cuda.device_count(),
        }
    return env


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
