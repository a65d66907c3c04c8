"""What the caches of both kinds of layer share: rows' lengths, room, refusals, and what a step of new tokens is.

Every store has one slot more than it holds: what must not be written (padding) is written there.

Lengths are known twice: on the device, where kernels read and count them, and on the host, which must know when there
is no more room. A step whose rows are told by a device tensor leaves the host with a bound only; it reads the lengths
back when it needs them. Axes: [B, slot, G, D].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    level: bool  # all rows held as many tokens before
    emitted: int = 0  # compressed tokens that the fastest-growing row gains
    window_k: Tensor | None = None  # [B, w-1 + C, G, Dk]: the ring in order, then the new tokens
    window_v: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """[B, C]: which tokens are not padding."""
        return torch.arange(self.positions.shape[1], device=self.counts.device) < self.counts[:, None]

    @property
    def begin(self) -> int | None:
        """Where the new tokens of all rows begin; None where rows differ in that or have padding."""
        return self.longest - self.positions.shape[1] if self.level and not self.padded else None

    def without_padding(self, x: Tensor) -> Tensor:
        """x with zeros for padding, which may hold anything: 0 · NaN is NaN behind every mask."""
        return torch.where(self.real[..., None], x, 0) if self.padded else x


@dataclass(frozen=True)
class HostLengths:
    """What the host knows of the rows' lengths: the numbers themselves, or bounds that none of them exceeds."""

    tokens: tuple[int, ...]
    exact: bool = True


