"""NSAConfig and the block arithmetic of Native Sparse Attention. Does not import torch at module level.

Symbols follow the paper (arXiv 2502.11089): compression block l and stride d, selection block l', n selected blocks,
window w. Positions t are 0-based.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

BRANCHES = ("compressed", "selected", "window")
MAX_SELECT_COUNT = 256
"""Most blocks per query that the kernels take."""
MAX_SELECT_BLOCK = 128
"""Most tokens in a selection block that the kernels take."""
SLOW_PLANES = 16  # of RoPE: two channels of each are scored by the scorer `own`
MOST_DECODED_BLOCKS = 1 << 14
"""Most selection blocks per row that the decode kernels handle: one program holds all their scores. Longer rows fall
back to the reference."""


def divisors(number: int) -> list[int]:
    """Divisors up to 4096; the limit keeps absurd numbers fast."""
    return [i for i in range(1, min(number, 4096) + 1) if number % i == 0]


def check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")


def check_above_zero(**numbers: float | None) -> None:
    """None is not checked."""
    for name, value in numbers.items():
        if value is None or (isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf):
            continue
        raise ValueError(f"{name}={value!r} must be a finite number above 0")


def check_group_size(heads: int, kv_heads: int) -> int:
    """Return h = H / G, the query heads per KV head; raise if G does not divide H."""
    check_sizes(heads=heads, kv_heads=kv_heads)
    if heads % kv_heads:
        choices = ", ".join(map(str, divisors(heads)))
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}: pick one of {choices}")
    return heads // kv_heads


def check_branches(branches: tuple[str, ...]) -> tuple[str, ...]:
    """Return the branches in the paper's order; raise on an empty, repeated or unknown one."""
    unknown = [b for b in branches if b not in BRANCHES]
    if isinstance(branches, str) or unknown or not branches or len(set(branches)) != len(branches):
        given = branches if isinstance(branches, str) else ",".join(map(str, branches))
        raise ValueError(f"branches={given} must name at least one, each once, of {', '.join(BRANCHES)}")
    return tuple(b for b in BRANCHES if b in branches)


@dataclass(frozen=True)
class NSAConfig:
    """Block sizes of the three branches.

    Compressed token i covers tokens [i·d, i·d + l); selection block j covers [j·l', (j+1)·l').
    """

    __pydantic_config__ = {"use_attribute_docstrings": True}  # noqa: RUF012  (not a field)

    compress_block: int = 32
    """l: tokens per compressed token."""
    compress_stride: int = 16
    """d: stride between compressed tokens; divides l and l'."""
    select_block: int = 64
    """l': tokens in one selection block; at least l."""
    select_count: int = 16
    """n: selected blocks per query, including forced ones."""
    select_initial: int = 1
    """Blocks at the start of the document that every query selects."""
    select_local: int = 2
    """Most recent blocks that every query selects: its own and those just before it."""
    window: int = 512
    """w: sliding window in tokens, the current token included."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{f.name}={value!r} must be an integer")
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
                f"lower compress_block to {block} or raise select_block to {l}"
            )
        forced = self.forced_blocks
        if self.select_count < forced:
            raise ValueError(
                f"select_count={self.select_count} is less than select_initial + select_local = {forced}: "
                f"set select_count to at least {forced}"
            )

    @property
    def forced_blocks(self) -> int:
        """Blocks that every query selects, whatever their scores."""
        return self.select_initial + self.select_local

    @property
    def selected_tokens(self) -> int:
        """Tokens of select_count whole blocks: queries at positions below this select every block of their past."""
        return self.select_count * self.select_block

    def num_visible(self, t: int) -> int:
        """num_cmp(t): compressed tokens visible to query t, those whose last token is at or before t."""
        seen = t + 1
        return 0 if seen < self.compress_block else (seen - self.compress_block) // self.compress_stride + 1

    def num_compressed(self, length: int) -> int:
        """Compressed tokens of a document of `length` tokens."""
        return self.num_visible(length - 1)

    def num_blocks(self, length: int) -> int:
        """Selection blocks of a document of `length` tokens; the last may be incomplete."""
        return -(-length // self.select_block)

    def compressed_cu_seqlens(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Bounds of the documents' compressed tokens, packed one after another. Does not synchronise."""
        import torch

        if not isinstance(cu_seqlens, torch.Tensor):
            raise TypeError(f"cu_seqlens is {type(cu_seqlens).__name__}: expected an int32 tensor [documents + 1]")
        lengths = cu_seqlens.diff()
        counts = ((lengths - self.compress_block).div(self.compress_stride, rounding_mode="floor") + 1).clamp_(0)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def unsupported_blocks(config: NSAConfig) -> str | None:
    """Why the kernels cannot run with these block sizes; None if they can."""
    for name in ("compress_block", "compress_stride", "select_block"):
        size = getattr(config, name)
        if size & (size - 1):
            return f"{name}={size} is not a power of two"
    if not 16 <= config.select_block <= MAX_SELECT_BLOCK:
        return f"select_block={config.select_block} is not within 16 … {MAX_SELECT_BLOCK}"
    return None


def unsupported_sizes(config: NSAConfig) -> str | None:
    """Why the training kernels cannot run with these settings, whatever the heads; None if they may."""
    reason = unsupported_blocks(config)
    if reason is None and config.select_count > MAX_SELECT_COUNT:
        reason = f"select_count={config.select_count} is more than {MAX_SELECT_COUNT}"
    return reason


def check_reach(nsa: NSAConfig, length: int) -> None:
    """Raise if a query of a sequence of `length` tokens would select far more than there is: slots and blocks without
    tokens take memory and time too. Sizes that the kernels take are always allowed."""
    if nsa.select_block > max(MAX_SELECT_BLOCK, length):
        raise ValueError(
            f"model.nsa.select_block={nsa.select_block} is more than the {length} tokens of the longest sequence: use "
            f"at most {max(MAX_SELECT_BLOCK, length)}"
        )
    blocks = nsa.num_blocks(length)
    if nsa.select_count > max(MAX_SELECT_COUNT, blocks, nsa.forced_blocks):
        raise ValueError(
            f"model.nsa.select_count={nsa.select_count} is far more than the {blocks} blocks of the longest sequence "
            f"({length} tokens): use {max(blocks, nsa.forced_blocks)} to read everything"
        )


class NoChoice(NamedTuple):
    """Why no query has a choice of blocks, and how to give it one."""

    reason: str
    fix: str
    reads_all: bool  # every query reads everything before it; otherwise only forced blocks


def nothing_to_choose(nsa: NSAConfig, length: int, dense_below: int) -> NoChoice | None:
    """Whether no query of a sequence of `length` tokens has a choice of blocks; None if some have."""
    reach = max(nsa.selected_tokens, dense_below)
    if length <= reach:
        by_dense = dense_below > nsa.selected_tokens
        lower = "model.dense_below" if by_dense else "model.nsa.select_count"
        return NoChoice(
            f"every query reads all of its sequence of at most {length} tokens "
            f"({'dense_below' if by_dense else 'select_count × select_block'} = {reach})",
            f"use sequences of more than {reach} tokens (data.seq_len or train.stages), or lower {lower}",
            True,
        )
    if nsa.select_count == nsa.forced_blocks:
        return NoChoice(
            f"all select_count={nsa.select_count} blocks of a query are forced ones (select_initial + select_local)",
            f"raise model.nsa.select_count above {nsa.select_count}",
            False,
        )
    return None


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[-8:]))
