"""What the benchmarks share before torch is imported: forms of attention to compare, `--settings KEY=VALUE,…`, and
processes with a time limit, one per cell of a grid: what kills one loses only that cell.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tercet.config.flags import key_options
from tercet.config.load import dense_baseline, load
from tercet.config.schema import RunConfig
from tercet.errors import UsageError
from tercet.inference.arguments import check_known
from tercet.model.config import is_all_dense

# Kinds of attention, as changes of a preset with sparse layers. "nsa" is the preset as it is, "dense" its baseline.
KINDS: dict[str, dict[str, Any]] = {
    "nsa": {},
    "two-branch": {"model.branches": ("selected", "window"), "model.selector": "learned"},
    "block-sparse": {"model.gate": "none", "model.compress_selected_keys": False},
    "dense": {},
}


def parse_settings(text: str, own: Mapping[str, str]) -> dict[str, Any]:
    """KEY=VALUE,…; values of lists may contain commas: model.branches=selected,window.

    own: keys that the benchmark sets itself, and the flag that chooses their value. They are refused: they would not be
    what is measured and counted.
    """
    pairs = [pair.strip(" ,") for pair in re.split(r",(?=[\s,]*[^,=]+=)", text) if pair.strip(" ,")]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"--settings {wrong[0]}: expected KEY=VALUE, e.g. model.nsa.window=512,train.clip=1")
    options, settings = key_options({}), {}
    for key, value in (pair.split("=", 1) for pair in pairs):
        if key in own:
            raise UsageError(f"--settings {key}={value}: this benchmark sets {key} itself; use {own[key]}")
        settings[key] = options[key].value([value]) if key in options else value
    return settings


def check_kinds(preset: str, kinds: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise before anything is measured if a column would not be what its name says."""
    check_known("--kinds", kinds, KINDS)
    for kind in kinds:
        for key in (KINDS[kind].keys() & settings.keys()) - {"model.selector"}:
            raise UsageError(f"--settings {key}={settings[key]}: --kinds {kind} sets {key}; use --kinds nsa")
        name, flags = of_kind(preset, kind, settings)
        attention = load(preset=name, flags=flags).config.model.attention
        if is_all_dense(attention) != (kind == "dense"):
            raise UsageError(
                f"--kinds {kind} with model.attention={attention} in {name}: give a preset with sparse layers, "
                "without model.attention in --settings"
            )


def of_kind(preset: str, kind: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The preset and the keys of one kind of attention."""
    return dense_baseline(preset) if kind == "dense" else preset, {**KINDS[kind], **settings}


def loaded(cell: Mapping[str, Any], **keys: Any) -> RunConfig:
    """The configuration of a cell, which names its preset and keys."""
    return load(preset=cell["preset"], flags={**keys, **cell["flags"]}).config


_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Ended:
    """A process that has ended. late: seconds after which it was stopped, None if it ended on its own."""

    code: int
    output: str
    late: float | None = None

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.late is not None

    @property
    def reason(self) -> str:
        """Why it failed: too slow, out of memory, or the last line of its error."""
        if self.late is not None:
            return f"too slow ({self.late:.0f} s)"
        if is_out_of_memory(self.output) or self.code in (-9, 137):
            return "out of memory"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit code {self.code}"])[-1]


def is_out_of_memory(text: str) -> bool:
    return any(sign in text for sign in _OUT_OF_MEMORY)


def run(words: Sequence[str], seconds: float, on_line: Callable[[str], None]) -> Ended:
    """Run a command. on_line: called with each line of stdout as soon as it is printed; a command that prints no line
    for `seconds` is stopped."""
    late: list[float] = []
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):

        def stop() -> None:
            late.append(seconds)
            process.kill()

        def start_timer() -> threading.Timer:
            timer = threading.Timer(seconds, stop)
            timer.start()
            return timer

        timer = start_timer()
        try:
            for line in process.stdout or ():
                timer.cancel()
                on_line(line)
                timer = start_timer()
            process.wait()
        except BaseException:  # interrupted
            process.kill()
            raise
        finally:
            timer.cancel()
        log.seek(0)
        return Ended(process.returncode, log.read(), late[0] if late else None)
