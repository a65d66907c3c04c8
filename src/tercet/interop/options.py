"""Options of `tercet import hf` and `tercet export hf`: defaults, and the checks that need no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from tercet.atomic_io import check_writable_folder
from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.model.config import AttentionKind, ModelConfig

BLOCK_SPARSE, TWO_BRANCH = "block-sparse", "two-branch"


@dataclass(frozen=True)
class ImportOptions:
    """Options of a dense import. An export of Tercet already has its own values for them."""

    nsa: NSAConfig = NSAConfig()  # noqa: RUF009  (frozen)
    attention: str | None = None
    compression: str = "mlp"
    compress_selected_keys: bool = False
    cover: str = "selected"
    gate_logit: float = 8.0
    dense_below: int = 0
    selector: str | None = None

    def changed(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        defaults = vars(ImportOptions())
        return [name for name, value in vars(self).items() if value != defaults[name]]


# Model classes of transformers by --format.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def check_empty(out: Path) -> None:
    """Raise if an output folder exists and is not empty, or cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: choose another folder, or remove it")
    check_writable_folder("OUT", out)


def attention_options(attention: str, dense_below: int, selector: str | None) -> dict[str, Any]:
    """Model settings for an `--attention` value. In patterns, block-sparse and two-branch stand in nsa's place."""
    kinds = _kinds(attention)
    names = (*get_args(AttentionKind), BLOCK_SPARSE, TWO_BRANCH)
    if unknown := [kind for kind in kinds if kind not in names]:
        raise UsageError(f"--attention {attention}: {unknown[0]!r} is unknown: pick from {', '.join(names)}")
    sparse = [name for name in (BLOCK_SPARSE, TWO_BRANCH, "nsa") if name in kinds]
    if len(sparse) > 1:
        raise UsageError(f"--attention {attention}: {' and '.join(sparse)} cannot be mixed in one model; use one")
    if dense_below and sparse != [BLOCK_SPARSE]:
        raise UsageError(f"--dense_below needs --attention {BLOCK_SPARSE}: other imports do not have it")
    options: dict[str, Any] = {}
    if sparse == [BLOCK_SPARSE]:
        options = {"gate": "none", "compression": "mean", "dense_below": dense_below}
        options["selector"] = selector or "own"
    elif sparse == [TWO_BRANCH]:
        if selector == "compressed":
            raise UsageError(f"--selector compressed has no effect with --attention {attention}: drop it")
        options = {"branches": ("selected", "window"), "selector": selector or "learned"}
    elif selector not in (None, "compressed"):
        raise UsageError(f"--selector needs --attention {BLOCK_SPARSE} or {TWO_BRANCH}: other imports do not have it")
    return {"attention": attention.replace(sparse[0], "nsa") if sparse else attention, **options}


def check_used(attention: str, given: ImportOptions) -> None:
    """Raise for options that the layers of an `--attention` value do not have."""
    kinds = set(_kinds(attention))
    unused = [] if "nsa" in kinds else ["compression", "compress_selected_keys"]
    unused += [] if kinds & {"nsa", TWO_BRANCH} else ["cover", "gate_logit"]
    names = [f"--{name}" for name in given.changed() if name in unused]
    if kinds == {"dense"}:
        default, own = asdict(ImportOptions().nsa), asdict(given.nsa)
        names += [f"--nsa.{name}" for name in own if own[name] != default[name]]
    if names:
        raise UsageError(f"{names[0]} has no effect with --attention {attention}: drop it")


def _kinds(attention: str) -> list[str]:
    return [part.partition("*")[0].strip() for part in attention.split(",")]


def check_family(config: ModelConfig, family: str) -> None:
    """Raise if a model of this configuration is not one of the family, apart from reading blocks."""
    if family not in ARCHITECTURES:
        raise UsageError(f"--format {family} is unknown: pick one of tercet, {', '.join(ARCHITECTURES)}")
    kinds = set(config.attention_kinds)
    rules = {
        "attention": (
            kinds <= {"dense", "nsa"} and ("nsa" not in kinds or not config.spec("nsa").gated),
            "only dense and block-sparse (model.gate = none) layers have a dense model's weights",
        ),
        "value_dim": (config.head_value_dim == config.head_dim, "value heads must be as large as key heads"),
        "qk_norm": (config.qk_norm == (family == "qwen3"), "qwen3 normalises queries and keys, the others do not"),
        "attention_bias": (
            config.attention_bias or family != "qwen2",
            "qwen2 has biases of queries, keys and values; use --format llama",
        ),
    }
    if family == "mistral":
        rules["attention_bias"] = (not config.attention_bias, "mistral has no biases; use --format llama")
    for name, (fits, why) in rules.items():
        if not fits:
            raise UsageError(f"model.{name}={getattr(config, name)} cannot be exported with --format {family}: {why}")
