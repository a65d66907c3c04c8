"""Block-sparse attention compiles for every architecture, and launches a part of what three branches launch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.offline import SHARED_KIB, Compiled, compiling
from kernels.test_compiles import CHOSEN, operator
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import ops
from tercet.attention.kernels.ops import Kept, Tensors

# sequence, query heads, KV heads, Dk, heads per group and head size of what scores the blocks
SHAPES = {
    "short": (2048, 12, 2, 64, 6, 64),
    "C": (8192, 12, 2, 64, 6, 64),
    "P": (16384, 64, 4, 128, 16, 128),
    "blocks of 128": (8192, 16, 2, 128, 4, 64),
    "long overlap": (8192, 12, 2, 64, 6, 64),
}
CONFIGS = {"blocks of 128": NSAConfig(128, 128, 128), "long overlap": NSAConfig(64, 16)}


def block_sparse(shape: str, *, packed: bool = False, scoring: bool = False) -> None:
    """`scoring`: choose blocks, and attend to none."""
    T, H, G, D, heads, size = SHAPES[shape]
    config = CONFIGS.get(shape, NSAConfig(compress_block=16))
    numbers = (ops.sizes_of(config), [], None)

    def tensor(tokens: int, heads: int, size: int) -> torch.Tensor:
        return torch.empty(1, tokens, heads, size, dtype=torch.bfloat16)

    q, k, v = tensor(T, H, D), tensor(T, G, D), tensor(T, G, D)
    cu = torch.zeros(5, dtype=torch.int32) if packed else None
    ccu = None if cu is None else ops.nsa_compressed_bounds(cu, config.compress_block, config.compress_stride)
    scorer = tensor(T, G * heads, size), tensor(config.num_compressed(T), G, size)
    lse = ops.nsa_compressed_lse(*scorer, cu, ccu, *numbers)
    blocks = ops.nsa_select(*scorer, lse, cu, ccu, *numbers)
    if scoring:
        return
    out, _, lse_s, _, _, *saved = ops.nsa_attend._init_fn(
        *Tensors(q, ks=k, vs=v, block_indices=blocks, cu=cu), *numbers
    )
    kept = Kept(q, ks=k, vs=v, o_s=out, lse_s=lse_s, block_indices=blocks, cu=cu)
    ops.nsa_backward(out, *kept, saved, *numbers)


@pytest.mark.parametrize(
    ("shape", "packed", "scoring"),
    [
        ("C", False, "hopper_scores"),
        ("long overlap", True, "hopper_scores"),
        pytest.param("P", True, "hopper_scores", marks=pytest.mark.slow),
        pytest.param("blocks of 128", True, "scores_kernel", marks=pytest.mark.slow),
    ],
)
def test_hopper_keeps_scores_in_registers(shape: str, packed: bool, scoring: str) -> None:
    """What the selected branch spills is measured in test_compiles.py."""
    with compiling(90) as found:
        block_sparse(shape, packed=packed, scoring=True)
    kernels = [c.name for c in found if c.name != "compressed_bounds_kernel"]
    assert kernels == ["compressed_lse_kernel", scoring, "select_kernel"]
    assert [c for c in found if c.stack > CHOSEN.get((c.name, shape), 0)] == []
    assert all(c.shared <= SHARED_KIB[90] * 1024 for c in found)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_other_architectures_have_room(capability: int) -> None:
    with compiling(capability, resources=False) as found:
        block_sparse("C")
        block_sparse("blocks of 128")
    assert all(c.shared <= SHARED_KIB[capability] * 1024 for c in found)


@pytest.mark.slow
def test_it_launches_a_part_of_what_three_branches_launch() -> None:
    def names(run: list[Compiled]) -> set[str]:
        return {c.name for c in run}

    with compiling(90, resources=False) as three:
        operator("C")
    with compiling(90, resources=False) as one:
        block_sparse("short")
    assert names(one) - names(three) == {"compressed_lse_kernel"}
    assert len(one) <= len(three) - 5
    assert not any("window" in name or "combine" in name or "compressed_dkv" in name for name in names(one))
