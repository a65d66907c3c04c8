"""Learned selectors and own queries on a GPU: kernels and models against the reference, compiled and packed."""

from __future__ import annotations

import pytest
import torch

import tercet
from kernels.test_block_scores import chosen
from tercet.attention import reference
from tercet.attention.kernels import block_lse as kernels
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.varlen import Documents
from tercet.model.transformer import ModelConfig, Transformer

pytestmark = pytest.mark.gpu

NSA = tercet.NSAConfig(compress_block=16, compress_stride=16, window=128)
BOUNDS = [0, 700, 716, 4096]
ROWS, BLOCK = 65536, 64
LENGTHS = (700, 1, 16, 0, 5000, 2475)


def make_model(selector: str = "learned") -> Transformer:
    torch.manual_seed(1)
    config = ModelConfig(
        layers=2, nsa=NSA, compression="mean", compress_selected_keys=True, selector=selector, selector_rotary=16
    )
    return Transformer(config).cuda().train()


def step(model: Transformer, tokens: torch.Tensor, bounds: torch.Tensor | None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(tokens, bounds, tokens, max_seqlen=None if bounds is None else 4096)
    (loss.total / tokens.numel()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("selector", "packed"), [("learned", False), ("learned", True), ("own", True)])
def test_a_model_trains_compiled_as_eager_and_twice_the_same(selector: str, packed: bool) -> None:
    model = make_model(selector)
    tokens = torch.randint(0, 256, (1, 4096) if packed else (2, 2048), device="cuda")
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda") if packed else None
    eager = step(model, tokens, bounds)
    for name, again in step(model, tokens, bounds).items():
        assert torch.equal(eager[name], again), name
    with torch.no_grad():
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model, tokens, bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for layer in model.attention_layers():
        layer.keep_sum = False
    model.compiled = True
    for block in model.blocks:
        block.compile()
    compiled = step(model, tokens, bounds)
    for name, expected in eager.items():
        assert (compiled[name] - expected).norm() <= 2e-2 * expected.norm(), name
        assert compiled[name].any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bounds", [[0, ROWS], [0, 30, 9000, 9001, 40123, ROWS]], ids=["whole", "packed"])
def test_log_sum_exps_and_their_gradients_are_the_references_and_repeat(bounds: list[int], dtype: torch.dtype) -> None:
    cu, row = torch.tensor(bounds, device="cuda"), torch.arange(100, ROWS, 128, device="cuda")
    position = row - cu[torch.searchsorted(cu, row, right=True) - 1]
    q = torch.randn(len(row), 2, 32, device="cuda").to(dtype).requires_grad_()
    k = torch.randn(ROWS, 2, 32, device="cuda").to(dtype).requires_grad_()
    exact_q, exact_k = q.detach().float().requires_grad_(), k.detach().float().requires_grad_()
    lse = kernels.block_lse(q, k, row, position, BLOCK, ROWS // BLOCK)
    expected = reference.block_lse(exact_q, exact_k, row, position, ROWS // BLOCK, BLOCK)
    assert torch.equal(lse.isinf(), expected.isinf())
    torch.testing.assert_close(lse, expected, atol=1e-4, rtol=0)
    grad = torch.randn_like(lse) * 1e-6  # as of a mean over queries: below what fp16 holds
    grads = torch.autograd.grad(lse, (q, k), grad, retain_graph=True)
    for x, again in zip(grads, torch.autograd.grad(lse, (q, k), grad), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, again)
    for x, right in zip(grads, torch.autograd.grad(expected, (exact_q, exact_k), grad), strict=True):
        assert (x.float() - right).norm() <= (3e-3 if dtype == torch.bfloat16 else 1e-4) * right.norm()


def other(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of other blocks."""
    return float((found != wanted).float().mean())


@pytest.mark.parametrize(
    ("dtype", "block", "size", "heads"),
    [
        (torch.bfloat16, 64, 32, 1),
        (torch.bfloat16, 16, 48, 1),
        (torch.float16, 128, 64, 1),
        (torch.float32, 64, 32, 1),
        (torch.bfloat16, 64, 32, 4),
        (torch.bfloat16, 128, 16, 7),
        (torch.float16, 32, 128, 3),
        (torch.bfloat16, 64, 64, 16),
    ],
)
def test_sequences_packed_documents_and_query_ranges_choose_as_fp64_does(dtype, block, size, heads) -> None:
    """One head per group: as a learned selector's; several: own queries."""
    config, own = tercet.NSAConfig(16, 16, block), heads > 1
    q, k = (torch.randn(1, 8192, 2 * h, size, device="cuda").to(dtype) for h in (heads, 1))
    whole = select_by_tokens(q, k, config, Documents(1, 8192, 0, None, None), own=own)
    assert other(whole[0, -512:], chosen(q[0].double(), k[0].double(), config, 512)) < 5e-4
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    packed = select_by_tokens(q, k, config, Documents(1, 8192, 0, bounds, None), own=own)
    pairs = zip(q[0].double().split(LENGTHS), k[0].double().split(LENGTHS), strict=True)
    for place, (one_q, one_k) in enumerate(pairs):
        end = sum(LENGTHS[: place + 1])
        found = packed[0, end - len(one_q) : end][-512:]
        assert not len(one_q) or other(found, chosen(one_q, one_k, config, 512)) < 5e-4
    part = Documents(1, 8192, 0, bounds, None, 3000, 4000)
    assert torch.equal(select_by_tokens(q[:, 3000:7000], k, config, part, own=own), packed[:, 3000:7000])
