"""What is said of a command line that could not be read: the option, what it was given, what it takes, the mend.

tyro has refused by then; its words name Python's types and functions (`invalid literal for int() with base 10`). Here
the arguments are gone through again, with the types that the options have.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from tercet.config.keys import all_keys, fields_of, is_table, suggestion
from tercet.config.load import as_none

_FLAG = re.compile(r"--[A-Za-z]")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Option:
    """What a flag takes, and what it has where it is not given."""

    annotation: Any
    default: Any
    or_none: bool = False  # whether `none` may be said
    required: bool = False
    repeated: bool = False  # a list with one value each time that the flag is given


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """The options that a function's signature makes, those of its tables by their dotted names."""
    hints, marked = typing.get_type_hints(function), typing.get_type_hints(function, include_extras=True)
    found: dict[str, Option] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        found |= _spread(name, hints[name], parameter.default)
        if name in found:
            found[name] = dataclasses.replace(
                found[name],
                required=parameter.default is inspect.Parameter.empty,
                repeated=tyro.conf.UseAppendAction in getattr(marked[name], "__metadata__", ()),
            )
    return found


def options_with_keys(own: type, values: Mapping[str, Any]) -> dict[str, Option]:
    """Every key of the configuration, with the values of a preset or a file, and the fields of the dataclass `own`."""
    keys = {
        path: Option(key.annotation, values.get(path, key.default), or_none=as_none(path, "none") is None)
        for path, key in all_keys().items()
    }
    hints = typing.get_type_hints(own)
    return keys | {f.name: Option(hints[f.name], f.default) for f in dataclasses.fields(own)}


def _spread(name: str, annotation: Any, default: Any) -> dict[str, Option]:
    if not is_table(annotation):
        return {name: Option(annotation, default)}
    fields = fields_of(annotation).items()
    return {k: v for leaf, (kind, _, value) in fields for k, v in _spread(f"{name}.{leaf}", kind, value).items()}


def complaint(arguments: Sequence[str], options: Mapping[str, Option], *, prog: str, loose: bool = False) -> str | None:
    """The first thing that is wrong with `arguments`, in one line; None if it is nothing that is known here.

    loose: there may be words that belong to no flag, which is how options that must be given are said.
    """
    given, free = set(), 0
    for words in _flags_with_values(arguments):
        flag, values = words[0], words[1:]
        if not _FLAG.match(flag):
            if not loose:
                return _stray(flag)
            free += 1
            continue
        name = flag[2:].replace("-", "_")
        positive = re.sub(r"(^|\.)no_(?=[^.]+$)", r"\1", name)
        if name not in options and positive in options and options[positive].annotation is bool:
            name = positive
        if name not in options:
            near = re.sub(r"(?<=mean )|(?<= or )", "--", suggestion(name, options))
            return f"unknown option {flag}: {near or '--help lists all options'}"
        said = _about(flag, values, options[name], name, loose)
        if said is not None:
            return said
        given.add(name)
        free += len(values) - _taken(options[name], len(values))
    return _missing(given, free, options, prog, loose)


def _taken(option: Option, behind: int) -> int:
    """How many of the words behind its flag are the option's own."""
    kind = _without_none(option.annotation)
    many = None if option.repeated else _many(kind)
    most = 0 if kind is bool else 1 if many is None else behind if many.count is None else many.count
    return min(most, behind)


def _missing(given: set[str], free: int, options: Mapping[str, Option], prog: str, loose: bool) -> str | None:
    """Of options that must be given: the words that belong to no flag are the first of them, where such are taken."""
    needed = [name for name, o in options.items() if o.required]
    if loose:
        needed = [name for name in needed if (many := _many(options[name].annotation)) is None or many.count]
        shown, lacking = [name.upper() for name in needed], [name.upper() for name in needed[free:]]
    else:
        shown = [f"--{name} {name.upper()}" for name in needed]
        lacking = [f"--{name}" for name in needed if name not in given]
    if not lacking:
        return None
    what = "it is" if len(lacking) == 1 else "they are"
    return f"{prog} lacks {' and '.join(lacking)}: write {' '.join([prog, *shown])}; --help tells what {what}"


