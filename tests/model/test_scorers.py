"""A scorer of blocks is one entry of a table: every mode then runs it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tercet
from cases import config, cu
from tercet.attention import spec
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer

BOUNDS = (37, 0, 3, 40)
CFG = config()  # blocks of 4; 4 of them are selected, 0 and the last two in any case


def last_blocks(q, k, row, position, blocks, block):
    """The later, the better."""
    return torch.arange(blocks, dtype=q.dtype).expand(q.shape[0], k.shape[1], blocks)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spec.SCORERS, "last", spec.Scorer("branch", last_blocks))


def make(kind=tercet.BlockSparseAttention):
    torch.manual_seed(0)
    layer = kind(12, 4, 2, 4, config=CFG, selector="last")
    layer.init_weights(0.6, 0.3)
    return layer.double()


def last_tokens(length: int) -> torch.Tensor:
    """Which keys each query reads: block 0, and the three blocks that end with its own."""
    t, s = torch.arange(length)[:, None], torch.arange(length)
    return (s <= t) & ((s < 4) | (s // 4 >= t // 4 - 2))


def test_the_operator_reads_what_it_chooses_and_the_kernels_say_that_they_do_not_know_it():
    q, k, v = (torch.randn(1, 80, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    out, aux = tercet.block_sparse_attention(q, k, v, config=CFG, scorer="last", return_aux=True)
    assert aux.block_indices[0, 79, 0].tolist() == [0, 17, 18, 19]
    k, v = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    full = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=last_tokens(80))
    torch.testing.assert_close(out, full.transpose(1, 2))


@pytest.mark.parametrize("kind", [tercet.BlockSparseAttention, tercet.NativeSparseAttention])
def test_packed_documents_and_new_tokens_equal_whole_sequences(kind):
    layer, x = make(kind), torch.randn(1, 80, 12, dtype=torch.float64)
    alone = torch.cat([layer(part) for part in x.split([n for n in BOUNDS if n], 1)], 1)
    torch.testing.assert_close(layer(x, cu(BOUNDS)), alone)
    cache = layer.make_cache(1)
    parts = torch.cat([layer(part, cache=cache) for part in x.split([30, 1, 1, 20, 28], 1)], 1)
    torch.testing.assert_close(parts, layer(x))


def test_a_split_sequence_equals_the_whole_one():
    from tercet.parallel.context import apply_context_parallelism, shard_sequence

    layer, x = make(), torch.randn(1, 80, 12, dtype=torch.float64)
    whole = layer(x, cu(BOUNDS))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        apply_context_parallelism(layer)
        own, _, shard = shard_sequence(x, x, cu(BOUNDS).tolist(), CFG, dist.group.WORLD)
        torch.testing.assert_close(layer(own, shard), whole)
    finally:
        dist.destroy_process_group()


def test_a_model_trains_with_it():
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn_dim": 64}
    model = Transformer(ModelConfig(**sizes, nsa=CFG, gate="none", selector="last"))
    tokens = torch.randint(0, 256, (1, 80))
    model(tokens, cu_seqlens=cu(BOUNDS), targets=tokens).total.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_transformers_models_use_it():
    transformers = pytest.importorskip("transformers")
    from tercet.interop.huggingface import use_block_sparse

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99))
    tokens = torch.randint(0, 99, (1, 60))
    model.set_attn_implementation("sdpa")
    hidden = torch.zeros(1, 1, 60, 60).masked_fill(~last_tokens(60), -torch.inf)
    expected = model(tokens, attention_mask=hidden).logits
    use_block_sparse(model, CFG, scorer="last")
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)
