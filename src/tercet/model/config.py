"""ModelConfig: the sizes of a model and their rules. Does not import torch, so that `tercet plan` starts fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tercet.attention.config import NSAConfig, check_above_zero, check_branches, check_group_size, check_sizes
from tercet.attention.spec import DENSE, SCORERS, AttentionSpec, block_sparse, check_exact_groups, implied, window

AttentionKind = Literal["nsa", "dense", "window"]
Branch = Literal["compressed", "selected", "window"]
RopeType = Literal["linear", "llama3", "yarn"]
# Keys without effect in a model with dense attention only. `backend` is not one: the feed-forward uses it too.
NSA_ONLY = (
    "nsa", "compression", "gate", "shared_kv", "compress_selected_keys", "branches",
    "selector", "selector_dim", "selector_rotary", "exact_groups", "dense_below",
)  # fmt: skip

MOST_LAYERS = 1024


def read_pattern(pattern: str) -> tuple[AttentionKind, ...]:
    """The layers that a pattern names: `kind` or `kind*count`, separated by commas, such as window*3,nsa."""
    names = get_args(AttentionKind)
    kinds: list[AttentionKind] = []
    for part in pattern.split(","):
        kind, star, count = (word.strip() for word in part.partition("*"))
        if kind not in names:
            fix = f"pick from {', '.join(names)}, such as nsa or window*3,nsa"
            if kind == "block-sparse":
                fix = "use nsa, with model.gate = none"
            raise ValueError(f"{part.strip()!r} is unknown: {fix}")
        if star and not (count.isascii() and count.isdecimal() and 1 <= int(count[:5]) <= MOST_LAYERS):
            raise ValueError(f"{part.strip()!r}: expected a count from 1 to {MOST_LAYERS} after *, such as {kind}*3")
        kinds += [kind] * (int(count) if star else 1)  # type: ignore[list-item]
    return tuple(kinds)


def layer_kinds(attention: str | Sequence[str], layers: int) -> tuple[AttentionKind, ...]:
    """The attention of each layer: a pattern is repeated to fill the layers, a list has one entry per layer."""
    if not isinstance(attention, str):
        if len(attention) != layers:
            raise ValueError(
                f"attention names {len(attention)} layers but layers={layers}: "
                "give one value for all layers, a pattern such as window*3,nsa, or a list with one entry per layer"
            )
        return tuple(attention)  # type: ignore[arg-type]
    kinds = read_pattern(attention)
    repeats, rest = divmod(layers, len(kinds))
    if rest:
        fits = f"{repeats * len(kinds)} or {(repeats + 1) * len(kinds)}" if repeats else f"{len(kinds)}"
        raise ValueError(
            f"attention={attention!r} names {len(kinds)} layers but layers={layers} is not a multiple of "
            f"{len(kinds)}: a pattern is repeated to fill the layers; use layers {fits}, or another pattern"
        )
    return kinds * repeats


def is_all_dense(attention: object) -> bool:
    """Whether a value of model.attention, perhaps read from a file, makes every layer dense."""
    if isinstance(attention, str):
        try:
            attention = read_pattern(attention)
        except ValueError:
            return False
    return isinstance(attention, (list, tuple)) and set(attention) == {"dense"}


@dataclass(frozen=True)
class RopeConfig:
    """RoPE channels that model.rope_scaling applies to."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    type: RopeType = "linear"
    """linear: all channels. llama3 and yarn, as in models of these names: low-frequency channels only; high-frequency
    channels keep their frequency."""
    original_length: int = 8192
    """llama3, yarn: sequence length before the model was extended."""
    slow: float = 1.0
    """llama3, yarn: channels with fewer rotations than this in original_length are scaled in full."""
    fast: float | None = None
    """llama3, yarn: channels with more rotations than this in original_length are not scaled; none: 4 for llama3, 32
    for yarn."""
    attention_factor: float | None = None
    """yarn: multiplies rotated queries and keys; none: 0.1 · ln(rope_scaling) + 1."""

    def __post_init__(self) -> None:
        if self.type not in (types := get_args(RopeType)):
            raise ValueError(f"rope.type={self.type!r} is unknown: pick one of {', '.join(types)}")
        plain = {f.name: f.default for f in fields(self) if f.name != "type"}
        unused = {"linear": tuple(plain), "llama3": ("attention_factor",), "yarn": ()}[self.type]
        for name in unused:
            if getattr(self, name) != plain[name]:
                raise ValueError(f"rope.{name}={getattr(self, name)} has no effect with rope.type={self.type}: drop it")
        for name in ("slow", "fast", "attention_factor"):
            check_above_zero(**{f"rope.{name}": getattr(self, name)})
        if not isinstance(self.original_length, int) or self.original_length < 1 or self.slow >= self.fast_or_default:
            raise ValueError(
                f"rope.original_length={self.original_length} must be at least 1, and rope.slow={self.slow:g} above 0 "
                f"and below rope.fast={self.fast_or_default:g}"
            )

    @property
    def fast_or_default(self) -> float:
        """rope.fast, or its default for rope.type."""
        return self.fast if self.fast is not None else {"linear": 32.0, "llama3": 4.0, "yarn": 32.0}[self.type]


