"""Random orders and the validation split as pure functions of integers.

There is no generator state to save, and results do not depend on the numpy version: numpy may change the streams of its
own generators, and a run resumed after an upgrade would read its documents in a different order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

SHORTEST_HELD_OUT = 16  # bytes, or tokens of shards, that are worth holding out
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, a bijection on uint64 with random-looking output."""
    value = value ^ (value >> np.uint64(30))
    value = value * np.uint64(0xBF58476D1CE4E5B9)
    value = value ^ (value >> np.uint64(27))
    value = value * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key(*parts: int) -> int:
    """Combine integers (a seed, an epoch, a block number, ...) into one 64-bit key."""
    state = 0
    for part in parts:  # `mix` on Python integers: ten times faster than numpy for a single number
        state = (state + part + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def random_u64(stream: int, count: int) -> np.ndarray:
    """`count` pseudo-random uint64 (splitmix64) that depend only on `stream`, a `key`."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(steps + np.uint64(stream))


def random_below(stream: int, count: int, bound: int) -> np.ndarray:
    """`count` int64 in [0, bound), bound < 2**31; uniform up to a bias below bound / 2**32."""
    halves = random_u64(stream, (count + 1) // 2).view(np.uint32)[:count]
    return ((halves.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).view(np.int64)


def permutation(count: int, *parts: int) -> np.ndarray:
    """A permutation of range(count) (int64) that depends only on `parts`."""
    return np.argsort(random_u64(key(*parts), count), kind="stable")


def document_hash(data: bytes) -> int:
    """64 bits of the SHA-256 of a document's UTF-8 text; decides its split."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def in_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents belong to validation: those with hashes in the lowest `fraction` of the range."""
    return hashes < np.uint64(validation_threshold(fraction))


def validation_threshold(fraction: float) -> int:
    return min(int(fraction * 2.0**64), _MASK)


@dataclass(frozen=True)
class HeldOutEnd:
    """The end of a text, which is for validation where whole documents are too few."""

    documents: int
    fraction: float
    total: int
    unit: str  # of total and size: bytes, or tokens of shards

    @property
    def size(self) -> int:
        return int(self.fraction * self.total)

    @property
    def too_short(self) -> str:
        """Why it is not held out after all, for the error that a split has no document."""
        if self.size >= SHORTEST_HELD_OUT:
            return ""
        return (
            f" (the last {self.size} of {self.total:,} {self.unit} would be held out instead, but that is below the "
            f"minimum of {SHORTEST_HELD_OUT})"
        )

    def __str__(self) -> str:
        few = f"{self.documents} documents are" if self.documents > 1 else "1 document is"
        return (
            f"{few} too few to hold out whole ones at validation_fraction={self.fraction:g}: validation reads the "
            f"last {self.size:,} of {self.total:,} {self.unit} instead"
        )
