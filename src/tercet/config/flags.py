"""Flags for every key of the configuration: `--train.lr 1e-3`. Parsing and help texts are tyro's.

tyro fills plain dataclasses that mirror the configuration, whose defaults are the values of the chosen preset
and file (so that `--help` shows what would really run). Only what was given on the command line is handed on:
the one place where values are checked is the configuration itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import tyro

from tercet.config.keys import Key, all_keys, docstrings, suggestion
from tercet.config.load import ConfigError, as_none, in_our_words
from tercet.config.misread import complaint, options_of, options_with_keys
from tercet.config.schema import RunConfig

T = TypeVar("T")

# The flags of the scripts that came before; each gets its answer instead of a guess by spelling.
FORMER_FLAGS = {
    "dataset": "--data.source (synthetic, python-source, fineweb-edu, or files of your own)",
    "precision": "--train.precision bf16|fp32",
    "steps": "--train.steps (optimizer updates)",
    "seq_len": "--data.seq_len",
    "batch_size": "--train.micro_batch (sequences per pass) with --train.tokens_per_step",
    "accum_batches": "--train.tokens_per_step (accumulation is derived from it)",
    "no_gc": "--train.activation_checkpointing none",
    "ddp": "--parallel.strategy ddp",
}


@dataclass(frozen=True)
class Parsed:
    """Options of the command itself by name, and the configuration's keys that were given."""

    options: Any
    overrides: dict[str, Any]


def parse(arguments: Sequence[str], *, options: type, values: Mapping[str, Any], prog: str, description: str) -> Parsed:
    """Read `arguments` as options of a command (fields of the dataclass `options`) and as keys.

    values: what help shows as a key's default, for keys that a preset or a file set.
    """
    own = {f.name for f in dataclasses.fields(options)}
    given = given_flags(arguments)
    for written, name in given:
        _check_known(written, name, own)
    mirrored = _mirror(options, values)
    result = _read(
        mirrored,
        _empty_as_tyro_writes_it(arguments),
        prog=prog,
        description=description,
        complain=lambda: complaint(arguments, options_with_keys(options, values), prog=prog),
    )
    overrides = {}
    for _, name in given:
        path = _positive(name)
        if path in all_keys():
            node: Any = result
            for part in path.split("."):
                node = getattr(node, part)
            overrides[path] = node
    return Parsed(result, overrides)


def call(function: Callable[..., T], arguments: Sequence[str], *, prog: str, positional: bool = False) -> T:
    """Call `function` with what `arguments` say: its signature is its options, its docstring their help.

    positional: parameters without a default are given without a flag.
    """

    # Put off, so that the function runs outside of tyro, and what it says on stderr passes through.
    @functools.wraps(function)
    def put_off(*given: Any, **named: Any) -> Callable[[], T]:
        return functools.partial(function, *given, **named)

    markers = (tyro.conf.PositionalRequiredArgs,) if positional else ()
    return _read(
        put_off,
        arguments,
        prog=prog,
        markers=markers,
        complain=lambda: complaint(arguments, options_of(function), prog=prog, loose=positional),
    )()


def _read(
    target: Callable[..., T],
    arguments: Sequence[str],
    *,
    prog: str,
    complain: Callable[[], str | None],
    description: str | None = None,
    markers: Sequence[Any] = (),
) -> T:
    """tyro, whose errors come in boxes: here each is one line, that of `complain` if it finds what is wrong."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                target,
                args=list(arguments),
                prog=prog,
                description=description,
                use_underscores=True,
                config=markers,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(complain() or _in_one_line(said.getvalue(), prog)) from None


def _empty_as_tyro_writes_it(arguments: Sequence[str]) -> list[str]:
    """`--run.threads none`, as files and the documentation have it; tyro knows None alone."""
    found, name = [], ""
    for argument in arguments:
        flag, given, value = argument.partition("=")
        if re.match(r"--[A-Za-z]", flag):
            name = flag[2:].replace("-", "_")
            empty = given and value == "none" and as_none(name, value) is None
            found.append(f"{flag}=None" if empty else argument)
        else:
            found.append("None" if argument == "none" and as_none(name, argument) is None else argument)
            name = ""
    return found


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """What `--name` was given, before anything is parsed: the preset must be known to show its help."""
    found = None
    for i, argument in enumerate(arguments):
        if argument == f"--{name}" and i + 1 < len(arguments):
            found = arguments[i + 1]
        elif argument.startswith(f"--{name}="):
            found = argument.partition("=")[2]
    return found


def given_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(as written, as a key) of everything that looks like a flag."""
    flags = [a.partition("=")[0] for a in arguments if re.match(r"--[A-Za-z]", a)]
    return [(flag, flag[2:].replace("-", "_")) for flag in flags]


