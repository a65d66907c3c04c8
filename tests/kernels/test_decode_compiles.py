"""Every launch of a decode step compiles for Ampere, Hopper and Blackwell without a GPU; Hopper spills nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import tercet
from kernels.conftest import INTERPRETING
from kernels.offline import SHARED_KIB, compiling
from tercet.attention.kernels import decode, table

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")
# batch, room, query heads, KV heads, Dk, Dv; select_block where it is not 64. Each is compiled with both selectors.
SHAPES = {
    "P": (16, 65536, 64, 4, 128, 128),
    "C": (1, 4096, 12, 2, 64, 64),
    "a million tokens": (1, 1_000_000, 4, 4, 64, 64),
    "head 96": (2, 300_000, 12, 2, 96, 96),
    "paper": (2, 4096, 32, 2, 192, 128),
    "blocks of 128": (2, 4096, 4, 1, 128, 128, 128),
}
# sin and cos have a slow way for large angles, never taken here, that keeps a table of 32 bytes in local memory
TABLE = 32


# channels of a selector, and how many of them are rotated; of own keys no more are rotated than already are
SELECTORS = {"learned": (32, 16), "learned, 256 channels": (256, 128), "learned, unrotated": (64, 0), "own": (32, 0)}


def steps(
    shape: str, dtype: torch.dtype, *, plain: bool, selector: str = "compressed", other_layers: bool = True
) -> None:
    """`other_layers`: a step of a dense and of a window layer too."""
    batch, room, heads, groups, dk, dv, *block = SHAPES[shape]
    config = tercet.NSAConfig(select_block=block[0] if block else 64)
    size, rotary = SELECTORS.get(selector, (0, 0))
    sizes = decode.Heads(heads, groups, dk, dv, size, selector == "own")

    def pair(slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.empty((), dtype=dtype).expand(batch, slots, groups, size) for size in (dk, dv))

    def weights(size: int) -> decode.CompressionWeights:
        shapes = (32, size), (size, 32 * size), (size,), (size, size), (size,)
        return decode.CompressionWeights(*(torch.empty(s, dtype=dtype) for s in shapes))

    lengths, turns = torch.zeros(batch, dtype=torch.int64), torch.empty(dk // 2 + 1, dtype=torch.float64)
    arrived = torch.zeros(decode.arrivals(batch, groups), dtype=torch.int32)
    held = decode.Held(
        lengths, turns, room, pair(room + 1), pair(513), pair(config.num_compressed(room) + 1), pair(33), arrived
    )
    counts = None if plain else torch.ones(batch, dtype=torch.int32)
    norm = torch.empty(dk, dtype=dtype)
    q = torch.empty(batch, 1, heads * dk, dtype=dtype)
    kv = torch.empty(batch, 1, groups * (dk + dv), dtype=dtype)
    gates = torch.empty(batch, 1, 3 * heads, dtype=dtype)
    options = {
        "branches": ("compressed", "selected", "window"), "shared": False, "softmax_gate": not plain,
        "norms": None if plain else decode.Norms(norm, (norm,) * 3, 1e-6), "phi": (weights(dk), weights(dv)),
    }  # fmt: skip
    if selector in SELECTORS:
        stored = torch.empty((), dtype=dtype).expand(batch, room + 1, groups, size)
        own_turns = torch.empty(rotary // 2, dtype=torch.float64) if rotary else None
        held = replace(held, selector=stored, selector_frequencies=own_turns)
        # as the layer projects them: slices of one row
        rows = [heads * dk, groups * (2 * dk + 3 * dv), 3 * heads, groups * size, groups * size]
        q, kv, gates, *scored = torch.empty(batch, 1, sum(rows), dtype=dtype).split(rows, -1)
        decode.nsa_step(
            q, kv, gates, held, counts, config, sizes,
            **options | {"absent": groups * dk, "phi": (decode.CompressionWeights(),) * 2},
            selector=None if selector == "own" else scored,
        )  # fmt: skip
        return
    decode.nsa_step(q, kv.repeat(1, 1, 3), gates, held, counts, config, sizes, **options)
    if not other_layers:
        return
    dense = decode.Held(lengths, turns, room, selected=held.selected)
    one_norm = None if plain else decode.Norms(norm, (norm,), 1e-6)
    decode.dense_step(q, kv, dense, counts, sizes, norms=one_norm)
    window = decode.Held(lengths, turns, room, window=held.window)
    decode.nsa_step(
        q, kv, None, window, counts, config, sizes, branches=("window",), shared=True, softmax_gate=False,
        norms=one_norm, phi=None,
    )  # fmt: skip


NSA_STEP = [
    "decode_append_kernel", "decode_prefix_kernel", "decode_scores_kernel", "decode_selected_window_kernel",
    "decode_merge_kernel",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overlap", "other_layers"),
    [(True, False), *(pytest.param(overlap, True, marks=pytest.mark.slow) for overlap in (True, False))],
)
def test_hopper_keeps_all_values_in_registers(overlap: bool, other_layers: bool, monkeypatch) -> None:
    monkeypatch.setattr(table, "PDL_ENABLED", overlap)
    with compiling(90) as found:
        steps("C", torch.bfloat16, plain=True, other_layers=other_layers)
    others = [
        "decode_append_kernel", "decode_prefix_kernel", "decode_merge_kernel",
        "decode_append_kernel", "decode_selected_window_kernel",  # a window layer; its merge is the dense one
    ]  # fmt: skip
    assert [c.name for c in found] == NSA_STEP + (others if other_layers else [])
    assert [c for c in found if c.stack > TABLE] == []


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_learned_selector_adds_no_launch_and_spills_nothing(selector: str) -> None:
    with compiling(90) as found:
        steps("C", torch.bfloat16, plain=True, selector=selector)
    assert [c.name for c in found] == NSA_STEP
    assert [c for c in found if c.stack > TABLE] == []


# less shared memory: 86, of cards with 24 and 48 GB (89 compiles like it), and 120
CALLS = [
    *product(
        (80, 90, 100),
        SHAPES,
        (torch.bfloat16, torch.float32),
        ("compressed", "learned", "learned, 256 channels", "own"),
    ),
    *product((86, 120), SHAPES, (torch.bfloat16,), ("compressed",)),
]


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "masked, normed, softmax gate"])
@pytest.mark.parametrize(("capability", "shape", "dtype", "selector"), CALLS, ids=str)
def test_everything_compiles(
    capability: int, shape: str, dtype: torch.dtype, selector: str, plain: bool, monkeypatch
) -> None:
    monkeypatch.setattr(table, "PDL_MOST_PAIRS", 10**6)
    with compiling(capability) as found:
        steps(shape, dtype, plain=plain, selector=selector)
    assert len(found) >= 5
    assert all(c.shared <= SHARED_KIB[capability] * 1024 for c in found), found
    if capability == 90 and dtype == torch.bfloat16 and max(SHAPES[shape][4:6]) <= 128:
        assert [c for c in found if c.stack > 2 * TABLE] == []
