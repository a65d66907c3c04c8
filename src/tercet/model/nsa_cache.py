"""KV caches of the layers that select blocks. Axes: [B, slot, G, D].

An NSACache holds, per row: keys and values of all tokens, for the selected branch; a ring of the last w tokens, for the
window; all compressed tokens; and a ring of the last l raw tokens, from which the next compressed token is computed
when its last raw token arrives. A learned selector adds a small key per token, rotated at its position. What no branch
of the layer reads is not stored: all tokens only with the selected branch, and with shared_kv the window is the end of
that store.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import MOST_DECODED_BLOCKS, NSAConfig
from tercet.model.cache import Cache, NewTokens


class NSACache(Cache):
    """The cache of one NativeSparseAttention layer, created by `layer.make_cache`."""

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config: NSAConfig = key["config"]
        branches = key["branches"]
        self.keeps_tokens = "selected" in branches
        self.keeps_window = "window" in branches and not (key["shared_kv"] and self.keeps_tokens)
        self.keeps_selector = "selector_dim" in key and self.keeps_tokens
        self.compresses: bool = key["compresses"]
        self.block_indices: Tensor | None = None
        """int32 [B, G, n]: blocks selected by the last step on the decode kernels."""
        super().__init__(key, batch, max_len, device, dtype)
        for kind, size in (("k", key["head_dim"]), ("v", key["value_dim"])):
            if self.compresses:
                self._stores[f"{kind}_tail"] = self._allocate(None, key["kv_heads"], size, self.config.compress_block)
            if self.keeps_window:
                self._stores[f"{kind}_window"] = self._allocate(None, key["kv_heads"], size, self.config.window)

    def append(
        self, new: NewTokens, raw_k: Tensor | None, keys: dict[str, Tensor], values: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Store the new tokens. Returns (index [B, E], raw keys, raw values [B, E, l, G, D]) of the compressed tokens
        that are now complete, E for the row that completes most; None if there are none, and in a first prefill."""
        self.block_indices = None
        if "window" in self.key["branches"] and not new.fresh:
            new.window_k = self._window_context("k", keys["window"], new)
            new.window_v = self._window_context("v", values["window"], new)
        if self.keeps_tokens:
            self._append("k_selected", keys["selected"], new)
            self._append("v_selected", values["selected"], new)
        if self.keeps_window:
            self._append_ring("k_window", keys["window"], new)
            self._append_ring("v_window", values["window"], new)
        if not self.compresses:
            return None
        assert raw_k is not None
        k = self._append_tail("k_tail", raw_k, new)
        v = self._append_tail("v_tail", values["compressed"], new)
        if k is None or v is None:
            return None
        return self.completed(new), k, v

    def completed(self, new: NewTokens) -> Tensor:
        """Indices [B, E] of the compressed tokens that these new tokens complete. Rows that complete fewer count on."""
        return self._num_compressed(new.start)[:, None] + torch.arange(new.emitted, device=self.device)

    def _append_tail(self, name: str, value: Tensor, new: NewTokens) -> Tensor | None:
        """Write new tokens to a ring of raw tokens. Returns the l tokens of each compressed token they complete."""
        l, d = self.config.compress_block, self.config.compress_stride
        nothing = new.emitted == 0 or new.fresh  # a first prefill compresses its whole sequence at once
        history = value if nothing else self._with_history(name, l, new, value)
        self._append_ring(name, value, new)
        if nothing:
            return None
        first = self.completed(new) * d - (new.start[:, None] - (l - 1))
        # rows that complete fewer read clamped tokens, and their result goes to the extra slot
        token = (first[..., None] + torch.arange(l, device=self.device)).clamp(0, history.shape[1] - 1)
        row = torch.arange(self.batch, device=self.device)[:, None, None]
        return history[row, token].to(value.dtype)

    def append_selector(self, new: NewTokens, keys: Tensor) -> None:
        """Store a learned selector's keys of the new tokens, rotated at their positions: [B, C, G, size]."""
        self._append("selector", keys, new)

    def append_compressed(self, new: NewTokens, **values: Tensor) -> None:
        """Store the compressed tokens that these new tokens completed, by store: [B, E, G, D] each."""
        for name, value in values.items():
            store = self._stores[name]
            if new.first is not None:
                first = self.config.num_compressed(new.first)
                store[:, first : first + value.shape[1]] = value
                continue
            index = self.completed(new)
            complete = index < self._num_compressed(new.start + new.counts)[:, None]
            self._scatter(store, torch.where(complete, index, store.shape[1] - 1), value)

    def compressed(self, new: NewTokens) -> tuple[Tensor, Tensor] | None:
        """Compressed keys and values that any of the new tokens can see; None before the first is complete."""
        count = self.config.num_compressed(new.longest)
        if count == 0:
            return None
        return self._stores["k_compressed"][:, :count], self._stores["v_compressed"][:, :count]

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks are scored, for which the decode kernels hold scratch."""
        return self.compresses or self.keeps_tokens

    def selector_frequencies(self) -> Tensor | None:
        """fp64 [rotated/2]: as `rope_frequencies`, of a learned selector's rotated channels; None if it has none."""
        if self._selector_frequencies is None and self.key.get("selector_rotary"):
            rotary = self._rotary(self.key["selector_rotary"])
            self._selector_frequencies = rotary.frequencies(self.device) / (2 * math.pi)
        return self._selector_frequencies

    def selector_keys(self, new: NewTokens) -> Tensor:
        """The selector's rotated keys of all tokens that any of the new tokens can see: [B, S, G, size]."""
        return self._stores["selector"][:, : new.longest]

    def selected(self) -> tuple[Tensor, Tensor]:
        return self._stores["k_selected"], self._stores["v_selected"]

    def stores(self) -> dict[str, Any]:
        """For the decode kernels: (keys, values) of every kind and a selector's keys; None for what is not kept."""
        names = {"selected": "selected", "window": "window", "compressed": "compressed", "raw": "tail"}
        pairs = {kind: self._pair(name) for kind, name in names.items()}
        return {**pairs, "selector": self._stores.get("selector")}

    def _limit_growth(self, tokens: int, capacity: int) -> int:
        # spare capacity must not push a row that still fits past the limit of the decode kernels
        most = MOST_DECODED_BLOCKS * self.config.select_block
        return min(capacity, most) if tokens <= most else capacity

    def _store_shapes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        shapes = {}
        for kind, size in (("k", self.key["head_dim"]), ("v", self.key["value_dim"])):
            if self.keeps_tokens:
                shapes[f"{kind}_selected"] = self.key["kv_heads"], size, tokens
            if self.compresses:
                shapes[f"{kind}_compressed"] = self.key["kv_heads"], size, self.config.num_compressed(tokens)
        if self.keeps_selector:
            shapes["selector"] = self.key["kv_heads"], self.key["selector_dim"], tokens
        return shapes

    def _count_emitted(self, before: list[int], after: list[int]) -> int:
        count = self.config.num_compressed
        return max(count(b) - count(a) for a, b in zip(before, after, strict=True))

    def _num_compressed(self, length: Tensor) -> Tensor:
        """config.num_compressed of each row's length."""
        l, d = self.config.compress_block, self.config.compress_stride
        return ((length - l).div(d, rounding_mode="floor") + 1).clamp(min=0)

    def _window_context(self, kind: str, value: Tensor, new: NewTokens) -> Tensor:
        """The last w-1 tokens before the new ones, in order, followed by the new ones."""
        if self.keeps_window:
            return self._with_history(f"{kind}_window", self.config.window, new, value)
        past = new.start[:, None] + torch.arange(1 - self.config.window, 0, device=self.device)
        row = torch.arange(self.batch, device=self.device)[:, None]
        store = self._stores[f"{kind}_selected"]
        return torch.cat((store[row, past.clamp(min=0)], value.to(store.dtype)), dim=1)

    def _with_history(self, name: str, size: int, new: NewTokens, value: Tensor) -> Tensor:
        """The last size-1 tokens of a ring, in order, followed by the new ones."""
        ring = self._stores[name]
        row = torch.arange(self.batch, device=self.device)[:, None]
        past = (new.start[:, None] + torch.arange(1 - size, 0, device=self.device)) % size
        return torch.cat((ring[row, past], value.to(ring.dtype)), dim=1)

    def _append_ring(self, name: str, value: Tensor, new: NewTokens) -> None:
        """Write token t to slot t mod size; of the new tokens, only the newest `size` are kept."""
        ring = self._stores[name]
        size = ring.shape[1] - 1
        if new.first is not None:
            value = value[:, -size:]
            slot = (new.longest - value.shape[1]) % size
            before_wrap = value[:, : size - slot]
            ring[:, slot : slot + before_wrap.shape[1]] = before_wrap
            if before_wrap.shape[1] < value.shape[1]:
                ring[:, : value.shape[1] - before_wrap.shape[1]] = value[:, size - slot :]
            return
        newest = new.real & (new.positions >= (new.start + new.counts)[:, None] - size)
        self._scatter(ring, torch.where(newest, new.positions % size, size), value)


