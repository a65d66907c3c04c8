"""Every launch of the operator compiles for Ampere, Hopper and Blackwell without a GPU; Hopper's shipped settings keep
all values in registers up to head size 128."""

from __future__ import annotations

from dataclasses import astuple
from importlib import import_module
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from kernels.offline import SHARED_KIB, Compiled, compiling
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import ops
from tercet.attention.kernels.varlen import Documents

selected = import_module("tercet.attention.kernels.selected.launch")

# sequence, query heads, KV heads, Dk, Dv
SHAPES = {
    "P": (16384, 64, 4, 128, 128),
    "C": (2048, 12, 2, 64, 64),
    "one head per group": (4096, 8, 8, 64, 64),
    "head 96": (4096, 12, 2, 96, 96),
    "paper": (4096, 32, 2, 192, 128),
    "head 256": (4096, 8, 2, 256, 256),
    # long enough for the KV-major design
    "paper, long": (16384, 32, 2, 192, 128),
    "head 256, long": (16384, 8, 2, 256, 256),
}
# Spills that were measured and chosen, or that no setting tried avoids: (kernel, shape) -> bytes per thread.
# kv_major_dkv: with dQ, one stage beat every setting without spills.
# query_major_dq: some of it outside the loop, where a tile with values that are not finite is recomputed.
CHOSEN: dict[tuple[str, str], int] = {
    ("kv_major_dkv", "P"): 80,
    # 128 registers, for a fourth block on a multiprocessor: .657 ms against .723 at C 32×2k; the loop spills nothing
    ("query_major_forward", "C"): 8,
    # 128 registers, for a fourth block on a multiprocessor: .524 ms against .549 at C 32×2k
    ("query_major_dq", "C"): 64,
    # packed: document bounds and the record for dk and dv, with the same 128 registers; query ranges: the first query
    ("query_major_dq", "one head per group"): 24,
    # head 96 is right, not tuned; the fused backward (272) appears where queries are a query range
    ("kv_major_dkv", "head 96"): 272,
    ("hopper_selected_dkv", "head 96"): 8,
    ("query_major_dq", "head 96"): 120,
    ("query_major_forward", "head 96"): 8,
    # 168 registers, for a third block on a multiprocessor: scores and choice 1.24 ms against 1.27 at C 1×64k
    ("scores_kernel", "C"): 120,
    # 128 registers, for a fourth block on a multiprocessor: .367 ms against .398 at C 32×2k; the loops spill nothing
    ("compressed_window_dq_kernel", "C"): 40,
    ("compressed_window_dq_kernel", "one head per group"): 40,
    # without the copy engine, which takes powers of two only
    ("compressed_window_dq_kernel", "head 96"): 64,
    ("window_dkv_kernel", "head 96"): 40,
    ("compressed_dkv_kernel", "head 96"): 40,
}


