"""Configuration keys by dotted name: what a value of each must be, and suggestions for misspelled names.

The parameters of a command are keys too: they have types, defaults and descriptions in the same way.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from tercet.config.schema import RunConfig

_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_NOUNS = {int: "an integer", float: "a number", Path: "a path"}


@dataclass(frozen=True)
class Key:
    """One value of the configuration, or one parameter of a command."""

    name: str
    annotation: Any
    about: str = ""
    default: Any = None
    required: bool = False
    positional: bool = False
    repeat: bool = False  # one value per flag; the flag may be given several times

    @cached_property
    def kinds(self) -> list[Any]:
        """Types and words that a value, or an entry of a list, can be: [bool, "auto"]. Empty: no flag can give it."""
        return _kinds(self.annotation)

    @cached_property
    def many(self) -> bool:
        """Whether this is a list."""
        return any(typing.get_origin(part) in (tuple, list) for part in (self.annotation, *_union(self.annotation)))

    @property
    def count(self) -> int | None:
        """How many values a flag takes; None: any number."""
        parts = typing.get_args(self.annotation)
        fixed = typing.get_origin(self.annotation) is tuple and ... not in parts
        return None if self.many and not fixed else len(parts) if fixed else 1

    @property
    def one_for_all(self) -> bool:
        """Whether one word stands for the whole list, as in model.attention and train.stages."""
        return self.many and (str in _union(self.annotation) or is_table(typing.get_args(self.annotation)[0]))

    @property
    def optional(self) -> bool:
        return types.NoneType in _union(self.annotation)

    @property
    def is_switch(self) -> bool:
        return bool in self.kinds and not self.many

    @property
    def negative(self) -> str:
        """The flag that turns a switch off: --log.no_tensorboard."""
        table, dot, leaf = self.name.rpartition(".")
        return f"--{table}{dot}no_{leaf}"

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if isinstance(kind, str))

    def takes_none(self) -> bool:
        """Whether the word `none` means null, as in files. In an option that is no key it may name a file."""
        return self.optional and ("." in self.name or self.kinds[0] not in (str, Path))

    def convert(self, word: str) -> Any:
        """A word of the command line as a value; the word itself if it is not one: validation refuses it."""
        for kind in self.kinds:
            if kind is bool and word.lower() in _BOOLEANS:
                return _BOOLEANS[word.lower()]
            if kind in (int, float, Path):
                try:
                    return kind(word)
                except ValueError:
                    pass
        return word

    def parts(self, word: str) -> list[str]:
        """The values in one word: commas separate those of a list, unless they may belong to a path or a pattern."""
        text = Path in self.kinds or (str in self.kinds and "." in self.name)  # data.path, model.attention
        if not self.many or self.repeat or text:
            return [word]
        return [part.strip() for part in word.split(",") if part.strip()]

    def accepts(self, word: str) -> bool:
        """Whether the word can be a value of a list of numbers or choices. Any text may be a positional argument."""
        return all(part in self.kinds or not isinstance(self.convert(part), str) for part in self.parts(word))

    def expected(self, given: Any = None, *, entry: bool = False) -> str:
        """What the value must be, as the end of an error message. entry: a value in the list."""
        if self.is_switch:
            words = ["true", "false", *self.choices]
            return f"must be {', '.join(words[:-1])} or {words[-1]}"
        whole_list = self.many and not entry and not self.one_for_all
        if self.choices and not whole_list:
            return f"must be one of {', '.join(self.choices)}{', or none' * self.takes_none()}"
        noun = _NOUNS.get(next(iter(self.kinds), str), "text")
        if self.kinds == [int] and isinstance(given, str) and (number := _integer(given)) is not None:
            return f"must be {noun}: write {number}"
        if whole_list:
            noun = f"{self.count} values" if self.count else "a list"
        value = self.default
        if isinstance(value, (tuple, list)):
            value = " ".join(map(str, value[:1] if entry else value))
        # not 0, which turns most things off
        such = f", such as {value}" if isinstance(value, (int, float, str)) and value else ""
        return f"must be {noun}{such}{', or none' * self.takes_none()}"


def _integer(word: str) -> int | None:
    """1e6 and 1,000 are integers to people."""
    try:
        number = float(word.replace(",", ""))
        return int(number) if number == int(number) else None
    except (ValueError, OverflowError):
        return None


def _union(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else ()


def _kinds(annotation: Any) -> list[Any]:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return [*parts]
    if parts and typing.get_origin(parts[0]) is tuple:  # lists in a list: one text each
        return [str]
    if parts:
        found = [_kinds(part) for part in parts if part not in (types.NoneType, ...)]
        return list(dict.fromkeys(kind for kinds in found for kind in kinds)) if all(found) else []
    if is_table(annotation):
        return [str] if hasattr(annotation, "parse") else []  # a table with a compact form
    return [annotation]


def is_table(annotation: Any) -> bool:
    """Whether this type is a table of keys rather than a value."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def keys_of(table: Any, prefix: str = "", defaults: Any = None) -> Iterable[Key]:
    """The keys of a section or a plain dataclass, those of the tables inside it too. defaults: an instance of it."""
    if issubclass(table, BaseModel):
        fields = [(name, f.annotation, f.description or "", f.get_default()) for name, f in table.model_fields.items()]
    else:
        abouts, hints = docstrings(table), typing.get_type_hints(table)
        fields = [(f.name, hints[f.name], abouts.get(f.name, ""), f.default) for f in dataclasses.fields(table)]
    for name, annotation, about, default in fields:
        default = getattr(defaults, name, default)
        if is_table(annotation):
            yield from keys_of(annotation, f"{prefix}{name}.", default)
        else:
            yield Key(f"{prefix}{name}", annotation, about, default)


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every key of RunConfig by dotted name, in schema order."""
    return {key.name: key for key in keys_of(RunConfig)}


def flatten(config: RunConfig) -> dict[str, Any]:
    """Dotted name -> value, for every key."""
    values = {}
    for path in all_keys():
        node: Any = config
        for name in path.split("."):
            node = getattr(node, name)
        values[path] = node
    return values


def flatten_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> value of a nested table. A key whose value is a table stays whole; unknown keys are kept."""
    flat: dict[str, Any] = {}
    pending = [*table.items()][::-1]
    while pending:  # not recursive: a file may be nested deeper than Python's stack
        path, value = pending.pop()
        if isinstance(value, Mapping) and path not in all_keys():
            pending += [(f"{path}.{name}", inner) for name, inner in value.items()][::-1]
        else:
            flat[path] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of flatten_table: dotted names become nested tables."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        *tables, leaf = path.split(".")
        node = root
        for name in tables:
            node = node.setdefault(name, {})
        node[leaf] = value
    return root


def suggestion(wrong: str, among: Iterable[str], mark: str = "") -> str:
    """`did you mean …?`, or "". The right name in another section (`lr` for `train.lr`) ranks first. mark: put before
    each name."""

    def similarity(known: str) -> float:
        leaves = known.rpartition(".")[2], wrong.rpartition(".")[2]
        alike = difflib.SequenceMatcher(None, *leaves).ratio()
        if alike == 1:
            return 1 + (known == wrong) - 0.2 * max(0, known.count(".") - 1)  # train.lr before train.selector.lr
        return (alike + difflib.SequenceMatcher(None, known, wrong).ratio()) / 2

    ranked = sorted(((similarity(known), known) for known in among), key=lambda pair: -pair[0])
    near = [mark + known for score, known in ranked[:3] if score >= 0.6 and score >= ranked[0][0] - 0.1]
    return f"did you mean {' or '.join(near)}?" if near else ""


@lru_cache
def docstrings(table: type) -> dict[str, str]:
    """Docstrings of a class's fields. pydantic reads them only for its models; NSAConfig is a plain dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(table))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
