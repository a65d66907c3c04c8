"""The command line: argparse parsers built from the configuration keys and from function signatures.

`-` and `_` are interchangeable. Values of a list are separated by spaces or commas. A switch has an opposite,
`--no_graph` or `--log.no_tensorboard`. pydantic checks and converts the values, like those of a file.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from tercet.config.keys import Key, all_keys, is_table, keys_of, nest, suggestion
from tercet.config.load import FLAG, ConfigError, as_none, explain, preset_names
from tercet.config.retired import RETIRED
from tercet.config.schema import RunConfig, check_storable

T = TypeVar("T")

# What other trainers call our keys, where guessing by spelling would mislead.
OTHER_NAMES = {
    **dict.fromkeys(("max_steps", "max_iters", "num_steps", "epochs", "num_train_epochs"), "train.steps"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_len"), "data.seq_len"),
    **dict.fromkeys(("accum_batches", "gradient_accumulation_steps"), "train.tokens_per_step"),
    **dict.fromkeys(("out_dir", "output_dir", "checkpoint_dir"), "run.dir"),
    **dict.fromkeys(("n_embd", "hidden_size"), "model.dim"),
    "dataset": "data.source", "batch_size": "train.micro_batch", "learning_rate": "train.lr", "grad_clip": "train.clip",
    "n_layer": "model.layers", "n_head": "model.heads", "no_gc": "train.activation_checkpointing",
    "ddp": "parallel.strategy",
}  # fmt: skip
# What `tercet train --help` shows besides the command's own options.
COMMON_KEYS = (
    "run.dir", "data.source", "data.path", "data.seq_len", "train.steps", "train.lr", "train.micro_batch",
)  # fmt: skip
_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH"}


@dataclass(frozen=True)
class Arg:
    """Metadata of a function parameter: `run: Annotated[Path, Arg("A run folder.")]`."""

    help: str = ""
    repeat: bool = False  # one value per flag; the flag may be given several times


class Parser(argparse.ArgumentParser):
    """A parser of these options, whose help has one group per title. brief: help texts up to their first full stop."""

    def __init__(self, prog: str, groups: Mapping[str, Iterable[Key]], *, brief: bool = False, **texts: Any) -> None:
        width = min(200, max(60, shutil.get_terminal_size((100, 24)).columns))
        super().__init__(
            prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=width), **texts,
        )  # fmt: skip
        for title, options in groups.items():
            name, _, about = title.partition(": ")
            group = self.add_argument_group(name or None, about or None)
            for option in options:
                _add(group, option, brief)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _add(group: argparse._ArgumentGroup, option: Key, brief: bool) -> None:
    """Add an option whose value is one text or a list of texts."""
    named: dict[str, Any] = {"dest": option.name, "help": _help(option, brief).replace("%", "%%")}
    if option.positional:
        group.add_argument(metavar=option.name.upper(), nargs="*" if option.many else None, **named)
        return
    flag, word = f"--{option.name}", "|".join(option.choices)
    if option.is_switch:
        word = "|".join(["true", "false", *option.choices])
    elif not word or len(word) > 22:
        word = next((_METAVARS[kind] for kind in option.types if kind in _METAVARS), "TEXT")
    if option.is_switch and "." not in option.name:
        group.add_argument(flag, action="store_const", const="true", **named)
    elif option.is_switch:
        group.add_argument(flag, nargs="?", const="true", metavar=word, **named)
    elif option.repeat:
        group.add_argument(flag, action="append", metavar=word, **named)
    else:
        group.add_argument(flag, nargs="*" if option.many else None, metavar=word, required=option.required, **named)
    if option.is_switch:
        named["help"] = argparse.SUPPRESS
        group.add_argument(option.negative, action="store_const", const="false", **named)


def _help(option: Key, brief: bool) -> str:
    """The description of an option, its choices and default. brief: only up to the first full stop or semicolon."""
    text, notes, value = " ".join(option.about.split()), [], option.default
    if brief:
        text = re.split(r"[.;](?: |$)", text)[0]
    elif len("|".join(option.choices)) > 22:
        notes.append(f"one of {', '.join(option.choices)}")
    if option.repeat:
        notes.append("can be repeated")
    if option.required and not option.positional:
        notes.append("required")
    elif value is True:
        notes.append(f"default: on; {option.negative} turns it off")
    elif value not in (None, "", ()):
        word = "off" if value is False else value
        notes.append(f"default: {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else word}")
    return f"{text} ({'; '.join(notes)})".strip() if notes else text


def key_options(values: Mapping[str, Any]) -> dict[str, Key]:
    """The configuration keys that are flags: all but tables in lists. `values` replace the schema's defaults."""
    return {name: replace(k, default=values.get(name, k.default)) for name, k in all_keys().items() if k.is_flag}


def function_options(function: Callable[..., Any], *, positional: bool = False) -> dict[str, Key]:
    """The parameters of a function, but those without a type; those of a table parameter have dotted names.

    positional: parameters without a default are positional arguments.
    """
    section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.M)[1:]
    texts = dict(zip(entries[::2], entries[1::2], strict=True))
    hints, marked = typing.get_type_hints(function), typing.get_type_hints(function, include_extras=True)
    found: dict[str, Key] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Any:
            continue
        arg = next((a for a in getattr(marked[name], "__metadata__", ()) if isinstance(a, Arg)), Arg())
        required = parameter.default is inspect.Parameter.empty
        default = None if required else parameter.default
        if is_table(hints[name]):
            found |= {key.name: key for key in keys_of(hints[name], f"{name}.", default) if key.is_flag}
            continue
        about = texts.get(name, arg.help)
        found[name] = Key(name, hints[name], about, default, required, positional and required, arg.repeat)
    return found


