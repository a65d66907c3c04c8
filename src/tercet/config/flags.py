"""The command line: options from the configuration keys and from function signatures, and their help texts.

`-` and `_` are interchangeable, and so are `--flag value` and `--flag=value`. Values of a list are separated by spaces
or commas. A switch has an opposite, `--no_graph` or `--log.no_tensorboard`. Of a flag given twice the last one counts,
unless it may be repeated. Values are checked where those of files are, by pydantic.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from tercet.config.keys import Key, all_keys, is_table, keys_of, nest, suggestion
from tercet.config.load import FLAG, ConfigError, explain, preset_names
from tercet.config.retired import RETIRED
from tercet.config.schema import RunConfig, check_storable

T = TypeVar("T")

# What earlier scripts and other trainers call our flags; guessing by spelling would mislead here.
OTHER_NAMES = {
    "dataset": "--data.source (synthetic, python-source, fineweb-edu, or your own files)",
    "precision": "--train.precision bf16|fp32",
    "steps": "--train.steps (optimizer updates)",
    "seq_len": "--data.seq_len",
    "batch_size": "--train.micro_batch (sequences per pass) with --train.tokens_per_step",
    "accum_batches": "--train.tokens_per_step (accumulation is derived from it)",
    "no_gc": "--train.activation_checkpointing none",
    "ddp": "--parallel.strategy ddp",
    "learning_rate": "--train.lr",
    **dict.fromkeys(("max_steps", "max_iters", "num_steps"), "--train.steps (optimizer updates)"),
    **dict.fromkeys(
        ("epochs", "num_train_epochs"), "--train.steps: one epoch is the tokens of the data / --train.tokens_per_step"
    ),
    "block_size": "--data.seq_len (of attention: --model.nsa.select_block)",
    **dict.fromkeys(("context_length", "max_seq_len"), "--data.seq_len"),
    "gradient_accumulation_steps": "--train.tokens_per_step (accumulation is derived from it)",
    "grad_clip": "--train.clip",
    **dict.fromkeys(("out_dir", "output_dir", "checkpoint_dir"), "--run.dir"),
    "n_layer": "--model.layers",
    "n_head": "--model.heads",
    **dict.fromkeys(("n_embd", "hidden_size"), "--model.dim"),
}
# What `tercet train --help` shows besides the command's own options.
COMMON_KEYS = (
    "run.dir", "data.source", "data.path", "data.seq_len", "train.steps", "train.lr", "train.micro_batch",
)  # fmt: skip
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_MAX_LEFT = 36  # longer flags have their text on the next line


@dataclass(frozen=True)
class Arg:
    """Metadata of a function parameter: `run: Annotated[Path, Arg("A run folder.")]`."""

    help: str = ""
    repeat: bool = False  # one value per flag; the flag may be given several times


def key_options(values: Mapping[str, Any]) -> dict[str, Key]:
    """The configuration keys that are flags: all but tables in lists. `values` replace the schema's defaults."""
    return {name: replace(k, default=values.get(name, k.default)) for name, k in all_keys().items() if k.kinds}


def function_options(function: Callable[..., Any], *, positional: bool = False) -> dict[str, Key]:
    """The parameters of a function, but those without a type; those of a table parameter have dotted names.

    positional: parameters without a default are positional arguments.
    """
    section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.M)[1:]
    texts = dict(zip(entries[::2], (" ".join(text.split()) for text in entries[1::2]), strict=True))
    hints, marked = typing.get_type_hints(function), typing.get_type_hints(function, include_extras=True)
    found: dict[str, Key] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Any:
            continue
        arg = next((a for a in getattr(marked[name], "__metadata__", ()) if isinstance(a, Arg)), Arg())
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        if is_table(hints[name]):
            found |= {key.name: key for key in keys_of(hints[name], f"{name}.", default) if key.kinds}
            continue
        about = texts.get(name, arg.help)
        found[name] = Key(name, hints[name], about, default, required, positional and required, arg.repeat)
    return found


