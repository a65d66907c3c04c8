"""Memory grows with T, not T²: peak of a fresh process; and the time of a training step."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

import tercet
from cases import Inputs, inputs

FORWARD = """
import resource, torch, tercet
torch.manual_seed(0)
T, H, G, D = {tokens}, 12, 2, 64
cfg = tercet.NSAConfig()
Tc = cfg.num_compressed(T)
q = torch.randn(1, T, H, D)
short = [torch.randn(1, Tc, G, D) for _ in range(2)]
long = [torch.randn(1, T, G, D) for _ in range(4)]
gates = torch.rand(1, T, H, 3)
with torch.no_grad():
    out = tercet.nsa_attention(q, *short, *long, gates, config=cfg, backend="reference")
assert torch.isfinite(out).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_bytes(tokens: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FORWARD.format(tokens=tokens)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
def test_16384_tokens_forward_in_less_than_4_gib():
    assert peak_bytes(16_384) < 4 * 2**30


def test_4096_tokens_never_hold_a_matrix_of_scores():
    """One branch's scores of all heads would be 12 x 4096 x 4096 x 4 bytes = 768 MiB."""
    assert peak_bytes(4096) - peak_bytes(64) < 300 * 2**20


def test_2048_tokens_forward_and_backward_in_seconds():
    cfg = tercet.NSAConfig()
    x: Inputs = inputs(
        cfg, 2048, groups=2, per_group=6, key_size=64, value_size=64, dtype=torch.float32, sharpness=1.0
    ).leaves()
    torch.set_num_threads(2)
    start = time.process_time()
    tercet.nsa_attention(*x.tensors(), config=cfg, backend="reference").sum().backward()
    seconds = time.process_time() - start
    assert all(torch.isfinite(v.grad).all() for v in x.tensors())
    # time on the cores, not on the clock: what else the machine does is no part of the law
    assert seconds < 15, f"{seconds:.1f} s on the cores"
