"""Several ranks: timed by `tercet bench scaling`, and the arithmetic of docs/scaling.md, held to PyTorch's sharding."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tercet.attention.config import NSAConfig
from tercet.bench.scaling import communication
from tercet.cli import main
from tercet.config.load import load
from tercet.model.transformer import Transformer

RANKS = 64
BENCH = ["--preset", "tiny", "--ranks", "2", "--strategies", "fsdp", "cp", "--batch", "2", "--length", "256",
         "--steps", "1", "--device", "cpu"]  # fmt: skip


def print_shard_size() -> int:
    """In a child process: shard a model with PyTorch, and print how many weights rank 0 holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    with torch.device("meta"):
        model = Transformer(load(preset="m7c").config.model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    print(sum(p.to_local().numel() for p in model.parameters()))
    return 0


def test_a_rank_holds_its_share_of_the_weights_and_little_more(fork_server):
    from scaling import shard_bytes  # not in the child process

    child = fork_server.call("bench.test_scaling:print_shard_size")
    assert child.wait() == 0, child.output
    held = int(child.output.split()[-1])
    expected = shard_bytes(load(preset="m7c").config.model, RANKS) / 16
    # rank 0 has the larger part of what does not divide: rows are not split
    assert expected <= held < 1.1 * expected


def test_a_million_tokens_over_eight_ranks_fetch_seven_eighths_of_the_keys():
    from scaling import context_traffic

    model = load(preset="m7c").config.model
    row = 2 * model.kv_heads * 2 * model.head_dim
    sent = context_traffic(model, 1 << 20, 8, passes=1) / model.layers / row
    nsa: NSAConfig = model.nsa
    most = 7 / 8 * (1 << 20) * (1 + 1 / nsa.compress_stride) + 2 * (nsa.window + nsa.compress_block)
    # no rank but the one of the last chunk needs all that lies before the end
    assert 0.9 * most < sent <= most


def test_the_page_shows_what_the_formulas_give():
    from scaling import cases, outlook, table

    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert "\n".join(table(cases())) in page
    assert all(outlook(case).tokens_per_s > 0 for case in cases())


def kernel(name: str, start: float, end: float, **more: bool) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=span, is_user_annotation=False, **more)


def test_exposed_communication_is_what_no_other_kernel_covers():
    sent = [kernel("ncclDevKernel_AllReduce", 0, 10), kernel("ncclDevKernel_AllGather", 8, 20)]
    computed = [kernel("gemm", 5, 9), kernel("void at::native::softmax", 7, 12), kernel("gemm", 30, 40)]
    assert communication([*sent, *computed]) == (20, 13)


@pytest.mark.slow
def test_ranks_are_timed_under_every_strategy(capsys):
    assert main(["bench", "scaling", *BENCH]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["ranks"], row["strategy"]) for row in found] == [(1, "single"), (2, "fsdp"), (2, "cp")]
    assert all(row["tokens_per_s"] > 0 and row["peak_gib"] > 0 for row in found)
