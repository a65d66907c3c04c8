"""RoPE in a config.json: read and write transformers' rope_parameters.

Models with rope_max_wavelength are written as longrope, which divides the frequency of every channel pair by a factor
of its own: by UNROTATED for pairs that are not rotated. The frequencies are then fixed, whatever else extends them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from tercet.errors import UsageError
from tercet.model.config import ModelConfig, RopeType
from tercet.model.rope import Rotary

# No angle even at millions of positions; in float32 its product with any usual theta is finite.
UNROTATED = 1e30


class ForeignModelError(UsageError):
    """A checkpoint that Tercet cannot represent."""


def rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Model settings for the RoPE of a config.json, as `dense_weights.read_config` reads it."""
    rope = hf_config["rope_parameters"]
    kind = rope.get("rope_type")
    known = ("default", *get_args(RopeType), "longrope")
    if kind not in known:
        raise ForeignModelError(f"rope_type={kind!r} cannot be imported: supported are {', '.join(known)}")
    if (partial := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ForeignModelError(
            f"partial_rotary_factor={partial} cannot be imported: Tercet rotates whole heads; pick a model that does"
        )
    settings: dict[str, Any] = {
        "rope_theta": rope["rope_theta"], "rope_scaling": 1.0, "rope": {}, "rope_max_wavelength": 0.0,
    }  # fmt: skip
    if kind == "default":
        return settings
    if kind == "linear":
        return {**settings, "rope_scaling": float(_need(rope, "factor"))}
    if kind == "longrope":
        return settings | _longrope_settings(hf_config, rope, settings["rope_theta"])

    original = float(_need(rope, "original_max_position_embeddings"))
    if original % 1:
        raise ForeignModelError(f"original_max_position_embeddings={original} cannot be imported: use a whole number")
    if kind == "llama3":
        factor = float(_need(rope, "factor"))
        options = {"slow": float(_need(rope, "low_freq_factor")), "fast": float(_need(rope, "high_freq_factor"))}
    else:
        factor, options = _yarn_settings(rope, original, hf_config.get("max_position_embeddings"))
    return {**settings, "rope_scaling": factor, "rope": {"type": kind, "original_length": int(original), **options}}


def _yarn_settings(rope: Mapping[str, Any], original: float, longest: int | None) -> tuple[float, dict[str, float]]:
    """The scaling factor, and the options of `model.rope`."""
    if not rope.get("truncate", True):
        raise ForeignModelError(
            "truncate=False of rope_type='yarn' cannot be imported: Tercet always truncates; pick another model"
        )
    factor = float(rope.get("factor") or (longest and longest / original) or _need(rope, "factor"))
    options = {"slow": float(rope.get("beta_slow") or 1), "fast": float(rope.get("beta_fast") or 32)}
    if rope.get("attention_factor") is not None:
        options["attention_factor"] = float(rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        by, of = (0.1 * float(rope[name]) * math.log(max(factor, 1)) + 1 for name in ("mscale", "mscale_all_dim"))
        options["attention_factor"] = by / of
    return factor, options


def _need(rope: Mapping[str, Any], name: str) -> Any:
    if rope.get(name) is None:
        raise ForeignModelError(
            f"config.json has no {name} for rope_type={rope['rope_type']!r}: add it, or copy the file again"
        )
    return rope[name]


def _longrope_settings(hf_config: Mapping[str, Any], rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The settings in the entry `tercet` if they give the factors of this longrope, else the simplest that do."""
    size = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    factors, long = ([min(float(f), UNROTATED) for f in _need(rope, name)] for name in ("short_factor", "long_factor"))
    if len(factors) != size // 2:
        raise ForeignModelError(f"short_factor has {len(factors)} entries, but head_dim={size} needs {size // 2}")
    if long != factors:
        raise ForeignModelError(
            "rope_type='longrope' cannot be imported if long_factor differs from short_factor: Tercet's RoPE is the "
            "same at all lengths; pick another model"
        )
    attention_factor = _longrope_attention_factor(hf_config, rope)
    stored = hf_config.get("tercet") or {}
    saved = ModelConfig(**{name: value for name, value in stored.items() if name.startswith("rope")})
    exported = Rotary(size, theta, saved.rope_scaling, saved.rope_max_wavelength, saved.rope)
    simplest = _simplest_rotary(size, theta, factors)
    for rotary in (exported, simplest):
        same = (math.isclose(*pair, rel_tol=1e-6) for pair in zip(factors, _longrope_factors(rotary), strict=True))
        if all(same) and math.isclose(attention_factor, rotary.attention_factor, rel_tol=1e-6):
            scaling, limit = rotary.scaling, rotary.max_wavelength
            return {"rope_scaling": scaling, "rope": rotary.rope, "rope_max_wavelength": limit}
    raise ForeignModelError(
        f"rope_type='longrope' with attention_factor={attention_factor:g} and factors {min(factors):g} to "
        f"{max(factors):g} cannot be imported: it needs attention_factor=1, one factor for all channels that are "
        f"rotated and {UNROTATED:g} for all slower ones; pick another model"
    )


def _longrope_attention_factor(hf_config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = float(_need(rope, "original_max_position_embeddings"))
    factor = float(rope.get("factor") or hf_config["max_position_embeddings"] / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _simplest_rotary(size: int, theta: float, factors: Sequence[float]) -> Rotary:
    """Linear scaling by the first factor, and a limit between the last rotated and the first unrotated wavelength."""
    rotated = sum(factor < UNROTATED for factor in factors)
    scaling = factors[0] if rotated else 1.0
    wavelengths = [scaling * 2 * math.pi * theta ** (2 * i / size) for i in range(len(factors))]
    limit = 0.0
    if rotated < len(factors):
        limit = math.sqrt(wavelengths[rotated - 1] * wavelengths[rotated]) if rotated else wavelengths[0] / 2
    return Rotary(size, theta, scaling, limit)


def _longrope_factors(rotary: Rotary) -> list[float]:
    """By how much the frequency of each channel pair is divided."""
    cpu = torch.device("cpu")
    plain = Rotary(rotary.size, rotary.theta).frequencies(cpu)
    factors: list[float] = (plain / rotary.frequencies(cpu)).clamp(max=UNROTATED).tolist()
    return factors


def rope_parameters(config: ModelConfig, length: int) -> dict[str, Any]:
    """transformers' rope_parameters of a model of at most `length` positions: the inverse of `rope_settings`."""
    rope, factor = config.rope, config.rope_scaling
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_max_wavelength:
        rotary = Rotary(config.head_dim, config.rope_theta, factor, config.rope_max_wavelength, rope)
        factors = _longrope_factors(rotary)
        return found | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": rotary.attention_factor,
            "factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if factor == 1 and rope.type == "linear":
        return found
    found |= {"rope_type": rope.type, "factor": factor}
    if rope.type == "linear":
        return found
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}[rope.type]
    found |= dict(zip(names, (rope.slow, rope.fast_or_default), strict=True))
    if rope.attention_factor is not None:
        found["attention_factor"] = rope.attention_factor
    return {**found, "original_max_position_embeddings": rope.original_length}