class Cache:
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
        self.room = 0
        """Tokens of a row that the stores have room for."""
        self.host = HostLengths((0,) * batch)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._reads: Tensor | None = None
        self._read_parts: Tensor | None = None
        self._turns: Tensor | None = None
        self._arrived: Tensor | None = None
        if max_len is not None:
            self._make_room(max_len)

    @property
    def reads(self) -> Tensor | None:
        """int64 [B, C, G]: keys that each query of the last call read, counted from what was really gathered and not
        masked. None where nobody counted: after a first prefill and after a chunk on the kernels of whole sequences,
        after `take_rows` and `put_row`. Of PyTorch's own dense kernel every key up to the query is told."""
        return self._reads if self._read_parts is None else self._read_parts.sum(-1)[:, None]

    @reads.setter
    def reads(self, reads: Tensor | None) -> None:
        self._reads, self._read_parts = reads, None

    def read_in_parts(self, parts: Tensor) -> None:
        """Keys that each program of a decode kernel read, int32 [B, G, parts]: added up only for who asks."""
        self._reads, self._read_parts = None, parts

    def turns(self) -> Tensor:
        """fp64 [Dk/2]: full turns per position of each pair, as the decode kernels want them."""
        if self._turns is None:
            size = self.key["head_dim"]
            exponent = torch.arange(0, size, 2, device=self.device, dtype=torch.float64) / size
            self._turns = self.key["theta"] ** -exponent / (self.key["scaling"] * 2 * math.pi)
        return self._turns

    def arrived(self, size: int) -> Tensor:
        """int32 [size]: where programs of a decode kernel count themselves; 0 between steps."""
        if self._arrived is None:
            self._arrived = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._arrived

    def nbytes(self) -> int:
        """Bytes of everything that is kept, counted from the stores themselves."""
        kept = [*self._stores.values(), *(x for x in (self._turns, self._arrived) if x is not None)]
        return sum(store.numel() * store.element_size() for store in kept)

    def take_rows(self, rows: Tensor) -> None:
        """Become the cache of these rows, in this order; a row may come again: beams, and batches that shrink."""
        known = self.known_lengths()
        self._stores = {name: store[rows] for name, store in self._stores.items()}
        self.host = HostLengths(tuple(known[row] for row in rows.tolist()))
        self.lengths, self.batch, self.reads = self.lengths[rows], len(self.host.tokens), None
        self._arrived = None

    def put_row(self, row: int, other: Cache) -> None:
        """Let this row hold what `other`, a cache of one row of the same layer, holds."""
        self._check_key(other.key)
        if other.batch != 1:
            raise ValueError(f"the other cache has batch {other.batch}: a row is put from a cache of batch 1")
        held = max(other.known_lengths())
        self._check_room(held)
        self._make_room(held)
        for name, store in self._stores.items():
            slots = min(store.shape[1], other._stores[name].shape[1]) - 1
            store[row, :slots] = other._stores[name][0, :slots]
        self.lengths[row] = other.lengths[0]
        tokens = list(self.host.tokens)
        tokens[row] = other.host.tokens[0]
        self.host = HostLengths(tuple(tokens), self.host.exact)
        self.reads = None

    def begin(self, key: dict[str, Any], x: Tensor, lengths: Tensor | None) -> Step:
        """Check that x can follow what is held, and say where its tokens stand."""
        self.check(key, x)
        batch, width = x.shape[:2]
        counts = self._counts(lengths, width)
        before = self.known_lengths()
        after = [a + b for a, b in zip(before, counts, strict=True)]
        self._check_room(max(after))
        # a copy: the tensor itself stays where it is, for CUDA graphs that count in it
        start = self.lengths.clone()
        step = Step(
            start=start,
            # told from the host only where rows differ: a copy to a device waits for it
            counts=torch.full((batch,), width, device=self.device)
            if lengths is None
            else torch.tensor(counts, device=self.device),
            # padding may reach past the longest row: it must not point outside the stores
            positions=(start[:, None] + torch.arange(width, device=self.device)).clamp(max=max(after) - 1),
            longest=max(after),
            fresh=not any(before),
            padded=min(counts) < width,
            level=min(before) == max(before),
        )
        self._plan(step, before, after)
        self._make_room(max(after))
        self.host = HostLengths(tuple(after))
        self.lengths += step.counts
        return step

    def begin_token(self, key: dict[str, Any], x: Tensor, lengths: Tensor | None) -> Tensor | None:
        """Check that one token of each row can follow. Gives the rows that get one, int32 [B]; None for all.

        `lengths` on a device are not read back: the host then knows bounds only. Whoever runs the token counts it in
        `lengths` on the device."""
        self.check(key, x)
        exact = self.host.exact
        counts, device_counts = [1] * self.batch, None
        if lengths is not None and lengths.device.type != "cpu":
            if lengths.shape != (self.batch,):
                raise ValueError(f"lengths has shape {list(lengths.shape)}: it must be [{self.batch}]")
            exact, device_counts = False, lengths.to(device=self.device, dtype=torch.int32)
        elif lengths is not None:
            counts = self._counts(lengths, 1)
            device_counts = torch.tensor(counts, dtype=torch.int32, device=self.device)
        after = [a + b for a, b in zip(self.host.tokens, counts, strict=True)]
        if self.max_len is not None and max(after) > self.max_len and not exact:
            # a bound that has reached the end says nothing yet
            counts = counts if lengths is None else self._counts(lengths, 1)
            after, exact = [a + b for a, b in zip(self.known_lengths(), counts, strict=True)], True
        self._check_room(max(after))
        self._make_room(max(after))
        self.host = HostLengths(tuple(after), exact)
        return device_counts

    def replayed(self) -> None:
        """A step that was captured as a CUDA graph is about to run again; which rows it counts, the device knows."""
        if self.max_len is not None and max(self.host.tokens) >= self.max_len:
            self.known_lengths()
        bounds = tuple(tokens + 1 for tokens in self.host.tokens)
        self._check_room(max(bounds))
        self.host = HostLengths(bounds, exact=False)

    def check(self, key: dict[str, Any], x: Tensor) -> None:
        """Refuse tokens that cannot follow what is held, whatever their number."""
        self._check_key(key)
        batch, width = x.shape[:2]
        if batch != self.batch:
            raise ValueError(f"x has batch {batch} and the cache was made for batch {self.batch}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device} and the cache on {self.device}: move all to one device")
        if width == 0:
            raise ValueError(f"x has shape {list(x.shape)}: it must have at least one token")

    def _check_key(self, key: dict[str, Any]) -> None:
        if key != self.key:
            theirs = ", ".join(f"{name}={self.key.get(name)!r}" for name in key if key[name] != self.key.get(name))
            ours = ", ".join(f"{name}={key[name]!r}" for name in key if key[name] != self.key.get(name))
            raise ValueError(f"the cache was made for {theirs} and the layer has {ours}: make one with make_cache()")

    def _counts(self, lengths: Tensor | None, width: int) -> list[int]:
        counts = [width] * self.batch if lengths is None else torch.as_tensor(lengths).tolist()
        if len(counts) != self.batch or any(not 0 <= count <= width for count in counts) or not any(counts):
            raise ValueError(f"lengths={counts} must be {self.batch} numbers from 0 to {width}, x's tokens, not all 0")
        return counts

    def _check_room(self, tokens: int) -> None:
        if self.max_len is not None and tokens > self.max_len:
            raise ValueError(
                f"the cache holds max_len={self.max_len} tokens and would need {tokens}: "
                "make a longer one, or one that grows (max_len=None)"
            )

    def known_lengths(self) -> list[int]:
        """The rows' lengths; read back from the device if the host knows bounds only."""
        if not self.host.exact:
            self.host = HostLengths(tuple(self.lengths.tolist()))
        return list(self.host.tokens)

    def _plan(self, step: Step, before: list[int], after: list[int]) -> None:
        """What a step means for the cache, told in host numbers."""

    def room_for(self, tokens: int) -> int:
        """The room that rows of so many tokens would find."""
        if tokens <= self.room:
            return self.room
        if self.max_len is not None:
            return self.max_len
        return max(tokens, self._spared(tokens, int(self.room * _GROWTH)))

    def _spared(self, tokens: int, room: int) -> int:
        """What there is to be of a room that `tokens` do not fill."""
        return room

    def _make_room(self, tokens: int) -> None:
        """Stores for rows of so many tokens."""
        if tokens <= self.room:
            return
        self.room = self.room_for(tokens)
        for name, (groups, size, slots) in self._sizes(self.room).items():
            self._stores[name] = self._grown(self._stores.get(name), groups, size, slots)

    def _sizes(self, tokens: int) -> dict[str, tuple[int, int, int]]:
        """Of every store that grows with the rows: name -> (KV heads, size, slots)."""
        raise NotImplementedError

    def _grown(self, store: Tensor | None, groups: int, size: int, slots: int) -> Tensor:
        """A store with room for `slots` and for the one that is written and never read."""
        # zeros, so that a slot not yet written is finite wherever a mask multiplies it by 0
        grown = torch.zeros(self.batch, slots + 1, groups, size, dtype=self.dtype, device=self.device)
        if store is not None:
            held = store.shape[1] - 1
            grown[:, :held] = store[:, :held]
        return grown

    def _keep(self, name: str, value: Tensor, step: Step) -> None:
        """Token t in slot t."""
        store = self._stores[name]
        if step.begin is None:
            self._write(store, torch.where(step.real, step.positions, store.shape[1] - 1), value)
        else:
            # a slice, where it will do: writing by index takes seven launches
            store[:, step.begin : step.longest] = value

    def _write(self, store: Tensor, slot: Tensor, value: Tensor) -> None:
        """slot: [B, C]; the last slot takes what is not to be kept."""
        row = torch.arange(self.batch, device=self.device)[:, None]
        store[row, slot] = value.to(store.dtype)

    def _pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a kind of store; None where it is not kept."""
        return (self._stores[f"k_{name}"], self._stores[f"v_{name}"]) if f"k_{name}" in self._stores else None