def call(function: Callable[..., T], arguments: Sequence[str], *, prog: str, positional: bool = False) -> T:
    """Call `function` with `arguments`. Its signature defines the options, its docstring the help."""
    given = read_arguments(arguments, function_options(function, positional=positional), prog=prog)
    return function(**bind(function, given))


def bind(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these options, checked, as arguments of the function."""
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters.values()
    named: dict[str, Any] = {p.name: {} for p in parameters if p.default is p.empty and is_table(hints[p.name])}
    named |= nest({name: as_none(name, value) for name, value in given.items()})
    for name, value in named.items():
        try:
            check_storable({name: value})
            named[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            raise ConfigError(explain(error, given, dict.fromkeys(given, FLAG), table=name)) from None
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return named


def read_arguments(arguments: Sequence[str], options: Mapping[str, Key], *, prog: str) -> dict[str, Any]:
    """The values given on the command line, as text, by option name."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = [re.sub(r"^--[a-z][\w.-]*(?==|$)", lambda flag: "--" + flag[0][2:].replace("-", "_"), word)
             for word in arguments[:end]]  # fmt: skip
    found, unknown = Parser(prog, {"": options.values()}).parse_known_intermixed_args([*words, *arguments[end:]])
    if unknown:
        raise ConfigError(_unknown(unknown[0], options, prog))
    given: dict[str, Any] = {}
    for name, option in options.items():
        if name in (values := vars(found)):
            texts = [values[name]] if isinstance(values[name], str) else values[name]
            given[name] = tuple(texts) if option.repeat else option.value(texts)
        elif option.required and option.many:
            given[name] = ()
    if "data.separator" in given:  # TOML has these escapes; shells leave them as they are
        given["data.separator"] = given["data.separator"].replace(r"\n", "\n").replace(r"\t", "\t")
    return given


def _unknown(word: str, options: Mapping[str, Key], prog: str) -> str:
    """The error for a word that is not an option, with the closest ones."""
    flag = word.partition("=")[0]
    name = flag[2:]
    if not flag.startswith("--"):
        preset = f"did you mean --preset {word}?" if "preset" in options and word in preset_names() else ""
        return f"unexpected argument {word}: {preset or f'`{prog} --help` lists the options'}"
    if "train.lr" in options:  # a configuration command
        if name in RETIRED:
            return f"{flag} is not an option since {RETIRED[name].since}: {RETIRED[name].meaning}"
        if name in all_keys():
            return f"{name} is a table and has no flag: set it in a file given with --config"
        if other := OTHER_NAMES.get(name.rpartition(".")[2]):
            return f"unknown option {flag}: use --{other}"
    near = suggestion(name, [n for n, option in options.items() if not option.positional], mark="--")
    return f"unknown option {flag}: {near or '--help lists all options'}"


def help_topic(arguments: Sequence[str]) -> str | None:
    """The word after --help, "" if there is none, and None if no help was asked for."""
    for i, argument in enumerate(arguments):
        if argument == "--":
            return None
        if argument in ("-h", "--help") or argument.startswith("--help="):
            following = next(iter(arguments[i + 1 : i + 2]), "")
            return argument.partition("=")[2] or ("" if following.startswith("-") else following)
    return None


def config_help(topic: str, own: Mapping[str, Key], keys: Mapping[str, Key], *, prog: str, about: str) -> str:
    """Help of a command that takes a configuration.

    topic: "" for the common options, "all", a section, a key, or a word to find keys by. own: the command's options.
    """
    if not topic:
        common = {"common options": [*own.values(), *(keys[name] for name in COMMON_KEYS)]}
        more = (
            f"Every configuration key is an option: --SECTION.KEY VALUE. To find one: {prog} --help WORD, or --help "
            f"SECTION, or --help all. Sections: {', '.join(RunConfig.model_fields)}."
        )
        return _page(prog, "[options]", about, common, brief=True, epilog=more)
    tables, everything = table_names(keys), topic == "all"
    groups = {
        f"{table}: {about_table(table)}": [key for name, key in keys.items() if name.rpartition(".")[0] == table]
        for table in tables
        if everything or f"{table}.".startswith(f"{topic}.")
    }
    if everything:
        return _page(prog, "[options]", about, {"command options": [*own.values()], **groups}, brief=True)
    if not groups:
        groups = {"": _matching(topic, {**own, **keys}, tables)}
    return Parser(prog, groups, usage=argparse.SUPPRESS).format_help().strip("\n")


def function_help(function: Callable[..., Any], *, prog: str, positional: bool = False) -> str:
    """Help of a command that is a function; the parameters as in `call`."""
    options = function_options(function, positional=positional).values()
    operands = [option for option in options if option.positional]
    usage = " ".join(option.name.upper() + " ..." * option.many for option in operands)
    flags = [option for option in options if not option.positional]
    return _page(prog, f"{usage} [options]".strip(), function.__doc__, {"arguments": operands, "options": flags})


def _page(
    prog: str, usage: str, about: str | None, groups: Mapping[str, list[Key]], *, brief: bool = False, epilog: str = ""
) -> str:
    description = inspect.cleandoc(about or "").partition("\nArgs:\n")[0]
    texts = {"usage": f"{prog} {usage}", "description": description.replace("%", "%%"), "epilog": epilog}
    return Parser(prog, groups, brief=brief, **texts).format_help().rstrip("\n")


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
