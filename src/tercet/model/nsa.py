"""NativeSparseAttention: the layer around the operator. x: [B, T, dim] -> [B, T, dim]"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tercet.attention.checks import check_config
from tercet.attention.config import (
    BRANCHES,
    NSAConfig,
    check_above_zero,
    check_branches,
    kv_sets,
    reads_compressed,
)
from tercet.attention.dispatch import check_backend
from tercet.attention.functional import NSAInputs, run_nsa
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing
from tercet.model import decode
from tercet.model.cache import NewTokens
from tercet.model.compression import Compression, compress_keys_and_values
from tercet.model.config import AttentionKind, RopeConfig
from tercet.model.layer import Scorer, SelectingLayer, are_plain
from tercet.model.nsa_cache import NSACache
from tercet.model.rope import CosSin, RopeCache, Rotary, compressed_positions, rope_cache, rotate
from tercet.model.selector import RandomBlocks, build_selector
from tercet.model.stats import AttentionStats

GATES = ("sigmoid", "softmax")


class Gate(nn.Module):
    """The gate (Eq. 5): three numbers per query head from the layer's input. [B, T, dim] -> [B, T, H, 3]

    Weights start at zero, so all gates of every head start equal: ½ each (sigmoid) or ⅓ (softmax; ½ of two branches).
    A softmax is over `branches`; the gates of others are 0.
    """

    def __init__(self, dim: int, heads: int, kind: str = "sigmoid", branches: tuple[str, ...] = BRANCHES) -> None:
        super().__init__()
        if kind not in GATES:
            raise ValueError(f"gate={kind!r} is unknown: pick one of {', '.join(GATES)}, or use BlockSparseAttention")
        self.kind, self.branches = kind, branches
        self.proj = nn.Linear(dim, 3 * heads)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.proj(x))

    def activate(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """Gates from the output of `proj` [B, T, 3H]; pass its bias if the output does not include it."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if bias is not None:
            logits = logits + bias
        logits = logits.unflatten(-1, (-1, 3))
        if self.kind == "sigmoid":
            return logits.sigmoid()
        if len(self.branches) == len(BRANCHES):
            return logits.softmax(-1)
        own = {b: part for b, part in zip(BRANCHES, logits.unbind(-1), strict=True) if b in self.branches}
        gates = dict(zip(own, torch.stack([*own.values()], -1).softmax(-1).unbind(-1), strict=True))
        return torch.stack([gates[b] if b in gates else torch.zeros_like(logits[..., 0]) for b in BRANCHES], -1)