def _in_one_line(box: str, prog: str) -> str:
    """tyro's box: a title, what is wrong, and perhaps options that are spelt alike."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │╭╮╰╯") for line in box.splitlines()]
    paragraphs: list[list[str]] = [[]]
    for line in lines[1:]:
        if set(line) <= {"─", "-"}:  # where the terminal knows ASCII only, the frame is of hyphens
            paragraphs += [[]] if paragraphs[-1] else []
        else:
            paragraphs[-1].append(line)
    said = " ".join(paragraphs[0]).removeprefix("Error parsing ")
    # What a section says is framed by pydantic: how many errors, in which class, the whole input, a link.
    framed = re.search(r"validation errors? for \w+ (.*?) \[type=\w+, input_value=(.*?), input_type=", said)
    if framed:
        section = said.partition(":")[0]
        key, of_a_value, rule = framed[1].partition(" Input should ")
        if of_a_value:
            return f"{section}.{key}={framed[2]} (flag): {in_our_words(of_a_value.lstrip() + rule)}"
        return f"{section}: {framed[1].replace('Value error, ', '')}"
    if said.startswith("Unrecognized options: "):
        return f"{said.partition(': ')[2]} is nothing that {prog} takes: `{prog} --help` lists what it does"
    return said


def _check_known(written: str, name: str, own: set[str]) -> None:
    keys = all_keys()
    path = _positive(name)
    if name in own or path in keys or name == "help":
        if path in keys and not _has_flag(keys[path]):
            raise ConfigError(f"{path} is a table, which no flag can say: set it in a file given with --config")
        return
    if name in FORMER_FLAGS:
        raise ConfigError(f"unknown option {written}: it is now {FORMER_FLAGS[name]}")
    hint = suggestion(name, [*keys, *sorted(own)])
    hint = re.sub(r"(?<=mean )|(?<= or )", "--", hint)
    raise ConfigError(f"unknown option {written}: {hint or '--help lists all options'}")


def _positive(name: str) -> str:
    """`log.no_tensorboard` is the key `log.tensorboard`, set to false."""
    if name in all_keys():
        return name
    table, _, leaf = name.rpartition(".")
    path = f"{table}.{leaf.removeprefix('no_')}"
    known = all_keys().get(path)
    return path if known is not None and known.annotation is bool else name


def _has_flag(key: Key) -> bool:
    def simple(kind: Any) -> bool:
        if typing.get_origin(kind) is Literal or kind in (bool, int, float, str, type(None), Ellipsis):
            return True
        return (
            bool(typing.get_args(kind))
            and typing.get_origin(kind) is not dict
            and all(map(simple, typing.get_args(kind)))
        )

    return simple(key.annotation)


def _mirror(options: type, values: Mapping[str, Any]) -> type:
    """A dataclass with the fields of `options` and, nested, one for each key that a flag can say."""
    tables: dict[str, list[Any]] = {"": _own_fields(options)}
    for path, key in all_keys().items():
        if not _has_flag(key):
            continue
        table, _, leaf = path.rpartition(".")
        default = values.get(path, key.default)
        default = tuple(default) if isinstance(default, list) else default
        tables.setdefault(table, []).append((leaf, _flag(key), dataclasses.field(default=default)))
    # Deepest tables first, each then a field of the one above it.
    for table in sorted(filter(None, tables), key=lambda t: -t.count(".")):
        above, _, leaf = table.rpartition(".")
        made = dataclasses.make_dataclass(leaf, tables[table], frozen=True)
        made.__doc__ = _about_table(table)
        tables.setdefault(above, []).append((leaf, made, dataclasses.field(default_factory=made)))
    order = {name: i for i, name in enumerate([*RunConfig.model_fields])}
    tables[""].sort(key=lambda f: order.get(f[0], -1))
    return dataclasses.make_dataclass(options.__name__, tables[""], frozen=True)


def _flag(key: Key) -> Any:
    return Annotated.__class_getitem__((key.annotation, tyro.conf.arg(help=key.about)))  # type: ignore[attr-defined]


def _own_fields(options: type) -> list[tuple[str, Any, Any]]:
    abouts = {name: about for base in reversed(options.__mro__[:-1]) for name, about in docstrings(base).items()}
    hints = typing.get_type_hints(options)
    return [
        (
            f.name,
            _flag(Key(f.name, hints[f.name], abouts.get(f.name, ""), f.default)),
            dataclasses.field(default=f.default),
        )
        for f in dataclasses.fields(options)
    ]


def _about_table(path: str) -> str:
    table: Any = RunConfig
    for name in path.split("."):
        table = typing.get_type_hints(table)[name]
    return (table.__doc__ or "").strip().splitlines()[0]
