"""LoRA fine-tuning of a block-sparse model with transformers and peft: python examples/lora.py

On a random Llama; for yours, replace it by AutoModelForCausalLM.from_pretrained. Needs: pip install 'tercet[lora]'
"""

from __future__ import annotations

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tercet
from tercet.interop.huggingface import use_block_sparse

# each query reads 4 blocks of 16 tokens, of documents of up to 256
BLOCKS = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=4)
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def documents(count: int) -> list[dict[str, torch.Tensor]]:
    """Documents of 128 to 256 tokens that count, each in steps of its own."""
    rows = []
    for _ in range(count):
        length, first, step = (int(torch.randint(*bounds, ())) for bounds in ((128, 257), (0, 64), (1, 4)))
        rows.append({"input_ids": (first + step * torch.arange(length)) % 64})
    return rows


def main(steps: int = 40) -> list[float]:
    """Losses of the fine-tuning."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    use_block_sparse(model, BLOCKS, dense_below=64)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.print_trainable_parameters()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        # documents packed into one row, which `position_ids` tell apart
        trainer = Trainer(adapted, arguments, train_dataset=documents(160), data_collator=DataCollatorWithFlattening())
        trainer.train()
        adapted.save_pretrained(folder)  # the adapters alone: load them onto a model with the same use_block_sparse(…)
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