def _flags_with_values(arguments: Sequence[str]) -> list[list[str]]:
    """Each flag with the words behind it; words before the first flag stand alone."""
    found: list[list[str]] = []
    for argument in arguments:
        if _FLAG.match(argument):
            flag, given, value = argument.partition("=")
            found.append([flag, value] if given else [flag])
        elif found and _FLAG.match(found[-1][0]):
            found[-1].append(argument)
        else:
            found.append([argument])
    return found


def _about(flag: str, values: list[str], option: Option, name: str, loose: bool) -> str | None:
    kind = _without_none(option.annotation)
    such = _such_as(option.default) + ", or none" * option.or_none
    shown = " ".join([flag, *(value or "''" for value in values)])
    if kind is bool:
        return _about_switch(shown, flag, values, name, loose)
    many = _many(kind)
    if many is not None and option.repeated:
        kind, many = many.of, None
    if many is None:
        if not values:
            return f"{flag} lacks its value: give {_rule(kind)}{such}"
        empty = _empty(values[0], option)
        if not empty and (said := _wrong(f"{flag} {values[0] or repr('')}", values[0], kind, such)):
            return said
        return None if loose or len(values) == 1 else _stray(values[1])
    if len(values) == 1 and _empty(values[0], option):
        return None
    if many.count not in (None, len(values)):
        return f"{shown}: {many.count} values are needed, not {len(values)}: give them{such}"
    return next((said for value in values if (said := _wrong(shown, value, many.of, such, several=True))), None)


def _empty(value: str, option: Option) -> bool:
    """Whether it says that there is none, of an option that may have none."""
    may = type(None) in typing.get_args(option.annotation)
    return may and (value == "None" or (value == "none" and option.or_none))


def _about_switch(shown: str, flag: str, values: list[str], name: str, loose: bool) -> str | None:
    if not values or (loose and values[0].lower() not in (*_TRUE, *_FALSE)):
        return None  # words behind a switch may be what the command works on
    table, dot, leaf = name.rpartition(".")
    both = [f"--{name}", f"--{table}{dot}no_{leaf}"]
    given = both[flag[2:].replace("-", "_") != name]
    word = values[0].lower()
    meant = [given] if word in _TRUE else [f for f in both if f != given] if word in _FALSE else both
    return f"{shown}: a switch takes no value: say {' or '.join(meant)} alone"


def _stray(word: str) -> str:
    return f"{word} belongs to no option: options begin with --, and --help lists them"


@dataclass(frozen=True)
class _Many:
    of: Any
    count: int | None


def _many(kind: Any) -> _Many | None:
    """Of a list, or of a value that may also be one."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next((found for part in typing.get_args(kind) if (found := _many(part))), None)
    if typing.get_origin(kind) not in (tuple, list):
        return None
    parts = typing.get_args(kind)
    return _Many(parts[0], None if len(parts) == 1 or parts[-1] is Ellipsis else len(parts))


def _wrong(shown: str, value: str, kind: Any, such: str, *, several: bool = False) -> str | None:
    if _accepts(kind, value):
        return None
    what = f"{shown}: {value or repr('')}" if several else shown
    if typing.get_origin(kind) is Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        return f"{what} is unknown: pick {'of' if several else 'one of'} {', '.join(choices)}"
    number = "whole number" if kind is int else "number"
    whole = _as_whole(value) if kind is int else None
    mend = f"write {whole}" if whole is not None else f"give {f'{number}s' if several else 'one'}{such}"
    return f"{what} is no {number}: {mend}"


def _accepts(kind: Any, value: str) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in [str(choice) for choice in typing.get_args(kind)]
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            return False
    return True  # text, or of a kind that is not known here: not for this page to refuse


def _as_whole(value: str) -> int | None:
    """1e6 and 1,000 are numbers to people."""
    try:
        number = float(value.replace(",", ""))
        return int(number) if number == int(number) else None
    except (ValueError, OverflowError):
        return None


def _rule(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    return {int: "a whole number", float: "a number"}.get(kind, "one")


def _without_none(annotation: Any) -> Any:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation


def _such_as(default: Any) -> str:
    if isinstance(default, (tuple, list)):
        default = " ".join(map(str, default))
    return f", such as {default}" if isinstance(default, (int, float, str)) and default != "" else ""
