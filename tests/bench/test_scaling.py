"""The arithmetic of docs/scaling.md, held to PyTorch's own sharding under a process group that sends nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tercet.attention.config import NSAConfig
from tercet.bench.scaling import cases, context_traffic, outlook, seven_billion, shard_bytes, table
from tercet.config.load import load
from tercet.model.cost import parameters

FAKE = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tercet.config.load import load
from tercet.model.transformer import Transformer

ranks = 64
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
with torch.device("meta"):
    model = Transformer(load(preset="m7c").config.model)
mesh = init_device_mesh("cpu", (ranks,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
print(sum(p.to_local().numel() for p in model.parameters()))
"""


def test_a_rank_holds_its_share_of_the_weights_and_little_more():
    done = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, check=True)
    held = int(done.stdout.split()[-1])
    expected = shard_bytes(load(preset="m7c").config.model, 64) / 16
    # rank 0 has the larger part of what does not divide: rows are not split
    assert expected <= held < 1.1 * expected


def test_a_million_tokens_over_eight_ranks_fetch_seven_eighths_of_the_keys():
    model = load(preset="m7c").config.model
    row = 2 * model.kv_heads * 2 * model.head_dim
    sent = context_traffic(model, 1 << 20, 8, passes=1) / model.layers / row
    nsa: NSAConfig = model.nsa
    most = 7 / 8 * (1 << 20) * (1 + 1 / nsa.compress_stride) + 2 * (nsa.window + nsa.compress_block)
    # no rank but the one of the last chunk needs all that lies before the end
    assert 0.9 * most < sent <= most


def test_the_seven_billion_have_seven_billion_parameters():
    assert parameters(seven_billion()).total == pytest.approx(7.2e9, rel=0.01)


def test_the_page_shows_what_the_formulas_give():
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert "\n".join(table(cases())) in page
    assert all(outlook(case).tokens_per_s > 0 for case in cases())
