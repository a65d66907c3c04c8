"""Options of `tercet import hf` and `tercet export hf`: defaults, and the checks that need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tercet.atomic_io import check_writable_folder
from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.model.config import AttentionKind, ModelConfig

BLOCK_SPARSE, TWO_BRANCH = "block-sparse", "two-branch"
# Which layers an option is for.
USED_BY = {
    "nsa": {"nsa", BLOCK_SPARSE, TWO_BRANCH, "window"},
    "compression": {"nsa"},
    "compress_selected_keys": {"nsa"},
    "gate_logit": {"nsa", TWO_BRANCH},
    "dense_below": {BLOCK_SPARSE},
    "selector": {BLOCK_SPARSE, TWO_BRANCH},
}


@dataclass(frozen=True)
class ImportOptions:
    """Options of a dense import. An export of Tercet already has its own values for them."""

    nsa: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    attention: str | None = None
    compression: str = "mlp"
    compress_selected_keys: bool = False
    gate_logit: float = 8.0
    dense_below: int = 0
    selector: str | None = None

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        defaults = vars(ImportOptions())
        return [name for name, value in vars(self).items() if value != defaults[name]]


def attention_options(chosen: ImportOptions) -> dict[str, Any]:
    """Model settings for `--attention` and what belongs to it. In patterns, block-sparse and two-branch stand in nsa's
    place."""
    attention = chosen.attention or "nsa"
    kinds = {part.partition("*")[0].strip() for part in attention.split(",")}
    names = (*get_args(AttentionKind), BLOCK_SPARSE, TWO_BRANCH)
    if unknown := sorted(kinds - set(names)):
        raise UsageError(f"--attention {attention}: {unknown[0]!r} is unknown: pick from {', '.join(names)}")
    sparse = [name for name in (BLOCK_SPARSE, TWO_BRANCH, "nsa") if name in kinds]
    if len(sparse) > 1:
        raise UsageError(f"--attention {attention}: {' and '.join(sparse)} cannot be mixed in one model; use one")
    for name in chosen.changed():
        if not kinds & USED_BY.get(name, kinds):
            fits = " or ".join(sorted(USED_BY[name]))
            raise UsageError(f"--{name} has no effect with --attention {attention}: drop it, or use {fits}")
    own: dict[str, dict[str, Any]] = {
        "nsa": {"compression": chosen.compression, "compress_selected_keys": chosen.compress_selected_keys},
        BLOCK_SPARSE: {"gate": "none", "dense_below": chosen.dense_below, "selector": chosen.selector or "own"},
        TWO_BRANCH: {"branches": ("selected", "window"), "selector": chosen.selector or "learned"},
    }
    options = {"attention": attention.replace(sparse[0], "nsa") if sparse else attention}
    return options | (own.get(sparse[0], {}) if sparse else {})


def check_empty(out: Path) -> None:
    """Raise if an output folder exists and is not empty, or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: choose another folder, or remove it")
    check_writable_folder("OUT", out)


def check_family(config: ModelConfig, family: str) -> None:
    """Raise if the layers of a model cannot be those of a dense model of transformers."""
    kinds = set(config.attention_kinds)
    if not kinds <= {"dense", "nsa"} or ("nsa" in kinds and config.spec("nsa").gated):
        raise UsageError(f"model.attention={config.attention} cannot be exported with --format {family}: only dense "
                         "and block-sparse (model.gate = none) layers have a dense model's weights")  # fmt: skip
    if config.qk_norm != (family == "qwen3"):
        has, fits = ("has", "qwen3") if config.qk_norm else ("has no", "qwen2" if config.attention_bias else "llama")
        raise UsageError(f"--format {family} does not fit: the model {has} QK norm; use --format {fits}")
