"""The `tercet` command: find the command, parse its arguments, return its exit code.

Nothing heavy is imported here: commands load pydantic to parse their arguments, and torch only after that. Exit codes
are what a command returns, or those of its error (tercet.errors), or 128 + N for signal N; docs/configuration.md
lists them.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import tercet
from tercet import hints
from tercet.errors import EXIT_FAILURE, TercetError, is_out_of_memory
from tercet.terminal import printable

if TYPE_CHECKING:
    from tercet.config.load import Layer, Loaded

OVERVIEW = """\
Tercet trains language models with Native Sparse Attention.

usage: tercet COMMAND [options]       tercet COMMAND --help

  train            train a model:             tercet train --preset tiny
  plan             estimate memory and time:  tercet plan --preset m7c --gpu H200
  presets          list the presets
  config show      print the configuration of a command line or a run, with the origin of each value
  config diff A B  compare two presets, TOML files or run folders
{others}
A configuration is a preset, then a TOML file, then flags; later ones win. Every key but data.mixture is a flag:
  tercet train --preset m7c --config mine.toml --train.lr 1e-3 --data.seq_len 8192
`tercet train --help` shows the common ones. --debug adds the traceback to an error.
"""

# command -> ("module:function", summary). The signature defines the options; parameters without a default are
# positional arguments. The docstring is the help, the result the exit code.
FUNCTIONS = {
    "report": ("tercet.report.commands:report", "check runs: GO, NO-GO or NOT TESTED, with an HTML report for each"),
    "watch": ("tercet.report.commands:watch", "follow a run live in the terminal"),
    "sweep": ("tercet.bench.sweep:sweep", "measure speed and memory over settings, or loss over learning rates"),
    "doctor": ("tercet.doctor.examine:doctor", "check this machine: versions, devices, kernels, disk, data"),
    "generate": ("tercet.inference.commands:generate", "generate text: tercet generate RUN --prompt TEXT"),
}
# `tercet GROUP NAME` calls a function of a module in the same way.
GROUPS = {
    "data": ("tercet.data.commands", "prepare, inspect and benchmark training data; train a tokenizer"),
    "bench": ("tercet.bench.commands", "benchmark attention, decoding and training"),
    "eval": (
        "tercet.inference.eval_commands",
        "evaluate a model: perplexity, context, needle, ruler, recall, lm-eval, selection-map",
    ),
    "export": ("tercet.interop.export_commands", "export a run for Transformers: tercet export hf RUN OUT"),
    "import": ("tercet.interop.import_commands", "import a Hugging Face checkpoint: tercet import hf FOLDER OUT"),
}
# Groups whose required parameters are positional arguments; in the others they are flags.
POSITIONAL = {"eval", "export", "import"}


@dataclass(frozen=True)
class Sources:
    """Options of every command that takes a configuration."""

    preset: str | None = None
    """Configuration to start from (`tercet presets` lists them)."""
    config: str | None = None
    """TOML file that overrides the preset, such as config.toml of an earlier run."""


@dataclass(frozen=True)
class TrainOptions(Sources):
    """Options of `tercet train` besides the configuration."""

    resume: str | None = None
    """Resume from a folder, or from the newest checkpoint in run.dir (auto); auto starts fresh if there is none."""
    allow_single_rank: bool = False
    """Use one GPU of a machine that has several."""


@dataclass(frozen=True)
class PlanOptions(Sources):
    """Options of `tercet plan` besides the configuration."""

    gpu: str | None = None
    """Plan for this GPU instead of this machine: H200, A100, …"""
    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True)
class ShowOptions(Sources):
    """Options of `tercet config show` besides the configuration."""

    changed: bool = False
    """Print only values that are not defaults, one per line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    announcer = AnnounceImports()
    sys.meta_path.insert(0, announcer)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal or a pipe that is not UTF-8
    try:
        _check_encoding(arguments)
        return _dispatch([a for a in arguments if a != "--debug"])
    except (TercetError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, TercetError) or is_out_of_memory(error)):
            raise
        if debug:
            import traceback

            traceback.print_exc()
        elif not getattr(error, "reported_elsewhere", False):
            print(f"error: {printable(_one_line(error))}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_FAILURE)
    except BrokenPipeError:
        # The reader stopped early, as in `tercet presets | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    finally:
        sys.meta_path.remove(announcer)


class AnnounceImports(MetaPathFinder):
    """Prints a line before the first import of a library that takes seconds to load, so that no command is silent."""

    SLOW = ("torch", "transformers")

    def __init__(self) -> None:
        # All ranks of a machine share a terminal.
        self._printed = os.environ.get("LOCAL_RANK", "0") != "0" or any(name in sys.modules for name in self.SLOW)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Leaves the search to the other finders."""
        if name in self.SLOW and not self._printed:
            self._printed = True
            print(f"loading {name} …", file=sys.stderr, flush=True)


def _one_line(error: Exception) -> str:
    if isinstance(error, TercetError):
        return str(error)
    cause = f" ({str(error).splitlines()[0][:200]})" if str(error) else ""
    return f"out of memory{cause}: use a smaller batch, a shorter context or a smaller model; --debug shows where"


def _check_encoding(arguments: Sequence[str]) -> None:
    """The files of a run are UTF-8, and name its folder, its data and its command line."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        raise _usage("the current folder was deleted: change to another one") from None
    for name in (*arguments, folder):
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise _usage(f"{name!a} is not UTF-8: rename the file or folder")


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("--version", "-V", "version"):
        print(f"tercet {tercet.__version__}")
        return 0
    from tercet.config.environment import environment_warnings

    # All ranks of a machine share their environment: warn once.
    for line in environment_warnings(os.environ) if os.environ.get("LOCAL_RANK", "0") == "0" else []:
        print(f"warning: {printable(line)}", file=sys.stderr)
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
    """Train a model. Start with `tercet train --preset tiny`. `tercet plan` takes the same options and estimates the
    cost. Repeat a run with --config RUN/config.toml; continue it with --run.dir RUN --resume auto."""
    loaded, options = _load(TrainOptions, arguments, "train", _train.__doc__)
    source = loaded.config.train.init_from
    if source is not None and options.resume is None and not Path(source).exists():
        raise _usage(f"train.init_from={source} does not exist: give a checkpoint, a run folder or a .safetensors file")
    print(f"tercet {tercet.__version__}: run {printable(loaded.config.run.name)}", flush=True)
    if loaded.config.parallel.world_size == 1:
        from tercet.train.resume import check_start

        check_start(loaded.config, options.resume)
    from tercet.train.trainer import train

    return train(loaded.config, origins=loaded.origins, resume=options.resume)


def _plan(arguments: list[str]) -> int:
    """Estimate the cost of a run without allocating anything: parameters, tokens, FLOPs, memory by part, time."""
    loaded, options = _load(PlanOptions, arguments, "plan", _plan.__doc__)
    from tercet.plan import find_device, make_plan, render

    plan = make_plan(loaded.config, find_device(loaded.config.run.device, options.gpu))
    if options.json:
        import json

        print(json.dumps(plan.as_dict()))
    else:
        if options.preset is None and options.config is None:
            print(f"{'config':<11} default, since neither --preset nor --config is given")
        print(printable("\n".join(render(loaded.config, plan))))
    return 0


def _presets(arguments: list[str]) -> int:
    """List the presets: configurations to start from."""
    from tercet.config.load import load, preset_about, preset_names

    if arguments and arguments[0] in ("-h", "--help"):
        print(f"usage: tercet presets\n\n{_presets.__doc__}")
        return 0
    if arguments:
        raise _usage(f"tercet presets takes no arguments, got {arguments[0]}: print one with `{hints.show_preset()}`")
    names = preset_names()
    width = max(map(len, names))
    print("\n".join(f"{name:<{width}}  {preset_about(name)}" for name in names))
    others = " and ".join(name for name in names if load(name).config.data.source != "fineweb-edu")
    print(f"\nAll but {others} stream FineWeb-Edu from the Hugging Face Hub, unless --data.source names other data.")
    print(f"Use one:  {hints.train_preset('NAME')}     See one:  {hints.show_preset()}")
    return 0


def _config(arguments: list[str]) -> int:
    parts = {"show": _show, "diff": _diff}
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tercet config show [RUN] [options]\n       tercet config diff A B")
        return 0
    if arguments[0] not in parts:
        raise _usage(f"unknown command config {arguments[0]}: {_near(arguments[0], parts)}")
    return parts[arguments[0]](arguments[1:])


def _show(arguments: list[str]) -> int:
    """Print the configuration of these options, or of a run folder (`tercet config show RUN`), as TOML, with the origin
    of each value."""
    from tercet.config.load import describe, keep_origins, preset_names, to_toml

    saved = Path(arguments[0]) / "config.toml" if arguments else None
    if saved is not None and saved.is_file():
        if len(arguments) == 1:
            print(printable(saved.read_text(encoding="utf-8")), end="")
            return 0
        arguments = ["--config", str(saved), *arguments[1:]]
    elif arguments and not arguments[0].startswith("-") and arguments[0] not in preset_names():
        raise _usage(f"{arguments[0]} is not a run folder: give one with a config.toml, --config FILE or --preset NAME")
    loaded, options = _load(ShowOptions, arguments, "config show", _show.__doc__)
    if saved is not None:
        loaded = keep_origins(loaded, saved)
    if options.changed:
        print(printable("\n".join(describe(loaded.config, loaded.origins))))
    else:
        print(printable(to_toml(loaded.config, loaded.origins)), end="")
    return 0


def _diff(arguments: list[str]) -> int:
    """Print the differences between two configurations; each is a preset, a TOML file or a run folder."""
    from tercet.config.load import differences, toml_value

    if any(a in ("-h", "--help") for a in arguments):
        print(f"usage: tercet config diff A B\n\n{_diff.__doc__}")
        return 0
    if len(arguments) != 2 or any(a.startswith("-") for a in arguments):
        raise _usage("tercet config diff compares two presets, TOML files or run folders: write tercet config diff A B")
    left, right = arguments
    found = differences(_named(left).config, _named(right).config)
    for path, (a, b) in found.items():
        print(printable(f"{path}: {toml_value(a)} -> {toml_value(b)}"))
    if not found:
        print(f"{left} and {right} are the same")
    return 0


def _function(command: str, arguments: list[str]) -> int:
    return _call(_found(command), arguments, f"tercet {command}", positional=True)


def _group(group: str, arguments: list[str]) -> int:
    functions = _members(group)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, functions))
        for name, function in functions.items():
            print(f"tercet {group} {name:<{width}}  {_first_line(function)}")
        return 0
    name = arguments[0].replace("_", "-")
    if name not in functions:
        raise _usage(f"unknown command {group} {arguments[0]}: {_near(arguments[0], functions)}")
    return _call(functions[name], arguments[1:], f"tercet {group} {name}", positional=group in POSITIONAL)