class NativeSparseAttention(SelectingLayer):
    """Each query attends to compressed tokens, to a few selected blocks in full, and to a sliding window.

    dim, heads, kv_heads, head_dim   sizes; value_dim is the head size of v, head_dim by default
    config       sizes of the three branches
    compression  φ: "mlp" (learnable, equals the mean at initialisation) or "mean"
    gate         "sigmoid" (the paper's) or "softmax" over the branches
    shared_kv    one K/V projection for all branches instead of three
    compress_selected_keys  compress the selected branch's keys instead of separate ones, so that blocks are selected by
                 a summary of the keys that will be read
    rope_theta, rope_scaling, rope_max_wavelength  RoPE base, a divisor for all positions, and the longest wavelength
                 of rotated channels (0: no limit)
    rope         which channels rope_scaling applies to; all by default
    qk_norm      RMS-normalise each head of q and k
    selector     what chooses the blocks: "compressed" (the compressed branch, as in the paper), "learned" (a query
                 and a key of `selector_dim` channels per token and KV head, of which RoPE rotates the first
                 `selector_rotary`, half of them by default) or "random" (a control)
    branches     omit branches. Without the compressed one, and with a selector other than "compressed", the layer has
                 no keys, values and φ for compressed tokens
    backend      "auto", "reference" or "triton"
    bias         biases in the projections
    norm_eps     epsilon of the norms of qk_norm
    """

    kind: AttentionKind = "nsa"
    cache_class = NSACache

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        compression: str = "mlp",
        gate: str = "sigmoid",
        shared_kv: bool = False,
        compress_selected_keys: bool = False,
        rope_theta: float = 10000.0,
        rope_scaling: float = 1.0,
        rope_max_wavelength: float = 0.0,
        rope: RopeConfig | None = None,
        qk_norm: bool = False,
        branches: tuple[str, ...] = BRANCHES,
        backend: str = "auto",
        bias: bool = False,
        norm_eps: float | None = None,
        selector: str = "compressed",
        selector_dim: int = 32,
        selector_rotary: int | None = None,
    ) -> None:
        key_sets, value_sets = kv_sets(branches, selector, shared_kv, compress_selected_keys)
        super().__init__(
            dim, heads, kv_heads, head_dim, value_dim, key_sets=key_sets, value_sets=value_sets, bias=bias,
            rotary=Rotary(head_dim, rope_theta, rope_scaling, rope_max_wavelength, rope),
        )  # fmt: skip
        check_backend(backend)
        self.config = NSAConfig() if config is None else config
        check_config(self.config)
        self.backend, self.branches = backend, check_branches(branches)
        self.compresses = reads_compressed(branches, selector)
        self.value_sets, self.shared_kv = value_sets, shared_kv
        self.compress_selected_keys = compress_selected_keys and self.compresses and not shared_kv
        self.gate = Gate(dim, heads, gate, self.branches)
        compression = compression if self.compresses else "mean"  # which has no parameters
        self.compress_k = Compression(compression, head_dim, self.config)
        self.compress_v = Compression(compression, self.value_dim, self.config)
        self.selector = build_selector(
            selector, dim, kv_heads, selector_dim, self.config, self.rotary, selector_rotary, backend
        )
        self.random_blocks = RandomBlocks(kv_heads, self.config) if selector == "random" else None
        check_above_zero(norm_eps=norm_eps)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norms = (
            nn.ModuleList(nn.RMSNorm(head_dim, eps=norm_eps) for _ in range(self.key_sets)) if qk_norm else None
        )
        self.stats = AttentionStats(self.config, self.branches)
        # Whether to save the gated sum, a tensor of q's size, for the backward pass. If not, a compiled layer
        # recomputes it there. Not worth it if activation checkpointing recomputes the whole block anyway.
        self.keep_sum = True

    @property
    def branch_names(self) -> tuple[str, ...]:
        return self.branches

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        super().init_weights(std, output_std)
        for part in (self.gate, self.compress_k, self.compress_v):
            part.init_weights()
        if self.selector is not None:
            self.selector.init_weights(std)

    def cache_key(self) -> dict[str, Any]:
        own = {"shared_kv": self.shared_kv, "branches": self.branches, "compresses": self.compresses}
        return super().cache_key() | own

    def chooses_randomly(self) -> bool:
        return self.random_blocks is not None

    def phi_is_plain(self) -> bool:
        return self.compress_k.is_plain() and self.compress_v.is_plain()

    # ------------------------------------------------------------ whole sequences

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        rope = rope_cache(self.rotary, x, packing, self.config) if rope is None else rope
        inputs = self.inputs(x, packing, rope)
        positions = None if packing is None else packing.position
        scored = None if self.selector is None else self.selector(x, positions, rope.selector)
        random = None if self.random_blocks is None else self.random_blocks.of_sequences(x, packing, rope.layer)
        fuse_output = not self.keep_sum and are_plain(self.o_proj)
        out, block_indices, self._route = run_nsa(
            inputs, config=self.config, packing=packing, backend=self.backend, branches=self.branches,
            output=(self.o_proj.weight, self.o_proj.bias) if fuse_output else None, selector=scored,
            block_indices=random,
        )  # fmt: skip
        self.stats.update(inputs.gates, block_indices, packing)
        if sampled is not None and block_indices is not None:
            q, k = inputs.q, inputs.k_selected
            out = self.with_selector_loss(out, x, scored, q, k, sampled, block_indices, packing, self._route[0])
        return out if fuse_output else self.o_proj(out.flatten(2))

    def inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> NSAInputs:
        """The operator's inputs for whole sequences x."""
        return self.fused_inputs(x, packing, rope) if self.can_fuse(x) else self.separate_inputs(x, packing, rope)

    def can_fuse(self, x: Tensor) -> bool:
        """Whether `fused_inputs` supports this layer and input.

        The kernel needs no norm between projection and RoPE, keys and values of one size, and at least one compressed
        token; and the weights it multiplies must belong to bare linear layers.
        """
        return (
            self.backend != "reference"
            and self.q_norm is None
            and self.value_dim == self.head_dim
            and x.shape[1] >= self.config.compress_block
            and kernels_run_on(x)
            and are_plain(self.q_proj, self.kv_proj, self.gate.proj)
            and self.phi_is_plain()
        )

    def fused_inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> NSAInputs:
        """Fused QKV and gate projection, split by one kernel into the layouts that the other kernels read.

        Four separate projections read x four times and write its gradient four times, and the steps between them and
        the kernels (RoPE, chunks for φ, gathering gradients) are a dozen compiled launches instead of two.
        """
        from tercet.attention.kernels import qkv_split

        weights = [self.q_proj.weight, self.kv_proj.weight, self.gate.proj.weight]
        width = qkv_split.columns(self.heads, self.kv_heads, self.head_dim, self._split_key_sets())
        weights.append(weights[0].new_zeros(width - sum(w.shape[0] for w in weights), self.dim))
        bias = None
        if self.q_proj.bias is not None:
            biases = (self.q_proj.bias, self.kv_proj.bias)
            bias = torch.cat((*biases, biases[0].new_zeros(width - sum(b.shape[0] for b in biases))))
        return self._split(F.linear(x, torch.cat(weights), bias), packing, rope, self.gate.proj.bias)

    def _split(self, y: Tensor, packing: Packing | None, rope: RopeCache, gate_bias: Tensor | None) -> NSAInputs:
        """The operator's inputs from the outputs of q_proj, kv_proj and gate.proj side by side; gate_bias: if it is not
        part of them."""
        from tercet.attention.kernels import qkv_split

        key_sets = self._split_key_sets()
        maps = (None,) * 4 if packing is None else tuple(packing.tokens_to_chunks)
        sizes = [self.heads, self.kv_heads, self.head_dim, self.config.compress_stride, key_sets]
        q, ks, vs, kw, vw, chunks, logits = qkv_split.split_qkv(y, rope.tokens, maps, sizes)
        kc = vc = None
        if self.compresses:
            assert rope.compressed is not None
            kc, vc = compress_keys_and_values(chunks, self.compress_k, self.compress_v, packing)
            kc = rotate(kc, rope.compressed, self.backend)
        return NSAInputs(q, kc, vc, ks, vs, kw, vw, self.gate.activate(logits, gate_bias))

    def _split_key_sets(self) -> int:
        from tercet.attention.kernels import qkv_split

        return self.key_sets if self.compresses or self.shared_kv else qkv_split.UNCOMPRESSED

    def separate_inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> NSAInputs:
        """Separate projections for q, keys and values, and gates: on any device, with every option."""
        q, raw_k, keys, values = self.project(x, None, rope.tokens)
        compressed: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.compresses:
            compressed = self._compress(raw_k, values["compressed"], packing, rope.compressed)
        selected, window = ((keys[branch], values[branch]) for branch in ("selected", "window"))
        return NSAInputs(q, *compressed, *selected, *window, self.gate(x))

    # ------------------------------------------------------------ projections

    def project(
        self, x: Tensor, positions: Tensor | None, cos_sin: CosSin | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(q, raw keys of the compressed branch, keys by branch, values by branch); q and the keys of the selected and
        window branches are rotated at their tokens' positions."""
        batch, length, _ = x.shape
        cos_sin = self.rotary.of_tokens(x, positions) if cos_sin is None else cos_sin
        q, flat_keys, flat_values = self._project_flat(x)
        q = q.view(batch, length, self.heads, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        key_sets = [k.view(batch, length, self.kv_heads, self.head_dim) for k in flat_keys]
        value_sets = [v.view(batch, length, self.kv_heads, self.value_dim) for v in flat_values]
        if self.k_norms is not None:
            key_sets = [norm(k) for norm, k in zip(self.k_norms, key_sets, strict=True)]
        keys, values = self._by_branch(key_sets), self._by_branch(value_sets)
        rotated = {"selected": rotate(keys["selected"], cos_sin, self.backend)}
        rotated["window"] = rotated["selected"] if self.shared_kv else rotate(keys["window"], cos_sin, self.backend)
        return rotate(q, cos_sin, self.backend), keys["compressed"], rotated, values

    def _project_flat(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """q, and the sets of keys and of values, all flat: [B, T, heads · size]."""
        q = self.q_proj(x)
        if self.shared_kv or not torch.is_grad_enabled() or not are_plain(self.kv_proj):
            parts = self.kv_proj(x).split(self.kv_rows, dim=-1)
        else:
            parts = self._project_in_groups(x)
        return q, *self._keys_and_values(parts)

    def _project_in_groups(self, x: Tensor) -> tuple[Tensor, ...]:
        """The parts of kv_proj's output from one matmul each for the compressed branch, the keys of the selected and
        window branches, and their values.

        For the backward pass the selected and window values are saved as they are, their keys rotated, and the
        compressed branch's by chunks. With one matmul for all, the saved values would keep the whole output alive, and
        one compiled kernel would assemble its gradient from all these layouts, at a quarter of the memory bandwidth.
        """
        sizes = self.kv_rows
        weights = self.kv_proj.weight.split(sizes)
        biases = None if self.kv_proj.bias is None else self.kv_proj.bias.split(sizes)
        keys, values = self._keys_and_values(tuple(range(len(sizes))))
        compressed = (*keys[:-2], *values[:-2])  # none if nothing reads compressed tokens
        parts: dict[int, Tensor] = {}
        for group in (compressed, keys[-2:], values[-2:]):
            if group:
                weight = torch.cat([weights[i] for i in group])
                bias = None if biases is None else torch.cat([biases[i] for i in group])
                product = F.linear(x, weight, bias)
                parts |= zip(group, product.split([sizes[i] for i in group], dim=-1), strict=True)
        return tuple(parts[i] for i in range(len(sizes)))

    def _by_branch(self, sets: Iterable[Tensor]) -> dict[str, Tensor]:
        """The set of keys, or of values, that each branch reads."""
        return dict(zip(BRANCHES, self.per_branch(tuple(sets)), strict=True))

    def _keys_and_values(self, parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Which parts of kv_proj's output, in the order of `kv_rows`, are keys and which are values."""
        first_key = int(self.compress_selected_keys)
        return parts[first_key::2], parts[1 - first_key :: 2]

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Rows of kv_proj, [set][k, v]; the compressed branch has no keys of its own with compress_selected_keys."""
        # super().kv_rows would break torch.compile's graph
        one = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        return (one * self.value_sets)[self.compress_selected_keys :]

    def per_branch(self, sets: tuple[Any, ...]) -> tuple[Any, ...]:
        """One entry per branch from one per key or value set: shared sets, or the selected keys, are repeated."""
        return sets[:1] * (len(BRANCHES) - len(sets)) + sets

    def _compress(
        self, k: Tensor, v: Tensor, packing: Packing | None, cos_sin: CosSin | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compress unrotated keys, and rotate the result once, at the position of each block's last token."""
        cos_sin = self.rotary.of_compressed(k, packing, self.config) if cos_sin is None else cos_sin
        return rotate(self.compress_k(k, packing), cos_sin, self.backend), self.compress_v(v, packing)

    # ------------------------------------------------------------ new tokens after a cache

    @torch.no_grad()  # inference only: cached tokens must not keep their autograd graph alive
    def _forward_cached(self, x: Tensor, cache: NSACache, lengths: Tensor | None, rope: RopeCache | None) -> Tensor:
        reason = decode.why_not_kernels(self, x, cache, lengths)
        if reason is None and x.shape[1] == 1:
            return decode.run_token(self, x, cache, lengths)
        new = cache.begin(self.cache_key(), x, lengths)
        x = new.zero_padding(x)
        given = None if self.random_blocks is None else self.random_blocks(new.positions, new.longest)
        if new.fresh:
            return self._prefill(x, new, cache, rope, given)
        # a learned selector's queries of the new tokens, and all keys that they can see
        scored = None
        if self.selector is not None and cache.keeps_selector:
            scored = self.selector.append([layer(x) for layer in self.selector_layers()], new, cache)
        q, raw_k, keys, values = self.project(x, new.positions)
        gates = self.gate(x)
        blocks = cache.append(new, raw_k, keys, values)
        if blocks is not None:
            index, block_k, block_v = blocks
            cos_sin = self.rotary.cos_sin(compressed_positions(index, self.config))
            k, v = rotate(self.compress_k.phi(block_k), cos_sin, self.backend), self.compress_v.phi(block_v)
            cache.append_compressed(new, k_compressed=k, v_compressed=v)
        if reason is None:
            out, self._route = decode.nsa_chunk(q, gates, keys, values, cache, new, self.config, self.branches, scored)
        else:
            self._route = ("reference", reason)
            out = decode.cached_nsa_attention(q, gates, cache, new, self.config, self.branches, scored, given)
        return self.o_proj(out.flatten(2))

    def _projections(self, cache: NSACache) -> tuple[nn.Linear, ...]:
        """q_proj, kv_proj and gate.proj, and those of a learned selector, if the cache keeps its keys."""
        own = self.selector_layers() if cache.keeps_selector else ()
        return self.q_proj, self.kv_proj, self.gate.proj, *own

    def _prefill(
        self, x: Tensor, new: NewTokens, cache: NSACache, rope: RopeCache | None, given: Tensor | None
    ) -> Tensor:
        """The first tokens of an empty cache: the whole-sequence operator is faster, and causal masks hide the right
        padding from every real token."""
        inputs, scored = self._project_prompt(x, new, cache, rope)
        cache.reads = None
        out, _, self._route = run_nsa(
            inputs, config=self.config, backend=self.backend, branches=self.branches, selector=scored,
            block_indices=given,
        )  # fmt: skip
        return self.o_proj(out.flatten(2))

    def _project_prompt(
        self, x: Tensor, new: NewTokens, cache: NSACache, rope: RopeCache | None
    ) -> tuple[NSAInputs, Scorer | None]:
        """The operator's inputs, and the queries and keys of a learned selector; the cache keeps its part of them. The
        outputs of the projections are freed on return: attention does not need them."""
        rope = rope_cache(self.rotary, x, None, self.config) if rope is None else rope
        layers = self._projections(cache)
        fused = decode.project_together(x, cache, *layers) if self.can_fuse(x) else None
        parts = None if fused is None else decode.split_outputs(fused, layers)
        scored = None
        if self.selector is not None and cache.keeps_selector:
            scorer = [layer(x) for layer in layers[3:]] if parts is None else parts[3:]
            scored = self.selector.append(scorer, new, cache, rope.selector)
        inputs = self.inputs(x, None, rope) if fused is None else self._split(fused, None, rope, None)
        # the cache keeps the last raw tokens of each row
        raw_k = None
        keys = {"selected": inputs.k_selected, "window": inputs.k_window}
        values = {"selected": inputs.v_selected, "window": inputs.v_window}
        if self.compresses:
            last = slice(None) if new.padded else slice(-self.config.compress_block, None)
            kv = self.kv_proj(x[:, last]) if parts is None else parts[1][:, last]
            raw_k, values["compressed"] = self._raw_compressed(kv)
        cache.append(new, raw_k, keys, values)
        if inputs.k_compressed is not None and inputs.v_compressed is not None:
            kc, vc = (each[:, : new.emitted] for each in (inputs.k_compressed, inputs.v_compressed))
            cache.append_compressed(new, k_compressed=kc, v_compressed=vc)
        return inputs, scored

    def _raw_compressed(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the compressed branch before φ, [B, T, G, D] each, from the output of kv_proj."""
        sets = self._keys_and_values(kv.split(self.kv_rows, dim=-1))
        k, v = (each[0].unflatten(-1, (self.kv_heads, -1)) for each in sets)
        return k if self.k_norms is None else self.k_norms[0](k), v

    def _absent(self) -> int:
        """Numbers per token by which kv_proj's output is shorter than three sets of keys and values."""
        if self.shared_kv:
            return 0
        return len(BRANCHES) * self.kv_heads * (self.head_dim + self.value_dim) - sum(self.kv_rows)

    def decode_token(self, x: Tensor, cache: NSACache, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        from tercet.attention.kernels import decode as kernels

        q, kv, gates, *scored = decode.project(x, cache, *self._projections(cache))
        key_norms = None if self.k_norms is None else self.per_branch(tuple(self.k_norms))
        out, read, cache.block_indices = kernels.nsa_step(
            q, kv, gates, decode.kernel_cache(cache), counts, self.config, decode.kernel_heads(self),
            branches=self.branches, shared=self.shared_kv, softmax_gate=self.gate.kind == "softmax",
            norms=decode.kernel_norms(self.q_norm, key_norms, q.dtype),
            phi=(decode.phi_weights(self.compress_k), decode.phi_weights(self.compress_v)),
            absent=self._absent(), selector=(scored[0], scored[1]) if scored else None,
        )  # fmt: skip
        return out, read