def call(function: Callable[..., T], arguments: Sequence[str], *, prog: str, positional: bool = False) -> T:
    """Call `function` with `arguments`. Its signature defines the options, its docstring the help."""
    options = function_options(function, positional=positional)
    return function(**bind(function, read_arguments(arguments, options, prog=prog), options))


def bind(function: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Key]) -> dict[str, Any]:
    """The values of these options, checked, as arguments of the function."""
    hints, named = typing.get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        own = {path: value for path, value in given.items() if path == name or path.startswith(f"{name}.")}
        table = is_table(hints[name])
        if not own and not table:
            continue
        values: Any = nest(own).get(name, {})
        if table and not issubclass(hints[name], BaseModel):
            values = asdict(parameter.default) | values
        try:
            check_storable(own)
            named[name] = TypeAdapter(hints[name]).validate_python(values)
        except ValidationError as error:
            raise ConfigError(explain(error, own, dict.fromkeys(own, FLAG), options, table=name)) from None
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return named


# ------------------------------------------------------------------------------------------------
# Reading


def read_arguments(arguments: Sequence[str], options: Mapping[str, Key], *, prog: str) -> dict[str, Any]:
    """The values given on the command line, by option name.

    A flag takes `=value`, and words up to the next flag. Where there are positional arguments, a switch takes only true
    and false, and a list of numbers leaves them the words that are none.
    """
    positional = [option for option in options.values() if option.positional]
    needed = sum(not option.many for option in positional)
    given: dict[str, Any] = {}
    free: list[str] = []  # positional arguments
    i = 0
    while i < len(arguments):
        flag, equals, value = arguments[i].partition("=")
        i += 1
        if arguments[i - 1] == "--":
            free += arguments[i:]
            break
        if not _is_flag(flag):
            free.append(arguments[i - 1])
            continue
        option, negated = _find(flag, options)
        words = [value] if equals else []
        follow = list(takewhile(lambda word: word != "--" and not _is_flag(word), arguments[i:]))
        taken = len(follow)
        if option.is_switch and positional and follow[:1] not in (["true"], ["false"]):
            taken = 0
        elif option.is_switch or not option.many or option.repeat:
            taken = min(1 - len(words), len(follow))
        else:
            keep = max(0, len(follow) - max(0, needed - len(free)))
            while taken > keep and not (str in option.kinds or option.accepts(follow[taken - 1])):
                taken -= 1
        i += taken
        value = _value(option, flag, [*words, *follow[:taken]], negated=negated)
        given[option.name] = (*given.get(option.name, ()), value) if option.repeat else value
    for option in positional:
        words = free if option.many else free[:1]
        free = free[len(words) :]
        if words or option.many:
            given[option.name] = _value(option, option.name.upper(), words)
    if free and "preset" in options and free[0] in preset_names():
        raise ConfigError(f"unexpected argument {free[0]}: did you mean --preset {free[0]}?")
    if free:
        rule = "" if positional else "options start with --; "
        raise ConfigError(f"unexpected argument {free[0]}: {rule}`{prog} --help` lists the options")
    required = {o.name: o.name.upper() if o.positional else f"--{o.name}" for o in options.values() if o.required}
    if missing := [shown for name, shown in required.items() if name not in given]:
        usage = " ".join(s if s == n.upper() else f"{s} {n.upper()}" for n, s in required.items())
        raise ConfigError(f"{prog} needs {' and '.join(missing)}: write {prog} {usage} (see {prog} --help)")
    return given


def _value(option: Key, flag: str, words: Sequence[str], *, negated: bool = False) -> Any:
    """The value of the words behind a flag."""
    if option.is_switch and not words:
        return not negated
    if negated:
        raise ConfigError(f"{flag} {words[0] or repr('')}: {option.negative} takes no value")
    if words in (["None"], ["none"]) and (option.takes_none() or (option.optional and words == ["None"])):
        return None
    if option.name == "data.separator":  # TOML has these escapes; shells leave them as they are
        escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
        words = [re.sub(r"\\([ntr\\])", lambda found: escapes[found[1]], word) for word in words]
    values = [option.convert(part) for word in words for part in option.parts(word)]
    one = not option.many or option.repeat
    if not values and (one or option.one_for_all):
        raise ConfigError(f"{flag} needs a value: it {option.expected(entry=option.repeat)}")
    return values[0] if one or (option.one_for_all and len(values) == 1) else tuple(values)


