"""Options of `tercet import hf`: their defaults, and the checks of them that need no torch."""

from __future__ import annotations

from typing import Any, get_args

from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.model.config import AttentionKind

BLOCK_SPARSE = "block-sparse"
# Options of a dense import. An export of Tercet already has its own values for them.
DEFAULT_OPTIONS: dict[str, Any] = {
    "nsa": NSAConfig(),
    "attention": None,
    "compression": "mlp",
    "compress_selected_keys": False,
    "cover": "selected",
    "gate_logit": 8.0,
    "dense_below": 0,
    "selector": "compressed",
}


def attention_options(attention: str, dense_below: int, selector: str) -> dict[str, Any]:
    """Model settings for an `--attention` value. Patterns may contain block-sparse in the same places as nsa."""
    kinds = [part.partition("*")[0].strip() for part in attention.split(",")]
    names = (*get_args(AttentionKind), BLOCK_SPARSE)
    if unknown := [kind for kind in kinds if kind not in names]:
        raise UsageError(f"--attention {attention}: {unknown[0]!r} is unknown: pick from {', '.join(names)}")
    if BLOCK_SPARSE not in kinds:
        for name, given in (("dense_below", dense_below), ("selector", selector != "compressed")):
            if given:
                raise UsageError(f"--{name} needs --attention {BLOCK_SPARSE}: other imports do not have it")
        return {"attention": attention}
    if "nsa" in kinds:
        raise UsageError(
            f"--attention {attention}: {BLOCK_SPARSE} and nsa cannot be mixed in one model; use one of them"
        )
    return {
        "attention": attention.replace(BLOCK_SPARSE, "nsa"), "gate": "none", "compression": "mean",
        "dense_below": dense_below, "selector": selector,
    }  # fmt: skip
