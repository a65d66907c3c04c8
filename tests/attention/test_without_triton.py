"""Without Triton (macOS) everything but the kernels works, and requesting them says what to install. A broken Triton or
a GPU that is too old is never touched unless requested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tercet.attention import hardware

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed: importing it raises ImportError
import torch, tercet
from tercet.attention.hardware import TRITON_INSTALLED

assert not TRITON_INSTALLED
layer = tercet.NativeSparseAttention(32, 4, 2, 8)
assert "torch._dynamo" not in sys.modules  # the compiler, which takes seconds to import
x = torch.randn(1, 70, 32)
layer(x).sum().backward()
assert "Triton is not installed" in layer.routes["compressed"].reason
layer.backend = "triton"
try:
    layer(x)
except RuntimeError as error:
    print(error)
"""


def test_without_triton_the_layer_trains_without_the_compiler_and_names_the_missing_package() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('backend="triton" cannot run here: Triton is not installed')
    assert len(done.stdout.splitlines()) == 1


BROKEN = """
import torch
from tercet.attention.hardware import TRITON_INSTALLED
from tercet.model.transformer import ModelConfig, Transformer

assert TRITON_INSTALLED
sizes = dict(dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=16)
tokens = torch.zeros(1, 70, dtype=torch.int64)
for attention in ("dense", "nsa"):
    model = Transformer(ModelConfig(**sizes, attention=attention))
    model(tokens, targets=tokens).total.backward()
    with torch.no_grad():
        cache = [layer.make_cache(1) for layer in model.attention_layers()]
        for part in (tokens[:, :40], tokens[:, :3], tokens[:, :1]):
            model(part, cache=cache)
    print(attention)
"""


@pytest.mark.slow
def test_a_broken_triton_does_not_affect_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so: undefined symbol')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["dense", "nsa"]


@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_no_kernel_runs_on_a_gpu_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(hardware, "TRITON_INSTALLED", True)
    monkeypatch.setattr(hardware, "_capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert hardware.kernels_run_on(x) is runs
