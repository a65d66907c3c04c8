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
{others}
A configuration is a preset, then a TOML file, then flags; later ones win. Every key but data.mixture is a flag:
  tercet train --preset m7c --config mine.toml --train.lr 1e-3 --data.seq_len 8192
`tercet train --help` shows the common ones, `tercet --help WORD` finds others. --debug adds the traceback to an error.
"""

# command -> ("module:function", summary). The signature defines the options; parameters without a default are
# positional arguments, but `loaded` is a configuration. The docstring is the help, the result the exit code.
FUNCTIONS = {
    "presets": ("tercet.cli:presets", "list the presets"),
    "report": ("tercet.report.commands:report", "check runs: GO, NO-GO or NOT TESTED, with an HTML report for each"),
    "watch": ("tercet.report.commands:watch", "follow a run live in the terminal"),
    "sweep": ("tercet.bench.sweep:sweep", "train with several learning rates and compare the losses"),
    "doctor": ("tercet.doctor.examine:doctor", "check this machine: versions, devices, kernels, disk, data"),
    "generate": ("tercet.inference.commands:generate", "generate text: tercet generate RUN --prompt TEXT"),
    "calibrate": ("tercet.inference.commands:calibrate", "which blocks a dense model needs: tercet calibrate FOLDER"),
}
# `tercet GROUP NAME` calls a function of a module in the same way.
GROUPS = {
    "config": ("tercet.cli", "show the configuration of a command line or a run, or compare two: config diff A B"),
    "data": ("tercet.data.commands", "prepare and inspect training data; train a tokenizer"),
    "bench": ("tercet.bench.commands", "benchmark attention, decoding and training"),
    "eval": (
        "tercet.inference.eval_commands",
        "evaluate a model: perplexity, context, ruler, lm-eval, selection-map",
    ),
    "export": ("tercet.interop.export_commands", "export a run for Transformers: tercet export hf RUN OUT"),
    "import": ("tercet.interop.import_commands", "import a Hugging Face checkpoint: tercet import hf FOLDER OUT"),
}
# Groups whose required parameters are positional arguments; in the others they are flags.
POSITIONAL = {"config", "eval", "export", "import"}


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
    if not arguments or arguments in (["-h"], ["--help"], ["help"]):
        print(_overview())
        return 0
    if arguments[0] in ("-h", "--help", "help"):  # of a command, else of the keys that a word finds
        known = arguments[1] in {*CONFIGURED, *FUNCTIONS, *GROUPS}
        arguments = [*arguments[1:], "--help"] if known else ["train", f"--help={arguments[1]}"]
    if arguments[0] in ("--version", "-V", "version"):
        print(f"tercet {tercet.__version__}")
        return 0
    from tercet.config.environment import environment_warnings

    # All ranks of a machine share their environment: warn once.
    for line in environment_warnings(os.environ) if os.environ.get("LOCAL_RANK", "0") == "0" else []:
        print(f"warning: {printable(line)}", file=sys.stderr)
    name, rest = arguments[0], arguments[1:]
    try:
        if name in GROUPS:
            return _group(name, rest)
        if name in CONFIGURED:
            return _configured(CONFIGURED[name], rest, f"tercet {name}")
        if name in FUNCTIONS:
            return _call(_found(name), rest, f"tercet {name}", positional=True)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    raise _usage(f"unknown command {name}: {_near(name, [*CONFIGURED, *FUNCTIONS, *GROUPS])}")


def train(loaded: Any, resume: str | None = None, allow_single_rank: bool = False) -> int:
    """Train a model. Start with `tercet train --preset tiny`. `tercet plan` takes the same options and estimates the
    cost. Repeat a run with --config RUN/config.toml; continue it with --run.dir RUN --resume auto.

    Args:
        resume: Resume from a folder, or from the newest checkpoint in run.dir (auto); auto starts fresh if there is
            none.
        allow_single_rank: Use one GPU of a machine that has several.
    """
    source = loaded.config.train.init_from
    if source is not None and resume is None and not Path(source).exists():
        raise _usage(f"train.init_from={source} does not exist: give a checkpoint, a run folder or a .safetensors file")
    print(f"tercet {tercet.__version__}: run {printable(loaded.config.run.name)}", flush=True)
    if loaded.config.parallel.world_size == 1:
        from tercet.train.resume import check_start

        check_start(loaded.config, resume)
    from tercet.train.trainer import train as run

    return run(loaded.config, origins=loaded.origins, resume=resume)


def plan(loaded: Any, gpu: str | None = None, json: bool = False) -> int:
    """Estimate the cost of a run without allocating anything: parameters, tokens, FLOPs, memory by part, time.

    Args:
        gpu: Plan for this GPU instead of this machine: H200, A100, …
        json: Print one line of JSON.
    """
    from json import dumps

    from tercet.plan import find_device, make_plan, render

    found = make_plan(loaded.config, find_device(loaded.config.run.device, gpu))
    if json:
        print(dumps(found.as_dict()))
        return 0
    if not any(origin.startswith(("preset ", "file ")) for origin in loaded.origins.values()):
        print(f"{'config':<11} default, since neither --preset nor --config is given")
    print(printable("\n".join(render(loaded.config, found))))
    return 0


def presets() -> int:
    """List the presets: configurations to start from."""
    from tercet.config.load import load, preset_about, preset_names

    names = preset_names()
    width = max(map(len, names))
    print("\n".join(f"{name:<{width}}  {preset_about(name)}" for name in names))
    others = " and ".join(name for name in names if load(name).config.data.source != "fineweb-edu")
    print(f"\nAll but {others} stream FineWeb-Edu from the Hugging Face Hub, unless --data.source names other data.")
    print(f"Use one:  {hints.train_preset('NAME')}     See one:  {hints.tercet('config', 'show', '--preset', 'NAME')}")
    return 0


def show(loaded: Any, changed: bool = False) -> int:
    """Print a configuration as TOML, with the origin of each value.

    It is that of the options, or that of a run folder: tercet config show RUN.

    Args:
        changed: Print only values that are not defaults, one per line.
    """
    from tercet.config.load import describe, to_toml

    lines = "\n".join(describe(loaded.config, loaded.origins)) + "\n" if changed else ""
    print(printable(lines or to_toml(loaded.config, loaded.origins)), end="")
    return 0


def diff(a: str, b: str) -> int:
    """Print the differences between two configurations.

    Args:
        a: A preset, a TOML file or a run folder.
        b: Another one.
    """
    from tercet.config.load import differences, toml_value

    found = differences(_named(a).config, _named(b).config)
    for path, (left, right) in found.items():
        print(printable(f"{path}: {toml_value(left)} -> {toml_value(right)}"))
    if not found:
        print(f"{a} and {b} are the same")
    return 0


# Commands that take a configuration: its keys are options too.
CONFIGURED: dict[str, Callable[..., int]] = {"train": train, "plan": plan}


def _group(group: str, arguments: list[str]) -> int:
    functions = _members(group)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, functions))
        for name, function in functions.items():
            print(f"tercet {group} {name:<{width}}  {(function.__doc__ or '').strip().partition(chr(10))[0]}")
        return 0
    name, prog = arguments[0].replace("_", "-"), f"tercet {group} {arguments[0]}"
    if name not in functions:
        raise _usage(f"unknown command {group} {arguments[0]}: {_near(arguments[0], functions)}")
    if functions[name] is show:
        return _show(arguments[1:])
    return _call(functions[name], arguments[1:], prog, positional=group in POSITIONAL)


def _members(group: str) -> dict[str, Callable[..., Any]]:
    """The group's commands: public functions of its module that return an exit code, by name."""
    if group == "config":
        return {"show": show, "diff": diff}
    module = importlib.import_module(GROUPS[group][0])
    own = [f for f in vars(module).values() if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    commands = [f for f in own if not f.__name__.startswith("_") and f.__annotations__.get("return") == "int"]
    return {f.__name__.replace("_", "-"): f for f in commands}


def _found(command: str) -> Callable[..., Any]:
    module, _, name = FUNCTIONS[command][0].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _call(function: Callable[..., Any], arguments: list[str], prog: str, *, positional: bool) -> int:
    from tercet.config.flags import call, function_help, help_topic

    if help_topic(arguments) is not None:
        print(function_help(function, prog=prog, positional=positional))
        return 0
    return int(call(function, arguments, prog=prog, positional=positional) or 0)


def _show(arguments: list[str]) -> int:
    """`tercet config show`, whose first argument may be a run folder: then print the file as it is, without options."""
    from tercet.config.load import preset_names

    saved = Path(arguments[0]) / "config.toml" if arguments else None
    if saved is not None and saved.is_file():
        if len(arguments) == 1:
            print(printable(saved.read_text(encoding="utf-8")), end="")
            return 0
        return _configured(show, ["--config", str(saved), *arguments[1:]], "tercet config show", saved)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in preset_names():
        raise _usage(f"{arguments[0]} is not a run folder: give one with a config.toml, --config FILE or --preset NAME")
    return _configured(show, arguments, "tercet config show")


def _configured(command: Callable[..., int], arguments: list[str], prog: str, saved: Path | None = None) -> int:
    loaded, options = _load(command, arguments, prog, saved)
    return command(loaded, **options)


def _load(
    command: Callable[..., int], arguments: list[str], prog: str, saved: Path | None = None
) -> tuple[Loaded, dict[str, Any]]:
    """The configuration of a command line (preset, file, flags), and the command's own options.

    saved: the file, if it is the config.toml of a run whose origins count.
    """
    from tercet.config.flags import Parser, bind, config_help, function_options, help_topic, key_options, read_arguments
    from tercet.config.keys import Key
    from tercet.config.load import FLAG, Layer, as_none, keep_origins, merge, read_layers

    # Needed before the rest is parsed, for defaults.
    first = Parser(prog, {"": [Key(name, str) for name in ("preset", "config", "resume", "run.dir")]})
    given = vars(first.parse_known_args([a for a in arguments if a not in ("-h", "--help")])[0])
    preset, file = given.get("preset"), given.get("config")
    training, first_rank = command is train, os.environ.get("LOCAL_RANK", "0") == "0"
    if training and preset is None and file is None:
        saved = _resumed_config(given.get("resume"), given.get("run.dir"))
        file = None if saved is None else str(saved)
    layers = read_layers(preset, file)
    values = {key: as_none(key, value) for layer in layers for key, value in layer.values.items()}
    own, keys = function_options(read_layers) | function_options(command), key_options(values)
    if (topic := help_topic(arguments)) is not None:
        print(printable(config_help(topic, own, keys, prog=prog, about=command.__doc__ or "")))
        raise SystemExit(0)
    flags = read_arguments(arguments, keys | own, prog=prog)
    own_flags = {name: flags.pop(name) for name in own if name in flags}
    options = bind(command, {name: value for name, value in own_flags.items() if name not in ("preset", "config")})
    resume = options.get("resume")
    if training:
        _check_resume(resume)
        if preset is None and file is None:
            raise _usage(_no_configuration(resume, flags.get("run.dir")))
        layers += _launch_layers(flags, allow_single_rank=options.get("allow_single_rank", False))
    loaded = merge([*layers, Layer(FLAG, flags)])
    for note in loaded.notes if first_rank else ():
        print(f"note: {printable(note)}", file=sys.stderr)
    # Only a run fetches a tokenizer from the Hub.
    if training or Path(loaded.config.data.tokenizer).expanduser().exists():
        from tercet.data.tokenizers import fit_vocabulary

        loaded = fit_vocabulary(loaded, partial(_saved_tokenizer, loaded, resume))
    return loaded if saved is None else keep_origins(loaded, saved), options


def _saved_tokenizer(loaded: Loaded, resume: str | None) -> Path | None:
    """Where the run to resume keeps its tokenizer: its original may have moved."""
    if resume is None:
        return None
    from tercet.train.run_folder import locate

    return locate(loaded.config.run, resume) / "tokenizer.json"


def _resumed_config(resume: str | None, folder: str | None) -> Path | None:
    """The config.toml of the run to resume, so that its options need not be repeated."""
    if resume == "auto":
        run = Path(folder) if folder else None
    else:
        from tercet.train.manifest import run_of

        run = run_of(Path(resume)) if resume else None
    return run / "config.toml" if run and (run / "config.toml").is_file() else None


def _check_resume(resume: str | None) -> None:
    fix = "give auto (the newest checkpoint in --run.dir), a run folder or a checkpoint folder"
    if resume is not None and not resume.strip():
        raise _usage(f"--resume {resume!r} is empty: {fix}")
    if resume is not None and resume != "auto" and Path(resume).is_file():
        raise _usage(f"--resume {resume} is a file, not a folder: {fix}")


def _no_configuration(resume: str | None, folder: str | None) -> str:
    """The error when there is no preset, no file, and no run to resume that has a config.toml."""
    presets = f"`{hints.tercet('presets')}` lists the presets"
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


def _launch_layers(flags: Mapping[str, Any], *, allow_single_rank: bool) -> list[Layer]:
    """Values from the way the process was started: the number of ranks that torchrun reports, --allow-single-rank."""
    from tercet.config.environment import launch_number
    from tercet.config.load import Layer

    layers = []
    if (ranks := os.environ.get("WORLD_SIZE")) is not None:
        layers.append(Layer("torchrun", {"parallel.world_size": launch_number("WORLD_SIZE", ranks, least=1)}))
    elif flags.get("parallel.strategy") == "single":  # resumes a run of several ranks on one
        layers.append(Layer("--parallel.strategy single", {"parallel.world_size": 1}))
    if allow_single_rank:
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
    raise _usage(f"{name} is not a preset, a TOML file or a run folder: `{hints.tercet('presets')}` lists the presets")


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
