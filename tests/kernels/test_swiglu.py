"""SwiGLU's gradient by its kernel: autograd's own; fp32, interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tercet.model import swiglu, transformer
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_equal_the_formula(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = transformer.SwiGLU(24, 1030), torch.randn(2, 3, 24)  # more columns than a program takes
    results: list[list[torch.Tensor]] = []
    launched: list[str] = []
    call = swiglu.call
    monkeypatch.setattr(swiglu, "call", lambda *args, **options: (launched.append("one"), call(*args, **options)))
    for kernel in (False, True):
        monkeypatch.setattr(transformer, "kernels_run_on", lambda y, kernel=kernel: kernel)
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])])
        assert len(launched) == kernel
    torch.testing.assert_close(results[1], results[0])


def test_the_operator_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.tercet.swiglu_gradient, (torch.randn(3, 20), torch.randn(3, 10)))


def test_gates_far_from_zero_give_no_nan() -> None:
    y = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    found = swiglu.swiglu_gradient(y, torch.ones(1, 2))
    torch.testing.assert_close(found, torch.tensor([[0.0, 3.0, 0.0, 200.0]]))


def test_the_reference_backend_takes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu, "call", None)
    sizes = {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 32, "vocab_size": 16}
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    for backend, launches in (("reference", False), ("auto", True)):
        model = Transformer(ModelConfig(**sizes, attention="dense", backend=backend))
        out = model(tokens).sum()
        if launches:
            with pytest.raises(TypeError, match="'NoneType' object is not callable"):
                out.backward()
        else:
            out.backward()
