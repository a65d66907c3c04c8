"""Launches of a decode step that begin while the one before ends (programmatic dependent launch, Hopper and later).

A launch costs a microsecond or two before its first instruction, as much as a step's kernels take on short contexts.
Where ENABLED the next launch's programs are placed as soon as all of this one's have begun, and wait there.

Two rules keep that right. A program waits before it writes anything, before it lets the next launch begin, and before
it ends: so whoever waits for a launch waits for all before it. And before waiting it reads only what the launch before
the last one, or an earlier one, has written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tercet.attention.kernels import settings

ENABLED = True
# Pairs of a row and a KV head. Programs placed while others still run lie unevenly over the multiprocessors: with 32
# pairs and more, whose programs are many and long, that cost more than it gained.
FEW_PAIRS = 8


def overlap(x: Tensor, pairs: int) -> bool:
    """Whether the launches of a step for so many pairs overlap on x's device."""
    return ENABLED and pairs <= FEW_PAIRS and settings.generation(x) >= 9


@triton.jit
def goes_on(COUNTS, b, MASKED: tl.constexpr):
    """Whether row b gets a token in this step."""
    if MASKED:
        return tl.load(COUNTS + b) > 0
    else:
        return True


@triton.jit
def wait_for_the_launch_before(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
