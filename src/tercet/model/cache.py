"""What a layer keeps of the tokens it has seen, so that the next ones can be read alone.

Native Sparse Attention keeps four things per row: keys and values of all tokens for the selected branch; a ring of the
last w for the window; all compressed tokens; and a ring of the last l raw tokens, from which the next compressed token
is made when its last raw token arrives. What no branch of the layer would read is not kept: without the selected branch
there is no store of all tokens, and with shared_kv the window is the end of that store. Rows may differ in length.
Axes: [B, slot, G, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import MOST_DECODED_BLOCKS, NSAConfig
from tercet.model.cache_rows import Cache, Step


class NSACache(Cache):
    """The cache of one NativeSparseAttention layer. Made by `layer.make_cache`."""

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config: NSAConfig = key["config"]
        branches = key["branches"]
        self.keeps_all = "selected" in branches
        self.keeps_ring = "window" in branches and not (key["shared_kv"] and self.keeps_all)
        self.compresses = "compressed" in branches or "selected" in branches
        self.block_indices: Tensor | None = None
        """int32 [B, G, n]: what the last decode step on the kernels selected."""
        super().__init__(key, batch, max_len, device, dtype)
        for kind, size in (("k", key["head_dim"]), ("v", key["value_dim"])):
            if self.compresses:
                self._stores[f"{kind}_tail"] = self._grown(None, key["kv_heads"], size, self.config.compress_block)
            if self.keeps_ring:
                self._stores[f"{kind}_window"] = self._grown(None, key["kv_heads"], size, self.config.window)

    def _spared(self, tokens: int, room: int) -> int:
        # room that nobody fills yet must not take a step from the decode kernels
        most = MOST_DECODED_BLOCKS * self.config.select_block
        return min(room, most) if tokens <= most else room

    def _sizes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        sizes = {}
        for kind, size in (("k", self.key["head_dim"]), ("v", self.key["value_dim"])):
            if self.keeps_all:
                sizes[f"{kind}_selected"] = self.key["kv_heads"], size, tokens
            if self.compresses:
                sizes[f"{kind}_compressed"] = self.key["kv_heads"], size, self.config.num_compressed(tokens)
        return sizes

    def _plan(self, step: Step, before: list[int], after: list[int]) -> None:
        count = self.config.num_compressed
        step.emitted = max(count(b) - count(a) for a, b in zip(before, after, strict=True))

    def append(
        self, step: Step, raw_k: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keep the new tokens. Returns (index [B, E], raw keys, raw values [B, E, l, G, D]) of the compressed tokens
        that are now complete, E for the row that completes most; None where no row does, and for a first prefill."""
        self.block_indices = None
        if "window" in self.key["branches"] and not step.fresh:
            step.window_k = self._window_context("k", keys["window"], step)
            step.window_v = self._window_context("v", values["window"], step)
        if self.keeps_all:
            self._keep("k_selected", keys["selected"], step)
            self._keep("v_selected", values["selected"], step)
        if self.keeps_ring:
            self._turn_ring("k_window", keys["window"], step)
            self._turn_ring("v_window", values["window"], step)
        if not self.compresses:
            return None
        l, d = self.config.compress_block, self.config.compress_stride
        none = step.emitted == 0 or step.fresh  # a first prefill compresses its whole sequence at once
        if not none:
            k = self._before("k_tail", l, step, raw_k)
            v = self._before("v_tail", l, step, values["compressed"])
        self._turn_ring("k_tail", raw_k, step)
        self._turn_ring("v_tail", values["compressed"], step)
        if none:
            return None
        index = self._first_new(step)[:, None] + torch.arange(step.emitted, device=self.device)
        first = index * d - (step.start[:, None] - (l - 1))
        # a row that completes fewer reads within its bounds, and what comes of it is written to the last slot
        token = (first[..., None] + torch.arange(l, device=self.device)).clamp(0, k.shape[1] - 1)
        row = torch.arange(self.batch, device=self.device)[:, None, None]
        return index, k[row, token].to(raw_k.dtype), v[row, token].to(raw_k.dtype)

    def append_compressed(self, step: Step, k: Tensor, v: Tensor) -> None:
        """Keep the compressed tokens that this step completed. k, v: [B, E, G, D]"""
        if not self.compresses:
            return
        if step.begin is not None:
            first = self.config.num_compressed(step.begin)
            for name, value in (("k_compressed", k), ("v_compressed", v)):
                self._stores[name][:, first : first + value.shape[1]] = value
            return
        index = self._first_new(step)[:, None] + torch.arange(k.shape[1], device=self.device)
        complete = index < self._visible(step.start + step.counts)[:, None]
        for name, value in (("k_compressed", k), ("v_compressed", v)):
            store = self._stores[name]
            self._write(store, torch.where(complete, index, store.shape[1] - 1), value)

    def compressed(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Compressed keys and values that any row of this step can see; None before the first is complete."""
        count = self.config.num_compressed(step.longest)
        if count == 0:
            return None
        return self._stores["k_compressed"][:, :count], self._stores["v_compressed"][:, :count]

    def selected(self) -> tuple[Tensor, Tensor]:
        return self._stores["k_selected"], self._stores["v_selected"]

    def stores(self) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Keys and values of every kind; None where a kind is not kept."""
        names = {"selected": "selected", "window": "window", "compressed": "compressed", "raw": "tail"}
        return {kind: self._pair(name) for kind, name in names.items()}

    def _visible(self, length: Tensor) -> Tensor:
        """config.num_compressed of each row's length."""
        l, d = self.config.compress_block, self.config.compress_stride
        return ((length - l).div(d, rounding_mode="floor") + 1).clamp(min=0)

    def _first_new(self, step: Step) -> Tensor:
        return self._visible(step.start)

    def _window_context(self, kind: str, value: Tensor, step: Step) -> Tensor:
        """The last w-1 tokens before the new ones, in order, followed by the new ones."""
        if self.keeps_ring:
            return self._before(f"{kind}_window", self.config.window, step, value)
        past = step.start[:, None] + torch.arange(1 - self.config.window, 0, device=self.device)
        row = torch.arange(self.batch, device=self.device)[:, None]
        store = self._stores[f"{kind}_selected"]
        return torch.cat((store[row, past.clamp(min=0)], value.to(store.dtype)), dim=1)

    def _before(self, name: str, size: int, step: Step, value: Tensor) -> Tensor:
        """The last size-1 tokens of a ring, in order, followed by the new ones."""
        ring = self._stores[name]
        row = torch.arange(self.batch, device=self.device)[:, None]
        past = (step.start[:, None] + torch.arange(1 - size, 0, device=self.device)) % size
        return torch.cat((ring[row, past], value.to(ring.dtype)), dim=1)

    def _turn_ring(self, name: str, value: Tensor, step: Step) -> None:
        """Token t stands in slot t mod size: those of the new ones stay that are the newest."""
        ring = self._stores[name]
        size = ring.shape[1] - 1
        if step.begin is not None:
            value = value[:, -size:]
            slot = (step.longest - value.shape[1]) % size
            before_end = value[:, : size - slot]
            ring[:, slot : slot + before_end.shape[1]] = before_end
            if before_end.shape[1] < value.shape[1]:
                ring[:, : value.shape[1] - before_end.shape[1]] = value[:, size - slot :]
            return
        newest = step.real & (step.positions >= (step.start + step.counts)[:, None] - size)
        self._write(ring, torch.where(newest, step.positions % size, size), value)


class DenseCache(Cache):
    """The cache of one DenseAttention layer: keys and values of all tokens."""

    def _sizes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        groups = self.key["kv_heads"]
        return {"k": (groups, self.key["head_dim"], tokens), "v": (groups, self.key["value_dim"], tokens)}

    def append(self, step: Step, k: Tensor, v: Tensor) -> None:
        self._keep("k", k, step)
        self._keep("v", v, step)

    def all(self, step: Step) -> tuple[Tensor, Tensor]:
        return self._stores["k"][:, : step.longest], self._stores["v"][:, : step.longest]

    def stores(self) -> tuple[Tensor, Tensor]:
        return self._stores["k"], self._stores["v"]
