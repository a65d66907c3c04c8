"""Commands that messages suggest to the user, quoted so that they can be pasted into a shell as they are."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tercet.shell import program, python


def tercet(*words: object) -> str:
    """`tercet WORDS`, with the program named as it can be started here."""
    return f"{program()} {shlex.join(map(str, words))}"


def torchrun(*words: object, ranks: int | str, nodes: int | None = 1) -> str:
    """The same on `ranks` ranks per machine. nodes: machines; None leaves them to torchrun's defaults."""
    where = [] if nodes is None else ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}"]
    module = [f"--nproc-per-node={ranks}", "-m", "tercet"]
    return f"{program('torchrun')} {shlex.join([*where, *module, *map(str, words)])}"


def list_presets() -> str:
    return tercet("presets")


def show_preset() -> str:
    return tercet("config", "show", "--preset", "NAME")


def train_preset(name: str = "tiny", run_dir: str | None = None) -> str:
    return tercet("train", "--preset", name, *([] if run_dir is None else ["--run.dir", run_dir]))


def train_config(file: str | Path, flags: Mapping[str, object] | None = None, *, ranks: int | None = None) -> str:
    """Train with a saved configuration and `flags` (dotted key -> value); ranks: start them with torchrun."""
    words: list[object] = ["train", "--config", file]
    for key, value in (flags or {}).items():
        words += [f"--{key}", value]
    return tercet(*words) if ranks is None else torchrun(*words, ranks=ranks)


def resume(folder: str | Path, ranks: int = 1) -> str:
    """Resume the run in `folder`; its configuration is read from there."""
    words = ("train", "--resume", "auto", "--run.dir", folder)
    if ranks == 1:
        return tercet(*words)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    return torchrun(*words, ranks=here, nodes=-(-ranks // here))


def report(folder: str | Path, *, baseline: str | Path | None = None) -> str:
    return tercet("report", folder, *([] if baseline is None else ["--baseline", baseline]))


def replay_step(dump: str | Path) -> str:
    """Replay a non-finite step from its dump."""
    return f"{python()} -m tercet.train.dump {shlex.quote(str(dump))}"


def generate(folder: str | Path, prompt: str = "TEXT") -> str:
    return tercet("generate", folder, "--prompt", prompt)


def watch(folder: str | Path) -> str:
    return tercet("watch", folder)


def show_config(folder: str | Path) -> str:
    """All settings of the run in `folder`."""
    return tercet("config", "show", folder)


def train_dense_baseline(folder: str | Path, preset: str | None) -> str:
    """Train the dense baseline of the run in `folder`, then compare the two."""
    source = ("--preset", preset) if preset else ("--config", f"{folder}/config.toml")
    dense = f"{folder}-dense"
    train = tercet("train", *source, "--model.attention", "dense", "--run.dir", dense)
    return f"{train}, then {report(folder, baseline=dense)}"


def relaunch(arguments: Sequence[str], *, ranks: int, per_machine: int, strategy: str) -> str:
    """The command line `arguments` again, under torchrun. per_machine: 0 for a number that the user fills in."""
    arguments = [a for a in arguments if a != "--allow-single-rank"]
    chosen = strategy != "single" or any(a.startswith("--parallel.strategy") for a in arguments)
    added = [] if chosen else ["--parallel.strategy", "ddp"]
    nodes = 1 if ranks == per_machine else -(-ranks // per_machine)
    return torchrun(*arguments, *added, ranks=per_machine or "N", nodes=nodes)
