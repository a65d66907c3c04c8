"""Configuration keys by dotted name, with their types, defaults and descriptions, and suggestions for misspelled names.

The parameters of a command are keys too. Values are checked by pydantic alone (tercet.config.load words its errors).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from tercet.config.schema import RunConfig


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
    def types(self) -> list[Any]:
        """The annotation and everything inside it: the members of unions and lists, the words of a Literal."""
        return _types(self.annotation)

    @property
    def many(self) -> bool:
        """Whether this is a list."""
        return any(typing.get_origin(part) in (tuple, list) for part in self.types)

    @property
    def optional(self) -> bool:
        return types.NoneType in self.types

    @property
    def is_switch(self) -> bool:
        return bool in self.types and not self.many

    @property
    def negative(self) -> str:
        """The flag that turns a switch off: --log.no_tensorboard."""
        table, dot, leaf = self.name.rpartition(".")
        return f"--{table}{dot}no_{leaf}"

    @property
    def choices(self) -> list[str]:
        return [part for part in self.types if isinstance(part, str)]

    @property
    def is_flag(self) -> bool:
        """Whether a flag can give it: tables in a list have none, unless they have a compact form."""
        return not any(is_table(part) and not hasattr(part, "parse") for part in self.types)

    def value(self, words: Sequence[str]) -> Any:
        """The words behind a flag as a value, still to be validated. Commas separate numbers and choices, and the words
        of a command's option; in a path or a pattern they belong to the text."""
        if self.many:
            nested = sum(typing.get_origin(part) is tuple for part in self.types) > 1
            if not (nested or Path in self.types or (str in self.types and "." in self.name)):
                words = [part.strip() for word in words for part in word.split(",") if part.strip()]
        values = [int(word) if int in self.types and re.fullmatch(r"-?\d{1,999}", word) else word for word in words]
        one_for_all = str in typing.get_args(self.annotation) and typing.get_origin(self.annotation) is not tuple
        return values[0] if not self.many or (one_for_all and len(values) == 1) else tuple(values)


def _types(annotation: Any) -> list[Any]:
    return [annotation, *(found for part in typing.get_args(annotation) for found in _types(part))]


def is_table(annotation: Any) -> bool:
    """Whether this type is a table of keys rather than a value."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def keys_of(table: Any, prefix: str = "", defaults: Any = None) -> Iterable[Key]:
    """The keys of a section or a plain dataclass, those of the tables inside it too. defaults: an instance of it."""
    if issubclass(table, BaseModel):
        fields = [(name, f.annotation, f.description or "", f.get_default()) for name, f in table.model_fields.items()]
    else:
        schema, hints = TypeAdapter(table).json_schema()["properties"], typing.get_type_hints(table)
        fields = [
            (f.name, hints[f.name], schema[f.name].get("description", ""), f.default) for f in dataclasses.fields(table)
        ]
    for name, annotation, about, default in fields:
        default = getattr(defaults, name, default)
        if is_table(annotation):
            yield from keys_of(annotation, f"{prefix}{name}.", default)
        else:
            yield Key(f"{prefix}{name}", annotation, " ".join(about.split()), default)


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