def _call(function: Callable[..., Any], arguments: list[str], prog: str, *, positional: bool) -> int:
    from tercet.config.flags import call, help_topic

    if help_topic(arguments) is not None:
        from tercet.config.help import function_help

        print(function_help(function, prog=prog, positional=positional))
        return 0
    return int(call(function, arguments, prog=prog, positional=positional) or 0)


def _found(command: str) -> Callable[..., Any]:
    module, _, name = FUNCTIONS[command][0].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _members(group: str) -> dict[str, Callable[..., Any]]:
    """Public functions defined in the group's module, by command name."""
    module = importlib.import_module(GROUPS[group][0])
    own = [f for f in vars(module).values() if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    return {f.__name__.replace("_", "-"): f for f in own if not f.__name__.startswith("_")}


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def _load(options: type[Sources], arguments: list[str], command: str, about: str | None) -> tuple[Loaded, Any]:
    """The configuration of a command line (preset, file, flags), and the command's own options."""
    from tercet.config.flags import help_topic, option_value, parse
    from tercet.config.load import Layer, as_none, keep_origins, merge, read_layers

    preset, file = option_value(arguments, "preset"), option_value(arguments, "config")
    resumed = None
    if command == "train" and preset is None and file is None:
        file = resumed = _resumed_config(option_value(arguments, "resume"), option_value(arguments, "run.dir"))
    layers = read_layers(preset, file)
    values = {key: as_none(key, value) for layer in layers for key, value in layer.values.items()}
    if (topic := help_topic(arguments)) is not None:
        from tercet.config.help import config_help

        print(printable(config_help(topic, options, values, prog=f"tercet {command}", about=about or "")))
        raise SystemExit(0)
    own, overrides = parse(arguments, options=options, values=values, prog=f"tercet {command}")
    if command == "train":
        _check_resume(own.resume)
    if command == "train" and own.preset is None and file is None:
        raise _usage(_no_configuration(own.resume, overrides.get("run.dir")))
    launched = _launch_layers(own, overrides) if command == "train" else []
    loaded = merge([*layers, *launched, Layer("flag", overrides)])
    for note in loaded.notes if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        print(f"note: {printable(note)}", file=sys.stderr)
    # Only a run fetches a tokenizer from the Hub.
    if command == "train" or Path(loaded.config.data.tokenizer).expanduser().exists():
        from tercet.data.tokenizers import fit_vocabulary

        loaded = fit_vocabulary(loaded, partial(_saved_tokenizer, loaded, getattr(own, "resume", None)))
    return loaded if resumed is None else keep_origins(loaded, Path(resumed)), own


def _saved_tokenizer(loaded: Loaded, resume: str | None) -> Path | None:
    """Where the run to resume keeps its tokenizer: its original may have moved."""
    if resume is None:
        return None
    from tercet.train.run_folder import locate

    return locate(loaded.config, resume) / "tokenizer.json"


def _resumed_config(resume: str | None, folder: str | None) -> str | None:
    """The config.toml of the run to resume, so that its options need not be repeated."""
    if resume == "auto":
        run = Path(folder) if folder else None
    else:
        from tercet.train.manifest import run_of

        run = run_of(Path(resume)) if resume else None
    return str(run / "config.toml") if run and (run / "config.toml").is_file() else None


def _check_resume(resume: str | None) -> None:
    fix = "give auto (the newest checkpoint in --run.dir), a run folder or a checkpoint folder"
    if resume is not None and not resume.strip():
        raise _usage(f"--resume {resume!r} is empty: {fix}")
    if resume is not None and resume != "auto" and Path(resume).is_file():
        raise _usage(f"--resume {resume} is a file, not a folder: {fix}")


def _no_configuration(resume: str | None, folder: str | None) -> str:
    """The error when there is no preset, no file, and no run to resume that has a config.toml."""
    presets = f"`{hints.list_presets()}` lists the presets"
    if resume is None and folder is not None and (Path(folder) / "config.toml").is_file():
        return f"{folder} already holds a run: resume it with {hints.resume(folder)}"
    if resume is None:
        return f"no configuration given: try `{hints.train_preset()}` ({presets})"
    if resume == "auto" and folder is None:
        return (
            "--resume auto needs --run.dir, a preset or a file: give the run folder with --run.dir, or start a new run "
            f"with `{hints.train_preset()}` ({presets})"
        )
    given, where = ("auto", str(folder)) if resume == "auto" else (resume, resume)
    why = "does not exist" if not Path(where).exists() else "has no config.toml"
    return (
        f"--resume {given}: there is no run to resume at {where}, which {why}: pass a run folder, or start a new run "
        f"with `{hints.train_preset(run_dir=folder or 'runs/NAME')}` ({presets})"
    )


def _launch_layers(options: Any, flags: Mapping[str, Any]) -> list[Layer]:
    """Values from the way the process was started: the number of ranks that torchrun reports, --allow-single-rank."""
    from tercet.config.environment import launch_number
    from tercet.config.load import Layer

    layers = []
    if (ranks := os.environ.get("WORLD_SIZE")) is not None:
        layers.append(Layer("torchrun", {"parallel.world_size": launch_number("WORLD_SIZE", ranks, least=1)}))
    elif flags.get("parallel.strategy") == "single":  # resumes a run of several ranks on one
        layers.append(Layer("--parallel.strategy single", {"parallel.world_size": 1}))
    if options.allow_single_rank:
        layers.append(Layer("--allow-single-rank", {"parallel.allow_single_rank": True}))
    return layers


def _named(name: str) -> Loaded:
    """The configuration of a preset, a TOML file or a run folder."""
    from tercet.config.load import load, preset_names

    path = Path(name)
    if name in preset_names():
        return load(preset=name)
    if path.is_dir():
        return load(file=path / "config.toml")
    if path.is_file() or path.suffix == ".toml":
        return load(file=path)
    raise _usage(f"{name} is not a preset, a TOML file or a run folder: `{hints.list_presets()}` lists the presets")


def _overview() -> str:
    commands = [(name, about) for name, (_, about) in FUNCTIONS.items()]
    commands += [(f"{name} …", about) for name, (_, about) in GROUPS.items()]
    return OVERVIEW.format(others="".join(f"  {name:<15}  {about}\n" for name, about in commands))


def _near(wrong: str, among: Iterable[str]) -> str:
    from tercet.config.keys import suggestion

    return suggestion(wrong, among) or f"one of {', '.join(among)}"


def _usage(message: str) -> TercetError:
    from tercet.config.load import ConfigError

    return ConfigError(message)
