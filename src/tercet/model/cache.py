"""What a layer keeps of the tokens it has seen, so that the next ones can be read alone.

Native Sparse Attention keeps four things per row: keys and values of all tokens for the selected branch; a ring of the
last w for the window; all compressed tokens; and the last l-1 raw tokens, from which the next compressed token is made
when its last raw token arrives. Rows may have different lengths. Axes: [B, slot, G, D].

Every store has one slot more than it holds: what must not be written (padding) is written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tercet.attention.spec import NSAConfig

_GROWTH = 1.5


@dataclass
class Step:
    """C new tokens for each row of the batch, of which the first `counts` are real."""

    start: Tensor  # int64 [B]: tokens held before
    counts: Tensor  # int64 [B]
    positions: Tensor  # int64 [B, C]
    longest: int  # the longest row after this step
    fresh: bool  # nothing was held before
    padded: bool  # some row has fewer than C real tokens
    emitted: int = 0  # compressed tokens that the fastest-growing row gains
    window_k: Tensor | None = None  # [B, w-1 + C, G, Dk]: the ring in order, then the new tokens
    window_v: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """[B, C]: which tokens are not padding."""
        return torch.arange(self.positions.shape[1], device=self.counts.device) < self.counts[:, None]

    def without_padding(self, x: Tensor) -> Tensor:
        """x with zeros for padding, which may hold anything: 0 · NaN is NaN behind every mask."""
        return torch.where(self.real[..., None], x, 0) if self.padded else x


class _Cache:
    """Lengths, capacity and refusals that both kinds of cache share."""

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1")
        if max_len is not None and max_len < 1:
            raise ValueError(f"max_len={max_len} must be at least 1, or None for a cache that grows")
        self.key, self.batch, self.max_len, self.device, self.dtype = key, batch, max_len, device, dtype
        self._stores: dict[str, Tensor] = {}
        self._host_lengths = [0] * batch
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reads: Tensor | None = None
        """int64 [B, C, G]: keys that each query of the last call read, counted from what was really gathered and not
        masked. None after a first prefill, which the whole-sequence operator runs."""

    def nbytes(self) -> int:
        """Bytes of everything that is kept, counted from the stores themselves."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())

    def take_rows(self, rows: Tensor) -> None:
        """Become the cache of these rows, in this order; a row may come again: beams, and batches that shrink."""
        self._stores = {name: store[rows] for name, store in self._stores.items()}
        self._host_lengths = [self._host_lengths[row] for row in rows.tolist()]
        self.lengths, self.batch, self.reads = self.lengths[rows], len(self._host_lengths), None

    def begin(self, key: dict[str, Any], x: Tensor, lengths: Tensor | None) -> Step:
        """Check that x can follow what is held, and say where its tokens stand."""
        if key != self.key:
            theirs = ", ".join(f"{name}={self.key.get(name)!r}" for name in key if key[name] != self.key.get(name))
            ours = ", ".join(f"{name}={key[name]!r}" for name in key if key[name] != self.key.get(name))
            raise ValueError(f"the cache was made for {theirs} and the layer has {ours}: make one with make_cache()")
        batch, width = x.shape[:2]
        if batch != self.batch:
            raise ValueError(f"x has batch {batch} and the cache was made for batch {self.batch}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device} and the cache on {self.device}: move all to one device")
        if width == 0:
            raise ValueError(f"x has shape {list(x.shape)}: it must have at least one token")
        counts = [width] * batch if lengths is None else torch.as_tensor(lengths).tolist()
        if len(counts) != batch or any(not 0 <= count <= width for count in counts) or not any(counts):
            raise ValueError(f"lengths={counts} must be {batch} numbers from 0 to {width}, x's tokens, not all 0")
        after = [a + b for a, b in zip(self._host_lengths, counts, strict=True)]
        if self.max_len is not None and max(after) > self.max_len:
            raise ValueError(
                f"the cache holds max_len={self.max_len} tokens and would need {max(after)}: "
                "make a longer one, or one that grows (max_len=None)"
            )
        start = self.lengths
        step = Step(
            start=start,
            # told from the host only where rows differ: a copy to a device waits for it
            counts=torch.full((batch,), width, device=self.device)
            if lengths is None
            else torch.tensor(counts, device=self.device),
            # padding may reach past the longest row: it must not point outside the stores
            positions=(start[:, None] + torch.arange(width, device=self.device)).clamp(max=max(after) - 1),
            longest=max(after),
            fresh=not any(self._host_lengths),
            padded=min(counts) < width,
        )
        self._plan(step, self._host_lengths, after)
        self._host_lengths = after
        self.lengths = start + step.counts
        return step

    def _plan(self, step: Step, before: list[int], after: list[int]) -> None:
        """What a step means for the cache, told in host numbers."""

    def _store(self, name: str, groups: int, size: int, slots: int) -> Tensor:
        """The named store with room for `slots` and the one that is written and never read."""
        store = self._stores.get(name)
        if store is not None and store.shape[1] > slots:
            return store
        held = 0 if store is None else store.shape[1] - 1
        if held > 0:  # a cache that grows
            slots = max(slots, int(held * _GROWTH))
        # zeros, so that a slot not yet written is finite wherever a mask multiplies it by 0
        grown = torch.zeros(self.batch, slots + 1, groups, size, dtype=self.dtype, device=self.device)
        if store is not None:
            grown[:, :held] = store[:, :held]
        self._stores[name] = grown
        return grown

    def _write(self, store: Tensor, slot: Tensor, value: Tensor) -> None:
        """slot: [B, C]; the last slot takes what is not to be kept."""
        row = torch.arange(self.batch, device=self.device)[:, None]
        store[row, slot] = value.to(store.dtype)


