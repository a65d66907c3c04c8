"""Configuration keys by dotted name, and suggestions for misspelled ones."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from tercet.config.schema import RunConfig


@dataclass(frozen=True)
class Key:
    """One value of the configuration."""

    path: str
    annotation: Any
    about: str
    default: Any


def is_table(annotation: Any) -> bool:
    """Whether this type is a table of keys rather than a value."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def fields_of(table: Any) -> dict[str, tuple[Any, str, Any]]:
    """name -> (annotation, help text, default) of a section or of a plain dataclass."""
    if issubclass(table, BaseModel):
        fields = table.model_fields.items()
        return {name: (f.annotation, f.description or "", f.get_default()) for name, f in fields}
    abouts = docstrings(table)
    hints = typing.get_type_hints(table)
    return {f.name: (hints[f.name], abouts.get(f.name, ""), f.default) for f in dataclasses.fields(table)}


@lru_cache(maxsize=1)
def all_keys() -> dict[str, Key]:
    """Every key of RunConfig by dotted name, in schema order."""
    return {key.path: key for key in _walk(RunConfig, "")}


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


def suggestion(wrong: str, among: Iterable[str]) -> str:
    """`did you mean …?`, or "". The right name in another section (`lr` for `train.lr`) ranks first."""

    def similarity(known: str) -> float:
        leaves = known.rpartition(".")[2], wrong.rpartition(".")[2]
        alike = difflib.SequenceMatcher(None, *leaves).ratio()
        deeper = 0.2 * max(0, known.count(".") - 1)  # train.lr before train.selector.lr
        return (
            1 + (known == wrong) - deeper
            if alike == 1
            else (alike + difflib.SequenceMatcher(None, known, wrong).ratio()) / 2
        )

    ranked = sorted(((similarity(known), known) for known in among), key=lambda pair: -pair[0])
    near = [known for score, known in ranked[:3] if score >= 0.6 and score >= ranked[0][0] - 0.1]
    return f"did you mean {' or '.join(near)}?" if near else ""


def _walk(table: type, prefix: str) -> Iterable[Key]:
    for name, (annotation, about, default) in fields_of(table).items():
        path = f"{prefix}{name}"
        if is_table(annotation):
            yield from _walk(annotation, path + ".")
        else:
            yield Key(path, annotation, about, default)


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