def _is_flag(word: str) -> bool:
    return word.startswith("--") and word[2:3].isascii() and word[2:3].isalpha()


def help_topic(arguments: Sequence[str]) -> str | None:
    """The word after --help, "" if there is none, and None if no help was asked for."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return None
        if argument in ("-h", "--help") or argument.startswith("--help="):
            following = next(iter(arguments[i + 1 : i + 2]), "")
            return argument.partition("=")[2] or ("" if following.startswith("-") else following)
    return None


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """The value of `--name` before parsing: the preset and the file are needed first, for defaults."""
    found = None
    for i, argument in enumerate(arguments):
        if argument == f"--{name}" and i + 1 < len(arguments):
            found = arguments[i + 1]
        elif argument.startswith(f"--{name}="):
            found = argument.partition("=")[2]
    return found


def _find(flag: str, options: Mapping[str, Key]) -> tuple[Key, bool]:
    """The option of a flag, and whether the flag turns it off."""
    name = flag[2:].replace("-", "_")
    if name in options and not options[name].positional:
        return options[name], False
    table, dot, leaf = name.rpartition(".")
    switch = options.get(f"{table}{dot}{leaf.removeprefix('no_')}")
    if switch and leaf.startswith("no_") and switch.is_switch:
        return switch, True
    if name in options:
        raise ConfigError(f"{flag}: {name.upper()} is a positional argument: write it without --{name}")
    if "train.lr" in options:  # a configuration command
        if name in RETIRED:
            raise ConfigError(f"{flag} is not an option since {RETIRED[name].since}: {RETIRED[name].meaning}")
        if name in all_keys():
            raise ConfigError(f"{name} is a table and has no flag: set it in a file given with --config")
        if leaf in OTHER_NAMES:
            raise ConfigError(f"unknown option {flag}: use {OTHER_NAMES[leaf]}")
    near = suggestion(name, [n for n, option in options.items() if not option.positional], mark="--")
    raise ConfigError(f"unknown option {flag}: {near or '--help lists all options'}")


# ------------------------------------------------------------------------------------------------
# Help


def config_help(topic: str, own: Mapping[str, Key], keys: Mapping[str, Key], *, prog: str, about: str) -> str:
    """Help of a command that takes a configuration.

    topic: "" for the common options, "all", a section, a key, or a word to find keys by. own: the command's options.
    """
    if not topic:
        common = [*own.values(), *(keys[name] for name in COMMON_KEYS)]
        sections = ", ".join(RunConfig.model_fields)
        return "\n".join([
            _usage(f"{prog} [options]", about), "Common options:", *_rows(common, brief=True), "",
            *_wrap("Every configuration key is an option: --SECTION.KEY VALUE. To find one:"),
            f"  {prog} --help WORD", f"  {prog} --help SECTION", *_wrap(f"Sections: {sections}", indent=2),
            f"  {prog} --help all",
        ])  # fmt: skip
    tables, everything = table_names(keys), topic == "all"
    shown = [name for name in tables if everything or f"{name}.".startswith(f"{topic}.")]
    if not shown:
        return "\n".join(_rows(_matching(topic, {**own, **keys}, tables)))
    lines = (
        [_usage(f"{prog} [options]", about), "Command options:", *_rows(own.values(), brief=True)] if everything else []
    )
    for table in shown:
        members = [option for name, option in keys.items() if name.rpartition(".")[0] == table]
        lines += ["", *_wrap(f"{table}: {about_table(table)}"), *_rows(members, brief=everything)]
    return "\n".join(lines).strip("\n")


def _matching(word: str, options: Mapping[str, Key], tables: Iterable[str]) -> list[Key]:
    """The option of this name, those whose last part it is or whose name contains it, or whose text does."""
    name = word.lstrip("-").replace("-", "_").lower()
    if name in options:
        return [options[name]]
    named = [option for key, option in options.items() if name in key]
    named.sort(key=lambda option: option.name.rpartition(".")[2] != name)
    found = named or [option for option in options.values() if word.lower() in option.about.lower()]
    if not found or not name:
        near = suggestion(word, [*tables, *options]) or f"give a key, or one of all, {', '.join(tables)}"
        raise ConfigError(f"--help {word}: no option has this in its name or description: {near}")
    return found


def function_help(function: Callable[..., Any], *, prog: str, positional: bool = False) -> str:
    """Help of a command that is a function; the parameters as in `call`."""
    options = function_options(function, positional=positional).values()
    operands, flags = ([option for option in options if option.positional == kind] for kind in (True, False))
    usage = " ".join([prog, *map(_left, operands), *["[options]"] * bool(flags)])
    lines = [_usage(usage, function.__doc__ or "")]
    lines += ["Arguments:", *_rows(operands), ""] if operands else []
    return "\n".join([*lines, *(["Options:", *_rows(flags)] if flags else [])]).rstrip("\n")


def _usage(usage: str, about: str) -> str:
    about = inspect.cleandoc(about).partition("\nArgs:\n")[0]
    paragraphs = ["\n".join(_wrap(" ".join(text.split()))) for text in about.split("\n\n") if text]
    return "\n\n".join([f"usage: {usage}", *paragraphs]) + "\n"


def _rows(options: Iterable[Key], *, brief: bool = False) -> list[str]:
    """Two columns. brief: each help text up to its first full stop or semicolon."""
    rows = [(_left(option), _right(option, brief=brief)) for option in options]
    column = max((len(left) for left, _ in rows if len(left) <= _MAX_LEFT), default=0) + 4
    lines: list[str] = []
    for left, right in rows:
        texts = textwrap.wrap(right, max(20, _width() - column), break_on_hyphens=False) or [""]
        if len(left) > column - 4:
            lines.append(f"  {left}")
            left = ""
        lines += [f"{f'  {left}' * (text is texts[0]):{column}}{text}".rstrip() for text in texts]
    return lines


def _left(option: Key) -> str:
    if option.positional:
        return option.name.upper() + " ..." * option.many
    if option.is_switch:
        return option.negative.replace("no_", "[no_]", 1)
    name = "|".join(option.choices) if _short(option) else _METAVARS.get(option.kinds[0], "NAME")
    count = 1 if option.repeat else option.count
    return " ".join([f"--{option.name}", *[name] * (count or 1)]) + " ..." * (count is None)


def _right(option: Key, *, brief: bool) -> str:
    text, notes, value = " ".join(option.about.split()), [], option.default
    if brief:
        text = re.split(r"[.;](?: |$)", text)[0]
    elif option.choices and not option.is_switch and not _short(option):
        notes.append(f"one of {', '.join(option.choices)}")
    if option.repeat:
        notes.append("can be repeated")
    if option.required and not option.positional:
        notes.append("required")
    elif value not in (None, "", ()):
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
        notes.append(f"default: {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else word}")
    return f"{text} ({'; '.join(notes)})".strip() if notes else text


def _short(option: Key) -> bool:
    return bool(option.choices) and len("|".join(option.choices)) <= 22


def table_names(keys: Iterable[str]) -> list[str]:
    """Sections and tables inside them, in the order of the schema: model, model.nsa, data, …"""
    order = list(RunConfig.model_fields)
    tables = {name.rpartition(".")[0] for name in keys}
    return sorted(tables, key=lambda table: (order.index(table.partition(".")[0]), table))


def about_table(path: str) -> str:
    table: Any = RunConfig
    for name in path.split("."):
        table = typing.get_type_hints(table)[name]
    return inspect.cleandoc(table.__doc__ or "").partition("\n")[0]


def _wrap(text: str, indent: int = 0) -> list[str]:
    later = " " * (indent + 2 * bool(indent))
    return textwrap.wrap(text, _width(), initial_indent=" " * indent, subsequent_indent=later)


def _width() -> int:
    return min(200, max(60, shutil.get_terminal_size((100, 24)).columns))
