"""The attention layers: Native Sparse Attention and its dense twin, with one face. x: [B, T, dim] -> [B, T, dim]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tercet.attention.checks import check_config, check_cu_seqlens, check_max_seqlen
from tercet.attention.config import (
    BRANCHES,
    NSAConfig,
    check_branches,
    check_group_size,
    check_shared_keys,
    check_sizes,
)
from tercet.attention.dispatch import BACKENDS, Route
from tercet.attention.functional import NSAInputs, run_nsa
from tercet.attention.layout import Packing
from tercet.model.cache import DenseCache, NSACache
from tercet.model.cached import cached_dense_attention, cached_dense_route, cached_nsa_attention
from tercet.model.compression import Compression
from tercet.model.config import NSA_ONLY
from tercet.model.decode import dense_token, nsa_chunk, nsa_token, why_not, why_not_chunk
from tercet.model.dense import dense_attention, dense_route
from tercet.model.gate import Gate
from tercet.model.plain import are_plain
from tercet.model.projection import one_product, takes_one_product
from tercet.model.rope import Rotary, Turn, Turns, rotate
from tercet.model.stats import AttentionStats


class NativeSparseAttention(nn.Module):
    """Every query reads a compressed view of the past, a few selected blocks in full, and a sliding window.

    dim, heads, kv_heads, head_dim   sizes; value_dim is the head size of v, head_dim unless given
    config       sizes of the three branches
    compression  φ: "mlp" (learnable, equals the mean at first) or "mean"
    gate         "sigmoid" (the paper's) or "softmax" over the three branches
    shared_kv    one K/V projection for all branches instead of three
    compress_selected_keys  the compressed branch has no keys of its own, φ reads the selected branch's: blocks are
                 chosen by a summary of the very keys that will be read
    rope_theta, rope_scaling  rotary positions; scaling divides all positions alike
    qk_norm      RMS-normalise each head of q and k
    branches     leave branches out, for ablations
    backend      "auto", "reference" or "triton"
    bias         biases in the projections
    norm_eps     epsilon of the norms of qk_norm
    """

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
        qk_norm: bool = False,
        branches: tuple[str, ...] = BRANCHES,
        backend: str = "auto",
        bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        check_group_size(heads, kv_heads)
        check_sizes(dim=dim, head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim)
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is unknown: pick one of {', '.join(BACKENDS)}")
        check_shared_keys(shared_kv, compress_selected_keys)
        self.config = NSAConfig() if config is None else config
        check_config(self.config)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.shared_kv, self.compress_selected_keys = shared_kv, compress_selected_keys
        self.backend, self.branches = backend, check_branches(branches)
        self.rotary = Rotary(head_dim, rope_theta, rope_scaling)

        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        # one matrix for all branches' keys and values: [set][k, v][kv head][size], see _widths
        self.kv_proj = nn.Linear(dim, sum(self._widths()), bias=bias)
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=bias)
        self.gate = Gate(dim, heads, gate)
        self.compress_k = Compression(compression, head_dim, self.config)
        self.compress_v = Compression(compression, self.value_dim, self.config)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norms = (
            nn.ModuleList(nn.RMSNorm(head_dim, eps=norm_eps) for _ in range(self.key_sets)) if qk_norm else None
        )
        self.stats = AttentionStats(self.config)
        # Whether the gated sum is kept for the backward pass. It costs a tensor of q's size; a compiled layer makes it
        # again on the way, for the time of writing it, but not within a block that is itself made again.
        self.keep_sum = True
        self._ran: dict[str, Route] | tuple[str, str | None] = {}

    @property
    def routes(self) -> dict[str, Route]:
        """The backend that each branch of the last call really ran on, and why not a faster one."""
        return self._ran if isinstance(self._ran, dict) else dict.fromkeys(self.branches, Route(*self._ran))

    @routes.setter
    def routes(self, routes: dict[str, Route]) -> None:
        self._ran = routes

    @property
    def key_sets(self) -> int:
        """Three, less the compressed branch's where it reads the selected one's, or one for all branches."""
        return 1 if self.shared_kv else len(BRANCHES) - self.compress_selected_keys

    def _widths(self) -> tuple[int, ...]:
        """Rows of kv_proj: keys and values of each set, less the keys that the compressed branch does not have."""
        pair = (self.kv_heads * self.head_dim, self.kv_heads * self.value_dim)
        return (pair * (1 if self.shared_kv else len(BRANCHES)))[self.compress_selected_keys :]

    def whole_sets(self, product: Tensor) -> Tensor:
        """What kv_proj gives, with every branch's keys in place. [..., C]"""
        if not self.compress_selected_keys:
            return product
        values, keys = self._widths()[:2]
        return torch.cat((product.narrow(-1, values, keys), product), -1)

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        """Set every parameter anew, also after `to_empty` from the meta device."""
        _init_linear(self.q_proj, std)
        _init_linear(self.kv_proj, std)
        _init_linear(self.o_proj, output_std)
        for part in (self.gate, self.compress_k, self.compress_v):
            part.init_weights()
        for norm in (self.q_norm, *(self.k_norms or ())):
            if norm is not None:
                norm.reset_parameters()

    def make_cache(self, batch: int, max_len: int | None = None, *, dtype: torch.dtype | None = None) -> NSACache:
        """An empty cache for `batch` sequences: of max_len tokens, allocated at once, or growing as tokens come."""
        weight = self.q_proj.weight
        return NSACache(self.cache_key(), batch, max_len, weight.device, weight.dtype if dtype is None else dtype)

    def cache_key(self) -> dict[str, Any]:
        """What a cache must have been made for."""
        return {
            "config": self.config, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_dim,
            "shared_kv": self.shared_kv, "branches": self.branches,
            "theta": self.rotary.theta, "scaling": self.rotary.scaling,
        }  # fmt: skip

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: NSACache | None = None,
        lengths: Tensor | None = None,
        turns: Turns | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x: [B, T, dim]. cu_seqlens: bounds of packed documents, B = 1 (or the `Packing` made of them). max_seqlen:
        no document is longer (all T tokens unless given): it spares the kernels what longer ones would need.

        With a cache, x continues what the cache holds. `lengths` [B] says how many of each row's T tokens are real
        (the rest is padding on the right, and its outputs mean nothing). `turns`: the rotary turns of this pass, where
        the caller has made them for all layers (`turns_of`).
        """
        _check_input(x, self.dim)
        check_max_seqlen(max_seqlen, cu_seqlens)
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and cache were both given: a cache holds one document per row")
            return self._with_cache(x, cache, lengths)
        if lengths is not None:
            raise ValueError("lengths was given without a cache: packed documents are told by cu_seqlens")
        packing = _packing(cu_seqlens, x, self.config, max_seqlen)
        turns = turns_of(self.rotary, x, packing, self.config) if turns is None else turns
        if takes_one_product(self, x):
            projected = one_product(self, x, packing, turns)
        else:
            projected = self._apart(x, packing, turns)
        multiplied = not self.keep_sum and are_plain(self.o_proj)
        out, block_indices, self._ran = run_nsa(
            projected, config=self.config, packing=packing, backend=self.backend, branches=self.branches,
            output=(self.o_proj.weight, self.o_proj.bias) if multiplied else None,
        )  # fmt: skip
        self.stats.update(projected.gates, block_indices, packing)
        return out if multiplied else self.o_proj(out.flatten(2))

    # ------------------------------------------------------------ parts

    def _apart(self, x: Tensor, packing: Packing | None, turns: Turns) -> NSAInputs:
        """By a product for each of q, keys and values, and gates: anywhere, with every option."""
        q, raw, keys, values = self.project(x, None, turns.tokens)
        compressed = self._compress(raw, values["compressed"], packing, turns.compressed)
        selected, window = ((keys[branch], values[branch]) for branch in ("selected", "window"))
        return NSAInputs(q, *compressed, *selected, *window, self.gate(x))

    def project(
        self, x: Tensor, positions: Tensor | None, turn: Turn | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """q and the selected and window keys rotated at their tokens' positions; the compressed branch's keys raw."""
        batch, length, _ = x.shape
        turn = _turn(self.rotary, x, positions) if turn is None else turn
        q, raw_keys, raw_values = self._projected(x)
        q = q.view(batch, length, self.heads, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        keys = {b: k.view(batch, length, self.kv_heads, self.head_dim) for b, k in raw_keys.items()}
        values = {b: v.view(batch, length, self.kv_heads, self.value_dim) for b, v in raw_values.items()}
        if self.k_norms is not None:
            norms = dict(zip(BRANCHES, self.per_branch(tuple(self.k_norms)), strict=True))
            keys = {branch: norms[branch](k) for branch, k in keys.items()}
        rotated = {"selected": rotate(keys["selected"], turn)}
        rotated["window"] = rotated["selected"] if self.shared_kv else rotate(keys["window"], turn)
        return rotate(q, turn), keys["compressed"], rotated, values

    def _projected(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """q, keys and values by branch, all flat: [B, T, heads · size]."""
        sizes = self._widths()
        own = 1 - self.compress_selected_keys  # keys of the compressed branch
        q = self.q_proj(x)
        if self.shared_kv or not torch.is_grad_enabled() or not are_plain(self.kv_proj):
            parts = self.kv_proj(x).split(sizes, dim=-1)
        else:
            # The selected and the window values are kept for the backward pass as they are, their keys rotated, the
            # compressed branch's chunk by chunk. Of one product for all, the values would keep the rest alive; and its
            # gradient would be put together by one kernel that knows all these layouts, at a quarter of the bandwidth.
            weights = self.kv_proj.weight.split(sizes)
            biases = None if self.kv_proj.bias is None else self.kv_proj.bias.split(sizes)
            found: dict[int, Tensor] = {}
            for group in (tuple(range(own + 1)), (own + 1, own + 3), (own + 2, own + 4)):
                weight = torch.cat([weights[i] for i in group])
                bias = None if biases is None else torch.cat([biases[i] for i in group])
                found |= zip(group, F.linear(x, weight, bias).split([sizes[i] for i in group], dim=-1), strict=True)
            parts = tuple(found[i] for i in range(len(sizes)))
        keys = dict(zip(BRANCHES, self.per_branch(parts[1 - own :: 2]), strict=True))
        return q, keys, dict(zip(BRANCHES, self.per_branch(parts[own::2]), strict=True))

    def per_branch(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of what there is once for each set, what each branch takes."""
        missing = len(BRANCHES) - len(parts)  # one set for all, or the compressed branch has the selected one's keys
        return parts[:1] * missing + parts

    def _compress(
        self, k: Tensor, v: Tensor, packing: Packing | None, turn: Turn | None = None
    ) -> tuple[Tensor, Tensor]:
        """Built from unrotated keys, and rotated once, at the position of each block's last token."""
        turn = _compressed_turn(self.rotary, k, packing, self.config) if turn is None else turn
        return rotate(self.compress_k(k, packing), turn), self.compress_v(v, packing)

    def _compressed_position(self, index: Tensor) -> Tensor:
        return _last_token(index, self.config)

    @torch.no_grad()  # a cache is for inference: kept tokens must not keep their graphs
    def _with_cache(self, x: Tensor, cache: NSACache, lengths: Tensor | None) -> Tensor:
        reason: str | None = "asked for"
        if self.backend != "reference":
            reason = why_not(self, x, cache) if x.shape[1] == 1 else why_not_chunk(self, x, cache, lengths)
        if reason is None and x.shape[1] == 1:
            self._ran = ("triton", None)
            return nsa_token(self, x, cache, lengths)
        if reason is not None and self.backend == "triton" and any(cache.host.tokens):
            raise RuntimeError(f'backend="triton" cannot run here: {reason}; backend="auto" takes the reference')
        step = cache.begin(self.cache_key(), x, lengths)
        x = step.without_padding(x)
        q, raw, keys, values = self.project(x, step.positions)
        gates = self.gate(x)
        blocks = cache.append(step, raw, keys, values)
        if step.fresh:
            # nothing lies before x: the whole-sequence operator is the faster way, and padding is past every real token
            k_compressed, v_compressed = self._compress(raw, values["compressed"], None)
            cache.append_compressed(step, k_compressed[:, : step.emitted], v_compressed[:, : step.emitted])
            cache.reads = None
            out, _, self._ran = run_nsa(
                NSAInputs(
                    q, k_compressed, v_compressed, keys["selected"], values["selected"], keys["window"],
                    values["window"], gates,
                ),
                config=self.config, backend=self.backend, branches=self.branches,
            )  # fmt: skip
        else:
            if blocks is not None:
                index, raw_k, raw_v = blocks
                k_compressed = rotate(self.compress_k.phi(raw_k), self.rotary.turn(self._compressed_position(index)))
                cache.append_compressed(step, k_compressed, self.compress_v.phi(raw_v))
            if reason is None:
                out, self._ran = nsa_chunk(self, q, gates, keys, values, cache, step)
            else:
                self._ran = ("reference", reason)
                out = cached_nsa_attention(q, gates, cache, step, self.config, self.branches)
        return self.o_proj(out.flatten(2))


class DenseAttention(nn.Module):
    """Full causal attention with the same face: what a dense model has where an NSA model has its layer.

    Arguments that only Native Sparse Attention has are accepted and mean nothing here.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        rope_theta: float = 10000.0,
        rope_scaling: float = 1.0,
        qk_norm: bool = False,
        bias: bool = False,
        norm_eps: float | None = None,
        **nsa_only: Any,
    ) -> None:
        super().__init__()
        known = {*NSA_ONLY, "backend"} - {"nsa"}  # which is `config` here
        unknown = set(nsa_only) - known
        if unknown:
            raise TypeError(f"DenseAttention got unknown arguments: {', '.join(sorted(unknown))}")
        check_group_size(heads, kv_heads)
        check_sizes(dim=dim, head_dim=head_dim, value_dim=head_dim if value_dim is None else value_dim)
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.rotary = Rotary(head_dim, rope_theta, rope_scaling)
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.kv_proj = nn.Linear(dim, kv_heads * (head_dim + self.value_dim), bias=bias)
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self._ran: dict[str, Route] | tuple[str, str | None] = ("sdpa", None)

    @property
    def routes(self) -> dict[str, Route]:
        """The kernel that the last call really ran on, and why not a faster one."""
        return self._ran if isinstance(self._ran, dict) else {"dense": Route(*self._ran)}

    @routes.setter
    def routes(self, routes: dict[str, Route]) -> None:
        self._ran = routes

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        _init_linear(self.q_proj, std)
        _init_linear(self.kv_proj, std)
        _init_linear(self.o_proj, output_std)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def make_cache(self, batch: int, max_len: int | None = None, *, dtype: torch.dtype | None = None) -> DenseCache:
        weight = self.q_proj.weight
        return DenseCache(self.cache_key(), batch, max_len, weight.device, weight.dtype if dtype is None else dtype)

    def cache_key(self) -> dict[str, Any]:
        return {
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_dim,
            "theta": self.rotary.theta, "scaling": self.rotary.scaling,
        }  # fmt: skip

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: DenseCache | None = None,
        lengths: Tensor | None = None,
        turns: Turns | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        _check_input(x, self.dim)
        check_max_seqlen(max_seqlen, cu_seqlens)
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and cache were both given: a cache holds one document per row")
            return self._with_cache(x, cache, lengths)
        if lengths is not None:
            raise ValueError("lengths was given without a cache: packed documents are told by cu_seqlens")
        packing = _packing(cu_seqlens, x, None, max_seqlen)
        positions = None if packing is None else packing.position
        q, k, v = self.project(x, positions, None if turns is None else turns.tokens)
        self._ran = dense_route(q, v, packing)
        return self.o_proj(dense_attention(q, k, v, packing).flatten(2))

    @torch.no_grad()
    def _with_cache(self, x: Tensor, cache: DenseCache, lengths: Tensor | None) -> Tensor:
        reason = why_not(self, x, cache) if x.shape[1] == 1 else None
        if x.shape[1] == 1 and reason is None:
            self._ran = ("triton", None)
            return dense_token(self, x, cache, lengths)
        step = cache.begin(self.cache_key(), x, lengths)
        q, k, v = self.project(step.without_padding(x), step.positions)
        cache.append(step, k, v)
        if step.fresh:
            # nothing lies before x, and padding is past every real token
            cache.reads = None
            self._ran = dense_route(q, v)
            return self.o_proj(dense_attention(q, k, v).flatten(2))
        name, why = cached_dense_route(q, cache, step)
        self._ran = name, reason or why  # of one token, why not its own kernels
        return self.o_proj(cached_dense_attention(q, cache, step).flatten(2))

    def project(self, x: Tensor, positions: Tensor | None, turn: Turn | None = None) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        turn = _turn(self.rotary, x, positions) if turn is None else turn
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)
        k, v = self.kv_proj(x).split((self.kv_heads * self.head_dim, self.kv_heads * self.value_dim), dim=-1)
        k = k.view(batch, length, self.kv_heads, self.head_dim)
        v = v.view(batch, length, self.kv_heads, self.value_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, turn), rotate(k, turn), v


def _packing(
    cu_seqlens: Tensor | Packing | None, x: Tensor, config: NSAConfig | None, max_seqlen: int | None
) -> Packing | None:
    """Where documents stand, and with a config their compressed tokens."""
    if cu_seqlens is None or isinstance(cu_seqlens, Packing):
        return cu_seqlens
    batch, length, _ = x.shape
    check_cu_seqlens(cu_seqlens, batch, length, x.device, values=_readable(cu_seqlens), max_seqlen=max_seqlen)
    compressed = 0 if config is None else length // config.compress_stride
    return Packing(cu_seqlens, length, compressed, config or NSAConfig(), max_seqlen)


def turns_of(rotary: Rotary, x: Tensor, packing: Packing | None, config: NSAConfig | None) -> Turns:
    """Turns of the tokens x [B, T, ...] and, with a config, of their compressed tokens: for all layers of a pass."""
    tokens = _turn(rotary, x, None if packing is None else packing.position)
    return Turns(tokens, None if config is None else _compressed_turn(rotary, x, packing, config))


def _turn(rotary: Rotary, x: Tensor, positions: Tensor | None) -> Turn:
    return rotary.turn(torch.arange(x.shape[1], device=x.device) if positions is None else positions)


def _compressed_turn(rotary: Rotary, x: Tensor, packing: Packing | None, config: NSAConfig) -> Turn:
    if packing is None:
        index = torch.arange(config.num_compressed(x.shape[1]), device=x.device)
    else:
        index = packing.compressed_index
    return rotary.turn(_last_token(index, config))


def _last_token(index: Tensor, config: NSAConfig) -> Tensor:
    """Positions of the last tokens under compressed tokens."""
    return index * config.compress_stride + config.compress_block - 1


def _readable(cu_seqlens: Tensor) -> bool:
    """Reading the numbers costs nothing: they are on the CPU, and nobody is tracing."""
    return cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_input(x: Tensor, dim: int) -> None:
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"x has shape {list(x.shape)}: it must have 3 axes, [batch, tokens, {dim}]")


def _init_linear(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
