"""The kernels as PyTorch operators: compiled to one graph, visible to dispatch modes, refused with a reason."""

from __future__ import annotations

import importlib
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tercet
from cases import attend, inputs
from tercet.attention import kernels
from tercet.attention.kernels.table import Launch

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=2, select_initial=0, select_local=1, window=12
)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def sample(tokens: int = 40):
    return inputs(CONFIG, tokens, groups=1, per_group=2, key_size=16, value_size=16, dtype=torch.float32)


def test_a_dispatch_mode_sees_the_selection_and_changes_no_bit() -> None:
    x = sample().leaves()
    wanted = attend(x, CONFIG, "triton")
    with Seen() as seen:
        out = attend(x, CONFIG, "triton")
    ours = [name for name in seen.names if name.startswith("tercet.")]
    assert ours == [
        "tercet.nsa_compressed.default",
        "tercet.nsa_select.default",
        "tercet.keep_selection.default",
        "tercet.nsa_attend.default",
    ]
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("watched", [False, True])
def test_second_derivatives_are_refused(watched: bool) -> None:
    x = sample().leaves()
    with Seen() if watched else nullcontext():
        out = attend(x.with_(q=x.q * x.q), CONFIG, "triton").sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives"):
        torch.autograd.grad(out, x.q, create_graph=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"select_block": 24, "compress_block": 8}, "select_block=24 is not a power of two"),
        ({"select_block": 8}, "select_block=8 is not within 16"),
    ],
)
def test_unsupported_sizes_have_a_reason(changes: dict[str, int], reason: str) -> None:
    cfg = tercet.NSAConfig(**{"compress_block": 8, "compress_stride": 4, "select_block": 16, **changes})
    x = inputs(cfg, 20, groups=1, per_group=1, key_size=16, value_size=16, dtype=torch.float32)
    assert reason in kernels.unsupported(*x.tensors()[:7], config=cfg)
    double = x.map(lambda t: t.double())
    assert "float64" in kernels.unsupported(*double.tensors()[:7], config=CONFIG)


def test_the_interpreter_refuses_bfloat16() -> None:
    x = sample().map(lambda t: t.bfloat16())
    with pytest.raises(RuntimeError, match=r"bfloat16.*interpreter.*float32"):
        attend(x, CONFIG, "triton")
    assert attend(x, CONFIG, "auto").isfinite().all()


def test_partial_sums_of_key_gradients_are_no_more_than_fill_a_device() -> None:
    split_work, launch = importlib.import_module("tercet.attention.kernels.compressed").split_work, Launch(parts=48)
    # 65,536 tokens, 2 groups of 6 heads, tiles of 64: in 128 documents all heads apart, in 4,096 none
    assert split_work(launch, 65536, 6, 2 * (64 + 128), by_heads=True) == (6, 6)
    assert split_work(launch, 65536, 6, 2 * (64 + 160), by_heads=True) == (3, 3)
    assert split_work(launch, 65536, 6, 2 * (64 + 4096), by_heads=True) == (1, 1)
    assert split_work(launch, 65536, 16, 4, by_heads=True) == (8, 8)
    assert split_work(launch, 65536, 6, 2 * 64, by_heads=False) == (16, 1)
    for programs in (1, 100, 2047, 2048, 5000):
        for heads in (1, 6, 7, 16):
            parts, sets = split_work(launch, 65536, heads, programs, by_heads=True)
            assert parts == 1 or (parts - 1) * programs < 2048
            assert heads % sets == 0


def test_operators_match_their_schemas_and_fake_implementations() -> None:
    """Results share no memory with arguments or each other, nothing is written to, and fakes have their shapes."""
    ops = importlib.import_module("tercet.attention.kernels.ops")
    x, bounds = sample(), torch.tensor([0, 17, 40], dtype=torch.int32)
    ccu = CONFIG.compressed_cu_seqlens(bounds)
    q, kc, vc, ks, vs, kw, vw, gates = x.tensors()
    numbers = (ops.sizes_of(CONFIG), [], 23)
    o_c, lse_c = ops.nsa_compressed(q, kc, vc, bounds, ccu, *numbers)
    blocks = ops.nsa_select(q, kc, lse_c, bounds, ccu, *numbers)
    given = ops.Tensors(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, blocks, bounds, ccu)
    out, o_s, lse_s, o_w, lse_w, *saved = torch.ops.tercet.nsa_attend(*given, *numbers)
    kept = given._replace(o_s=o_s, lse_s=lse_s, o_w=o_w, lse_w=lse_w)
    checks = ("test_schema", "test_faketensor")
    for name, arguments in (
        ("nsa_compressed", (q, kc, vc, bounds, ccu, *numbers)),
        ("nsa_select", (q, kc, lse_c, bounds, ccu, *numbers)),
        ("nsa_select_by_tokens", (ks, kw, bounds, False, *numbers)),
        ("nsa_select_by_tokens", (q, kw, bounds, True, *numbers)),
        ("nsa_delta", (out, gates, o_c, o_s, o_w)),
        ("nsa_backward", (out, *kept, saved, *numbers)),
    ):
        operator = getattr(torch.ops.tercet, name).default
        torch.library.opcheck(operator, arguments, test_utils=checks)
        storages = [t.untyped_storage().data_ptr() for t in as_tuple(operator(*arguments)) if t.numel()]
        given = {t.untyped_storage().data_ptr() for t in arguments if isinstance(t, torch.Tensor)}
        assert len(set(storages)) == len(storages), name
        assert not given & set(storages), name


def test_an_operator_without_a_gradient_refuses_what_needs_one() -> None:
    ops = importlib.import_module("tercet.attention.kernels.ops")
    q, kc, vc, *_, gates = sample().leaves().tensors()
    given = (q, kc, vc, None, None, ops.sizes_of(CONFIG), [], None)
    with pytest.raises(RuntimeError, match=r"nsa_compressed has no gradient, and its argument 0 requires one"):
        torch.ops.tercet.nsa_compressed(*given)
    with torch.no_grad():
        out, _ = torch.ops.tercet.nsa_compressed(*given)
    assert not out.requires_grad
    with pytest.raises(RuntimeError, match=r"nsa_delta has no gradient, and its argument 1 requires one"):
        torch.ops.tercet.nsa_delta(out, gates, out, out, out)
    y, turn = torch.zeros(1, 20, 64, requires_grad=True), [torch.zeros(20, 1, 8)] * 2
    with pytest.raises(RuntimeError, match=r"heads_apart has no gradient, and its argument 0 requires one"):
        torch.ops.tercet.heads_apart(y, *turn, None, None, [1, 1, 16, 4, 1])
    with pytest.raises(RuntimeError, match=r"heads_together has no gradient, and its argument 0 requires one"):
        torch.ops.tercet.heads_together([y], *turn, None, None, [1, 1, 16, 4, 1])


def as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
