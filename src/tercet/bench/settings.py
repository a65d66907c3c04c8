"""Configuration keys as one argument: `--settings KEY=VALUE,…`. No torch."""

from __future__ import annotations

import re
from typing import Any

from tercet.config.flags import key_options
from tercet.errors import UsageError


def parse_settings(text: str) -> dict[str, Any]:
    """KEY=VALUE,…; values of lists may contain commas: model.branches=selected,window."""
    pairs = [pair.strip(" ,") for pair in re.split(r",(?=[\s,]*[^,=]+=)", text) if pair.strip(" ,")]
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise UsageError(f"--settings {wrong[0]}: expected KEY=VALUE, e.g. model.nsa.window=512,train.clip=1")
    options, settings = key_options({}), {}
    for key, value in (pair.split("=", 1) for pair in pairs):
        kind = options[key].type if key in options else None
        is_list = kind is not None and kind.container is not None and not kind.unwrap
        settings[key] = options[key].parts(value) if is_list else value
    return settings
