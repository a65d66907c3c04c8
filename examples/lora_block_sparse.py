"""LoRA fine-tuning of a block-sparse Llama with transformers and peft: python examples/lora_block_sparse.py

Trains a small dense Llama, lets it read long documents block by block, and fine-tunes only LoRA adapters on a task that
it has not seen: a minute on a CPU. For a model of the hub, replace `pretrain` by AutoModelForCausalLM.from_pretrained.

Needs: pip install 'tercet[lora]'
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tercet
from tercet.interop.huggingface import use_block_sparse

VOCABULARY = 64
# reads 4 blocks of 16 tokens, of documents of up to 256
BLOCKS = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=4)


def documents(count: int, steps: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """Documents of 128 to 256 tokens, each the one before plus a constant step, which the model has to find out."""
    rows = []
    for _ in range(count):
        length, first = int(torch.randint(128, 257, ())), torch.randint(VOCABULARY, ())
        step = steps[int(torch.randint(len(steps), ()))]
        rows.append({"input_ids": (first + step * torch.arange(length)) % VOCABULARY})
    return rows


def train(model: Any, rows: list[dict[str, Tensor]], steps: int, learning_rate: float) -> list[float]:
    """Losses of training on documents packed into one row, which `position_ids` tell apart."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening())
        trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def pretrain(steps: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    losses = train(model, documents(256, steps=(1, 2, 3)), steps, 1e-2)
    print(f"dense training: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return model


def main(dense_steps: int = 80, lora_steps: int = 80) -> list[float]:
    """Losses of the LoRA fine-tuning."""
    torch.manual_seed(0)
    model = pretrain(dense_steps)
    use_block_sparse(model, BLOCKS, dense_below=64)
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    adapted.print_trainable_parameters()
    losses = train(adapted, documents(256, steps=(5, 7)), lora_steps, 1e-2)
    print(f"LoRA, block-sparse: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    prompt = 5 * torch.arange(200)[None] % VOCABULARY
    answer = adapted.generate(input_ids=prompt.to(adapted.device), max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"after {prompt[0, -4:].tolist()} it continues {answer[0, 200:].tolist()}")
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)  # the adapters alone; load them onto a model with the same use_block_sparse(…)
    return losses


if __name__ == "__main__":
    main()
