"""The kernels around the operator compile for Ampere, Hopper and Blackwell without a GPU, and spill nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.conftest import INTERPRETING
from kernels.offline import compiling
from tercet.attention.kernels import combine, qkv_split
from tercet.model import swiglu

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")


SPLITS = [  # capability; H, G, D, d and the number of key sets; data type; packed
    (90, [12, 2, 64, 16, 3], torch.bfloat16, True),
    (90, [12, 2, 64, 16, 1], torch.bfloat16, False),
    (90, [12, 2, 64, 16, qkv_split.UNCOMPRESSED], torch.bfloat16, True),
]
MORE = [
    (90, [64, 4, 128, 16, 3], torch.bfloat16, False),
    (90, [64, 4, 128, 16, 2], torch.bfloat16, True),
    (90, [32, 32, 64, 16, 3], torch.bfloat16, True),
    (80, [12, 2, 96, 16, 1], torch.float16, True),
    (100, [12, 2, 64, 16, 2], torch.float32, False),
    (90, [12, 2, 64, 16, 1], torch.bfloat16, True),
    (90, [12, 2, 64, 16, 2], torch.bfloat16, True),
    (90, [12, 2, 64, 16, 2], torch.bfloat16, False),
    (80, [12, 2, 96, 16, 3], torch.float16, True),
    (80, [12, 2, 96, 16, 2], torch.float16, True),
    (100, [12, 2, 64, 16, 3], torch.float32, False),
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


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_swiglu_gradient_and_delta_compile_without_spills(capability: int) -> None:
    o, gates = torch.empty(1, 64, 12, 64, dtype=torch.bfloat16), torch.empty(1, 64, 12, 3)
    with compiling(capability) as found:
        swiglu.swiglu_gradient._init_fn(torch.empty(8, 4096), torch.empty(8, 2048))
        combine.deltas([o, o, o], o, gates, mix=True)
    assert [(c.name, c.stack) for c in found] == [("_gradient", 0), ("delta_kernel", 0)]
