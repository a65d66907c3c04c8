"""The attention layer of every form: project, choose blocks, attend, mix, project. x: [B, T, dim] -> [B, T, dim]

A form is an AttentionSpec. NativeSparseAttention and its siblings (layers.py) only build one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tercet.attention.checks import check_max_seqlen, check_packing, make_packing
from tercet.attention.config import BRANCHES, check_above_zero, check_group_size, check_sizes
from tercet.attention.dispatch import Route, check_backend
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.selector import Ranges, TokenScorer, own_scorer, slow_channels
from tercet.attention.spec import AttentionSpec, check_exact_groups
from tercet.model import decode
from tercet.model.cache import Cache
from tercet.model.compression import Compression, are_plain, compress_keys_and_values
from tercet.model.rope import CosSin, RopeCache, Rotary, rope_cache, rotate
from tercet.model.selector import EVERY, BlockSelector, attach_loss, build_selector, mix_bits, sample_queries
from tercet.model.stats import AttentionStats


class Gate(nn.Module):
    """The gate (Eq. 5): three numbers per query head from the layer's input. [B, T, dim] -> [B, T, H, 3]

    Weights start at zero, so all gates of every head start equal: ½ each (sigmoid) or ⅓ (softmax; ½ of two branches).
    A softmax is over `branches`; the gates of others are 0.
    """

    def __init__(self, dim: int, heads: int, kind: str = "sigmoid", branches: tuple[str, ...] = BRANCHES) -> None:
        super().__init__()
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


class Attention(nn.Module):
    """An attention layer.

    spec         the form of attention
    rotary       RoPE of queries and keys
    qk_norm      RMS-normalise each head of q and k; norm_eps: epsilon of these norms
    selector_dim, selector_rotary   channels of a learned selector, and how many of them RoPE rotates: half by default
    backend      "auto", "reference" or "triton"
    bias         biases in the projections
    """

    gate: Gate | None
    selector: BlockSelector | None
    q_norm: nn.RMSNorm | None

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        *,
        spec: AttentionSpec,
        rotary: Rotary,
        qk_norm: bool = False,
        bias: bool = False,
        norm_eps: float | None = None,
        backend: str = "auto",
        selector_dim: int = 32,
        selector_rotary: int | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        check_group_size(heads, kv_heads)
        check_sizes(dim=dim, head_dim=head_dim, value_dim=value_dim)
        check_backend(backend)
        check_above_zero(norm_eps=norm_eps)
        check_exact_groups(spec.exact_groups, spec.scorer, kv_heads)
        if spec.exact_groups is not None and len(spec.exact_groups) == kv_heads:
            spec = replace(spec, exact_groups=None)
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.spec, self.config, self.rotary, self.backend = spec, spec.blocks, rotary, backend
        self.key_sets, value_sets = spec.kv_sets
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.kv_proj = nn.Linear(dim, kv_heads * (self.key_sets * head_dim + value_sets * value_dim), bias=bias)
        self.o_proj = nn.Linear(heads * value_dim, dim, bias=bias)
        sizes = kv_heads, selector_dim, self.config, rotary, selector_rotary, backend
        # the order of a model's parameters is that of its gradients' norm: keep it
        if spec.gate is None:
            self.gate = None
            self._make_norms(qk_norm, norm_eps)
            self.selector = build_selector(spec, dim, *sizes)
        else:
            self.gate = Gate(dim, heads, spec.gate, spec.branches)
            compression = spec.compression if spec.compresses else "mean"  # which has no parameters
            self.compress_k = Compression(compression, head_dim, self.config)
            self.compress_v = Compression(compression, value_dim, self.config)
            self.selector = build_selector(spec, dim, *sizes)
            self._make_norms(qk_norm, norm_eps)
        self.stats = AttentionStats(self.config, spec.branches)
        # Whether to save the gated sum, a tensor of q's size, for the backward pass. If not, a compiled layer
        # recomputes it there. Not worth it if activation checkpointing recomputes the whole block anyway.
        self.keep_sum = True
        self._route: dict[str, Route] | tuple[str, str | None] = {}
        self._ran = spec.branches

    def _make_norms(self, qk_norm: bool, eps: float | None) -> None:
        self.q_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        if not self.spec.gated:
            self.k_norm = nn.RMSNorm(self.head_dim, eps=eps) if qk_norm else None
        else:
            norms = (nn.RMSNorm(self.head_dim, eps=eps) for _ in range(self.key_sets))
            self.k_norms = nn.ModuleList(norms) if qk_norm else None

    @property
    def key_norms(self) -> list[nn.RMSNorm]:
        """The norm of each set of keys; none without QK norm."""
        if self.q_norm is None:
            return []
        return [self.k_norm] if not self.spec.gated else list(self.k_norms)  # type: ignore[list-item, arg-type]

    # ------------------------------------------------------------ what ran, and initial weights

    @property
    def kind(self) -> str:
        """As model.attention names it."""
        return self.spec.kind

    @property
    def score_channels(self) -> Ranges | None:
        """Channels of q and k that the scorer `own` reads; None for all of them."""
        return slow_channels(self.head_dim)

    @property
    def routes(self) -> dict[str, Route]:
        """The backend that each branch of the last call ran on, and why no faster one ran; dense if no query had to
        choose blocks."""
        # Set as a plain tuple while torch.compile traces the layer, which cannot trace a Route.
        return self._route if isinstance(self._route, dict) else dict.fromkeys(self._ran, Route(*self._route))

    @routes.setter
    def routes(self, routes: dict[str, Route]) -> None:
        self._route = routes

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        """Reinitialise every parameter, also after `to_empty` from the meta device."""
        for linear, width in ((self.q_proj, std), (self.kv_proj, std), (self.o_proj, output_std)):
            nn.init.normal_(linear.weight, std=width)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.gate is not None:
            for part in (self.gate, self.compress_k, self.compress_v):
                part.init_weights()
        if self.selector is not None:
            self.selector.init_weights(std)

    # ------------------------------------------------------------ caches

    def make_cache(self, batch: int, max_len: int | None = None, *, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences: preallocated for max_len tokens, or growing if max_len is None."""
        weight = self.q_proj.weight
        return Cache(self.cache_key(), batch, max_len, weight.device, weight.dtype if dtype is None else dtype)

    def cache_key(self) -> dict[str, Any]:
        """The settings that a cache must have been created for."""
        key = {
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_dim,
            "theta": self.rotary.theta, "scaling": self.rotary.scaling,
            "max_wavelength": self.rotary.max_wavelength, "rope": self.rotary.rope, "spec": self.spec,
        }  # fmt: skip
        return key if self.selector is None else key | self.selector.cache_key()

    # ------------------------------------------------------------ calls

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: Any = None,
        lengths: Tensor | None = None,
        rope: RopeCache | None = None,
        max_seqlen: int | None = None,
        sampled: Tensor | None = None,
    ) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim].

        cu_seqlens  bounds of packed documents, B = 1, or their Packing
        cache       x continues the tokens in this cache; inference only
        lengths     [B], with a cache: how many of each row's T tokens are real. The rest is right padding, and its
                    outputs are meaningless
        rope        cos/sin of this pass, if the caller computed them for all layers (`rope.rope_cache`); with a cache:
                    only if it is empty
        max_seqlen  with cu_seqlens: upper bound on document length, T by default. A tight bound saves the kernels work
        sampled     int64 [S]: flat indices of the queries on which the loss of a learned selector is computed in this
                    pass, or on which the statistics measure how well blocks are chosen. By default a learned selector
                    learns on one query in 128
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}: expected 3 axes, [batch, tokens, {self.dim}]")
        if 0 in x.shape:
            raise ValueError(f"x has shape {list(x.shape)}: expected at least one token")
        check_max_seqlen(max_seqlen, cu_seqlens)
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and cache were both given: a cache holds one document per row")
            return decode.forward(self, x, cache, lengths, rope)
        check_lengths_have_cache(lengths)
        if isinstance(cu_seqlens, Packing):
            check_packing(cu_seqlens, x, cu_seqlens.config if self.spec.dense else self.config)
        elif cu_seqlens is not None:
            count = 0 if self.spec.dense else None
            cu_seqlens = make_packing(cu_seqlens, x, self.config, max_seqlen, compressed=count)
        return self._forward_sequence(x, cu_seqlens, rope, self._sample(x) if sampled is None else sampled)

    def _sample(self, x: Tensor) -> Tensor | None:
        """Queries on which a learned selector learns if the caller names none."""
        if self.selector is None or not (self.training and torch.is_grad_enabled() and x.numel()):
            return None
        # hashed: as fp32, half-precision numbers end in zeros, and every sample would be the first of its 128 queries
        bits = x.detach()[..., 0].float().view(torch.int32).long() & 0xFFFFFFFF
        return sample_queries(mix_bits(bits), EVERY)

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        if rope is None:
            rope = rope_cache(self.rotary, x, packing, self.config if self.spec.compresses else None)
        inputs = self.inputs(x, packing, rope)
        # without a choice, blocks are chosen only to count them or for the selector's loss
        wanted = self.stats.enabled or (self.selector is not None and sampled is not None)
        wanted = wanted and not self.spec.gated and self.spec.selects
        longest = x.shape[1] if packing is None else packing.max_seqlen
        scorer = None
        if self.spec.gated or wanted or longest > self.spec.reads_all_below:
            scorer = self._scorer(x, inputs, packing, rope)
        fuse_output = self.gate is not None and not self.keep_sum and are_plain(self.o_proj)
        found = attend(
            inputs, self.spec, packing=packing, backend=self.backend, scorer=scorer, select=wanted,
            output=(self.o_proj.weight, self.o_proj.bias) if fuse_output else None,
        )  # fmt: skip
        self._ran, self._route = found.branches, found.route
        out, blocks = found.out, found.block_indices
        self.stats.update(inputs.gates, blocks, packing)
        if sampled is not None and blocks is not None:
            out = self._with_selector_loss(out, x, scorer, inputs, sampled, blocks, packing)
        return out if fuse_output else self.o_proj(out.flatten(2))

    def _scorer(
        self, x: Tensor, inputs: AttentionInputs, packing: Packing | None, rope: RopeCache
    ) -> TokenScorer | None:
        """What scores blocks by single tokens; None if compressed tokens do."""
        if self.selector is not None:
            positions = None if packing is None else packing.position
            return TokenScorer(*self.selector(x, positions, rope.selector))
        return self.branch_scorer(inputs.q, inputs.k_selected)

    def branch_scorer(self, q: Tensor, k: Tensor | None) -> TokenScorer | None:
        if k is None or not self.spec.by_branch:
            return None
        return own_scorer(q, k, self.score_channels, self.spec)

    def _with_selector_loss(
        self, out: Tensor, x: Tensor, scorer: TokenScorer | None, inputs: AttentionInputs, rows: Tensor,
        block_indices: Tensor, packing: Packing | None,
    ) -> Tensor:  # fmt: skip
        """Return `out` with the loss of the learned selector attached: the backward pass of `out` also runs that of the
        loss. Without a learned selector, only measure how well blocks were chosen, if statistics are on."""
        q, k = inputs.q, inputs.k_selected
        assert k is not None
        if self.selector is None or scorer is None:
            self.stats.update_choice(q, k, rows, block_indices, packing)
            return out
        route = self._route[0] if self.gate is not None and isinstance(self._route, tuple) else self.backend
        loss, quality = self.selector.loss_of_rows(
            x, scorer.keys, q, k, rows, block_indices, packing, measure=self.stats.enabled, backend=route
        )
        self.stats.update_selector(quality)
        return attach_loss(out, loss * self.selector.weight)

    # ------------------------------------------------------------ projections

    def inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> AttentionInputs:
        """The operator's inputs for whole sequences x."""
        return self.fused_inputs(x, packing, rope) if self.can_fuse(x) else self.separate_inputs(x, packing, rope)

    def can_fuse(self, x: Tensor) -> bool:
        """Whether `fused_inputs` supports this layer and input.

        The kernel needs gates, no norm between projection and RoPE, keys and values of one size, and at least one
        compressed token; and the weights it multiplies must belong to bare linear layers.
        """
        return (
            self.gate is not None
            and self.backend != "reference"
            and self.q_norm is None
            and self.value_dim == self.head_dim
            and x.shape[1] >= self.config.compress_block
            and kernels_run_on(x)
            and are_plain(self.q_proj, self.kv_proj, self.gate.proj)
            and self.phi_is_plain()
        )

    def phi_is_plain(self) -> bool:
        """Whether φ, if the layer has one, is fully described by its weights, which is all the decode kernels read."""
        return self.gate is None or (self.compress_k.is_plain() and self.compress_v.is_plain())

    def fused_inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> AttentionInputs:
        """Fused QKV and gate projection, split by one kernel into the layouts that the other kernels read.

        Four separate projections read x four times and write its gradient four times, and the steps between them and
        the kernels (RoPE, chunks for φ, gathering gradients) are a dozen compiled launches instead of two.
        """
        from tercet.attention.kernels import qkv_split

        assert self.gate is not None
        weights = [self.q_proj.weight, self.kv_proj.weight, self.gate.proj.weight]
        width = qkv_split.columns(self.heads, self.kv_heads, self.head_dim, self._split_key_sets())
        weights.append(weights[0].new_zeros(width - sum(w.shape[0] for w in weights), self.dim))
        bias = None
        if self.q_proj.bias is not None:
            biases = (self.q_proj.bias, self.kv_proj.bias)
            bias = torch.cat((*biases, biases[0].new_zeros(width - sum(b.shape[0] for b in biases))))
        return self.split(F.linear(x, torch.cat(weights), bias), packing, rope, self.gate.proj.bias)

    def split(self, y: Tensor, packing: Packing | None, rope: RopeCache, gate_bias: Tensor | None) -> AttentionInputs:
        """The operator's inputs from the outputs of q_proj, kv_proj and gate.proj side by side; gate_bias: if it is not
        part of them."""
        from tercet.attention.kernels import qkv_split

        assert self.gate is not None
        maps = (None,) * 4 if packing is None else tuple(packing.tokens_to_chunks)
        sizes = [self.heads, self.kv_heads, self.head_dim, self.config.compress_stride, self._split_key_sets()]
        q, ks, vs, kw, vw, chunks, logits = qkv_split.split_qkv(y, rope.tokens, maps, sizes)
        kc = vc = None
        if self.spec.compresses:
            assert rope.compressed is not None
            kc, vc = compress_keys_and_values(chunks, self.compress_k, self.compress_v, packing)
            kc = rotate(kc, rope.compressed, self.backend)
        return AttentionInputs(q, kc, vc, ks, vs, kw, vw, self.gate.activate(logits, gate_bias))

    def _split_key_sets(self) -> int:
        from tercet.attention.kernels import qkv_split

        return self.key_sets if self.spec.compresses or self.spec.shared_kv else qkv_split.UNCOMPRESSED

    def separate_inputs(self, x: Tensor, packing: Packing | None, rope: RopeCache) -> AttentionInputs:
        """Separate projections for q, keys and values, and gates: on any device, with every option."""
        q, raw_k, keys, values = self.project(x, None, rope.tokens)
        compressed: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.spec.compresses:
            assert raw_k is not None
            compressed = self.compress(raw_k, values["compressed"], packing, rope)
        return AttentionInputs.of_branches(q, compressed, keys, values, None if self.gate is None else self.gate(x))

    def compress(self, k: Tensor, v: Tensor, packing: Packing | None, rope: RopeCache | None) -> tuple[Tensor, Tensor]:
        """Compressed keys, rotated, and values of whole sequences."""
        cos_sin = None if rope is None else rope.compressed
        cos_sin = self.rotary.of_compressed(k, packing, self.config) if cos_sin is None else cos_sin
        return rotate(self.compress_k(k, packing), cos_sin, self.backend), self.compress_v(v, packing)

    def project(
        self,
        x: Tensor,
        positions: Tensor | None,
        cos_sin: CosSin | None = None,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """(q, raw keys of the compressed branch, keys by branch, values by branch); q and the keys of other branches
        are rotated at their tokens' positions. A dense layer's keys are those of the selected branch. projected:
        outputs of q_proj and kv_proj, if the caller has them."""
        batch, length, _ = x.shape
        cos_sin = self.rotary.of_tokens(x, positions) if cos_sin is None else cos_sin
        q, flat_keys, flat_values = self._project_flat(x, projected)
        q = q.view(batch, length, self.heads, self.head_dim)
        key_sets = [k.view(batch, length, self.kv_heads, self.head_dim) for k in flat_keys]
        value_sets = [v.view(batch, length, self.kv_heads, self.value_dim) for v in flat_values]
        if self.q_norm is not None:
            q = self.q_norm(q)
            key_sets = [norm(k) for norm, k in zip(self.key_norms, key_sets, strict=True)]
        if not self.spec.gated:
            name = "window" if "window" in self.spec.branches else "selected"
            k = rotate(key_sets[0], cos_sin, self.backend)
            return rotate(q, cos_sin, self.backend), None, {name: k}, {name: value_sets[0]}
        keys, values = (dict(zip(BRANCHES, self.per_branch(sets), strict=True)) for sets in (key_sets, value_sets))
        rotated = {"selected": rotate(keys["selected"], cos_sin, self.backend)}
        rotated["window"] = (
            rotated["selected"] if self.spec.shared_kv else rotate(keys["window"], cos_sin, self.backend)
        )
        return rotate(q, cos_sin, self.backend), keys["compressed"], rotated, values

    def _project_flat(
        self, x: Tensor, projected: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """q, and the sets of keys and of values, all flat: [B, T, heads · size]."""
        if projected is not None:
            return projected[0], *self.keys_and_values(projected[1].split(self.kv_rows, dim=-1))
        q = self.q_proj(x)
        if len(self.kv_rows) == 2 or not torch.is_grad_enabled() or not are_plain(self.kv_proj):
            parts = self.kv_proj(x).split(self.kv_rows, dim=-1)
        else:
            parts = self._project_in_groups(x)
        return q, *self.keys_and_values(parts)

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
        keys, values = self.keys_and_values(tuple(range(len(sizes))))
        compressed = (*keys[:-2], *values[:-2])  # none if nothing reads compressed tokens
        parts: dict[int, Tensor] = {}
        for group in (compressed, keys[-2:], values[-2:]):
            if group:
                weight = torch.cat([weights[i] for i in group])
                bias = None if biases is None else torch.cat([biases[i] for i in group])
                product = F.linear(x, weight, bias)
                parts |= zip(group, product.split([sizes[i] for i in group], dim=-1), strict=True)
        return tuple(parts[i] for i in range(len(sizes)))

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Rows of kv_proj, [set][k, v]; the compressed branch has no keys of its own with compress_selected_keys."""
        key_sets, value_sets = self.spec.kv_sets
        one = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        return (one * value_sets)[value_sets - key_sets :]

    def keys_and_values(self, parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Which parts of kv_proj's output, in the order of `kv_rows`, are keys and which are values."""
        first_key = len(self.kv_rows) % 2  # without keys of the compressed branch, its values come first
        return parts[first_key::2], parts[1 - first_key :: 2]

    def per_branch(self, sets: list[Any]) -> list[Any]:
        """One entry per branch from one per key or value set: shared sets, or the selected keys, are repeated."""
        return sets[:1] * (len(BRANCHES) - len(sets)) + sets


def check_lengths_have_cache(lengths: Tensor | None) -> None:
    if lengths is not None:
        raise ValueError("lengths was given without a cache: use cu_seqlens for packed documents")
