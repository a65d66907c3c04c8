"""Empty documents after the last one, as the fixed number of bounds of a recorded step has them: not a bit changes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import tercet
from cases import attend, cu, inputs
from tercet.attention.kernels.table import selected_settings

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, select_count=2, select_initial=0, select_local=1, window=12
)
DOCUMENTS = (18, 0, 14)
EMPTY = (0,) * 5


@pytest.mark.parametrize("design", ["union", pytest.param("kv-major", marks=pytest.mark.slow)])
def test_empty_documents_at_the_end_change_no_bit(design: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if design == "kv-major":  # for every range, by limits that any union of blocks exceeds
        selected = importlib.import_module("tercet.attention.kernels.selected.launch")
        settings = replace(selected_settings(16, 16, torch.float32, 16), forward_limit=0.0, backward_limit=0.0)
        monkeypatch.setattr(selected, "selected_settings", lambda *_: settings)
    x = inputs(
        CONFIG, sum(DOCUMENTS), groups=1, per_group=1, key_size=16, value_size=16, documents=DOCUMENTS,
        dtype=torch.float32,
    )  # fmt: skip
    found = []
    for documents in (DOCUMENTS, DOCUMENTS + EMPTY):
        leaves = x.leaves()
        out, aux = attend(
            leaves, CONFIG, "triton", return_aux=True, cu_seqlens=cu(documents), max_seqlen=max(DOCUMENTS)
        )
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append([out.detach(), aux.block_indices, *torch.autograd.grad((out * weights).sum(), leaves.tensors())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
