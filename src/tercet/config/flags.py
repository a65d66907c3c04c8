"""The command-line parser: flags for every configuration key, and commands made from function signatures.

Options are read off type annotations, of the schema (`--train.lr 1e-3`), of a command's dataclass of options, or of a
function's parameters. `-` and `_` are interchangeable, and so are `--flag value` and `--flag=value`. Values of a list
are separated by spaces or commas. A switch has an opposite, `--no_cache` or `--log.no_tensorboard`. Of a flag given
twice the last one counts, unless it may be repeated.

Every error is a ConfigError: one line with the option, its value, the rule and the fix. help.py prints the help texts.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from tercet.config.keys import all_keys, docstrings, fields_of, is_table, nest, suggestion
from tercet.config.load import ConfigError, as_none, explain, preset_names
from tercet.config.retired import RETIRED

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
    "max_steps": "--train.steps (optimizer updates)",
    "max_iters": "--train.steps (optimizer updates)",
    "num_steps": "--train.steps (optimizer updates)",
    "epochs": "--train.steps: one epoch is the tokens of the data / --train.tokens_per_step",
    "num_train_epochs": "--train.steps: one epoch is the tokens of the data / --train.tokens_per_step",
    "block_size": "--data.seq_len (of attention: --model.nsa.select_block)",
    "context_length": "--data.seq_len",
    "max_seq_len": "--data.seq_len",
    "gradient_accumulation_steps": "--train.tokens_per_step (accumulation is derived from it)",
    "grad_clip": "--train.clip",
    "out_dir": "--run.dir",
    "output_dir": "--run.dir",
    "checkpoint_dir": "--run.dir",
    "n_layer": "--model.layers",
    "n_head": "--model.heads",
    "n_embd": "--model.dim",
    "hidden_size": "--model.dim",
}

# TOML strings have these escapes; shells leave them as they are.
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", "\\\\": "\\"}
ESCAPED_KEYS = ("data.separator",)

_FLAG = re.compile(r"--[A-Za-z]")
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


@dataclass(frozen=True)
class Arg:
    """Metadata of a function parameter: `run: Annotated[Path, Arg("A run folder.")]`."""

    help: str = ""
    repeat: bool = False  # one value per flag; the flag may be given several times


@dataclass(frozen=True)
class ValueType:
    """What a flag accepts: `item` is bool, int, float, str, Path or a Literal."""

    item: Any
    container: type | None = None  # tuple or list
    count: int | None = 1  # number of values; None: any number
    optional: bool = False  # accepts none
    unwrap: bool = False  # one value stands for itself, as in `str | tuple[str, ...]`
    words: tuple[str, ...] = ()  # accepted by a switch besides true and false, as in `bool | Literal["auto"]`

    @property
    def choices(self) -> tuple[str, ...]:
        return typing.get_args(self.item)

    @property
    def is_switch(self) -> bool:
        return self.item is bool and self.container is None


@dataclass(frozen=True)
class Option:
    """One flag or positional argument."""

    name: str
    type: ValueType
    default: Any = None
    help: str = ""
    required: bool = False
    positional: bool = False
    repeat: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    def parts(self, word: str) -> list[str]:
        """The values in one word: commas separate those of a list, unless they may belong to a path or a pattern."""
        text = self.type.item is Path or (self.type.item is str and "." in self.name)  # data.path, model.attention
        if self.type.container is None or self.repeat or text:
            return [word]
        return [part.strip() for part in word.split(",") if part.strip()]

    @property
    def negative(self) -> str:
        """The flag that turns a switch off: --log.no_tensorboard."""
        table, dot, leaf = self.name.rpartition(".")
        return f"--{table}{dot}no_{leaf}"


def parse(
    arguments: Sequence[str], *, options: type, values: Mapping[str, Any], prog: str
) -> tuple[Any, dict[str, Any]]:
    """Parse `arguments` into the dataclass `options` and the configuration keys that were given as flags.

    values: defaults from the preset and the file, used in error messages.
    """
    own = command_options(options)
    given = read_arguments(arguments, {**key_options(values), **own}, prog=prog)
    taken = {name: given.pop(name) for name in own if name in given}
    return options(**taken), given


def call(function: Callable[..., T], arguments: Sequence[str], *, prog: str, positional: bool = False) -> T:
    """Call `function` with `arguments`. Its signature defines the options, its docstring the help.

    positional: parameters without a default are positional arguments.
    """
    options = function_options(function, positional=positional)
    given = read_arguments(arguments, options, prog=prog)
    named = {name: value for name, value in given.items() if "." not in name}
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_table(hints[name]):
            named[name] = _build_table(name, hints[name], parameter.default, given)
    return function(**named)


# ------------------------------------------------------------------------------------------------
# Options from types


def key_options(values: Mapping[str, Any]) -> dict[str, Option]:
    """A flag for each configuration key, except tables in lists. `values` replace the schema's defaults."""
    return {
        path: Option(path, kind, values.get(path, key.default), key.about)
        for path, key in all_keys().items()
        if (kind := value_type(key.annotation))
    }


