"""NativeSparseAttention inside a transformers model, trained with its Trainer: python examples/layer_in_transformers.py

Replaces every attention layer of a Llama by NSA, with the old weights and the gates open on the selected branch. Up to
select_count × select_block tokens the model is unchanged, and training continues from there.

Needs: pip install 'tercet[eval]'
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tercet
from tercet.interop.huggingface.dense_weights import open_gate


class InLlama(nn.Module):
    """The layer behind the interface of a Llama attention layer."""

    def __init__(self, attention: Any, config: LlamaConfig, nsa: tercet.NSAConfig) -> None:
        super().__init__()
        self.layer = tercet.NativeSparseAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads,
            config=nsa,
            rope_theta=config.rope_parameters["rope_theta"],
        )
        with torch.no_grad():
            self.layer.q_proj.weight.copy_(attention.q_proj.weight)
            self.layer.o_proj.weight.copy_(attention.o_proj.weight)
            self.layer.kv_proj.weight.copy_(torch.cat((attention.k_proj.weight, attention.v_proj.weight)).repeat(3, 1))
        open_gate(self.layer.gate, 8.0)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        # The layer is causal and applies RoPE itself: Llama's mask and rotary embeddings are not needed.
        return self.layer(hidden_states), None


def main(steps: int = 30) -> list[float]:
    """Replace the layers, check that the loss is unchanged, and train."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    tokens = (torch.randint(64, (16, 1)) + torch.arange(64)) % 64
    before = model(tokens, labels=tokens).loss.item()
    nsa = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=8, window=16)
    for block in model.model.layers:
        block.self_attn = InLlama(block.self_attn, config, nsa)
    after = model(tokens, labels=tokens).loss.item()
    print(f"loss with Llama's attention {before:.4f}, with NSA in its place {after:.4f}")
    assert abs(after - before) < 1e-2

    rows = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]} -> {losses[-1]}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
