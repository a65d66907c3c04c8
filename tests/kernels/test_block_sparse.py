"""Block-sparse attention on the kernels, interpreted: against the reference, forward and backward, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tercet
from cases import Inputs, cu, inputs
from tercet.attention.layout import Packing, Span
from tercet.attention.operator import Attended, AttentionInputs, attend, pool_keys
from tercet.attention.spec import block_sparse

from .test_operators import Seen

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=3, select_local=1)
DOCUMENTS = (58, 0, 5)


def run(q: Tensor, k: Tensor, v: Tensor, means: Tensor | None = None, **options: object) -> Attended:
    inputs = AttentionInputs(q, means, None, k, v)
    return attend(inputs, block_sparse(CONFIG), backend="triton", select=True, **options)


def sample(tokens: int = 63, config: tercet.NSAConfig = CONFIG, **options: object) -> Inputs:
    sizes = {"groups": 2, "per_group": 2, "key_size": 16, "value_size": 16, "dtype": torch.float32}
    return inputs(config, tokens, **{**sizes, **options})


def results(x: Inputs, backend: str, config: tercet.NSAConfig = CONFIG, **options: object):
    """out, its gradients and the selection."""
    leaves = [a.detach().clone().requires_grad_() for a in (x.q, x.ks, x.vs)]
    out, aux = tercet.block_sparse_attention(*leaves, config=config, backend=backend, return_aux=True, **options)
    dout = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return out.detach(), torch.autograd.grad(out, leaves, dout), aux


def assert_equals_reference(x: Inputs, config: tercet.NSAConfig = CONFIG, **options: object) -> None:
    out, grads, aux = results(x, "triton", config, **options)
    right, right_grads, right_aux = results(x, "reference", config, **options)
    assert aux.routes == {"selected": "triton"}
    assert torch.equal(aux.block_indices, right_aux.block_indices)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    for found, expected in zip(grads, right_grads, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("documents", "dense_below"),
    [(DOCUMENTS, 0), (None, 53), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((DOCUMENTS, 53), (None, 0)))],
)
def test_outputs_and_gradients_equal_the_references(documents: tuple[int, ...] | None, dense_below: int) -> None:
    assert_equals_reference(sample(documents=documents), cu_seqlens=cu(documents), dense_below=dense_below)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_own_queries_and_keys_choose_as_in_the_reference(documents: tuple[int, ...] | None) -> None:
    options = {"scorer": "own", "score_channels": torch.arange(4, 12), "cu_seqlens": cu(documents)}
    assert_equals_reference(sample(documents=documents), **options)


@pytest.mark.usefixtures("as_on_a_device")
def test_documents_whose_bounds_the_host_does_not_know() -> None:
    assert_equals_reference(sample(documents=DOCUMENTS), cu_seqlens=cu(DOCUMENTS), dense_below=53)


def test_blocks_of_128_with_a_selector() -> None:
    config = tercet.NSAConfig(
        compress_block=128, compress_stride=128, select_block=128, select_count=2, select_initial=0, select_local=1
    )
    selector = torch.randn(1, 400, 1, 32), torch.randn(1, 400, 1, 32)
    assert_equals_reference(sample(400, config, groups=1), config, selector=selector)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_query_range_equals_its_part_of_the_whole(documents: tuple[int, ...] | None) -> None:
    x = sample(documents=documents)
    packing = None if documents is None else Packing(cu(documents), 63, 15, CONFIG)
    whole = run(x.q, x.ks, x.vs, packing=packing)
    part = run(x.q[:, 52:63], x.ks, x.vs, pool_keys(x.ks, CONFIG, packing), packing=packing, span=Span(52))
    assert torch.equal(part.block_indices, whole.block_indices[:, 52:63])
    torch.testing.assert_close(part.out, whole.out[:, 52:63], rtol=1e-5, atol=1e-6)


def test_one_query_after_keys_stored_head_by_head_equals_its_row_of_the_whole() -> None:
    x = sample(batch=2)
    k, v = (a.transpose(1, 2).contiguous().transpose(1, 2) for a in (x.ks, x.vs))  # as in transformers' cache
    whole = run(x.q, x.ks, x.vs)
    last = run(x.q[:, 62:], k, v, span=Span(62))
    torch.testing.assert_close(last.out, whole.out[:, 62:], rtol=1e-5, atol=1e-6)


def test_only_scores_selection_and_one_branch_run() -> None:
    x = sample()
    with Seen() as seen:
        tercet.block_sparse_attention(x.q, x.ks, x.vs, config=CONFIG, backend="triton")
    assert [name.split(".")[1] for name in seen.names if name.startswith("tercet.")] == [
        "nsa_compressed_lse",
        "nsa_select",
        "keep_selection",
        "nsa_attend",
    ]


def test_results_need_no_initialised_memory(poisoned: None) -> None:
    out, grads, _ = results(sample(), "triton", dense_below=53)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


def test_where_every_block_is_read_a_dense_kernel_runs() -> None:
    x = sample(48)
    out, aux = tercet.block_sparse_attention(x.q, x.ks, x.vs, config=CONFIG, backend="triton", return_aux=True)
    assert aux.routes == {"dense": "sdpa"}
    assert aux.block_indices[0, -1, 0].tolist() == [0, 1, 2]
    torch.testing.assert_close(out, results(x, "reference")[0], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------ decode steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense_below": 72, "qk_norm": True},  # the prompt is read by dense attention
        {"selector": "learned", "selector_dim": 6, "selector_rotary": 4},
    ],
    ids=str,
)
def test_decode_steps_equal_the_references(options: dict[str, object]) -> None:
    layer = tercet.BlockSparseAttention(16, 3, 1, 8, 6, config=CONFIG, **options)
    layer.init_weights(0.3, 0.3)
    lengths, steps = torch.tensor([71, 46]), 6
    x, more = torch.randn(2, 71, 16), torch.randn(steps, 2, 1, 16)
    outs, caches = {}, {}
    for backend in ("reference", "auto"):
        layer.backend = backend
        cache = caches[backend] = layer.make_cache(2, 80)
        layer(x, cache=cache, lengths=lengths)
        rows = [layer(token, cache=cache, lengths=torch.tensor([1, i % 2])) for i, token in enumerate(more)]
        outs[backend] = torch.stack([row[:, 0] for row in rows])
    assert layer.routes == {"selected": "triton"}
    torch.testing.assert_close(outs["auto"][:, 0], outs["reference"][:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outs["auto"][1::2, 1], outs["reference"][1::2, 1], rtol=1e-5, atol=1e-5)
    for name, store in caches["auto"]._stores.items():
        torch.testing.assert_close(store[:, :-1], caches["reference"]._stores[name][:, :-1], rtol=1e-5, atol=1e-6)
    # learned: the selector's keys are not counted; before dense_below no block key is needed, but it is read
    t = 76
    tokens = 2 * 16 + t % 16 + 1
    keys = 0 if "selector" in options else CONFIG.num_visible(t)
    assert caches["auto"].reads[0].item() == keys + tokens


def test_auto_runs_a_selector_that_the_kernels_do_not_take():
    x = sample()
    selector = (torch.randn(1, 63, 2, 300), torch.randn(1, 63, 2, 300))  # the kernels take at most 256 channels
    out, aux = tercet.block_sparse_attention(
        x.q, x.ks, x.vs, config=CONFIG, backend="auto", selector=selector, return_aux=True
    )
    right, right_aux = tercet.block_sparse_attention(
        x.q, x.ks, x.vs, config=CONFIG, backend="reference", selector=selector, return_aux=True
    )
    assert aux.routes == {"selected": "triton"}
    assert torch.equal(aux.block_indices, right_aux.block_indices)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
