"""The KV cache of an attention layer: lengths, capacity and stores of tokens. Axes: [B, slot, G, D].

What the layer's spec reads is stored, per row: keys and values of all tokens, for the selected and the dense branch; a
ring of the last w tokens, for the window (with shared_kv, the window is the end of all tokens); all compressed tokens,
and a ring of the last l raw tokens, from which the next compressed token is computed when its last raw token arrives;
means of blocks of keys, where they choose the blocks; and the key per token that scores blocks: a learned selector's,
rotated at its position, or the slowest channels of the selected branch's (none if all of its channels count).

Rows may differ in length. Every store has one extra slot at the end, to which writes of padding are redirected.

Lengths exist twice: on the device, where kernels read and update them, and on the host, which must know when capacity
runs out. If a step's rows are given by a device tensor, the host only keeps an upper bound; it reads the lengths back
when it needs them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tercet.attention.config import BRANCHES, MOST_DECODED_BLOCKS, check_sizes
from tercet.attention.selector import slow_channels, take_channels
from tercet.attention.spec import AttentionSpec
from tercet.model.rope import Rotary

_GROWTH = 1.5


@dataclass
class NewTokens:
    """C new tokens for each row of the batch; the first `counts` of them are real."""

    start: Tensor  # int64 [B]: tokens in the cache before
    counts: Tensor  # int64 [B]
    width: int  # C
    before: list[int]  # start, on the host
    added: list[int]  # counts, on the host
    emitted: int = 0  # most compressed tokens that any row completes
    window_k: Tensor | None = None  # [B, w-1 + C, G, Dk]: the window ring in order, then the new tokens
    window_v: Tensor | None = None

    @property
    def longest(self) -> int:
        """Length of the longest row afterwards."""
        return max(map(operator.add, self.before, self.added))

    @property
    def fresh(self) -> bool:
        """Whether the cache was empty."""
        return not any(self.before)

    @property
    def padded(self) -> bool:
        return min(self.added) < self.width

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
        return self.before[0] if len({*self.before}) == 1 and not self.padded else None

    def zero_padding(self, x: Tensor) -> Tensor:
        """x with its padding set to zero: it may hold NaN, and 0 · NaN is NaN behind every mask."""
        return torch.where(self.real[..., None], x, 0) if self.padded else x


@dataclass(frozen=True)
class HostLengths:
    """Row lengths as the host knows them: exact, or upper bounds."""

    tokens: tuple[int, ...]
    exact: bool = True


class Cache:
    """The cache of one attention layer, created by `layer.make_cache`.

    key: the settings of the layer (`Attention.cache_key`)
    """

    def __init__(
        self, key: dict[str, Any], batch: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        check_sizes(batch=batch, max_len=1 if max_len is None else max_len)
        self.key, self.batch, self.max_len, self.device, self.dtype = key, batch, max_len, device, dtype
        spec: AttentionSpec = key["spec"]
        self.spec, self.config = spec, spec.blocks
        self.keeps_tokens = spec.selects or spec.dense
        self.keeps_window = "window" in spec.branches and not (spec.shared_kv and self.keeps_tokens)
        own = spec.by_branch and spec.exact_groups is None
        self.scored_channels = slow_channels(key["head_dim"]) if own else None
        """Of the selected branch's keys, for the scorer `own`; None: all, or another scorer."""
        self.selector_size = sum(end - first for first, end in self.scored_channels or ())
        """Channels of the stored keys that score blocks; 0 for none."""
        if spec.selects and "selector_dim" in key:
            self.selector_size = key["selector_dim"]
        self.block_indices: Tensor | None = None
        """int32 [B, G, n]: blocks selected by the last step on the decode kernels."""
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
        for kind, size in (("k", key["head_dim"]), ("v", key["value_dim"])):
            if spec.compresses:
                self._stores[f"{kind}_tail"] = self._allocate(None, key["kv_heads"], size, self.config.compress_block)
            if self.keeps_window:
                self._stores[f"{kind}_window"] = self._allocate(None, key["kv_heads"], size, self.config.window)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles do not copy the layers' weights."""
        return self.__dict__ | {"_fused_weights": {}}

    # ------------------------------------------------------------ what the last call read

    @property
    def reads(self) -> Tensor | None:
        """int64 [B, C, G]: keys that each query of the last call read, counted from what was gathered and not masked;
        without those that only score blocks.

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
        new = NewTokens(start, device_counts, width, before, counts, self._count_emitted(before, after))
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
        if not (self.spec.compresses or self.spec.pools):
            return 0
        count = self.config.num_compressed
        return max(count(b) - count(a) for a, b in zip(before, after, strict=True))

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
        capacity = int(self.capacity * _GROWTH)
        # spare capacity must not push a row that still fits past the limit of the decode kernels
        most = MOST_DECODED_BLOCKS * self.config.select_block
        if self.keeps_blocks and tokens <= most:
            capacity = min(capacity, most)
        return max(tokens, capacity)

    def _reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        self.capacity = self.capacity_for(tokens)
        for name, (groups, size, slots) in self._store_shapes(self.capacity).items():
            self._stores[name] = self._allocate(self._stores.get(name), groups, size, slots)

    def _store_shapes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        """Stores that grow with the rows: name -> (KV heads, size, slots)."""
        shapes, groups, compressed = {}, self.key["kv_heads"], self.config.num_compressed(tokens)
        for kind, size in (("k", self.key["head_dim"]), ("v", self.key["value_dim"])):
            if self.keeps_tokens:
                shapes[f"{kind}_selected"] = groups, size, tokens
            if self.spec.compresses or (self.spec.pools and kind == "k"):
                shapes[f"{kind}_compressed"] = groups, size, compressed
        if self.selector_size:
            shapes["selector"] = groups, self.selector_size, tokens
        return shapes

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

    # ------------------------------------------------------------ what the layer stores and reads

    def append(
        self, new: NewTokens, raw_k: Tensor | None, keys: dict[str, Tensor], values: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Store the new tokens. Returns (index [B, E], keys, values [B, E, l, G, D]) of the compressed tokens that are
        now complete, E for the row that completes most; None if there are none, and in a first prefill. Keys are raw,
        or, where blocks are chosen by their means, those that are read, without values."""
        self.block_indices = None
        if "window" in self.spec.branches and not new.fresh:
            new.window_k = self._window_context("k", keys["window"], new)
            new.window_v = self._window_context("v", values["window"], new)
        if self.keeps_tokens:
            self._append("k_selected", keys["selected"], new)
            self._append("v_selected", values["selected"], new)
        if self.scored_channels is not None:
            self._append("selector", take_channels(keys["selected"], self.scored_channels), new)
        if self.keeps_window:
            self._append_ring("k_window", keys["window"], new)
            self._append_ring("v_window", values["window"], new)
        # a first prefill compresses its whole sequence at once
        complete = new.emitted > 0 and not new.fresh
        if self.spec.pools and complete:
            # rows that complete fewer read clamped tokens, and their result goes to the extra slot
            token = (self.completed(new) * self.config.compress_stride)[..., None] + self._block_places()
            return self.completed(new), self._rows("k_selected", token.clamp(max=self.capacity - 1)), None
        if not self.spec.compresses:
            return None
        assert raw_k is not None
        k = self._append_tail("k_tail", raw_k, new, complete)
        v = self._append_tail("v_tail", values["compressed"], new, complete)
        return None if k is None else (self.completed(new), k, v)

    def _block_places(self) -> Tensor:
        return torch.arange(self.config.compress_block, device=self.device)

    def _rows(self, name: str, slot: Tensor) -> Tensor:
        """Slots [B, ...] of a store."""
        row = torch.arange(self.batch, device=self.device).view(-1, *(1,) * (slot.dim() - 1))
        return self._stores[name][row, slot]

    def completed(self, new: NewTokens) -> Tensor:
        """Indices [B, E] of the compressed tokens that these new tokens complete. Rows that complete fewer count on."""
        return self._num_compressed(new.start)[:, None] + torch.arange(new.emitted, device=self.device)

    def _append_tail(self, name: str, value: Tensor, new: NewTokens, complete: bool) -> Tensor | None:
        """Write new tokens to a ring of raw tokens. Returns the l tokens of each compressed token they complete."""
        l, d = self.config.compress_block, self.config.compress_stride
        history = self._with_history(name, l, new, value) if complete else value
        self._append_ring(name, value, new)
        if not complete:
            return None
        first = self.completed(new) * d - (new.start[:, None] - (l - 1))
        # rows that complete fewer read clamped tokens, and their result goes to the extra slot
        token = (first[..., None] + self._block_places()).clamp(0, history.shape[1] - 1)
        row = torch.arange(self.batch, device=self.device)[:, None, None]
        return history[row, token].to(value.dtype)

    def append_selector(self, new: NewTokens, keys: Tensor) -> None:
        """Store a learned selector's keys of the new tokens, rotated at their positions: [B, C, G, size]."""
        self._append("selector", keys, new)

    def append_compressed(self, new: NewTokens, **values: Tensor | None) -> None:
        """Store the compressed tokens that these new tokens completed, by store: [B, E, G, D] each."""
        for name, value in values.items():
            if value is None:
                continue
            store = self._stores[name]
            if new.first is not None:
                first = self.config.num_compressed(new.first)
                store[:, first : first + value.shape[1]] = value
                continue
            index = self.completed(new)
            complete = index < self._num_compressed(new.start + new.counts)[:, None]
            self._scatter(store, torch.where(complete, index, store.shape[1] - 1), value)

    def append_prompt(self, new: NewTokens, k: Tensor | None, v: Tensor | None) -> None:
        """Store the compressed tokens of a first prefill; those of right padding are left out."""
        k, v = (None if x is None else x[:, : new.emitted] for x in (k, v))
        self.append_compressed(new, k_compressed=k, v_compressed=v)

    def compressed(self, new: NewTokens) -> tuple[Tensor, Tensor | None]:
        """Compressed keys and values that any of the new tokens can see; no values where keys are means."""
        count = self.config.num_compressed(new.longest)
        k, v = self._stores["k_compressed"], self._stores.get("v_compressed")
        return k[:, :count], None if v is None else v[:, :count]

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks are scored, for which the decode kernels hold scratch."""
        return self.spec.compresses or self.spec.selects

    def selector_frequencies(self) -> Tensor | None:
        """fp64 [rotated/2]: as `rope_frequencies`, of a learned selector's rotated channels; None if it has none."""
        if self._selector_frequencies is None and self.key.get("selector_rotary"):
            rotary = self._rotary(self.key["selector_rotary"])
            self._selector_frequencies = rotary.frequencies(self.device) / (2 * math.pi)
        return self._selector_frequencies

    def selector_keys(self, new: NewTokens) -> Tensor:
        """The keys that score blocks, of all tokens that any of the new tokens can see: [B, S, G, size]."""
        return self._stores["selector" if self.selector_size else "k_selected"][:, : new.longest]

    def all(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens that any of the new ones can see."""
        return self._stores["k_selected"][:, : new.longest], self._stores["v_selected"][:, : new.longest]

    def stores(self) -> dict[str, Any]:
        """For the decode kernels: (keys, values) of every kind, and keys that score blocks; None if not kept."""
        held: dict[str, Any] = {"selector": self._stores.get("selector")}
        for kind in (*BRANCHES, "raw"):
            name = "tail" if kind == "raw" else kind
            k = self._stores.get(f"k_{name}")
            held[kind] = None if k is None else (k, self._stores.get(f"v_{name}", k))  # of means, no values are read
        return held

    def _num_compressed(self, length: Tensor) -> Tensor:
        """config.num_compressed of each row's length."""
        l, d = self.config.compress_block, self.config.compress_stride
        return ((length - l).div(d, rounding_mode="floor") + 1).clamp(min=0)

    def _window_context(self, kind: str, value: Tensor, new: NewTokens) -> Tensor:
        """The last w-1 tokens before the new ones, in order, followed by the new ones."""
        if self.keeps_window:
            return self._with_history(f"{kind}_window", self.config.window, new, value)
        past = new.start[:, None] + torch.arange(1 - self.config.window, 0, device=self.device)
        held = self._rows(f"{kind}_selected", past.clamp(min=0))
        return torch.cat((held, value.to(held.dtype)), dim=1)

    def _with_history(self, name: str, size: int, new: NewTokens, value: Tensor) -> Tensor:
        """The last size-1 tokens of a ring, in order, followed by the new ones."""
        past = (new.start[:, None] + torch.arange(1 - size, 0, device=self.device)) % size
        held = self._rows(name, past)
        return torch.cat((held, value.to(held.dtype)), dim=1)

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
