"""Orders and splits that are pure functions of numbers: no generator state, nothing to save, the same on every
numpy version and machine.

numpy's own generators were not used: their streams may change between numpy versions, and a run resumed after an
upgrade would read documents in another order.
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser: a bijection of 64-bit integers whose outputs look random. uint64 in and out."""
    value = value ^ (value >> np.uint64(30))
    value = value * np.uint64(0xBF58476D1CE4E5B9)
    value = value ^ (value >> np.uint64(27))
    value = value * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key(*parts: int) -> int:
    """One 64-bit key out of several integers (a seed, an epoch, a block number...)."""
    state = 0
    for part in parts:  # `mix`, on Python integers: ten times faster than numpy for one number
        state = (state + part + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def random_u64(stream: int, count: int) -> np.ndarray:
    """`count` random-looking uint64 that depend on `stream` (a `key`) only: splitmix64's own sequence."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(steps + np.uint64(stream))


def random_below(stream: int, count: int, bound: int) -> np.ndarray:
    """`count` integers of 0 … bound-1 (bound < 2**31), uniform but for a bias below bound / 2**32. int64."""
    halves = random_u64(stream, (count + 1) // 2).view(np.uint32)[:count]
    return ((halves.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).view(np.int64)


def permutation(count: int, *parts: int) -> np.ndarray:
    """0 … count-1 in an order that depends on `parts` only. int64."""
    return np.argsort(random_u64(key(*parts), count), kind="stable")


def document_hash(data: bytes) -> int:
    """64 bits of SHA-256 of a document's UTF-8 text: decides its side of the validation split."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def in_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are for validation: those whose hash lies in the lowest `fraction` of all hashes."""
    return hashes < np.uint64(validation_threshold(fraction))


def validation_threshold(fraction: float) -> int:
    return min(int(fraction * 2.0**64), _MASK)
