"""The kernels around the operator and of selectors compile for Ampere, Hopper and Blackwell, and spill nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.conftest import INTERPRETING
from kernels.offline import SHARED_KIB, Compiled, compiling
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import block_lse, combine, qkv_split
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.varlen import Documents
from tercet.model import swiglu

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")


SPLITS = [  # capability; H, G, D, d and the number of key sets; data type; packed
    (90, [12, 2, 64, 16, 3], torch.bfloat16, True),
    (90, [12, 2, 64, 16, qkv_split.UNCOMPRESSED], torch.bfloat16, True),
]
MORE = [
    (90, [12, 2, 64, 16, 1], torch.bfloat16, False),
    (90, [64, 4, 128, 16, 3], torch.bfloat16, False),
    (90, [64, 4, 128, 16, 2], torch.bfloat16, True),
    (90, [32, 32, 64, 16, 3], torch.bfloat16, True),
    (80, [12, 2, 96, 16, 1], torch.float16, True),
    (100, [12, 2, 64, 16, 2], torch.float32, False),
]


@pytest.mark.parametrize(
    ("capability", "sizes", "dtype", "packed"), [*SPLITS, *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE)]
)
def test_the_qkv_split_and_its_backward_compile_without_spills(
    capability: int, sizes: list[int], dtype: torch.dtype, packed: bool
) -> None:
    tokens = 1000
    y = torch.empty(1 if packed else 2, tokens, qkv_split.columns(*sizes[:3], sizes[4]), dtype=dtype)
    cos_sin = [torch.empty(tokens, 1, sizes[2] // 2)] * 2
    in_chunks = tokens // 16 * 16
    maps = [torch.empty(in_chunks, dtype=torch.int64), torch.empty(in_chunks, dtype=torch.bool)]
    maps += [torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, dtype=torch.bool)]
    there, is_there, back, is_back = maps if packed else [None] * 4
    with compiling(capability) as found:
        grads = qkv_split.split_qkv(y, cos_sin, (there, is_there, back, is_back), sizes)
        qkv_split.heads_together(grads, *cos_sin, back, is_back, sizes)
    assert [(c.name, c.stack) for c in found] == [("qkv_split_kernel", 0), ("qkv_split_kernel", 0)]


@pytest.mark.parametrize("capability", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 100))])
def test_swiglu_gradient_and_delta_compile_without_spills(capability: int) -> None:
    o, gates = torch.empty(1, 64, 12, 64, dtype=torch.bfloat16), torch.empty(1, 64, 12, 3)
    with compiling(capability) as found:
        swiglu.swiglu_gradient._init_fn(torch.empty(8, 4096), torch.empty(8, 2048))
        combine.deltas([o, o, o], o, gates, mix=True)
    assert [(c.name, c.stack) for c in found] == [("_gradient", 0), ("delta_kernel", 0)]


# ------------------------------------------------------------ selectors


def compiled(capability: int, size: int, block: int, *, part: bool = False, dtype=torch.bfloat16) -> list[Compiled]:
    """`part`: packed documents and a query range."""
    q, k = torch.empty(1, 4096 if part else 8192, 2, size, dtype=dtype), torch.empty(1, 8192, 2, size, dtype=dtype)
    bounds = (torch.zeros(5, dtype=torch.int32), None, 2048, 4096) if part else (None, None)
    with compiling(capability) as found:
        select_by_tokens(q, k, NSAConfig(16, 16, block), Documents(1, 8192, 0, *bounds))
    assert [c.name for c in found] == ["token_scores_kernel", "select_kernel"]
    return found


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (32, 64),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((32, 16), (32, 32), (32, 128), (48, 64), (64, 64))),
    ],
)
@pytest.mark.parametrize("part", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hopper_keeps_scores_in_registers_and_several_programs_fit(size: int, block: int, part: bool) -> None:
    scores, choice = compiled(90, size, block, part=part)
    assert (scores.stack, choice.stack) == (0, 0)
    # programs overlap each other's products and exponentials; a multiprocessor has 65,536 registers
    programs = 3 if block > 16 else 2  # the sums of more blocks need more registers
    assert programs * 32 * scores.warps * scores.registers <= 65536
    assert programs * (scores.shared + 1024) <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_every_architecture_has_room(capability: int, dtype: torch.dtype) -> None:
    for size, block in ((32, 64), (16, 128), (256, 64)):
        for c in compiled(capability, size, block, part=True, dtype=dtype):
            assert c.shared <= SHARED_KIB[capability] * 1024


@pytest.mark.parametrize(
    ("capability", "size", "block", "dtype"),
    [
        (90, 32, 64, torch.bfloat16),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (90, 32, 64, torch.float32),
                (90, 64, 128, torch.bfloat16),
                (90, 48, 16, torch.bfloat16),
                (80, 32, 64, torch.float16),
                (100, 32, 64, torch.bfloat16),
            )
        ),
    ],
)
def test_log_sum_exps_and_their_backward_compile_without_spills(
    capability: int, size: int, block: int, dtype: torch.dtype
) -> None:
    q, k = torch.empty(512, 2, size, dtype=dtype), torch.empty(65536, 2, size, dtype=dtype)
    queries = [torch.empty(512, dtype=torch.int64)] * 2
    with compiling(capability) as found:
        lse = block_lse.nsa_block_lse(q, k, *queries, block, 65536 // block)
        block_lse.nsa_block_lse_backward(lse, lse, q, k, *queries, block)
    names = ["block_lse_kernel", "block_lse_dq_kernel", "block_lse_dk_kernel"]
    assert [(c.name, c.stack) for c in found] == [(name, 0) for name in names]