def command_options(options: type) -> dict[str, Option]:
    """The fields of a dataclass of command options, inherited ones included."""
    texts = {name: text for base in reversed(options.__mro__[:-1]) for name, text in docstrings(base).items()}
    hints = typing.get_type_hints(options)
    return {
        f.name: Option(f.name, _known(hints[f.name]), f.default, texts.get(f.name, ""))
        for f in dataclasses.fields(options)
    }


def function_options(function: Callable[..., Any], *, positional: bool = False) -> dict[str, Option]:
    """The parameters of a function; those of a table parameter have dotted names."""
    texts = parameter_docs(function)
    hints, marked = typing.get_type_hints(function), typing.get_type_hints(function, include_extras=True)
    found: dict[str, Option] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = hints[name]
        arg = next((a for a in getattr(marked[name], "__metadata__", ()) if isinstance(a, Arg)), Arg())
        required = parameter.default is inspect.Parameter.empty
        if is_table(annotation):
            found |= _table_options(name, annotation, None if required else parameter.default)
            continue
        found[name] = Option(
            name,
            _known(annotation),
            None if required else parameter.default,
            texts.get(name, arg.help),
            required,
            positional and required,
            arg.repeat,
        )
    return found


def parameter_docs(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter descriptions from the `Args:` section of a docstring."""
    section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def value_type(annotation: Any) -> ValueType | None:
    """What a flag of this type accepts; None if flags cannot express it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (bool, int, float, str, Path) or origin is Literal:
        return ValueType(annotation)
    if is_table(annotation) and hasattr(annotation, "parse"):  # a table with a compact form
        return ValueType(str, unwrap=True)
    if origin in (tuple, list):
        item = value_type(parts[0])
        fixed = origin is tuple and parts[-1] is not Ellipsis
        return item and ValueType(item.item, origin, len(parts) if fixed else None, unwrap=item.unwrap)
    if origin in (typing.Union, types.UnionType):
        kinds = [value_type(part) for part in parts if part is not type(None)]
        widest = next((kind for kind in kinds if kind and kind.container), kinds[0])
        if widest is None or None in kinds:
            return None
        words = tuple(word for kind in kinds if kind and widest.is_switch for word in kind.choices)
        return dataclasses.replace(widest, optional=type(None) in parts, unwrap=len(kinds) > 1, words=words)
    return None


def _known(annotation: Any) -> ValueType:
    kind = value_type(annotation)
    if kind is None:
        raise TypeError(f"no flag can express {annotation}")
    return kind


def _table_options(prefix: str, table: Any, default: Any) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for leaf, (annotation, text, value) in fields_of(table).items():
        name, value = f"{prefix}.{leaf}", getattr(default, leaf, value)
        if is_table(annotation):
            found |= _table_options(name, annotation, value)
        elif kind := value_type(annotation):
            found[name] = Option(name, kind, value, text)
    return found


def _build_table(name: str, table: Any, default: Any, given: Mapping[str, Any]) -> Any:
    flat = {path: value for path, value in given.items() if path.startswith(f"{name}.")}
    values = nest(flat).get(name, {})
    try:
        if issubclass(table, BaseModel):
            return table.model_validate(values)
        return dataclasses.replace(default, **values)
    except ValidationError as error:
        raise ConfigError(explain(error, flat, dict.fromkeys(flat, "flag"), table=name)) from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


# ------------------------------------------------------------------------------------------------
# Parsing


def read_arguments(arguments: Sequence[str], options: Mapping[str, Option], *, prog: str) -> dict[str, Any]:
    """The values given on the command line, by option name.

    A flag takes `=value`, or words up to the next flag: `_count` says how many. A switch takes a word only in commands
    without positional arguments; otherwise the word is one of those.
    """
    positional = [option for option in options.values() if option.positional]
    needed = sum(option.type.count == 1 for option in positional)
    given: dict[str, Any] = {}
    free: list[str] = []  # positional arguments
    switch_before: dict[int, tuple[str, bool]] = {}  # index in `free` -> the switch directly before, and if it negates
    i = 0
    while i < len(arguments):
        flag, equals, value = arguments[i].partition("=")
        i += 1
        if flag == "--" and not equals:
            free += arguments[i:]
            break
        if not _FLAG.match(flag):
            free.append(arguments[i - 1])
            continue
        option, negated = _find(flag, options)
        words = [value] if equals else []
        follow = list(takewhile(lambda word: not re.match(r"--([A-Za-z]|$)", word), arguments[i:]))
        if option.type.is_switch:
            if positional and not equals and follow:
                switch_before[len(free)] = flag, negated
            elif not equals:
                words = follow[:1]
                i += len(words)
            given[option.name] = _read_switch(flag, words, option, negated)
            continue
        taken = _count(option, words, follow, missing=needed - len(free), greedy=not positional)
        words += follow[:taken]
        i += taken
        result = _read_values(flag, words, option)
        given[option.name] = (*given.get(option.name, ()), result) if option.repeat else result
    _assign(free, positional, given, switch_before, prog)
    if missing := [option for option in options.values() if option.required and option.name not in given]:
        raise ConfigError(_missing(missing, options, prog))
    return given


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


def _find(flag: str, options: Mapping[str, Option]) -> tuple[Option, bool]:
    """The option of a flag, and whether the flag turns it off."""
    name = flag[2:].replace("-", "_")
    if name in options and not options[name].positional:
        return options[name], False
    table, dot, leaf = name.rpartition(".")
    switch = options.get(f"{table}{dot}{leaf.removeprefix('no_')}")
    if switch and leaf.startswith("no_") and switch.type.is_switch:
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
    near = re.sub(r"(?<=mean )|(?<= or )", "--", suggestion(name, [n for n, o in options.items() if not o.positional]))
    raise ConfigError(f"unknown option {flag}: {near or '--help lists all options'}")


def _count(option: Option, words: Sequence[str], follow: Sequence[str], *, missing: int, greedy: bool) -> int:
    """How many of the words behind a flag are its values.

    missing: positional arguments not given yet; they may be the last words, if the option cannot take those.
    greedy: the command has no positional arguments, so a surplus word is an error of this option.
    """
    if option.repeat or option.type.count == 1:
        return min(1 - len(words), len(follow))
    if option.type.count is not None:
        return len(follow) if greedy else min(option.type.count - len(words), len(follow))
    taken = len(follow)
    while taken > max(0, len(follow) - missing) and not _accepts(option, follow[taken - 1]):
        taken -= 1
    return taken


def _read_switch(flag: str, words: Sequence[str], option: Option, negated: bool) -> bool | str:
    if not words:
        return not negated
    value = _BOOLEANS.get(words[0].lower())
    if negated:
        raise ConfigError(f"{flag} {words[0] or repr('')}: {option.negative} takes no value")
    if words[0] in option.type.words:
        return words[0]
    if value is None:
        values = "true, false or auto" if "auto" in option.type.words else "true or false"
        raise ConfigError(
            f"{flag} {words[0] or repr('')}: expected {values}, or {option.flag} or {option.negative} alone"
        )
    return value


def _read_values(flag: str, words: Sequence[str], option: Option) -> Any:
    kind, shown = option.type, " ".join([flag, *(word or "''" for word in words)])
    example = _example(option.default) + (", or none" if _takes_none(option) else "")
    if len(words) == 1 and kind.optional and (words[0] == "None" or (words[0] == "none" and _takes_none(option))):
        return None
    if kind.container is None or option.repeat:
        if not words:
            raise ConfigError(f"{flag} needs a value: expected {_expected(kind)}{example}")
        word = words[0]
        if option.name in ESCAPED_KEYS:
            word = re.sub(r"\\[ntr\\]", lambda match: ESCAPES[match[0]], word)
        return _convert(shown, word, kind, example)
    words = [part for word in words for part in option.parts(word)]
    if (kind.count is not None and len(words) != kind.count) or (kind.unwrap and not words):
        raise ConfigError(f"{shown}: expected {kind.count or 'one or more'} values{example}, got {len(words)}")
    values = [_convert(f"{shown}: {word or repr('')}", word, kind, example) for word in words]
    return values[0] if kind.unwrap and len(values) == 1 else kind.container(values)


def _convert(shown: str, word: str, kind: ValueType, example: str) -> Any:
    if kind.choices:
        if word not in kind.choices:
            pick = "pick from" if kind.container else "pick one of"
            raise ConfigError(f"{shown} is unknown: {pick} {', '.join(kind.choices)}")
        return word
    try:
        value = kind.item(word)
        if kind.item is int and abs(value) >= 2**63:
            raise ConfigError(f"{shown} is an integer of {len(word)} digits: it must fit in 64 bits")
        return value
    except ValueError:
        whole = _as_integer(word) if kind.item is int else None
        fix = f"write {whole}" if whole is not None else f"give {'numbers' if kind.container else 'one'}{example}"
        raise ConfigError(f"{shown} is not {_expected(kind)}: {fix}") from None


def _accepts(option: Option, word: str) -> bool:
    try:
        for part in option.parts(word):
            _convert("", part, option.type, "")
    except ConfigError:
        return False
    return True


def _takes_none(option: Option) -> bool:
    """Whether `none` means null, as in files. For text that is no configuration key it may be a file name."""
    return option.type.optional and (option.type.item not in (str, Path) or as_none(option.name, "none") is None)


def _as_integer(word: str) -> int | None:
    """1e6 and 1,000 are integers to people."""
    try:
        number = float(word.replace(",", ""))
        return int(number) if number == int(number) else None
    except (ValueError, OverflowError):
        return None


def _assign(
    free: Sequence[str],
    positional: Sequence[Option],
    given: dict[str, Any],
    switch_before: Mapping[int, tuple[str, bool]],
    prog: str,
) -> None:
    """Hand the words that belong to no flag to the positional arguments, in order."""
    used = 0
    for option in positional:
        words = free[used:] if option.type.count is None else free[used : used + 1]
        used += len(words)
        if words or option.type.count is None:
            given[option.name] = _read_values(option.name.upper(), words, option)
    if used < len(free):
        for i, (flag, negated) in switch_before.items():
            if (word := free[i]).lower() in _BOOLEANS:
                raise ConfigError(f"{flag} {word}: write {f'{flag} alone' if negated else f'{flag}={word}'}")
        word = free[used]
        if not positional and word in preset_names():
            raise ConfigError(f"unexpected argument {word}: did you mean --preset {word}?")
        rule = "" if positional else "options start with --; "
        raise ConfigError(f"unexpected argument {word}: {rule}`{prog} --help` lists the options")


def _missing(missing: Sequence[Option], options: Mapping[str, Option], prog: str) -> str:
    def usage(option: Option) -> str:
        return option.name.upper() if option.positional else f"{option.flag} {option.name.upper()}"

    names = " and ".join(option.name.upper() if option.positional else option.flag for option in missing)
    needed = " ".join(usage(option) for option in options.values() if option.required)
    return f"{prog} needs {names}: write {prog} {needed} (see {prog} --help)"


def _expected(kind: ValueType) -> str:
    if kind.choices:
        return f"one of {', '.join(kind.choices)}"
    return {int: "an integer", float: "a number", Path: "a path"}.get(kind.item, "text")


def _example(default: Any) -> str:
    if isinstance(default, (tuple, list)):
        default = " ".join(map(str, default))
    # not 0, which turns most things off
    return f", such as {default}" if isinstance(default, (int, float, str)) and default else ""
