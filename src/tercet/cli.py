"""The command line: parse, call, exit code. torch is imported by the commands that compute, not here.

Exit codes: what a command returns, or what its error says (tercet.errors), or 130 and 143 for signals; all of them are
listed in docs/configuration.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import tercet
from tercet.errors import TercetError
from tercet.typed import typed

if TYPE_CHECKING:
    from tercet.config.load import Layer, Loaded

OVERVIEW = """\
Tercet trains language models whose attention is Native Sparse Attention.

usage: tercet COMMAND [options]       tercet COMMAND --help

  train            train a model:            tercet train --preset tiny
  plan             what a run will cost:     tercet plan --preset m7c --gpu H200
  presets          configurations to start from
  config show      the configuration that a command line means, each value with its origin
  config diff A B  what differs between two presets, files or run folders
{others}
A configuration is a preset, then a TOML file, then flags; later ones win. Every key is a flag:
  tercet train --preset m7c --config mine.toml --train.lr 1e-3 --data.seq_len 8192
With --debug an error shows its traceback.
"""

# command -> "module:function" and a sentence. The function's signature is the command's options (those without a
# default stand without a flag), its docstring its help, its result the exit code.
FUNCTIONS = {
    "report": ("tercet.report.commands:report", "judge runs: GO, NO-GO or NOT TESTED, with a page for each"),
    "watch": ("tercet.report.commands:watch", "a live view of a run"),
    "sweep": ("tercet.bench.sweep:sweep", "tokens/s and memory over lengths, batches, strategies; a process per cell"),
    "flight": ("tercet.parallel.flight_recorder:flight", "which rank was in which collective when a run failed"),
    "doctor": ("tercet.doctor.commands:doctor", "examine this machine: versions, devices, kernels, disk, data"),
    "generate": ("tercet.inference.commands:generate", "text from a model: tercet generate RUN --prompt TEXT"),
}
# `tercet GROUP NAME` calls a function of the module in the same way, all options with their flags.
GROUPS = {
    "data": ("tercet.data.commands", "texts into tokens: prepare, train-tokenizer, inspect, bench"),
    "bench": ("tercet.bench.commands", "measure attention and training"),
    "eval": ("tercet.inference.eval_commands", "measure a model: perplexity, needle, recall, selection-map"),
    "export": ("tercet.interop.export_commands", "a run for other libraries: tercet export hf RUN OUT"),
    "import": ("tercet.interop.import_commands", "a model of theirs to train on: tercet import hf FOLDER OUT"),
}
# Groups whose commands take what they work on without a flag.
POSITIONAL = {"eval", "export", "import"}


@dataclass(frozen=True)
class Sources:
    """Where the configuration comes from."""

    preset: str | None = None
    """A configuration to start from; `tercet presets` lists them."""
    config: str | None = None
    """A TOML file whose values go over the preset's, such as RUN/config.toml of an earlier run."""


@dataclass(frozen=True)
class TrainOptions(Sources):
    """Options of `tercet train` itself."""

    resume: str | None = None
    """Go on from a checkpoint: auto (the newest in run.dir, or a fresh start if there is none) or a folder."""
    allow_single_rank: bool = False
    """Train in one process on one GPU although this machine has several."""


@dataclass(frozen=True)
class PlanOptions(Sources):
    """Options of `tercet plan` itself."""

    gpu: str | None = None
    """Plan for this GPU instead of what is in this machine: H200, A100, …"""
    json: bool = False
    """Print one line of JSON instead."""


