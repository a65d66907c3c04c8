"""single = ddp = fsdp = hsdp = cp: first loss, gradients, statistics, and losses (slow: of twenty steps)."""

from __future__ import annotations

import pytest

from fork_server import ForkServer
from parallel.world import assert_below, run_ranks

# Every strategy, with and without recomputed activations and accumulation, and what changes its communication.
FAST = [
    "ddp, accumulated, recomputed", "fsdp, grad_op", "fsdp, muon", "cp full 1", "cp, learned selector",
    "fsdp, selectors only",
]  # fmt: skip
MANY = ["hsdp, plain", "cp with data"]
FORMS = ("two-branch", "own", "learned", "dense")
SLOW = [
    "ddp", "fsdp", "cp", "cp, whole rows", "cp, accumulated, recomputed", "fsdp, bf16", "fsdp, learned selector",
    "ddp, bf16 gradients", "fsdp, bf16 gradients", "ddp, bf16", "fsdp, accumulated",
    "fsdp, untied", "cp, bf16", "ddp, learned selector", "ddp, muon", "cp, muon",
    "ddp, selectors only", "cp, selectors only",
    *(f"{s}, form {form}" for s in ("ddp", "fsdp", "cp") for form in FORMS),
    *(f"{s} {m} {a}" for s in ("ddp", "fsdp", "cp") for m in ("none", "selective", "full") for a in (1, 3)),
]  # fmt: skip
PLAIN = ("ddp", "fsdp", "cp", "hsdp, plain", "cp with data")


def few(cases: list[str]) -> list[str]:
    return [f"2:{case}" for case in cases]


def many(cases: list[str]) -> list[str]:
    """Twenty steps for each plain strategy; its variants would differ within the first three."""
    return [f"{20 if case in PLAIN else 3}:{case}" for case in cases]


def check(server: ForkServer, ranks: int, cases: list[str], seconds: float = 600) -> None:
    """`cases`: STEPS:CASE, of strategies_ranks.py."""
    results = run_ranks(server, ranks, "strategies_ranks", *cases, seconds=seconds)
    assert [f"{t['steps']}:{t['case']}" for t in results] == cases
    for t in results:
        low = "bf16" in t["case"]
        # statistics: of two branches or one there are fewer
        assert t["numbers"] >= (20 if "form" not in t["case"] else 0 if "dense" in t["case"] else 12), t
        assert t["equal"], t
        assert t["losses"] < (2e-2 if low else 1e-5 if "muon" in t["case"] else 1e-4), t
        if low:
            assert t["gradient"] < 3e-2, t
            # not exactly zero: gradients really are communicated in half precision
            assert t["gradient"] > 0 or t["case"] == "ddp, bf16", t
            continue
        assert_below([t], loss=1e-6, gradient=1e-5, norm=1e-6, stats=1e-9, choice=1e-6)
        assert t["steps"] < 20 or t["fell"] > 0.5, t


def test_two_ranks_train_like_one_under_every_strategy(fork_server):
    check(fork_server, 2, few(FAST))


def test_four_ranks_train_like_one_with_hsdp_and_with_data_parallel_sequences(fork_server):
    check(fork_server, 4, few(MANY))


@pytest.mark.slow
def test_two_ranks_train_like_one_in_every_combination(fork_server):
    check(fork_server, 2, many(SLOW), seconds=1800)


@pytest.mark.slow
def test_four_ranks_train_like_one_in_every_combination(fork_server):
    check(fork_server, 4, many([*MANY, "hsdp", "hsdp, muon"]))
