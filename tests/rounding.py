"""Two ways to the same gradients in bf16: neither is the other's measure, fp32 is that of both."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# Rounded in other places, the same sums are as far from the truth, give or take chance: over the numbers of one
# parameter it evens out to a fifth, but a bias of six numbers may meet it by luck. Hence half as much again, and a
# rounding or two of bf16. What is really wrong, a term left out or a document, is wrong by tenths.
TIMES, LUCK = 1.5, 2.0**-7
# of what is taken for right: a measure that is itself far off would let everything pass
FARTHEST = 5e-2


def distance(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|. 0 of two zeros; nan where anything is."""
    apart, size = (found.double() - exact.double()).norm().item(), exact.double().norm().item()
    return 0.0 if apart == 0 else apart / size if size else float("inf")


def check_as_near(found: Mapping[str, Tensor], known: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Every `found` is as near to `exact` as what is `known` to be right in the same type."""
    assert found.keys() == known.keys() == exact.keys()
    wrong = []
    for name, truth in exact.items():
        mine, usual = distance(found[name], truth), distance(known[name], truth)
        if not (mine <= TIMES * usual + LUCK and usual <= FARTHEST):
            wrong.append(f"{name}: {mine:.1e} from the truth, where {usual:.1e} is usual")
    assert not wrong, "; ".join(wrong)
