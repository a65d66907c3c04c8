"""KV caches: lengths, capacity and stores of tokens, and the cache of a dense layer. Axes: [B, slot, G, D].

Rows may differ in length. Every store has one extra slot at the end, to which writes of padding are redirected.

Lengths exist twice: on the device, where kernels read and update them, and on the host, which must know when capacity
runs out. If a step's rows are given by a device tensor, the host only keeps an upper bound; it reads the lengths back
when it needs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tercet.attention.config import check_sizes
from tercet.model.rope import Rotary

_GROWTH = 1.5


@dataclass
class NewTokens:
    """C new tokens for each row of the batch; the first `counts` of them are real."""

    start: Tensor  # int64 [B]: tokens in the cache before
    counts: Tensor  # int64 [B]
    width: int  # C
    longest: int  # length of the longest row afterwards
    fresh: bool  # the cache was empty
    padded: bool  # some row has fewer than C real tokens
    aligned: bool  # all rows had the same length before
    emitted: int = 0  # most compressed tokens that any row completes
    window_k: Tensor | None = None  # [B, w-1 + C, G, Dk]: the window ring in order, then the new tokens
    window_v: Tensor | None = None

    @cached_property
    def positions(self) -> Tensor:
        """int64 [B, C]. A first prefill, whose RoPE angles are computed once for all layers, does not need them."""
        # padding may reach past the longest row: clamp it to the stores
        return (self.start[:, None] + torch.arange(self.width, device=self.start.device)).clamp(max=self.longest - 1)

    @property
    def real(self) -> Tensor:
        """[B, C]: which tokens are not padding."""
        return torch.arange(self.width, device=self.counts.device) < self.counts[:, None]

    @property
    def first(self) -> int | None:
        """Position of the first new token in all rows; None if rows differ or are padded."""
        return self.longest - self.width if self.aligned and not self.padded else None

    def zero_padding(self, x: Tensor) -> Tensor:
        """x with its padding set to zero: it may hold NaN, and 0 · NaN is NaN behind every mask."""
        return torch.where(self.real[..., None], x, 0) if self.padded else x


@dataclass(frozen=True)
class HostLengths:
    """Row lengths as the host knows them: exact, or upper bounds."""

    tokens: tuple[int, ...]
    exact: bool = True


class Cache:
    """Base class of the caches: lengths, capacity and checks.

    key: the settings of the layer that the cache belongs to (`AttentionLayer.cache_key`)
    """

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        check_sizes(batch=batch, max_len=1 if max_len is None else max_len)
        self.key, self.batch, self.max_len, self.device, self.dtype = key, batch, max_len, device, dtype
        self._stores: dict[str, Tensor] = {}
        self.capacity = 0
        """Tokens per row that the stores have room for."""
        self.host_lengths = HostLengths((0,) * batch)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._reads: Tensor | None = None
        self._read_parts: Tensor | None = None
        self._rope_frequencies: Tensor | None = None
        self._selector_frequencies: Tensor | None = None
        self._arrival_counters: Tensor | None = None
        self._fused_weights: dict[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}
        if max_len is not None:
            self._reserve(max_len)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles do not copy the layers' weights."""
        return self.__dict__ | {"_fused_weights": {}}

    # ------------------------------------------------------------ what the last call read

    @property
    def reads(self) -> Tensor | None:
        """int64 [B, C, G]: keys that each query of the last call read, counted from what was gathered and not masked;
        without those of a learned selector.

        None if nothing was counted: after prefill, after a chunk on the whole-sequence kernels, after `take_rows` and
        `put_row`. PyTorch's dense kernel does not count: every key up to the query is reported.
        """
        return self._reads if self._read_parts is None else self._read_parts.sum(-1)[:, None]

    @reads.setter
    def reads(self, reads: Tensor | None) -> None:
        self._reads, self._read_parts = reads, None

    def set_partial_reads(self, parts: Tensor) -> None:
        """Keys read by each program of a decode kernel, int32 [B, G, parts]; summed only when `reads` is accessed."""
        self._reads, self._read_parts = None, parts

    # ------------------------------------------------------------ for the decode kernels

    def rope_frequencies(self) -> Tensor:
        """fp64 [Dk/2 + 1]: full rotations per position of each pair, and the factor of rotated vectors."""
        if self._rope_frequencies is None:
            rotary = self._rotary(self.key["head_dim"])
            rotations = rotary.frequencies(self.device) / (2 * math.pi)
            self._rope_frequencies = torch.cat((rotations, rotations.new_full((1,), rotary.attention_factor)))
        return self._rope_frequencies

    def _rotary(self, size: int) -> Rotary:
        return Rotary(size, *(self.key[name] for name in ("theta", "scaling", "max_wavelength", "rope")))

    def arrival_counters(self, size: int) -> Tensor:
        """int32 [size]: counters with which the programs of a decode kernel synchronise; 0 between steps."""
        if self._arrival_counters is None:
            self._arrival_counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._arrival_counters

    def fused_weights(self, layers: tuple[nn.Linear, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of linear layers that read the same input, as one layer's. Zeros make the rows a multiple of
        16, so that every row of the product is aligned. Copied at the first step: like the cached tokens, they are
        those of one set of weights."""
        # one copy per dtype (autocast): a captured CUDA graph may read the other one
        key = (dtype, *layers)
        if key not in self._fused_weights:
            weights = [layer.weight.to(dtype) for layer in layers]
            rows = sum(w.shape[0] for w in weights)
            weights.append(weights[0].new_zeros(-rows % 16, weights[0].shape[1]))
            bias = None
            if any(layer.bias is not None for layer in layers):
                bias = weights[0].new_zeros(rows + weights[-1].shape[0])
                for part, layer in zip(bias.split([w.shape[0] for w in weights]), layers, strict=False):
                    if layer.bias is not None:
                        part.copy_(layer.bias)
            self._fused_weights[key] = torch.cat(weights), bias
        return self._fused_weights[key]

    # ------------------------------------------------------------ rows

    def nbytes(self) -> int:
        """Bytes of everything stored for the tokens: without copies of weights."""
        frequencies = self._rope_frequencies, self._selector_frequencies
        stored = [*self._stores.values(), *frequencies, self._arrival_counters]
        return sum(store.numel() * store.element_size() for store in stored if store is not None)

    def take_rows(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; repeats are allowed (beam search, shrinking batches)."""
        known = self.known_lengths()
        self._stores = {name: store[rows] for name, store in self._stores.items()}
        self.host_lengths = HostLengths(tuple(known[row] for row in rows.tolist()))
        self.lengths, self.batch, self.reads = self.lengths[rows], len(self.host_lengths.tokens), None
        self._arrival_counters = None

    def put_row(self, row: int, other: Cache) -> None:
        """Copy `other`, a cache of one row of the same layer, into this row."""
        self._check_key(other.key)
        if other.batch != 1:
            raise ValueError(f"the other cache has batch {other.batch}: put_row takes a cache of batch 1")
        held = max(other.known_lengths())
        self._check_capacity(held)
        self._reserve(held)
        for name, store in self._stores.items():
            slots = min(store.shape[1], other._stores[name].shape[1]) - 1
            store[row, :slots] = other._stores[name][0, :slots]
        self.lengths[row] = other.lengths[0]
        tokens = list(self.host_lengths.tokens)
        tokens[row] = other.host_lengths.tokens[0]
        self.host_lengths = HostLengths(tuple(tokens), self.host_lengths.exact)
        self.reads = None

    def known_lengths(self) -> list[int]:
        """Exact row lengths; reads them back from the device if the host only has bounds."""
        if not self.host_lengths.exact:
            self.host_lengths = HostLengths(tuple(self.lengths.tolist()))
        return list(self.host_lengths.tokens)

    @property
    def is_empty(self) -> bool:
        """Whether the host knows that no row has a token."""
        return self.host_lengths.exact and not any(self.host_lengths.tokens)

    # ------------------------------------------------------------ new tokens

    def begin(self, key: dict[str, Any], x: Tensor, lengths: Tensor | None) -> NewTokens:
        """Check that x can follow the cached tokens, and reserve slots for it."""
        self.check(key, x)
        batch, width = x.shape[:2]
        counts = self._counts(lengths, width)
        before = self.known_lengths()
        after = [a + b for a, b in zip(before, counts, strict=True)]
        self._check_capacity(max(after))
        # a copy: self.lengths is updated in place, because CUDA graphs refer to it
        start = self.lengths.clone()
        if lengths is None:
            device_counts = torch.full((batch,), width, device=self.device)
        else:  # a copy from the host, which waits for the device
            device_counts = torch.tensor(counts, device=self.device)
        new = NewTokens(
            start=start,
            counts=device_counts,
            width=width,
            longest=max(after),
            fresh=not any(before),
            padded=min(counts) < width,
            aligned=min(before) == max(before),
        )
        new.emitted = self._count_emitted(before, after)
        self._reserve(max(after))
        self.host_lengths = HostLengths(tuple(after))
        self.lengths += new.counts
        return new

    def begin_token(self, key: dict[str, Any], x: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Check that one token per row can follow. Returns which rows get one, int32 [B]; None for all.

        `lengths` on a device are not read back: the host then keeps bounds. The decode kernels update `self.lengths`.
        """
        self.check(key, x)
        exact = self.host_lengths.exact
        counts, device_counts = [1] * self.batch, None
        if lengths is not None and lengths.device.type != "cpu":
            if lengths.shape != (self.batch,):
                raise ValueError(f"lengths has shape {list(lengths.shape)}: expected [{self.batch}]")
            exact, device_counts = False, lengths.to(device=self.device, dtype=torch.int32)
        elif lengths is not None:
            counts = self._counts(lengths, 1)
            device_counts = torch.tensor(counts, dtype=torch.int32, device=self.device)
        after = [a + b for a, b in zip(self.host_lengths.tokens, counts, strict=True)]
        if self.max_len is not None and max(after) > self.max_len and not exact:
            # the bound exceeds max_len: read the exact lengths before raising
            counts = counts if lengths is None else self._counts(lengths, 1)
            after, exact = [a + b for a, b in zip(self.known_lengths(), counts, strict=True)], True
        self._check_capacity(max(after))
        self._reserve(max(after))
        self.host_lengths = HostLengths(tuple(after), exact)
        return device_counts

    def count_replay(self) -> None:
        """Update the host's bounds before a captured CUDA graph of a step is replayed."""
        if self.max_len is not None and max(self.host_lengths.tokens) >= self.max_len:
            self.known_lengths()
        bounds = tuple(tokens + 1 for tokens in self.host_lengths.tokens)
        self._check_capacity(max(bounds))
        self.host_lengths = HostLengths(bounds, exact=False)

    def check(self, key: dict[str, Any], x: Tensor) -> None:
        """Raise if x cannot follow the cached tokens, whatever its length."""
        self._check_key(key)
        batch, width = x.shape[:2]
        if batch != self.batch:
            raise ValueError(f"x has batch {batch} and the cache was made for batch {self.batch}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device} and the cache on {self.device}: move both to one device")
        if width == 0:
            raise ValueError(f"x has shape {list(x.shape)}: expected at least one token")

    def _check_key(self, key: dict[str, Any]) -> None:
        if key != self.key:
            differ = [name for name in self.key | key if key.get(name) != self.key.get(name)]
            theirs, ours = (", ".join(f"{name}={have.get(name)!r}" for name in differ) for have in (self.key, key))
            raise ValueError(f"the cache was made for {theirs} and the layer has {ours}: create it with make_cache()")

    def _counts(self, lengths: Tensor | None, width: int) -> list[int]:
        counts = [width] * self.batch if lengths is None else torch.as_tensor(lengths).tolist()
        if len(counts) != self.batch or any(not 0 <= count <= width for count in counts) or not any(counts):
            raise ValueError(
                f"lengths={counts}: expected {self.batch} numbers from 0 to {width}, the tokens of x, not all 0"
            )
        return counts

    def _count_emitted(self, before: list[int], after: list[int]) -> int:
        """Most compressed tokens that any row completes as it grows from `before` to `after` tokens."""
        return 0

    # ------------------------------------------------------------ capacity and stores

    def _check_capacity(self, tokens: int) -> None:
        if self.max_len is not None and tokens > self.max_len:
            raise ValueError(
                f"the cache holds max_len={self.max_len} tokens but needs {tokens}: "
                "create a longer one, or one that grows (max_len=None)"
            )

    def capacity_for(self, tokens: int) -> int:
        """The capacity after reserving this many tokens per row."""
        if tokens <= self.capacity:
            return self.capacity
        if self.max_len is not None:
            return self.max_len
        return max(tokens, self._limit_growth(tokens, int(self.capacity * _GROWTH)))

    def _limit_growth(self, tokens: int, capacity: int) -> int:
        """The capacity to grow to when `tokens` are needed and `capacity` is proposed."""
        return capacity

    def _reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        self.capacity = self.capacity_for(tokens)
        for name, (groups, size, slots) in self._store_shapes(self.capacity).items():
            self._stores[name] = self._allocate(self._stores.get(name), groups, size, slots)

    def _store_shapes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        """Stores that grow with the rows: name -> (KV heads, size, slots)."""
        raise NotImplementedError

    def _allocate(self, store: Tensor | None, groups: int, size: int, slots: int) -> Tensor:
        """A store of `slots` slots and the extra one, with the contents of the old store."""
        # zeros: an unwritten slot must be finite where a mask multiplies it by 0
        grown = torch.zeros(self.batch, slots + 1, groups, size, dtype=self.dtype, device=self.device)
        if store is not None:
            held = store.shape[1] - 1
            grown[:, :held] = store[:, :held]
        return grown

    def _append(self, name: str, value: Tensor, new: NewTokens) -> None:
        """Write token t to slot t."""
        store = self._stores[name]
        if new.first is None:
            self._scatter(store, torch.where(new.real, new.positions, store.shape[1] - 1), value)
        else:
            # a slice where possible: indexed writes take seven launches
            store[:, new.first : new.longest] = value

    def _scatter(self, store: Tensor, slot: Tensor, value: Tensor) -> None:
        """slot: [B, C]; the last slot takes what is not kept."""
        row = torch.arange(self.batch, device=self.device)[:, None]
        store[row, slot] = value.to(store.dtype)

    def _pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a store; None if it is not kept."""
        return (self._stores[f"k_{name}"], self._stores[f"v_{name}"]) if f"k_{name}" in self._stores else None


class DenseCache(Cache):
    """The cache of one DenseAttention layer: keys and values of all tokens."""

    def _store_shapes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        groups = self.key["kv_heads"]
        return {"k": (groups, self.key["head_dim"], tokens), "v": (groups, self.key["value_dim"], tokens)}

    def append(self, new: NewTokens, k: Tensor, v: Tensor) -> None:
        self._append("k", k, new)
        self._append("v", v, new)

    def all(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        return self._stores["k"][:, : new.longest], self._stores["v"][:, : new.longest]

    def stores(self) -> tuple[Tensor, Tensor]:
        return self._stores["k"], self._stores["v"]
