"""What the benchmarks share before torch is imported: forms of attention to compare, and `--settings KEY=VALUE,…`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tercet.config.flags import key_options
from tercet.config.load import dense_baseline, load
from tercet.config.schema import RunConfig
from tercet.errors import UsageError
from tercet.inference.arguments import check_known
from tercet.model.config import is_all_dense

# Kinds of attention, as changes of a preset with sparse layers. "nsa" is the preset as it is, "dense" its baseline.
KINDS: dict[str, dict[str, Any]] = {
    "nsa": {},
    "two-branch": {"model.branches": ("selected", "window"), "model.selector": "learned"},
    "block-sparse": {"model.gate": "none", "model.compress_selected_keys": False},
    "dense": {},
}


def parse_settings(text: str, own: Mapping[str, str]) -> dict[str, Any]:
    """KEY=VALUE,…; values of lists may contain commas: model.branches=selected,window.

    own: keys that the benchmark sets itself, and the flag that chooses their value. They are refused: they would not be
    what is measured and counted.
    """
    pairs = [pair.strip(" ,") for pair in re.split(r",(?=[\s,]*[^,=]+=)", text) if pair.strip(" ,")]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"--settings {wrong[0]}: expected KEY=VALUE, e.g. model.nsa.window=512,train.clip=1")
    options, settings = key_options({}), {}
    for key, value in (pair.split("=", 1) for pair in pairs):
        if key in own:
            raise UsageError(f"--settings {key}={value}: this benchmark sets {key} itself; use {own[key]}")
        is_list = key in options and options[key].many and not options[key].one_for_all
        settings[key] = options[key].parts(value) if is_list else value
    return settings


def check_kinds(preset: str, kinds: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise before anything is measured if a column would not be what its name says."""
    check_known("--kinds", kinds, KINDS)
    for kind in kinds:
        for key in (KINDS[kind].keys() & settings.keys()) - {"model.selector"}:
            raise UsageError(f"--settings {key}={settings[key]}: --kinds {kind} sets {key}; use --kinds nsa")
        name, flags = of_kind(preset, kind, settings)
        attention = load(preset=name, flags=flags).config.model.attention
        if is_all_dense(attention) != (kind == "dense"):
            raise UsageError(
                f"--kinds {kind} with model.attention={attention} in {name}: give a preset with sparse layers, "
                "without model.attention in --settings"
            )


def of_kind(preset: str, kind: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The preset and the keys of one kind of attention."""
    return dense_baseline(preset) if kind == "dense" else preset, {**KINDS[kind], **settings}


def loaded(cell: Mapping[str, Any], **keys: Any) -> RunConfig:
    """The configuration of a cell, which names its preset and keys."""
    return load(preset=cell["preset"], flags={**keys, **cell["flags"]}).config
