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
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import tercet
from tercet import hints
from tercet.errors import EXIT_FAILURE, TercetError, UsageError, is_out_of_memory
from tercet.terminal import printable

if TYPE_CHECKING:
    from tercet.config.load import Loaded

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
    "bench": ("tercet.bench.commands", "benchmark attention, decoding, training and several ranks"),
    "eval": ("tercet.inference.eval_commands", "evaluate a model: perplexity, context, ruler, selection-map"),
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
        for word in (*arguments, _current_folder()):  # files of a run hold its paths and command line in UTF-8
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise UsageError(f"{word!a} is not UTF-8: rename the file or folder")
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


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted: change to another one") from None


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
    # The M7C scripts read these variables. All ranks of a machine share their environment: warn once.
    former = sorted(name for name in os.environ if name.startswith("NSA_"))
    if former and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: not read: {', '.join(former)}; docs/from-m7c.md says what took their place", file=sys.stderr)
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
    raise UsageError(f"unknown command {name}: {_near(name, [*CONFIGURED, *FUNCTIONS, *GROUPS])}")


def train(loaded: Any, resume: str | None = None) -> int:
    """Train a model. Start with `tercet train --preset tiny`. `tercet plan` takes the same options and estimates the
    cost. Repeat a run with --config RUN/config.toml; continue it with --run.dir RUN --resume auto.

    Args:
        resume: Resume from a folder, or from the newest checkpoint in run.dir (auto); auto starts fresh if there is
            none.
    """
    source = loaded.config.train.init_from
    if source is not None and resume is None and not Path(source).exists():
        raise UsageError(
            f"train.init_from={source} does not exist: give a checkpoint, a run folder or a .safetensors file"
        )
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

    It is that of the options, or that of a preset, TOML file or run folder: tercet config show RUN.

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

    left, right = (_load(show, _source(name), "tercet config diff")[0].config for name in (a, b))
    found = differences(left, right)
    for path, values in found.items():
        print(printable(f"{path}: {' -> '.join(map(toml_value, values))}"))
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
        raise UsageError(f"unknown command {group} {arguments[0]}: {_near(arguments[0], functions)}")
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
    return vars(importlib.import_module(module))[name]  # type: ignore[no-any-return]


def _call(function: Callable[..., Any], arguments: list[str], prog: str, *, positional: bool) -> int:
    from tercet.config.flags import call, function_help, help_topic

    if help_topic(arguments) is not None:
        print(function_help(function, prog=prog, positional=positional))
        return 0
    return int(call(function, arguments, prog=prog, positional=positional) or 0)


def _show(arguments: list[str]) -> int:
    """`tercet config show`, whose first argument may be a run folder."""
    if not arguments or arguments[0].startswith("-"):
        return _configured(show, arguments, "tercet config show")
    source = _source(arguments[0])
    saved = Path(source[1]) if Path(arguments[0]).is_dir() else None
    return _configured(show, [*source, *arguments[1:]], "tercet config show", saved)


def _source(name: str) -> list[str]:
    """The flag for a preset, a TOML file or the configuration of a run folder."""
    from tercet.config.load import preset_names

    if name in preset_names():
        return ["--preset", name]
    file = Path(name) / "config.toml" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise UsageError(f"{name} is not a preset, a TOML file or a run folder: `tercet presets` lists the presets")
    return ["--config", str(file)]


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
    preset, file, resume, training = given.get("preset"), given.get("config"), given.get("resume"), command is train
    if training and preset is None and file is None:
        saved = _resumed_config(resume, given.get("run.dir"))
        file = None if saved is None else str(saved)
    layers = read_layers(preset, file)
    values = {key: as_none(key, value) for layer in layers for key, value in layer.values.items()}
    source, own, keys = function_options(read_layers), function_options(command), key_options(values)
    if (topic := help_topic(arguments)) is not None:
        print(printable(config_help(topic, source | own, keys, prog=prog, about=command.__doc__ or "")))
        raise SystemExit(0)
    flags = read_arguments(arguments, keys | source | own, prog=prog)
    options = bind(command, {name: flags[name] for name in own if name in flags})
    flags = {name: value for name, value in flags.items() if name in keys}
    if training:
        if preset is None and file is None:
            raise UsageError(_no_configuration(resume, given.get("run.dir")))
        if resume is not None and resume != "auto" and (not resume.strip() or Path(resume).is_file()):
            raise UsageError(
                f"--resume {resume!r} is not a folder: give auto (the newest checkpoint in --run.dir), a run folder or "
                "a checkpoint folder"
            )
        from tercet.parse import launch_number

        if (ranks := os.environ.get("WORLD_SIZE")) is not None:
            number = launch_number("WORLD_SIZE", ranks, least=1)
            layers.append(Layer("torchrun", {"parallel.world_size": number}))
        elif flags.get("parallel.strategy") == "single":  # resumes a run of several ranks on one
            layers.append(Layer("--parallel.strategy single", {"parallel.world_size": 1}))
    loaded = merge([*layers, Layer(FLAG, flags)])
    for note in loaded.notes if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        print(f"note: {printable(note)}", file=sys.stderr)
    # Only a run fetches a tokenizer from the Hub.
    if training or Path(loaded.config.data.tokenizer).expanduser().exists():
        from tercet.data.tokenizers import fit_vocabulary

        loaded = fit_vocabulary(loaded, lambda: _saved_tokenizer(loaded, resume))
    return loaded if saved is None else keep_origins(loaded, saved), options


def _saved_tokenizer(loaded: Loaded, resume: str | None) -> Path | None:
    """Where the run to resume keeps its tokenizer: its original may have moved."""
    if resume is None:
        return None
    from tercet.train.run_folder import locate

    return locate(loaded.config.run, resume) / "tokenizer.json"


def _resumed_config(resume: str | None, folder: str | None) -> Path | None:
    """The config.toml of the run to resume, so that its options need not be repeated."""
    from tercet.train.manifest import run_of

    run = run_of(Path(resume)) if resume and resume != "auto" else Path(folder) if resume and folder else None
    return run / "config.toml" if run and (run / "config.toml").is_file() else None


def _no_configuration(resume: str | None, folder: str | None) -> str:
    """The error when there is no preset, no file, and no run to resume that has a config.toml."""
    start = f"`{hints.train_preset(run_dir=folder)}` (`{hints.tercet('presets')}` lists the presets)"
    if resume is None and folder is not None and (Path(folder) / "config.toml").is_file():
        return f"{folder} already holds a run: resume it with {hints.resume(folder)}"
    if resume is None:
        return f"no configuration given: try {start}"
    where = folder if resume == "auto" else resume
    if where is None:
        return f"--resume auto needs --run.dir, a preset or a file: give the run folder, or start a run with {start}"
    why = "has no config.toml" if Path(where).exists() else "does not exist"
    return f"--resume {resume}: there is no run to resume at {where}, which {why}: start one with {start}"


def _overview() -> str:
    commands = [(name, about) for name, (_, about) in FUNCTIONS.items()]
    commands += [(f"{name} …", about) for name, (_, about) in GROUPS.items()]
    return OVERVIEW.format(others="".join(f"  {name:<15}  {about}\n" for name, about in commands))


def _near(wrong: str, among: Iterable[str]) -> str:
    from tercet.config.keys import suggestion

    return suggestion(wrong, among) or f"one of {', '.join(among)}"
