"""Blocks that a model of transformers chose itself, as MiniMax-M3 does, are read as its eager code reads them."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from interop.test_families import build, run, some_tokens
from tercet.interop.huggingface.support import UnsupportedError

SPARSE = {
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "mlp_layer_types": ["dense"] * 3,
    "dense_intermediate_size": 48, "index_block_size": 8, "index_topk_blocks": 3, "index_local_blocks": 1,
    "index_n_heads": 2, "index_head_dim": 8,
}  # fmt: skip
ERROR = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def model():
    return build("minimax_m3_vl_text", SPARSE)


def test_outputs_and_gradients_are_those_of_eager_code(model):
    tokens = some_tokens(2, 60)
    model.set_attn_implementation("eager")
    expected = run(model, tokens)
    model.set_attn_implementation("tercet")
    torch.testing.assert_close(run(model, tokens), expected, **ERROR)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_with_a_cache_and_padding(model, padding: str, monkeypatch):
    for layer in model.model.layers[1:]:  # on the left, the model's choice depends on what it computes for padding
        monkeypatch.setattr(layer.self_attn.indexer, "topk_blocks", 8 if padding == "left" else 3)
    tokens, mask = some_tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    if padding != "none":
        mask[0, slice(0, 13) if padding == "left" else slice(50, 60)] = 0
    results = []
    for name in ("sdpa" if padding == "left" else "eager", "tercet"):  # eager gives NaN there
        model.set_attn_implementation(name)
        cache, parts = DynamicCache(config=model.config), []
        with torch.no_grad():
            for part in (slice(0, 40), slice(40, 41), slice(41, 60)):
                seen = None if padding == "none" else mask[:, : part.stop]
                out = model(tokens[:, part], attention_mask=seen, past_key_values=cache, use_cache=True)
                parts.append(out.logits)
        results.append(torch.cat(parts, 1)[mask.bool()])
    torch.testing.assert_close(*results, **ERROR)


def test_packed_documents_are_refused(model):
    model.set_attn_implementation("tercet")
    with pytest.raises(UnsupportedError, match="restart within a row"):
        model(some_tokens(1, 30), position_ids=torch.arange(30)[None] % 20, use_cache=False)
