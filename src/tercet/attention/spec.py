"""AttentionSpec: a form of attention as a value. Does not import torch.

NSA, two-branch, block-sparse, window and dense attention are values of it; everything that depends on the form asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tercet.attention.config import BRANCHES, NSAConfig, check_branches


class Scorer(NamedTuple):
    """What chooses blocks."""

    reads: str
    """compressed: compressed tokens, or means of keys without a gate. branch: queries and keys of the selected branch,
    in their slowest channels. projections: queries and keys of a BlockSelector."""
    score: Callable[..., Any] | None = None
    """(queries [S, H, size], keys [T, G, size], row, position, blocks, block) -> scores [S, G, blocks], as
    `reference.own_scores`; None: one of reference.py's, which the kernels compute too."""


SCORERS = {"compressed": Scorer("compressed"), "own": Scorer("branch"), "learned": Scorer("projections")}
"""All scorers by name. An entry added here works in every form and mode, in PyTorch."""
GATES = ("sigmoid", "softmax")


@dataclass(frozen=True)
class AttentionSpec:
    """Which branches a layer has, what mixes them, what chooses blocks, and which keys and values it projects."""

    blocks: NSAConfig = field(default_factory=NSAConfig)
    branches: tuple[str, ...] = BRANCHES
    """Some of compressed, selected and window, in this order; or dense alone."""
    gate: str | None = "sigmoid"
    """sigmoid or softmax over the branches. None: one branch as it is, and a dense layer's parameters."""
    scorer: str = "compressed"
    compression: str = "mlp"
    shared_kv: bool = False
    """One set of keys and values for all branches."""
    compress_selected_keys: bool = False
    dense_below: int = 0
    """Without a gate: queries at positions below this read everything."""
    exact_groups: tuple[int, ...] | None = None
    """With the scorer own: the KV heads that choose by it; the others choose by the means of blocks. None: all do."""

    def __post_init__(self) -> None:
        if self.gate is not None and self.gate not in GATES:
            raise ValueError(
                f"gate={self.gate!r} is unknown: pick one of {', '.join(GATES)}, or use BlockSparseAttention"
            )
        if self.scorer not in SCORERS:
            raise ValueError(f"selector={self.scorer!r} is unknown: pick one of {', '.join(SCORERS)}")
        check_exact_groups(self.exact_groups, self.scorer)
        if self.dense:
            return
        if not isinstance(self.blocks, NSAConfig):
            raise TypeError(f"config is {type(self.blocks).__name__}: it must be a tercet.NSAConfig")
        object.__setattr__(self, "branches", check_branches(self.branches))
        if not isinstance(self.dense_below, int) or isinstance(self.dense_below, bool) or self.dense_below < 0:
            raise ValueError(f"dense_below={self.dense_below!r} must be an integer of at least 0")
        own_keys = not self.compresses or self.shared_kv  # which others the compressed branch would have is moot
        object.__setattr__(self, "compress_selected_keys", self.compress_selected_keys and not own_keys)

    @property
    def means(self) -> NSAConfig:
        """Sizes with which KV heads choose that are not among exact_groups: one compressed token per block."""
        size = self.blocks.select_block
        return replace(self.blocks, compress_block=size, compress_stride=size)

    @property
    def dense(self) -> bool:
        return self.branches == ("dense",)

    @property
    def kind(self) -> str:
        """As model.attention names it."""
        if self.gated or self.selects:
            return "nsa"
        return self.branches[0]

    @property
    def gated(self) -> bool:
        """Whether gates mix branches, each with keys and values of its own."""
        return self.gate is not None

    @property
    def selects(self) -> bool:
        return "selected" in self.branches

    @property
    def by_tokens(self) -> bool:
        """Whether single tokens score the blocks."""
        return self.selects and SCORERS[self.scorer].reads != "compressed"

    @property
    def by_branch(self) -> bool:
        """Whether the queries and keys of the selected branch score the blocks."""
        return self.selects and SCORERS[self.scorer].reads == "branch"

    @property
    def sparse(self) -> bool:
        """Whether there are gates or blocks, which statistics count."""
        return self.kind == "nsa"

    @property
    def compresses(self) -> bool:
        """Whether the layer has compressed tokens: for their branch, or for the choice of blocks."""
        return self.gated and ("compressed" in self.branches or (self.selects and self.scorer == "compressed"))

    @property
    def pools(self) -> bool:
        """Whether blocks are chosen by means of the keys that are read."""
        return not self.gated and self.selects and self.scorer == "compressed"

    @property
    def reads_compressed(self) -> bool:
        """Whether anything reads compressed tokens or means of keys."""
        return self.compresses or self.pools

    @property
    def kv_sets(self) -> tuple[int, int]:
        """Sets of keys and of values that a layer projects."""
        if not self.gated or self.shared_kv:
            return 1, 1
        return (3 - self.compress_selected_keys, 3) if self.compresses else (2, 2)

    @property
    def reads_all_below(self) -> int:
        """Queries at positions below this read every token up to their own; without a gate."""
        return max(self.dense_below, self.blocks.selected_tokens)


def check_exact_groups(groups: Iterable[int] | None, scorer: str, kv_heads: int | None = None) -> None:
    """Raise unless these are KV heads, each once; kv_heads: how many there are, if known."""
    if groups is None:
        return
    groups = tuple(groups)
    shown = ",".join(map(str, groups)) or "none"
    if scorer != "own":
        raise ValueError(f"exact_groups={shown} needs selector=own, not {scorer}: drop exact_groups, or use own")
    most = max([*groups, 0]) + 1 if kv_heads is None else kv_heads
    if len(set(groups)) != len(groups) or not set(groups) <= set(range(most)):
        known = "KV heads" if kv_heads is None else f"of the KV heads 0 … {kv_heads - 1}"
        raise ValueError(f"exact_groups={shown}: expected {known}, each at most once")


def without_kernel(scorer: str) -> str | None:
    """Why the kernels do not choose blocks by this scorer; None if they do."""
    return f"the kernels have no scorer {scorer}" if SCORERS[scorer].score is not None else None


def block_sparse(
    blocks: NSAConfig, scorer: str = "compressed", dense_below: int = 0, exact_groups: tuple[int, ...] | None = None
) -> AttentionSpec:
    """The selected branch alone."""
    return AttentionSpec(
        blocks, ("selected",), None, scorer, compression="mean", shared_kv=True, dense_below=dense_below,
        exact_groups=exact_groups,
    )  # fmt: skip


def window(blocks: NSAConfig) -> AttentionSpec:
    """The window branch alone."""
    return AttentionSpec(blocks, ("window",), None, compression="mean")


DENSE = AttentionSpec(branches=("dense",), gate=None, compression="mean", shared_kv=True)


def implied(gate: str | None) -> dict[str, Any]:
    """What a model's setting `gate` leaves no choice for: none is block-sparse attention, one branch and one set of
    keys and values."""
    return {"shared_kv": True, "branches": ("selected",), "compression": "mean"} if gate == "none" else {}
