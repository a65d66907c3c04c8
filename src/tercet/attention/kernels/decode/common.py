"""Shared by the decode kernels: layouts and programmatic dependent launch (PDL, Hopper and newer).

A launch costs a microsecond or two before its first instruction, as much as a kernel of a decode step takes on short
contexts. With PDL the programs of the next launch are placed as soon as all programs of this one have started, and wait
there (`table.overlap_launches` says when it is used). Two rules keep that correct:

- A program waits before it writes anything, before it lets the next launch start, and before it ends. So waiting
  for a launch means waiting for all launches before it.
- Before waiting, a program reads only what was written two or more launches ago.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True)
class Heads:
    heads: int
    groups: int
    key_size: int
    value_size: int
    selector_size: int = 0  # channels of the keys that score blocks; 0: the compressed tokens score them
    own: bool = False  # these keys are the slowest channels of the selected branch's, not a learned selector's


@dataclass(frozen=True)
class Parts:
    """Partial results of a step: compressed (dense: all) keys first, then selected blocks, then the window."""

    o: Tensor  # fp32 [B, H, parts, Dv], normalised over the keys of the part
    lse: Tensor  # fp32 [B, H, parts], base 2; -inf where the part read no keys
    read: Tensor  # int32 [B, G, parts]: keys read

    @property
    def count(self) -> int:
        return self.lse.shape[2]


@dataclass(frozen=True)
class Scores:
    """What blocks are selected by: scores of the compressed tokens, or scores of the blocks by single tokens."""

    logits: Tensor  # fp32 [B, H, room], base 2; of blocks: [B, G, room]
    lse: Tensor | None  # fp32 [B, H, splits or more], base 2: of each split's keys, -inf for none; of blocks: None


@triton.jit
def row_is_active(COUNTS, b, MASKED: tl.constexpr):
    """Whether row b gets a token in this step."""
    if MASKED:
        return tl.load(COUNTS + b) > 0
    else:
        return True


@triton.jit
def wait_for_previous_launch(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
