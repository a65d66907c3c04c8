"""Writing TOML: the standard library only reads it, and a configuration needs no more than this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def dumps(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Dotted keys as TOML tables, in the order given, each value followed by its comment.

    Keys of one table must stand together, but for tables within it.
    """
    tables: dict[str, list[str]] = {}
    for path, item in values.items():
        table, _, leaf = path.rpartition(".")
        comment = f"  # {comments[path]}" if path in comments else ""
        tables.setdefault(table, []).append(f"{leaf} = {value(item)}{comment}")
    blocks = ["\n".join([f"[{name}]", *lines] if name else lines) for name, lines in tables.items()]
    return "\n\n".join(blocks) + "\n"


def value(item: Any) -> str:
    """One value; what is empty is written "none", which TOML has no word for."""
    if item is None:
        return '"none"'
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int | float):
        return repr(item)
    if isinstance(item, BaseModel):
        return value(item.model_dump(exclude_none=True))
    if isinstance(item, Mapping):
        inside = ", ".join(f"{json.dumps(str(k))} = {value(v)}" for k, v in item.items() if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(value(v) for v in item)}]"
    # JSON strings are TOML basic strings, but for DEL, which TOML wants escaped.
    return json.dumps(str(item), ensure_ascii=False).replace("\x7f", "\\u007f")