@dataclass(frozen=True)
class ShowOptions(Sources):
    """Options of `tercet config show` itself."""

    changed: bool = False
    """Only what is not a default, one line each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The `tercet` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        return _dispatch([a for a in arguments if a != "--debug"])
    except TercetError as error:
        if debug:
            traceback.print_exc()
        elif not getattr(error, "reported_elsewhere", False):  # one of many ranks says it for all
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `tercet presets | head`: whoever read has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("--version", "-V", "version"):
        print(f"tercet {tercet.__version__}")
        return 0
    from tercet.config.environment import environment_warnings

    # torchrun gives all processes of a machine the same environment: one of them speaks of it
    for line in environment_warnings(os.environ) if os.environ.get("LOCAL_RANK", "0") == "0" else []:
        print(f"warning: {line}", file=sys.stderr)
    name, rest = arguments[0], arguments[1:]
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "plan": _plan,
        "presets": _presets,
        "config": _config,
        **{group: partial(_group, group) for group in GROUPS},
        **{command: partial(_function, command) for command in FUNCTIONS},
    }
    if name not in commands:
        raise _usage(f"unknown command {name}: {_near(name, commands)}")
    try:
        return commands[name](rest)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def _train(arguments: list[str]) -> int:
    """Train a model. Begin with `tercet train --preset tiny`; `tercet plan` takes the same options and says what they
    cost. The run folder keeps config.toml, from which --config repeats the run, and checkpoints, from which
    --resume auto goes on."""
    loaded, options = _load(TrainOptions, arguments, "train", _train.__doc__)
    print(f"tercet {tercet.__version__}: run {loaded.config.run.name}, loading torch …", flush=True)
    from tercet.train.trainer import train

    return train(loaded.config, origins=loaded.origins, resume=options.resume)


def _plan(arguments: list[str]) -> int:
    """What a run will cost, before anything is allocated: parameters, tokens, arithmetic, memory by part, time."""
    loaded, options = _load(PlanOptions, arguments, "plan", _plan.__doc__)
    from tercet.plan import find_device, make_plan, render

    plan = make_plan(loaded.config, find_device(loaded.config.run.device, options.gpu))
    if options.json:
        import json

        print(json.dumps(plan.as_dict()))
    else:
        print("\n".join(render(loaded.config, plan)))
    return 0


def _presets(arguments: list[str]) -> int:
    from tercet.config.load import preset_about, preset_names

    if arguments and arguments[0] not in ("-h", "--help"):
        raise _usage(f"tercet presets takes no arguments, not {arguments[0]}: see one with `tercet config show`")
    names = preset_names()
    width = max(map(len, names))
    print("\n".join(f"{name:<{width}}  {preset_about(name)}" for name in names))
    print(f"\nUse one:  {typed()} train --preset NAME     See one:  {typed()} config show --preset NAME")
    return 0


def _config(arguments: list[str]) -> int:
    parts = {"show": _show, "diff": _diff}
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tercet config show [options]\n       tercet config diff A B")
        return 0
    if arguments[0] not in parts:
        raise _usage(f"unknown command config {arguments[0]}: {_near(arguments[0], parts)}")
    return parts[arguments[0]](arguments[1:])


def _show(arguments: list[str]) -> int:
    """The configuration that these options mean, as TOML, each value with its origin."""
    loaded, options = _load(ShowOptions, arguments, "config show", _show.__doc__)
    from tercet.config.load import describe, to_toml

    if options.changed:
        print("\n".join(describe(loaded.config, loaded.origins)))
    else:
        print(to_toml(loaded.config, loaded.origins), end="")
    return 0


def _diff(arguments: list[str]) -> int:
    """What differs between two configurations; each is a preset, a TOML file or a run folder."""
    from tercet.config.load import differences, toml_value

    if len(arguments) != 2 or any(a.startswith("-") for a in arguments):
        raise _usage("tercet config diff takes two presets, TOML files or run folders: tercet config diff A B")
    left, right = arguments
    found = differences(_named(left).config, _named(right).config)
    for path, (a, b) in found.items():
        print(f"{path}: {toml_value(a)} -> {toml_value(b)}")
    if not found:
        print(f"{left} and {right} are the same")
    return 0


def _function(command: str, arguments: list[str]) -> int:
    from tercet.config.flags import call

    function = _found(command)
    if function is None:
        raise _usage(f"tercet {command} is not part of this version")
    return int(call(function, arguments, prog=f"tercet {command}", positional=True) or 0)


def _group(group: str, arguments: list[str]) -> int:
    from tercet.config.flags import call

    functions = _members(group)
    if not functions:
        raise _usage(f"tercet {group} is not part of this version")
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, functions))
        for name, function in functions.items():
            print(f"tercet {group} {name:<{width}}  {_first_line(function)}")
        return 0
    name = arguments[0].replace("_", "-")
    if name not in functions:
        raise _usage(f"unknown command {group} {arguments[0]}: {_near(arguments[0], functions)}")
    return int(call(functions[name], arguments[1:], prog=f"tercet {group} {name}", positional=group in POSITIONAL) or 0)


def _found(command: str) -> Callable[..., Any] | None:
    module, _, name = FUNCTIONS[command][0].partition(":")
    return getattr(importlib.import_module(module), name, None) if _exists(module) else None


def _members(group: str) -> dict[str, Callable[..., Any]]:
    """Functions that the group's module defines itself, by the names that they have on the command line."""
    if not _exists(GROUPS[group][0]):
        return {}
    module = importlib.import_module(GROUPS[group][0])
    own = [f for f in vars(module).values() if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    return {f.__name__.replace("_", "-"): f for f in own if not f.__name__.startswith("_")}


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def _load(options: type[Sources], arguments: list[str], command: str, about: str | None) -> tuple[Loaded, Any]:
    """Preset, file and flags of a command line as one configuration, and the options of the command itself."""
    from tercet.config.flags import option_value, parse
    from tercet.config.load import Layer, as_none, merge, read_layers

    preset, file = option_value(arguments, "preset"), option_value(arguments, "config")
    if command == "train" and preset is None and file is None:
        file = _resumed_config(option_value(arguments, "resume"), option_value(arguments, "run.dir"))
    layers = read_layers(preset, file)
    values = {key: as_none(key, value) for layer in layers for key, value in layer.values.items()}
    description = " ".join((about or "").split())
    parsed = parse(arguments, options=options, values=values, prog=f"tercet {command}", description=description)
    own = parsed.options
    if command == "train":
        _check_resume(own.resume)
    if command == "train" and own.preset is None and file is None:
        raise _usage(_unconfigured(own.resume, parsed.overrides.get("run.dir")))
    return merge([*layers, *(_launched(own) if command == "train" else []), Layer("flag", parsed.overrides)]), own


def _resumed_config(resume: str | None, folder: str | None) -> str | None:
    """The configuration that the run to go on with has kept, so that it need not be said again."""
    if resume == "auto":
        run = Path(folder) if folder else None
    else:
        from tercet.train.manifest import run_of

        run = run_of(Path(resume)) if resume else None
    return str(run / "config.toml") if run and (run / "config.toml").is_file() else None


def _check_resume(resume: str | None) -> None:
    """What can be no run, whatever the configuration."""
    name = "auto (the newest of --run.dir), or name the folder of a run or of one of its checkpoints"
    if resume is not None and not resume.strip():
        raise _usage(f"--resume {resume!r} names nothing: say {name}")
    if resume is not None and resume != "auto" and Path(resume).is_file():
        raise _usage(f"--resume {resume} is a file, not a folder: say {name}")


def _unconfigured(resume: str | None, folder: str | None) -> str:
    """Why there is nothing to train: no preset, no file, and no run to go on with that has kept its own."""
    if resume is None:
        return f"no configuration given: try `{typed()} train --preset tiny`, or `{typed()} presets` for the list"
    if resume == "auto" and folder is None:
        return (
            "--resume auto without --run.dir, a preset or a file names no run: give the folder of one with --run.dir, "
            f"or begin one with `{typed()} train --preset tiny` (`{typed()} presets` lists them)"
        )
    given, where = ("auto", str(folder)) if resume == "auto" else (resume, resume)
    said = "does not exist" if not Path(where).exists() else "has kept no config.toml"
    new = shlex.quote(folder or "runs/NAME")
    return (
        f"--resume {given}: there is no run to resume at {where}, which {said}: name the folder of a run, or begin one "
        f"with `{typed()} train --preset tiny --run.dir {new}` (`{typed()} presets` lists them)"
    )


def _launched(options: Any) -> list[Layer]:
    """What the way of starting says: torchrun tells each process how many there are."""
    from tercet.config.load import Layer

    layers = []
    if "WORLD_SIZE" in os.environ:
        layers.append(Layer("torchrun", {"parallel.world_size": int(os.environ["WORLD_SIZE"])}))
    if options.allow_single_rank:
        layers.append(Layer("--allow-single-rank", {"parallel.allow_single_rank": True}))
    return layers


def _named(name: str) -> Loaded:
    """A configuration by the name of its preset, its file or its run folder."""
    from tercet.config.load import load, preset_names

    path = Path(name)
    if name in preset_names():
        return load(preset=name)
    if path.is_dir():
        return load(file=path / "config.toml")
    if path.is_file() or path.suffix == ".toml":
        return load(file=path)
    raise _usage(f"{name} is neither a preset nor a TOML file nor a run folder: `tercet presets` lists the presets")


def _overview() -> str:
    # What is not installed is not shown; nothing is imported to say so.
    commands = [(name, where.partition(":")[0], about) for name, (where, about) in FUNCTIONS.items()]
    groups = [(f"{name} …", where, about) for name, (where, about) in GROUPS.items()]
    lines = [f"  {name:<15}  {about}\n" for name, where, about in commands + groups if _exists(where)]
    return OVERVIEW.format(others="".join(lines))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False


def _near(wrong: str, among: Iterable[str]) -> str:
    from tercet.config.keys import suggestion

    return suggestion(wrong, among) or f"one of {', '.join(among)}"


def _usage(message: str) -> TercetError:
    from tercet.config.load import ConfigError

    return ConfigError(message)