class NSACache(_Cache):
    """The cache of one NativeSparseAttention layer. Made by `layer.make_cache`."""

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(key, batch, max_len, device, dtype)
        self.config: NSAConfig = key["config"]
        groups, tail = key["kv_heads"], self.config.compress_block - 1
        for kind, size in (("k", key["head_dim"]), ("v", key["value_dim"])):
            self._stores[f"{kind}_tail"] = torch.zeros(batch, tail, groups, size, dtype=dtype, device=device)
            self._store(f"{kind}_window", groups, size, self.config.window)
            if max_len is not None:
                self._store(f"{kind}_selected", groups, size, max_len)
                self._store(f"{kind}_compressed", groups, size, self.config.num_compressed(max_len))

    def _plan(self, step: Step, before: list[int], after: list[int]) -> None:
        count = self.config.num_compressed
        step.emitted = max(count(b) - count(a) for a, b in zip(before, after, strict=True))

    def append(
        self, step: Step, raw_k: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keep the new tokens. Returns (index [B, E], raw keys, raw values [B, E, l, G, D]) of the compressed tokens
        that are now complete, E for the row that completes most; None where no row does, and for a first prefill."""
        capacity = step.longest if self.max_len is None else self.max_len
        for name, value in (("k_selected", keys["selected"]), ("v_selected", values["selected"])):
            store = self._store(name, value.shape[2], value.shape[3], capacity)
            self._write(store, torch.where(step.real, step.positions, store.shape[1] - 1), value)
        step.window_k = self._extend_window("k_window", keys["window"], step)
        step.window_v = self._extend_window("v_window", values["window"], step)
        k = self._extend_tail("k_tail", raw_k, step)
        v = self._extend_tail("v_tail", values["compressed"], step)
        if step.emitted == 0 or step.fresh:  # a first prefill compresses its whole sequence at once
            return None
        l, d = self.config.compress_block, self.config.compress_stride
        index = self._first_new(step)[:, None] + torch.arange(step.emitted, device=self.device)
        first = index * d - (step.start[:, None] - (l - 1))
        # a row that completes fewer reads within its bounds, and what comes of it is written to the last slot
        token = (first[..., None] + torch.arange(l, device=self.device)).clamp(0, k.shape[1] - 1)
        row = torch.arange(self.batch, device=self.device)[:, None, None]
        return index, k[row, token].to(raw_k.dtype), v[row, token].to(raw_k.dtype)

    def append_compressed(self, step: Step, k: Tensor, v: Tensor) -> None:
        """Keep the compressed tokens that this step completed. k, v: [B, E, G, D]"""
        length = step.longest if self.max_len is None else self.max_len
        index = self._first_new(step)[:, None] + torch.arange(k.shape[1], device=self.device)
        complete = index < self._visible(step.start + step.counts)[:, None]
        for name, value in (("k_compressed", k), ("v_compressed", v)):
            store = self._store(name, value.shape[2], value.shape[3], self.config.num_compressed(length))
            self._write(store, torch.where(complete, index, store.shape[1] - 1), value)

    def compressed(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """Compressed keys and values that any row of this step can see; None before the first is complete."""
        count = self.config.num_compressed(step.longest)
        if count == 0:
            return None
        return self._stores["k_compressed"][:, :count], self._stores["v_compressed"][:, :count]

    def selected(self) -> tuple[Tensor, Tensor]:
        return self._stores["k_selected"], self._stores["v_selected"]

    def _visible(self, length: Tensor) -> Tensor:
        """config.num_compressed of each row's length."""
        l, d = self.config.compress_block, self.config.compress_stride
        return ((length - l).div(d, rounding_mode="floor") + 1).clamp(min=0)

    def _first_new(self, step: Step) -> Tensor:
        return self._visible(step.start)

    def _extend_window(self, name: str, value: Tensor, step: Step) -> Tensor:
        """The last w-1 tokens before the new ones, in order, followed by the new ones; then the ring moves on."""
        w = self.config.window
        ring = self._stores[name]
        row = torch.arange(self.batch, device=self.device)[:, None]
        past = (step.start[:, None] + torch.arange(1 - w, 0, device=self.device)) % w
        context = torch.cat((ring[row, past], value.to(ring.dtype)), dim=1)
        newest = step.real & (step.positions >= (step.start + step.counts)[:, None] - w)
        self._write(ring, torch.where(newest, step.positions % w, w), value)
        return context

    def _extend_tail(self, name: str, value: Tensor, step: Step) -> Tensor:
        """The last l-1 raw tokens followed by the new ones; keeps the last l-1 of that."""
        size = self.config.compress_block - 1
        context = torch.cat((self._stores[name], value.to(self.dtype)), dim=1)
        row = torch.arange(self.batch, device=self.device)[:, None]
        self._stores[name] = context[row, step.counts[:, None] + torch.arange(size, device=self.device)]
        return context


class DenseCache(_Cache):
    """The cache of one DenseAttention layer: keys and values of all tokens."""

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(key, batch, max_len, device, dtype)
        if max_len is not None:
            self._store("k", key["kv_heads"], key["head_dim"], max_len)
            self._store("v", key["kv_heads"], key["value_dim"], max_len)

    def append(self, step: Step, k: Tensor, v: Tensor) -> None:
        capacity = step.longest if self.max_len is None else self.max_len
        for name, value in (("k", k), ("v", v)):
            store = self._store(name, value.shape[2], value.shape[3], capacity)
            self._write(store, torch.where(step.real, step.positions, store.shape[1] - 1), value)

    def all(self, step: Step) -> tuple[Tensor, Tensor]:
        return self._stores["k"][:, : step.longest], self._stores["v"][:, : step.longest]
