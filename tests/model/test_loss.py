"""The chunked cross-entropy is the plain one: same value, same gradients, less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tercet.model.cost import LOGITS_BYTES, chunk_rows
from tercet.model.loss import IGNORED, cross_entropy


def inputs(rows: int, vocab: int, dim: int = 24, dtype: torch.dtype = torch.float64, ignored: float = 0.2):
    g = torch.Generator().manual_seed(rows * 1000 + vocab)
    hidden = torch.randn(rows, dim, generator=g, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g, dtype=dtype) * 0.5).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=g)
    targets[torch.rand(rows, generator=g) < ignored] = IGNORED
    return hidden, weight, targets


def plain(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize(("rows", "vocab", "chunk"), [(37, 50, 8), (64, 11, 64), (5, 300, 100), (33, 7, 1), (1, 2, 4)])
def test_value_and_gradients_equal_the_plain_loss_for_any_chunking(rows, vocab, chunk):
    hidden, weight, targets = inputs(rows, vocab)
    expected = plain(hidden, weight, targets)
    wanted = torch.autograd.grad(expected * 0.37, (hidden, weight))
    loss = cross_entropy(hidden, weight, targets, rows=chunk)
    found = torch.autograd.grad(loss.total * 0.37, (hidden, weight))
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert loss.tokens.item() == (targets != IGNORED).sum().item()
    assert loss.tokens.dtype == torch.int64


def test_batches_of_any_shape_are_flattened_and_targets_of_another_shape_rejected():
    hidden, weight, targets = inputs(24, 9)
    loss = cross_entropy(hidden.view(2, 3, 4, -1), weight, targets.view(2, 3, 4), rows=5)
    torch.testing.assert_close(loss.total, plain(hidden, weight, targets))
    with pytest.raises(ValueError, match=r"targets has shape \[12, 2\]"):
        cross_entropy(hidden, weight, targets.view(12, 2))


def test_fp32_stays_within_rounding_of_fp64():
    hidden, weight, targets = inputs(300, 1000, dtype=torch.float64)
    exact = plain(hidden, weight, targets)
    loss = cross_entropy(hidden.detach().float(), weight.detach().float(), targets, rows=64)
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total.double(), exact, rtol=2e-6, atol=0)


def test_the_compiled_loss_equals_the_eager_loss(monkeypatch):
    from tercet.model import loss as module

    compiled = torch.compile(module._loss, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(module, "_compiled_loss", lambda: compiled)
    found, wanted = [], []
    for asked, into in ((True, found), (False, wanted)):
        hidden, weight, targets = inputs(50, 30, dtype=torch.float32)
        loss = cross_entropy(hidden, weight, targets, rows=16, compiled=asked)
        loss.total.backward()
        with torch.no_grad():
            into += [loss.total, hidden.grad, weight.grad, cross_entropy(hidden, weight, targets, compiled=asked).total]
    torch.testing.assert_close(found, wanted)


def test_second_derivatives_are_rejected():
    hidden, weight, targets = inputs(5, 7)
    total = cross_entropy(hidden * hidden, weight, targets).total
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_ignored_targets_give_zero_loss_and_zero_gradients():
    hidden, weight, targets = inputs(10, 6)
    loss = cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), rows=4)
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.tokens.item() == 0
    assert hidden.grad.abs().max().item() == 0
    assert weight.grad.abs().max().item() == 0


def test_huge_logits_neither_overflow_nor_lose_the_gradient():
    hidden, weight, targets = inputs(16, 30, dtype=torch.float32, ignored=0)
    big = (hidden.detach() * 1e4).requires_grad_()
    loss = cross_entropy(big, weight, targets, rows=3)
    loss.total.backward()
    torch.testing.assert_close(loss.total, plain(big, weight, targets))
    assert torch.isfinite(big.grad).all()


def test_under_autocast_logits_are_bf16_and_sums_are_fp32():
    hidden, weight, targets = inputs(200, 64, dtype=torch.float32)
    exact = plain(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(hidden, weight, targets, rows=32)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert (loss.total - exact).abs().item() / exact.item() < 1e-2
    assert loss.total.item() != exact.item()


def test_a_small_scale_is_not_rounded_to_the_hidden_dtype():
    """1e-6 is subnormal in fp16, which would be off by 1.3%."""
    hidden, weight, targets = inputs(20, 30, dtype=torch.float16, ignored=0)
    weight = weight.detach() * 1000
    (whole,) = torch.autograd.grad(cross_entropy(hidden, weight, targets).total, hidden)
    (scaled,) = torch.autograd.grad(cross_entropy(hidden, weight, targets).total * 1e-6, hidden)
    assert scaled.dtype == torch.float16
    wanted = whole.double() * 1e-6
    assert (scaled.double() - wanted).norm() < 5e-4 * wanted.norm()


def test_no_grad_computes_no_gradients(monkeypatch):
    hidden, weight, targets = inputs(40, 12)
    asked = []
    from tercet.model import loss as module

    original = module._loss_inplace
    monkeypatch.setattr(
        module, "_loss_inplace", lambda *a, gradient: asked.append(gradient) or original(*a, gradient=gradient)
    )
    with torch.no_grad():
        cross_entropy(hidden, weight, targets, rows=16)
    assert asked == [False, False, False]
    cross_entropy(hidden, weight, targets, rows=40)
    assert asked[-1] is True


def test_no_more_logits_than_one_chunk_exist_at_once():
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (vocab,):
                largest = max(largest, out.numel() // vocab)
            return out

    rows, vocab = 1000, 77
    hidden, weight, targets = inputs(rows, vocab, dtype=torch.float32)
    with Watch():
        cross_entropy(hidden, weight, targets, rows=128)
    assert 0 < largest <= 128


@pytest.mark.parametrize("vocab", [2, 256, 50304, 262144, 10**7])
def test_chunk_size_follows_the_vocabulary(vocab):
    rows = chunk_rows(vocab)
    assert rows & (rows - 1) == 0
    assert rows == 256 or LOGITS_BYTES / 2 < 4 * vocab * rows <= LOGITS_BYTES
