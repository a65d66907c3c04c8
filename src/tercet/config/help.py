"""Help texts of the command line, as plain aligned columns wrapped to the terminal's width."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tercet.config.flags import Option, command_options, function_options, key_options
from tercet.config.keys import suggestion
from tercet.config.load import ConfigError
from tercet.config.schema import RunConfig

# What `tercet train --help` shows besides the command's own options.
COMMON_KEYS = (
    "run.dir", "data.source", "data.path", "data.seq_len", "train.steps", "train.lr", "train.micro_batch",
)  # fmt: skip
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_MAX_LEFT = 36  # longer flags have their text on the next line


def config_help(topic: str, options: type, values: Mapping[str, Any], *, prog: str, about: str) -> str:
    """Help of a command that takes a configuration.

    topic: "" for the common options, "all", a section, a key, or a word to find keys by. values: those of the preset
    and the file.
    """
    own, keys = command_options(options), key_options(values)
    tables = table_names(keys)
    width = _width()
    if not topic:
        common = [*own.values(), *(keys[name] for name in COMMON_KEYS)]
        sections = ", ".join(RunConfig.model_fields)
        return "\n".join(
            [
                _usage(prog, about, width),
                "Common options:",
                *_rows(common, width, brief=True),
                "",
                *_wrap("Every configuration key is an option: --SECTION.KEY VALUE. To find one:", width),
                f"  {prog} --help WORD",
                f"  {prog} --help SECTION",
                *_wrap(f"Sections: {sections}", width, indent=2),
                f"  {prog} --help all",
            ]
        )
    everything = topic == "all"
    shown = [name for name in tables if everything or f"{name}.".startswith(f"{topic}.")]
    if not shown:
        return "\n".join(_rows(_matching(topic, own | keys, tables), width))
    lines = [_usage(prog, about, width), "Command options:"] if everything else []
    lines += _rows(own.values(), width, brief=True) if everything else []
    for table in shown:
        members = [option for name, option in keys.items() if name.rpartition(".")[0] == table]
        lines += ["", *_wrap(f"{table}: {about_table(table)}", width), *_rows(members, width, brief=everything)]
    return "\n".join(lines).strip("\n")


def _matching(word: str, options: Mapping[str, Option], tables: Iterable[str]) -> list[Option]:
    """The option of this name, those whose last part it is or whose name contains it, or whose text does."""
    name = word.lstrip("-").replace("-", "_").lower()
    if name in options:
        return [options[name]]
    named = [option for key, option in options.items() if name in key]
    named.sort(key=lambda option: option.name.rpartition(".")[2] != name)
    found = named or [option for option in options.values() if word.lower() in option.help.lower()]
    if not found or not name:
        near = suggestion(word, [*tables, *options]) or f"give a key, or one of all, {', '.join(tables)}"
        raise ConfigError(f"--help {word}: no option has this in its name or description: {near}")
    return found


def function_help(function: Callable[..., Any], *, prog: str, positional: bool = False) -> str:
    """Help of a command that is a function; the parameters as in flags.call."""
    width = _width()
    options = function_options(function, positional=positional)
    about = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0]
    operands = [option for option in options.values() if option.positional]
    flags = [option for option in options.values() if not option.positional]
    names = [option.name.upper() + " ..." * (option.type.count is None) for option in operands]
    lines = [_usage(" ".join([prog, *names]), about, width)]
    if operands:
        lines += ["Arguments:", *_rows(operands, width), ""]
    lines += ["Options:", *_rows(flags, width)] if flags else []
    return "\n".join(lines).rstrip("\n")


def _usage(prog: str, about: str, width: int) -> str:
    paragraphs = [_wrap(" ".join(text.split()), width) for text in about.split("\n\n")]
    return "\n\n".join([f"usage: {prog} [options]", *("\n".join(lines) for lines in paragraphs if lines)]) + "\n"


def _rows(options: Iterable[Option], width: int, *, brief: bool = False) -> list[str]:
    """Two columns. brief: each help text up to its first full stop or semicolon."""
    rows = [(_left(option), _right(option, brief=brief)) for option in options]
    column = max((len(left) for left, _ in rows if len(left) <= _MAX_LEFT), default=0) + 4
    lines: list[str] = []
    for left, right in rows:
        texts = textwrap.wrap(right, max(20, width - column), break_on_hyphens=False) or [""]
        if len(left) > column - 4:
            lines.append(f"  {left}")
            lines += [f"{'':{column}}{text}" for text in texts]
        else:
            lines.append(f"{f'  {left}':{column}}{texts[0]}".rstrip())
            lines += [f"{'':{column}}{text}" for text in texts[1:]]
    return lines


def _left(option: Option) -> str:
    kind = option.type
    if option.positional:
        return option.name.upper() + " ..." * (kind.count is None)
    if kind.is_switch:
        table, dot, leaf = option.name.rpartition(".")
        return f"--{table}{dot}[no_]{leaf}"
    name = "|".join(kind.choices) if _short(kind.choices) else _METAVARS.get(kind.item, "NAME")
    count = 1 if option.repeat else kind.count
    return " ".join([option.flag, *[name] * (count or 1)]) + " ..." * (count is None)


def _right(option: Option, *, brief: bool) -> str:
    text = " ".join(option.help.split())
    if brief:
        text = re.split(r"[.;](?: |$)", text)[0]
    notes = []
    if option.type.choices and not _short(option.type.choices) and not brief:
        notes.append(f"one of {', '.join(option.type.choices)}")
    if option.repeat:
        notes.append("can be repeated")
    if option.required:
        notes += [] if option.positional else ["required"]
    elif option.default not in (None, "", ()):
        notes.append(f"default: {_shown(option.default)}")
    return f"{text} ({'; '.join(notes)})".strip() if notes else text


def _short(choices: tuple[str, ...]) -> bool:
    return bool(choices) and len("|".join(choices)) <= 22


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def table_names(keys: Iterable[str]) -> list[str]:
    """Sections and tables inside them, in the order of the schema: model, model.nsa, data, …"""
    tables = dict.fromkeys(name.rpartition(".")[0] for name in keys)
    order = list(RunConfig.model_fields)
    return sorted(tables, key=lambda table: (order.index(table.partition(".")[0]), table))


def about_table(path: str) -> str:
    table: Any = RunConfig
    for name in path.split("."):
        table = typing.get_type_hints(table)[name]
    return inspect.cleandoc(table.__doc__ or "").partition("\n")[0]


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2 * bool(indent)))


def _width() -> int:
    return min(200, max(60, shutil.get_terminal_size((100, 24)).columns))
