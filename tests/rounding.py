"""Compare two bf16 computations of the same gradients: both are measured against fp32, not each other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

# The same sums rounded in other places have about the same error. Over a large parameter the errors agree to a fifth;
# a bias of six numbers may be lucky. So allow 1.5 times the known error plus one or two bf16 roundings. Real mistakes,
# such as a missing term or document, are off by tenths.
TIMES, LUCK = 1.5, 2.0**-7
# limit on the known error itself: a poor baseline would let everything pass
FARTHEST = 5e-2


def distance(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact|; 0 for two zeros, NaN if anything is."""
    apart, size = (found.double() - exact.double()).norm().item(), exact.double().norm().item()
    return 0.0 if apart == 0 else apart / size if size else float("inf")


def check_as_near(found: Mapping[str, Tensor], known: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Every `found` must be about as close to `exact` as `known`, a correct result in the same dtype."""
    assert found.keys() == known.keys() == exact.keys()
    wrong = []
    for name, truth in exact.items():
        mine, usual = distance(found[name], truth), distance(known[name], truth)
        if not (mine <= TIMES * usual + LUCK and usual <= FARTHEST):
            wrong.append(f"{name}: error {mine:.1e}, expected about {usual:.1e}")
    assert not wrong, "; ".join(wrong)
