"""Rotary position embeddings (RoPE): half-rotation as in Llama. x: [B, T, heads, D]; positions: [T] or [B, T]."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig, check_above_zero, check_sizes
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing
from tercet.model.config import RopeConfig

CosSin = tuple[Tensor, Tensor]
"""(cos, sin), fp32 [..., T, 1, D/2]."""


class RopeCache(NamedTuple):
    """What layers need of one forward pass besides x: cos/sin, shared by all layers."""

    tokens: CosSin
    compressed: CosSin | None
    """At the positions of the compressed tokens; None if no layer has any."""
    selector: CosSin | None = None
    """Of learned selectors, at the tokens; None if they rotate nothing."""


class Rotary:
    """Angles theta^(-2i/D) · position / scaling for every pair (i, i + D/2) of a head.

    `scaling` divides all positions: a model trained at 8k reads 32k with scaling 4 (position interpolation); `rope`
    may limit it to some pairs. Pairs with a wavelength of more than `max_wavelength` positions are not rotated (0: all
    are).
    """

    def __init__(
        self,
        size: int,
        theta: float = 10000.0,
        scaling: float = 1.0,
        max_wavelength: float = 0.0,
        rope: RopeConfig | None = None,
    ) -> None:
        check_sizes(head_dim=size)
        if size % 2:
            raise ValueError(f"head_dim={size} is odd: RoPE rotates pairs, use an even size")
        check_above_zero(rope_theta=theta, rope_scaling=scaling, rope_max_wavelength=max_wavelength or None)
        if not isinstance(rope, RopeConfig | None):
            raise TypeError(f"rope is {type(rope).__name__}: it must be a tercet.model.config.RopeConfig")
        self.size, self.theta, self.scaling = size, float(theta), float(scaling)
        self.max_wavelength = float(max_wavelength)
        self.rope = RopeConfig() if rope is None else rope

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys, in cos and sin (YaRN)."""
        if self.rope.type != "yarn":
            return 1.0
        if self.rope.attention_factor is not None:
            return self.rope.attention_factor
        return 0.1 * math.log(max(self.scaling, 1.0)) + 1.0

    def of_size(self, size: int) -> Rotary:
        """The same rotation for other vectors, without an attention factor."""
        rope = self.rope if self.attention_factor == 1 else replace(self.rope, attention_factor=1.0)
        return Rotary(size, self.theta, self.scaling, self.max_wavelength, rope)

    def frequencies(self, device: torch.device) -> Tensor:
        """fp64 [size/2]: radians per position of each pair."""
        exponent = torch.arange(0, self.size, 2, device=device, dtype=torch.float64) / self.size
        frequencies = self.theta**-exponent
        kept = self._kept(frequencies)
        frequencies = frequencies / self.scaling if kept is None else frequencies * (kept + (1 - kept) / self.scaling)
        if self.max_wavelength:
            frequencies = torch.where(2 * math.pi / frequencies > self.max_wavelength, 0.0, frequencies)
        return frequencies

    def _kept(self, frequencies: Tensor) -> Tensor | None:
        """How much of its frequency each pair keeps: 0 is divided by `scaling`, 1 is not. None: all are divided."""
        rope, length = self.rope, self.rope.original_length
        if rope.type == "linear":
            return None
        if rope.type == "llama3":  # by full rotations in the original length
            rotations = length * frequencies / (2 * math.pi)
            return ((rotations - rope.slow) / (rope.fast_or_default - rope.slow)).clamp(0, 1)

        # yarn: by index, between the pairs that have this many rotations
        def pair(rotations: float) -> float:
            return self.size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = max(math.floor(pair(rope.fast_or_default)), 0), min(math.ceil(pair(rope.slow)), self.size - 1)
        index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float64)
        return 1 - ((index - first) / (last - first or 0.001)).clamp(0, 1)

    def cos_sin(self, positions: Tensor) -> CosSin:
        """Computed per pass, because a table would need the longest T in advance; but once for all layers, because
        fp64 cosines fused into every kernel that uses them took a third of a training step."""
        # fp64: at position 1,000,000 an fp32 angle is off by 0.06 rad
        angle = positions[..., None].double() * self.frequencies(positions.device)
        factor = self.attention_factor
        cos, sin = ((part * factor).float().unsqueeze(-2) for part in (angle.cos(), angle.sin()))
        return cos, sin

    def of_tokens(self, x: Tensor, positions: Tensor | None) -> CosSin:
        """cos/sin of the tokens x [B, T, ...], at 0 … T-1 unless positions are given."""
        return self.cos_sin(torch.arange(x.shape[1], device=x.device) if positions is None else positions)

    def of_compressed(self, x: Tensor, packing: Packing | None, config: NSAConfig) -> CosSin:
        """cos/sin of the compressed tokens of x [B, T, ...]."""
        if packing is None:
            index = torch.arange(config.num_compressed(x.shape[1]), device=x.device)
        else:
            index = packing.compressed_index
        return self.cos_sin(compressed_positions(index, config))


def rope_cache(rotary: Rotary, x: Tensor, packing: Packing | None, config: NSAConfig | None) -> RopeCache:
    """cos/sin of the tokens x [B, T, ...] and, with a config, of their compressed tokens."""
    tokens = rotary.of_tokens(x, None if packing is None else packing.position)
    return RopeCache(tokens, None if config is None else rotary.of_compressed(x, packing, config))


def compressed_positions(index: Tensor, config: NSAConfig) -> Tensor:
    """Position of each compressed token: that of its last token."""
    return index * config.compress_stride + config.compress_block - 1


def rotate(x: Tensor, cos_sin: CosSin, backend: str = "auto") -> Tensor:
    if backend != "reference" and _in_one_launch(x):
        return _rotate_on_gpu(x, cos_sin)
    cos, sin = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in cos_sin)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_first(x: Tensor, cos_sin: CosSin, backend: str = "auto") -> Tensor:
    """`rotate` for fewer angles than x has pairs: its first channels are rotated, the others stay as they are."""
    if backend != "reference" and _in_one_launch(x):
        return _rotate_on_gpu(x, cos_sin)
    cos, sin = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in cos_sin)
    pairs = cos.shape[-1]
    first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    rotated = first * cos - second * sin, second * cos + first * sin
    # rounded before they are joined: a sequence's queries are copied once
    return torch.cat((*(part.to(x.dtype) for part in rotated), rest), dim=-1)


def _in_one_launch(x: Tensor) -> bool:
    """Whether a kernel without a gradient can rotate x."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func.vmap: x has no storage
        return False
    return x.dim() == 4 and x.numel() > 0 and kernels_run_on(x)


def _rotate_on_gpu(x: Tensor, cos_sin: CosSin) -> Tensor:
    from tercet.attention.kernels.qkv_split import rotate as kernel

    return kernel(x, *cos_sin)
