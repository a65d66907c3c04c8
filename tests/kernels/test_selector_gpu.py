"""Learned and random selection on a GPU: against the reference, compiled, packed, without synchronising, same bits."""

from __future__ import annotations

import pytest
import torch

import tercet
from tercet.attention.selector import block_lse
from tercet.model.selector import sample_queries
from tercet.model.transformer import ModelConfig, Transformer

pytestmark = pytest.mark.gpu

NSA = tercet.NSAConfig(compress_block=16, compress_stride=16, window=128)
BOUNDS = [0, 700, 716, 4096]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exps_of_blocks_are_the_references(dtype: torch.dtype) -> None:
    q, k = torch.randn(40, 12, 64, device="cuda", dtype=dtype), torch.randn(5000, 2, 64, device="cuda", dtype=dtype)
    rows = torch.randint(900, 5000, (40,), device="cuda")
    position = rows - torch.randint(0, 900, (40,), device="cuda")
    found = block_lse(q, k, rows, position, 79, NSA.select_block)
    expected = block_lse(q.double().cpu(), k.double().cpu(), rows.cpu(), position.cpu(), 79, NSA.select_block)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("selector", "packed"), [("learned", False), ("learned", True), ("random", True)])
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


def test_the_kernels_choose_the_references_blocks() -> None:
    layer = tercet.NativeSparseAttention(768, 12, 2, 64, config=NSA, selector="learned", selector_rotary=16).cuda()
    layer.init_weights(0.1, 0.02)
    x = torch.randn(1, 4096, 768, device="cuda")
    chosen = []
    layer.stats.update = lambda gates, block_indices, packing: chosen.append(block_indices)  # type: ignore[method-assign]
    for layer.backend in ("triton", "reference"):
        layer(x, taught=sample_queries(torch.arange(4096, device="cuda")[None], 128))
    assert (chosen[0] != chosen[1]).float().mean() < 5e-4
