"""Memory grows with T, not T²: the peak of a process; and the time of a training step."""

from __future__ import annotations

import resource
import sys
import time

import pytest
import torch

import tercet
from cases import Inputs, inputs
from fork_server import ForkServer


def forward() -> int:
    """In a child process: one forward pass of as many tokens as its argument says. Prints the peak memory."""
    torch.manual_seed(0)
    tokens, heads, groups, size = int(sys.argv[1]), 12, 2, 64
    cfg = tercet.NSAConfig()
    q = torch.randn(1, tokens, heads, size)
    short = [torch.randn(1, cfg.num_compressed(tokens), groups, size) for _ in range(2)]
    long = [torch.randn(1, tokens, groups, size) for _ in range(4)]
    gates = torch.rand(1, tokens, heads, 3)
    with torch.no_grad():
        out = tercet.nsa_attention(q, *short, *long, gates, config=cfg, backend="reference")
    assert torch.isfinite(out).all()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    return 0


def peak_bytes(server: ForkServer, tokens: int) -> int:
    child = server.call("laws.test_memory_law:forward", str(tokens))
    assert child.wait() == 0, child.output
    return int(child.output.split()[-1])


@pytest.mark.slow
def test_16384_tokens_forward_in_less_than_4_gib(fork_server):
    assert peak_bytes(fork_server, 16_384) < 4 * 2**30


def test_4096_tokens_never_hold_a_score_matrix(fork_server):
    """One branch's scores of all heads would be 12 x 4096 x 4096 x 4 bytes = 768 MiB."""
    assert peak_bytes(fork_server, 4096) - peak_bytes(fork_server, 64) < 300 * 2**20


def test_2048_tokens_forward_and_backward_in_seconds():
    cfg = tercet.NSAConfig()
    x: Inputs = inputs(
        cfg, 2048, groups=2, per_group=6, key_size=64, value_size=64, dtype=torch.float32, sharpness=1.0
    ).leaves()
    start = time.process_time()
    tercet.nsa_attention(*x.tensors(), config=cfg, backend="reference").sum().backward()
    seconds = time.process_time() - start
    assert all(torch.isfinite(v.grad).all() for v in x.tensors())
    # time on the cores, not on the clock: what else the machine does is no part of the law
    assert seconds < 15, f"{seconds:.1f} s on the cores"