def operator(
    shape: str,
    *,
    packed: bool = False,
    query_range: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    longest: int | None = None,
) -> None:
    T, H, G, DK, DV = SHAPES[shape]
    # a query range: the second quarter's queries, against all keys
    queries, span = (T // 4, [T, T // 4, T // 4, T // 4]) if query_range else (T, [])
    config = NSAConfig()
    numbers = (list(astuple(config)), span, longest)

    def tensor(tokens: int, heads: int, size: int) -> torch.Tensor:
        return torch.empty(1, tokens, heads, size, dtype=dtype)

    q, gates = tensor(queries, H, DK), tensor(queries, H, 3)
    Tc = config.num_compressed(T)
    kc, vc = tensor(Tc, G, DK), tensor(Tc, G, DV)
    ks, vs, kw, vw = tensor(T, G, DK), tensor(T, G, DV), tensor(T, G, DK), tensor(T, G, DV)
    cu = torch.zeros(5, dtype=torch.int32) if packed else None
    ccu = None if cu is None else config.compressed_cu_seqlens(cu)
    o_c, lse_c = ops.nsa_compressed(q, kc, vc, cu, ccu, *numbers)
    blocks = ops.nsa_select(q, kc, lse_c, cu, ccu, *numbers)
    x = ops.Tensors(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, blocks, cu, ccu)
    out, o_s, lse_s, o_w, lse_w, *saved = ops.nsa_attend._init_fn(*x, *numbers)
    ops.nsa_backward(out, *x._replace(o_s=o_s, lse_s=lse_s, o_w=o_w, lse_w=lse_w), saved, *numbers)


def spilled(found: list[Compiled], shape: str) -> list[Compiled]:
    return [c for c in found if c.stack > CHOSEN.get((c.name, shape), 0)]


def test_hopper_keeps_all_values_in_registers() -> None:
    with compiling(90) as found:
        operator("C")
    assert len(found) >= 12
    assert spilled(found, "C") == []
    assert [c for c in found if c.serialised] == []
    assert any(c.name.startswith("hopper") for c in found)
    assert all(c.shared <= 227 * 1024 for c in found)


@pytest.mark.slow
def test_a_window_layer_runs_on_the_kernels_of_the_window_branch() -> None:
    """The window alone, without gates: forward and backward of packed documents."""
    q, k = torch.empty(1, 2048, 12, 64, dtype=torch.bfloat16), torch.empty(1, 2048, 2, 64, dtype=torch.bfloat16)
    x = ops.Tensors(q, kw=k, vw=k, cu=torch.zeros(5, dtype=torch.int32))
    numbers = ops.Numbers(ops.sizes_of(NSAConfig()), [], 2048)
    with compiling(90) as found:
        out, _, _, _, lse, _ = ops.attend(x, numbers)
        ops.gradients(out, x._replace(o_w=out, lse_w=lse), [], numbers)
    assert [c.name for c in found] == ["hopper_forward", "delta_kernel", "compressed_window_dq_kernel", "hopper_dkv"]
    assert spilled(found, "C") == []
    assert [c for c in found if c.serialised] == []


@pytest.mark.parametrize(
    "heads", [pytest.param(80, id="80 heads per group", marks=pytest.mark.slow), pytest.param(12, id="blocks of 16")]
)
def test_what_hoppers_selected_keys_do_not_take_is_tritons(heads: int) -> None:
    with compiling(90, only="kv_major_dkv_transposed", resources=False) as found:
        q, k = torch.empty(1, 2048, heads, 64, dtype=torch.bfloat16), torch.empty(1, 2048, 1, 64, dtype=torch.bfloat16)
        rows, blocks = torch.empty(1, 2048, heads), torch.empty(1, 2048, 1, 16, dtype=torch.int32)
        config = NSAConfig() if heads == 80 else NSAConfig(compress_block=16, select_block=16)
        selected.selected_backward(q, k, k, blocks, rows, q, rows, rows, config, Documents(1, 2048, 0, None, None))
    assert [c.name for c in found] == ["kv_major_dkv_transposed"]


@pytest.mark.parametrize("what", ["q", "dout", "records"])
def test_rows_beyond_32_bits_are_tritons(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's kernel for the selected keys counts from the first token of all by 32 bits."""
    names: list[str] = []
    monkeypatch.setattr(selected.table, "generation", lambda x: 9)
    monkeypatch.setattr(selected.Call, "launch", lambda call, kernel, *args, **options: names.append(kernel.__name__))

    def chosen(tokens: int, wide: int) -> set[str]:
        """`wide`: numbers from token to token of what is looked at; the others' tokens lie as near as they can."""
        H, G = (256, 4) if what == "records" else (12, 2)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        def rows(name: str) -> torch.Tensor:
            step = wide if name == what else 64
            return empty((1,), torch.bfloat16).as_strided((1, tokens, H, 64), (tokens * step, step, 64, 1))

        k, per_row = empty((1, tokens, G, 64), torch.bfloat16), empty((1, tokens, H), torch.float32)
        blocks = empty((1, tokens, G, 16), torch.int32)
        names.clear()
        selected.selected_backward(
            rows("q"), k, k, blocks, per_row, rows("dout"), per_row, per_row, NSAConfig(),
            Documents(1, tokens, 0, None, None),
        )  # fmt: skip
        return {name for name in names if "dkv" in name and not name.startswith("sum")}

    # tokens · numbers: just below 2^31, and 2^31
    below, at = ((1 << 21) - 1, 1 << 21) if what == "records" else (2048, 2048)
    assert chosen(below, (1 << 20) - 8) == {"hopper_selected_dkv"}
    assert chosen(at, 1 << 20) == {"kv_major_dkv_transposed"}


def test_threads_meet_before_one_writes_over_what_others_read() -> None:
    """Merging KV-major outputs, every thread reads the forced blocks' log-sum-exp, and one writes all blocks' there."""
    with compiling(90, only="merge_partials", resources=False) as found:
        q, k = torch.empty(1, 8192, 16, 128, dtype=torch.bfloat16), torch.empty(1, 8192, 1, 128, dtype=torch.bfloat16)
        blocks = torch.empty(1, 8192, 1, 16, dtype=torch.int32)
        selected.selected_forward(q, k, k, blocks, NSAConfig(), Documents(1, 8192, 0, None, None))
    assert [c.meetings for c in found] == [1]


VARIANTS = ("bf16", "packed", "bounded", "query range", "fp16", "fp32")
CALLS = [
    *product((80, 90, 100), [shape for shape in SHAPES if "256" not in shape and "long" not in shape], VARIANTS),
    # less shared memory: 86, of cards with 24 and 48 GB (89 compiles like it), and 120
    *product((86, 120), ("C", "paper"), ("bf16", "packed")), (86, "P", "bf16"), (86, "C", "fp32"),
    *((86, shape, "bf16") for shape in ("head 256", "paper, long", "head 256, long")), (80, "head 256, long", "bf16"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shape", "variant"), CALLS)
def test_everything_compiles(capability: int, shape: str, variant: str) -> None:
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(variant, torch.bfloat16)
    with compiling(capability) as found:
        operator(
            shape,
            packed=variant in ("packed", "bounded", "query range"),
            query_range=variant == "query range",
            dtype=dtype,
            longest=1024 if variant == "bounded" else None,
        )
    assert len(found) >= 12
    assert all(c.shared <= SHARED_KIB[capability] * 1024 for c in found), found
    if capability == 90 and variant != "fp32" and max(SHAPES[shape][3:]) <= 128:
        assert spilled(found, shape) == []
        assert [c for c in found if c.serialised] == []


# ------------------------------------------------------------ block-sparse attention

# sequence, query heads, KV heads, Dk, heads per group and head size of what scores the blocks
SPARSE_SHAPES = {
    "short": (2048, 12, 2, 64, 6, 64),
    "C": (8192, 12, 2, 64, 6, 64),
    "P": (16384, 64, 4, 128, 16, 128),
    "blocks of 128": (8192, 16, 2, 128, 4, 64),
    "long overlap": (8192, 12, 2, 64, 6, 64),
}
SPARSE_CONFIGS = {"blocks of 128": NSAConfig(128, 128, 128), "long overlap": NSAConfig(64, 16)}


def block_sparse(shape: str, *, packed: bool = False, scoring: bool = False) -> None:
    """`scoring`: choose blocks, and attend to none."""
    T, H, G, D, heads, size = SPARSE_SHAPES[shape]
    config = SPARSE_CONFIGS.get(shape, NSAConfig(compress_block=16))
    numbers = (ops.sizes_of(config), [], None)

    def tensor(tokens: int, heads: int, size: int) -> torch.Tensor:
        return torch.empty(1, tokens, heads, size, dtype=torch.bfloat16)

    q, k, v = tensor(T, H, D), tensor(T, G, D), tensor(T, G, D)
    cu = torch.zeros(5, dtype=torch.int32) if packed else None
    ccu = None if cu is None else config.compressed_cu_seqlens(cu)
    scorer = tensor(T, G * heads, size), tensor(config.num_compressed(T), G, size)
    lse = ops.nsa_compressed_lse(*scorer, cu, ccu, *numbers)
    blocks = ops.nsa_select(*scorer, lse, cu, ccu, *numbers)
    if scoring:
        return
    x = ops.Tensors(q, ks=k, vs=v, block_indices=blocks, cu=cu)
    out, _, lse_s, _, _, *saved = ops.nsa_attend._init_fn(*x, *numbers)
    ops.nsa_backward(out, *x._replace(o_s=out, lse_s=lse_s), saved, *numbers)


@pytest.mark.parametrize(
    ("shape", "packed", "scoring"),
    [
        ("C", False, "hopper_scores"),
        ("long overlap", True, "hopper_scores"),
        pytest.param("P", True, "hopper_scores", marks=pytest.mark.slow),
        pytest.param("blocks of 128", True, "scores_kernel", marks=pytest.mark.slow),
    ],
)
def test_hopper_keeps_the_scores_of_block_sparse_attention_in_registers(shape: str, packed: bool, scoring: str) -> None:
    """What the selected branch spills is measured above."""
    with compiling(90) as found:
        block_sparse(shape, packed=packed, scoring=True)
    assert [c.name for c in found] == ["compressed_lse_kernel", scoring, "select_kernel"]
    assert [c for c in found if c.stack > CHOSEN.get((c.name, shape), 0)] == []
    assert all(c.shared <= SHARED_KIB[90] * 1024 for c in found)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_block_sparse_attention_has_room_on_other_architectures(capability: int) -> None:
    with compiling(capability, resources=False) as found:
        block_sparse("C")
        block_sparse("blocks of 128")
    assert all(c.shared <= SHARED_KIB[capability] * 1024 for c in found)