class BlockSparseCache(NSACache):
    """The cache of one BlockSparseAttention layer: keys and values of all tokens, and what scores the blocks: means of
    the keys, or a learned selector's keys. Needs no ring of raw tokens, since it keeps all of them."""

    def append_tokens(self, new: NewTokens, k: Tensor, v: Tensor) -> Tensor | None:
        """Store the new tokens. Returns the keys of the blocks that are now complete [B, E, l, G, D], if their means
        are needed; None if there are none, and in a first prefill."""
        self.block_indices = None
        self._append("k_selected", k, new)
        self._append("v_selected", v, new)
        if new.emitted == 0 or new.fresh or self.keeps_selector:
            return None
        l, d = self.config.compress_block, self.config.compress_stride
        # rows that complete fewer read clamped tokens, and their result goes to the extra slot
        token = (self.completed(new)[..., None] * d + torch.arange(l, device=self.device)).clamp(max=self.capacity - 1)
        row = torch.arange(self.batch, device=self.device)[:, None, None]
        return self._stores["k_selected"][row, token]

    def all(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens."""
        k, v = self.selected()
        return k[:, : new.longest], v[:, : new.longest]

    def stores(self) -> dict[str, Any]:
        """For the decode kernels, which read no values of compressed tokens here."""
        if self.keeps_selector:
            return {"selected": self.selected(), "selector": self._stores["selector"]}
        return {"selected": self.selected(), "compressed": (self._stores["k_compressed"],) * 2}

    def block_keys(self, new: NewTokens) -> Tensor:
        """Means of keys that any of the new tokens can see."""
        return self._stores["k_compressed"][:, : self.config.num_compressed(new.longest)]

    def _store_shapes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        shapes = super()._store_shapes(tokens)
        if not self.keeps_selector:
            count = self.config.num_compressed(tokens)
            shapes["k_compressed"] = self.key["kv_heads"], self.key["head_dim"], count
        return shapes