def check_selector(size: int, rotary: int | None) -> None:
    """Channels of a learned selector, and how many of them RoPE rotates (None: half)."""
    check_sizes(selector_dim=size)
    if rotary is not None and rotary not in range(0, size + 1, 2):
        raise ValueError(
            f"selector_rotary={rotary} is not an even number of at most selector_dim={size}: "
            f"use {max(0, min(int(rotary), size)) // 2 * 2}"
        )


class ModelConfig(BaseModel):
    """A decoder of the Llama family: RMSNorm, SwiGLU, RoPE, grouped KV heads; sparse, dense or window attention."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    dim: int = Field(default=768, ge=1, le=2**17)
    """Width of the residual stream."""
    layers: int = Field(default=12, ge=1, le=MOST_LAYERS)
    """Number of blocks."""
    heads: int = Field(default=12, ge=1, le=4096)
    """Query heads (H)."""
    kv_heads: int = Field(default=2, ge=1, le=4096)
    """Key/value heads (G); divides heads."""
    head_dim: int = Field(default=64, ge=2, le=4096)
    """Size of one query and key head (Dk); even, for RoPE."""
    value_dim: int | None = Field(default=None, ge=1, le=4096)
    """Size of one value head (Dv); none: same as head_dim."""
    ffn_dim: int = Field(default=2048, ge=1, le=2**20)
    """Inner width of the SwiGLU."""
    vocab_size: int = Field(default=256, ge=2, le=2**24)
    """Vocabulary size: at least that of the tokenizer (256 for bytes)."""
    tie_embeddings: bool = True
    """Share one matrix between embedding and head."""
    attention: str | tuple[str, ...] = "nsa"
    """Attention of all layers: nsa, dense, or window (the last nsa.window tokens only); a pattern of layers such as
    nsa*11,dense or window*3,nsa, repeated to fill model.layers; or a list with one entry per layer."""
    nsa: NSAConfig = NSAConfig()
    """Block sizes of Native Sparse Attention."""
    compression: Literal["mlp", "mean"] = "mlp"
    """How a block of keys and values becomes one. mlp: learned, starts as the mean. mean: their mean."""
    gate: Literal["sigmoid", "softmax", "none"] = "sigmoid"
    """How the outputs of the branches are weighted. sigmoid: independently, as in the paper. softmax: over
    them. none: block-sparse attention, which only reads selected blocks and has a dense model's parameters."""
    shared_kv: bool = False
    """One key/value projection for all branches instead of one per branch."""
    compress_selected_keys: bool = False
    """Compress the selected branch's keys instead of separate ones, so that blocks are selected by the keys that
    will be read; values stay separate."""
    selector: str = "compressed"
    """What chooses the blocks. compressed: the compressed branch, as in the paper, or means of keys with gate = none.
    own: the queries and keys of the branch itself, without parameters. learned: separate small projections that learn
    to choose."""
    selector_dim: int = Field(default=32, ge=1, le=256)
    """Channels of a learned selector's queries and keys, per KV head."""
    selector_rotary: int | None = Field(default=None, ge=0)
    """Channels of a learned selector to which RoPE is applied; the others compare content alone. An even number of at
    most selector_dim; none: half of it."""
    exact_groups: tuple[tuple[int, ...], ...] = ()
    """With selector = own: the KV heads of each layer that choose by it, such as [[0, 1], [], [1]], or 0,1 none 1 as
    a flag. The others choose by the means of blocks of their keys, which costs less. Empty: all choose by it."""
    branches: tuple[Branch, ...] = ("compressed", "selected", "window")
    """Branches to use; omit some for an ablation."""
    dense_below: int = Field(default=0, ge=0)
    """With gate = none: queries at positions below this read everything, as in dense attention."""
    backend: Literal["auto", "reference", "triton"] = "auto"
    """Implementation of NSA. auto: the fastest that runs here. triton: the GPU kernels, or an error. reference:
    PyTorch, also for the feed-forward layer."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary position embedding."""
    rope_scaling: float = Field(default=1.0, gt=0)
    """Divides positions, in all channels or in those that model.rope selects; above 1 to extend a model to longer
    sequences."""
    rope: RopeConfig = RopeConfig()
    """Which channels rope_scaling applies to."""
    rope_max_wavelength: float = Field(default=0.0, ge=0)
    """Channels with a longer wavelength than this, in positions, are not rotated: they compare content alone, at any
    distance. For a model that will read longer texts later, set it to the sequence length of most of its training. 0:
    all are rotated."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before RoPE."""
    attention_bias: bool = False
    """Biases in the attention projections, as in the Qwen2 family."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of every RMSNorm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights; divided by sqrt(2 · layers) for projections into the residual stream."""

    @field_validator("attention")
    @classmethod
    def _known_attention(cls, attention: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(attention, str):
            read_pattern(attention)
            return attention
        names = get_args(AttentionKind)
        for kind in attention:
            if kind not in names:
                pattern = ": write a pattern as one text, with commas" if "*" in kind or "," in kind else ""
                raise ValueError(f"{kind!r} is unknown: a list takes {', '.join(names)}, one per layer{pattern}")
        return attention

    @field_validator("exact_groups", mode="before")
    @classmethod
    def _parse_exact_groups(cls, layers: Any) -> Any:
        """Layers as text hold numbers with commas between them, or none."""
        if not isinstance(layers, list | tuple):
            return layers
        return [() if x == "none" else x.split(",") if isinstance(x, str) else x for x in layers]

    @field_validator("selector")
    @classmethod
    def _known_selector(cls, selector: str) -> str:
        if selector not in SCORERS:
            raise ValueError(f"{selector!r} is unknown: pick one of {', '.join(SCORERS)}")
        return selector

    @field_validator("branches")
    @classmethod
    def _known_branches(cls, branches: tuple[str, ...]) -> tuple[str, ...]:
        return check_branches(branches)

    @model_validator(mode="before")
    @classmethod
    def _block_sparse_defaults(cls, values: Any) -> Any:
        """gate = none leaves no choice for these: they need not be given."""
        return {**implied(values.get("gate")), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        check_group_size(self.heads, self.kv_heads)
        self._check_block_sparse()
        if self.selector != "compressed" and "selected" not in self.branches:
            raise ValueError(
                f"selector={self.selector} has no effect with branches={','.join(self.branches)}, which read no "
                "selected blocks: add selected to branches, or use selector=compressed"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: RoPE rotates pairs, use {self.head_dim + 1}")
        if self.rope.type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 1 for rope.type=yarn: 10000 is usual")
        check_selector(self.selector_dim, self.selector_rotary)
        layer_kinds(self.attention, self.layers)
        self._check_exact_groups()
        return self

    def _check_exact_groups(self) -> None:
        if not self.exact_groups:
            return
        if len(self.exact_groups) != self.layers:
            raise ValueError(
                f"exact_groups names {len(self.exact_groups)} layers but layers={self.layers}: give one list per layer"
            )
        for i, (kind, groups) in enumerate(zip(self.attention_kinds, self.exact_groups, strict=True)):
            try:
                check_exact_groups(groups, self.selector, self.kv_heads)
            except ValueError as error:
                raise ValueError(f"layer {i}: {error}") from None
            if groups and kind != "nsa":
                raise ValueError(f"exact_groups names KV heads of layer {i}, which is {kind}: give it an empty list")

    def _check_block_sparse(self) -> None:
        fixed = implied(self.gate)
        if self.dense_below and not fixed:
            raise ValueError(f"dense_below={self.dense_below} needs gate=none: only block-sparse attention has it")
        for name, value in fixed.items():
            if (given := getattr(self, name)) != value:
                shown, given = (",".join(v) if isinstance(v, tuple) else str(v).lower() for v in (value, given))
                raise ValueError(
                    f"gate=none is block-sparse attention, one set of keys and values and no gates: it needs "
                    f"{name}={shown}, not {given}; drop {name}, or use gate=sigmoid"
                )

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The attention of each layer."""
        return layer_kinds(self.attention, self.layers)

    @property
    def attention_names(self) -> tuple[str, ...]:
        """The attention of each layer in messages: nsa without gates is called block-sparse."""
        sparse = "block-sparse" if not self.spec("nsa").gated else "nsa"
        return tuple(sparse if kind == "nsa" else kind for kind in self.attention_kinds)

    @property
    def nsa_options(self) -> str:
        """How nsa layers differ from the paper's, as a phrase after attention_names: ", branches selected and window,
        learned selector"; empty if they do not."""
        if "nsa" not in self.attention_kinds:
            return ""
        left_out = self.spec("nsa").gated and len(self.branches) < len(get_args(Branch))
        branches = f", {'branch' if len(self.branches) == 1 else 'branches'} {' and '.join(self.branches)}"
        selector = "" if self.selector == "compressed" else f", {self.selector} selector"
        return branches * left_out + selector

    def spec(self, kind: str, layer: int | None = None) -> AttentionSpec:
        """The form of attention of layers of this kind; with `layer`, also what only this one has."""
        if kind != "nsa":
            return DENSE if kind == "dense" else window(self.nsa)
        groups = None if layer is None or not self.exact_groups else self.exact_groups[layer]
        if implied(self.gate):
            return block_sparse(self.nsa, self.selector, self.dense_below, groups)
        return AttentionSpec(
            self.nsa, self.branches, self.gate, self.selector, self.compression, self.shared_kv,
            self.compress_selected_keys, exact_groups=groups,
        )  # fmt: skip

    @property
    def unused_keys(self) -> dict[str, tuple[str, ...]]:
        """Settings without effect in this model, by the reason."""
        kinds, unused = self.attention_kinds, dict[str, tuple[str, ...]]()
        if "nsa" not in kinds:
            sizes = tuple(f"nsa.{f.name}" for f in fields(self.nsa) if f.name != "window")
            unused[f"no layer is nsa (model.attention={self.attention})"] = (*NSA_ONLY, *sizes)
        else:
            if not self.spec("nsa").reads_compressed:
                unused["no layer reads compressed tokens (model.branches, model.selector)"] = (
                    "compression", "compress_selected_keys", "nsa.compress_block", "nsa.compress_stride"
                )  # fmt: skip
            elif self.shared_kv:
                unused["all branches share one set of keys (model.shared_kv)"] = ("compress_selected_keys",)
            if self.selector != "learned":
                unused[f"model.selector={self.selector} is not learned"] = ("selector_dim", "selector_rotary")
        if "window" not in kinds and ("nsa" not in kinds or "window" not in self.branches):
            unused["no layer has a window (model.attention, model.branches)"] = ("nsa.window",)
        return unused

    @property
    def head_value_dim(self) -> int:
        """Dv."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Sampling:
    """How to sample the next token. temperature 0 is greedy: the most likely token, the lowest id among ties."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (isinstance(self.top_k, int) and self.top_k >= 0, "at least 0 (0 is all tokens)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is none)"),
        }
        for name, (valid, rule) in rules.items():
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")
