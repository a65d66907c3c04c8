"""Load a RunConfig from defaults, a preset, a TOML file and flags, and record where each value came from.

Later layers win. A file or preset can build on a preset with `preset = "NAME"`. Also writes configurations as TOML.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tercet.atomic_io import write_json, write_text
from tercet.config.keys import all_keys, flatten, flatten_table, nest, suggestion
from tercet.config.retired import ignored, refused, without_retired
from tercet.config.schema import RunConfig
from tercet.config.sections import StageConfig
from tercet.errors import UsageError
from tercet.parse import parse_json, parse_toml

DEFAULT = "default"
FLAG = "flag"
# A repeated run gets a new folder, and a permission holds for one start.
NOT_SAVED = ("run.dir", "data.accept_changes", "checkpoint.allow_config_change")


class ConfigError(UsageError):
    """The configuration or the command line is wrong. The message is one line and names the fix."""


@dataclass(frozen=True)
class Layer:
    """Values from one origin: dotted key -> value."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Loaded:
    """A validated configuration, and the origin of each dotted key."""

    config: RunConfig
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    """About settings of earlier versions in the file."""


def load(preset: str | None = None, file: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> Loaded:
    """Merge defaults, preset, file and flags (dotted key -> value), in that order."""
    return merge([*read_layers(preset, file), Layer(FLAG, flags or {})])


def read_layers(preset: str | None = None, config: str | Path | None = None) -> list[Layer]:
    """Layers of the preset and the file. Not validated yet: flags may complete them.

    Args:
        preset: Configuration to start from (`tercet presets` lists them).
        config: TOML file that overrides the preset, such as config.toml of an earlier run.
    """
    layers = [] if config is None else _layers(read_toml(Path(config)), f"file {config}")
    based_on = [layer.origin for layer in layers if layer.origin.startswith("preset ")]
    if preset is None:
        return layers
    if based_on and based_on[-1] != f"preset {preset}":
        raise ConfigError(f"--preset {preset} and --config {config}, which builds on {based_on[-1]}: give only one")
    return layers if based_on else preset_layers(preset) + layers


def merge(layers: list[Layer]) -> Loaded:
    """Merge layers, later ones winning, into one validated configuration."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(all_keys(), DEFAULT)
    notes = [f"{layer.origin}: {note}" for layer in layers if (note := ignored(layer.values))]
    for layer in layers:
        if problems := refused(layer.values):
            raise ConfigError(f"{layer.origin}: {problems[0]}")
        if layer.values.get("train.stages"):  # train.steps follows, unless this layer or a later one gives it
            values.pop("train.steps", None)
            origins["train.steps"] = layer.origin
        for path, value in without_retired(layer.values).items():
            _check_key(path, layer.origin)
            values[path] = as_none(path, value)
            origins[path] = layer.origin
    try:
        config = RunConfig.model_validate(nest(values))
    except ValidationError as error:
        raise ConfigError(explain(error, values, origins)) from None
    return Loaded(config, origins, tuple(notes))


def read_stored(values: Mapping[str, Any]) -> RunConfig:
    """A configuration that a checkpoint holds, maybe of an earlier version: newer keys get their defaults."""
    return RunConfig.model_validate(nest(without_retired(flatten_table(values))))


def keep_origins(loaded: Loaded, file: Path) -> Loaded:
    """The origins saved next to a run's config.toml, for the values that come from it."""
    try:
        saved = parse_json((file.parent / "origins.json").read_text(encoding="utf-8"))
        known = {key: str(origin) for key, origin in saved.items() if loaded.origins.get(key) == f"file {file}"}
    except (OSError, ValueError, AttributeError):
        return loaded  # missing or damaged: the file is their origin
    return dataclasses.replace(loaded, origins=loaded.origins | known)


def preset_names() -> list[str]:
    folder = resources.files("tercet.config") / "presets"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def preset_about(name: str) -> str:
    """One-line description of a preset."""
    return str(_preset_table(name).get("about", ""))


def dense_baseline(name: str) -> str:
    """The preset with dense attention to compare with: `NAME-dense`, or the baseline of the preset it builds on."""
    while f"{name}-dense" not in preset_names():
        name = _preset_table(name)["preset"]
    return f"{name}-dense"


def preset_layers(name: str) -> list[Layer]:
    """Layers of a preset, after those of the preset it builds on."""
    return _layers(_preset_table(name), f"preset {name}")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file; errors are one line and name the file."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def write_config(config: RunConfig, origins: Mapping[str, str], folder: str | Path) -> None:
    """Write `config.toml`, which `tercet train --config` can repeat, and `origins.json`."""
    folder = Path(folder)
    write_text(folder / "config.toml", to_toml(config, origins))
    write_json(folder / "origins.json", dict(origins))


def to_toml(config: RunConfig, origins: Mapping[str, str] | None = None) -> str:
    """The complete configuration as TOML, with each value's origin as a comment."""
    values = {path: value for path, value in flatten(config).items() if path not in NOT_SAVED}
    return toml_dumps(values, comments=origins or {})


def describe(config: RunConfig, origins: Mapping[str, str], *, without: Container[str] = ()) -> list[str]:
    """Lines of `key = value  # origin`, of the values that differ from the defaults or were given as flags: a saved
    configuration sets every key, and repeating it should not print them all. without: origins to leave out."""
    defaults = flatten(RunConfig())
    shown = [
        (f"{path} = {toml_value(value)}", origins.get(path, DEFAULT))
        for path, value in flatten(config).items()
        if value != defaults[path] or origins.get(path) == FLAG
        if origins.get(path) not in without
    ]
    width = min(max((len(text) for text, _ in shown), default=0), 60)
    return [f"{text:<{width}}  # {origin}" for text, origin in shown]


def differences(left: RunConfig, right: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with both values."""
    a, b = flatten(left), flatten(right)
    return {path: (a[path], b[path]) for path in a if a[path] != b[path]}


def _layers(table: dict[str, Any], origin: str) -> list[Layer]:
    table = dict(table)
    table.pop("about", None)
    parent = table.pop("preset", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f'preset={parent!r} in {origin} must be the name of a preset, such as "tiny"')
    for name, value in table.items():
        if not isinstance(value, Mapping) and name in RunConfig.model_fields:
            raise ConfigError(f"{name}={value!r} in {origin} must be a table: write [{name}] with its keys below")
    base = preset_layers(parent) if parent is not None else []
    return [*base, Layer(origin, flatten_table(table))]


def _preset_table(name: str) -> dict[str, Any]:
    names = preset_names()
    if name not in names:
        hint = suggestion(name, names)
        raise ConfigError(f"unknown preset {name}: {hint or 'choose one of ' + ', '.join(names)}")
    return tomllib.loads((resources.files("tercet.config") / "presets" / f"{name}.toml").read_text("utf-8"))


def _check_key(path: str, origin: str) -> None:
    keys = all_keys()
    if path in keys:
        return
    if any(known.startswith(path + ".") for known in keys):
        raise ConfigError(f"{path} in {origin} is a table, not a value: set one of its keys, such as {path}.…")
    hint = suggestion(path, keys) or "`tercet config show` lists all keys"
    raise ConfigError(f"unknown key {path} in {origin}: {hint}")


def as_none(path: str, value: Any) -> Any:
    """Convert "none" to None for optional keys: TOML and command lines have no null."""
    key = all_keys().get(path)
    return None if value in ("none", "None") and key is not None and key.optional else value


def explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str], table: str = "") -> str:
    """A validation error in one line: key, value, origin and rule. table: what was validated, if not everything."""
    problems: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        place = [*filter(None, [table]), *problem["loc"]]
        path = ".".join(map(str, place))
        name = next((key for key in values if path == key or path.startswith(f"{key}.")), path)
        inside = place[name.count(".") + 1 :]  # of a list: the entry and its field; of a union: a type
        entry = next((i for i, part in enumerate(inside) if isinstance(part, int)), None)
        known, parsed = all_keys().get(name), problem["type"].endswith(("_parsing", "_type"))
        rule = problem["msg"].replace("Input should be", "must be")
        if problem["type"] == "value_error":
            rule = str(problem["ctx"]["error"])
        elif parsed:
            rule = rule.partition(", ")[0]
        if entry is not None:
            field = ".".join(map(str, inside[entry + 1 :]))
            rule = f"{field and f'{field} of '}entry {int(inside[entry]) + 1}: {rule}"
        elif parsed and known and known.default and not known.choices and isinstance(known.default, int | float | str):
            rule += f", such as {known.default}"
        rules = problems.setdefault(name, [])
        rules += [rule] * (rule not in rules)
    shown = [
        f"{f'{name}={_shown(values[name], origins[name])} ({origins[name]})' if name in values else name}: "
        + " or ".join(rules).replace(" or must be ", " or ")
        for name, rules in problems.items()
    ]
    return shown[0].removeprefix(": ") + (f" (and {len(shown) - 1} more)" if len(shown) > 1 else "")


def _shown(value: Any, origin: str) -> str:
    """As on a command line if it comes from there, else as in Python."""
    words = value if isinstance(value, tuple) else (value,)
    return " ".join(map(str, words)) if words and origin == FLAG else repr(value)


# The standard library only reads TOML; these two functions write what a configuration needs.


def toml_dumps(values: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Format dotted keys as TOML tables, in the given order, each value followed by its comment."""
    tables: dict[str, list[str]] = {}
    for path, item in values.items():
        table, _, leaf = path.rpartition(".")
        comment = f"  # {comments[path]}" if path in comments else ""
        tables.setdefault(table, []).append(f"{leaf} = {toml_value(item)}{comment}")
    blocks = ["\n".join([f"[{name}]", *lines] if name else lines) for name, lines in tables.items()]
    return "\n\n".join(blocks) + "\n"


def toml_value(item: Any) -> str:
    """Format one value as TOML; None becomes "none"."""
    if item is None:
        return '"none"'
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int | float):
        return repr(item)
    if isinstance(item, BaseModel) and not isinstance(item, StageConfig):
        return toml_value(item.model_dump(exclude_none=True))
    if isinstance(item, Mapping):
        pairs = ", ".join(f"{json.dumps(str(k))} = {toml_value(v)}" for k, v in item.items() if v is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(toml_value(v) for v in item)}]"
    # A JSON string is a valid TOML basic string, except that TOML requires DEL to be escaped. Escaping all control
    # characters also protects the terminal.
    text = json.dumps(str(item), ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
