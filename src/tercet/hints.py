"""Commands that messages suggest to the user, quoted so that they can be pasted into a shell as they are."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def tercet(*words: object) -> str:
    """`tercet WORDS`, with the program named as it can be started here."""
    return f"{program()} {shlex.join(map(str, words))}"


def torchrun(*words: object, ranks: int | str, nodes: int | None = 1) -> str:
    """The same on `ranks` ranks per machine. nodes: machines; None leaves them to torchrun's defaults."""
    where = [] if nodes is None else ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}"]
    module = [f"--nproc-per-node={ranks}", "-m", "tercet"]
    return f"{program('torchrun')} {shlex.join([*where, *module, *map(str, words)])}"


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


def report(*folders: str | Path) -> str:
    return tercet("report", *folders)


def generate(folder: str | Path, prompt: str = "TEXT") -> str:
    return tercet("generate", folder, "--prompt", prompt)


def train_dense_baseline(folder: str | Path, preset: str | None) -> str:
    """Train the dense baseline of the run in `folder`, then compare the two."""
    source = ("--preset", preset) if preset else ("--config", f"{folder}/config.toml")
    dense = f"{folder}-dense"
    train = tercet("train", *source, "--model.attention", "dense", "--run.dir", dense)
    return f"{train}, then {report(folder, dense)}"


def relaunch(arguments: Sequence[str], *, ranks: int, per_machine: int, strategy: str) -> str:
    """The command line `arguments` again, under torchrun. per_machine: 0 for a number that the user fills in."""
    arguments = [a for a in arguments if a != "--parallel.allow_single_rank"]
    chosen = strategy != "single" or any(a.startswith("--parallel.strategy") for a in arguments)
    added = [] if chosen else ["--parallel.strategy", "ddp"]
    nodes = 1 if ranks == per_machine else -(-ranks // per_machine)
    return torchrun(*arguments, *added, ranks=per_machine or "N", nodes=nodes)


# Programs as the user can type them: without an active environment, `tercet` alone is not found.

_MODULES = {"tercet": "tercet", "torchrun": "torch.distributed.run"}


def program(name: str = "tercet") -> str:
    """How to start a program of this environment: by its name if PATH leads to it, else as a module of this Python."""
    script, found = Path(sys.executable).with_name(name), shutil.which(name)
    # PATH may lead to another environment's program: compare the files.
    same = found is not None and script.is_file() and os.path.samefile(found, script)
    return name if same else f"{python()} -m {_MODULES[name]}"


def python() -> str:
    """How to start this Python."""
    here = Path(sys.executable)
    found = shutil.which(here.name)
    # Compare folders, not files: a virtual environment's Python is a link to the base interpreter.
    if found is not None and Path(found).parent.resolve() == here.parent.resolve():
        return here.name
    return shlex.quote(f"./{here.relative_to(Path.cwd())}" if here.is_relative_to(Path.cwd()) else str(here))
