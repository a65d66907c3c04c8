"""NSAConfig and the block arithmetic of Native Sparse Attention. Pure Python: no torch at import.

Symbols are the paper's (arXiv 2502.11089): l, d the compression block and stride, l' the selection block, n the
number of selected blocks, w the window. Positions t are 0-based.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BRANCHES = ("compressed", "selected", "window")
MOST_DECODED_BLOCKS = 1 << 14
"""Selection blocks of a row whose scores one program of the decode kernels holds: beyond them is the reference's."""


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def check_group_size(heads: int, kv_heads: int) -> int:
    """h = H / G, the query heads that share one KV head; refused unless it is a whole number."""
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        choices = ", ".join(map(str, divisors(heads)))
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}: pick one of {choices}")
    return heads // kv_heads


def check_shared_keys(shared_kv: bool, compress_selected_keys: bool) -> None:
    if shared_kv and compress_selected_keys:
        raise ValueError(
            "shared_kv=True and compress_selected_keys=True were both given: one K/V set for all branches already "
            "compresses the selected branch's keys; leave one of them out"
        )


def check_branches(branches: tuple[str, ...]) -> tuple[str, ...]:
    """The branches in the paper's order; refused when empty, repeated or unknown."""
    unknown = [b for b in branches if b not in BRANCHES]
    if isinstance(branches, str) or unknown or not branches or len(set(branches)) != len(branches):
        raise ValueError(f"branches={branches!r} must be a non-empty choice, each once, of {', '.join(BRANCHES)}")
    return tuple(b for b in BRANCHES if b in branches)


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of the three branches. Every rule is checked here; whoever holds an NSAConfig holds a valid one.

    Compressed token i covers tokens [i·d, i·d + l); selection block j covers [j·l', (j+1)·l').
    """

    compress_block: int = 32
    """l: tokens under one compressed token."""
    compress_stride: int = 16
    """d: stride between compressed tokens; divides l and l'."""
    select_block: int = 64
    """l': tokens in one selection block; at least l."""
    select_count: int = 16
    """n: selected blocks per query, the forced ones included."""
    select_initial: int = 1
    """Blocks at the beginning of the document that every query selects."""
    select_local: int = 2
    """Blocks that every query selects at its own end: the current one and those just before it."""
    window: int = 512
    """w: sliding window in tokens, the current token included."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{f.name}={value!r} must be a whole number")
            least = 0 if f.name == "select_initial" else 1
            if value < least:
                raise ValueError(f"{f.name}={value} must be at least {least}")
        l, d, block = self.compress_block, self.compress_stride, self.select_block
        if l % d:
            raise ValueError(
                f"compress_stride={d} does not divide compress_block={l}: pick one of {_some(divisors(l))}"
            )
        if block % d:
            raise ValueError(
                f"compress_stride={d} does not divide select_block={block}: make select_block a multiple of {d}"
            )
        if l > block:
            raise ValueError(
                f"compress_block={l} is larger than select_block={block}: "
                f"take compress_block of at most {block} or select_block of at least {l}"
            )
        forced = self.select_initial + self.select_local
        if self.select_count < forced:
            raise ValueError(
                f"select_count={self.select_count} is less than select_initial + select_local = {forced}: "
                f"take select_count of at least {forced}"
            )

    def num_visible(self, t: int) -> int:
        """num_cmp(t): how many compressed tokens query t sees, those whose last token is at or before t."""
        seen = t + 1
        return 0 if seen < self.compress_block else (seen - self.compress_block) // self.compress_stride + 1

    def num_compressed(self, length: int) -> int:
        """How many compressed tokens a document of this many tokens has."""
        return self.num_visible(length - 1)

    def num_blocks(self, length: int) -> int:
        """How many selection blocks a document of this many tokens has, the last one perhaps incomplete."""
        return -(-length // self.select_block)

    def num_selected(self, t: int) -> int:
        """|I|: how many blocks query t selects."""
        return min(self.select_count, t // self.select_block + 1)

    def compressed_cu_seqlens(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Bounds of the documents' compressed tokens, which stand one after another. No synchronisation."""
        import torch

        lengths = cu_seqlens.diff()
        counts = ((lengths - self.compress_block).div(self.compress_stride, rounding_mode="floor") + 1).clamp_(0)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[-8:]))
