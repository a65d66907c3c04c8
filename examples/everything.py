"""End to end on a CPU in about a minute: train, evaluate, generate, export, load in transformers, run lm-eval.

    python examples/everything.py [FOLDER]         FOLDER keeps the results

Needs: pip install 'tercet[eval]'
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tercet
import tercet.interop.huggingface  # registers Tercet's models with transformers
from tercet.cli import main as tercet_command
from tercet.config.load import load
from tercet.inference.perplexity import by_position, held_out, overall
from tercet.interop.huggingface.export import export
from tercet.train.trainer import train

SIZES = {
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 1,
    "model.head_dim": 16,
    "model.ffn_dim": 128,
    "model.vocab_size": 256,
    "model.nsa.compress_block": 8,
    "model.nsa.compress_stride": 4,
    "model.nsa.select_block": 16,
    "model.nsa.select_count": 4,
    "model.nsa.window": 32,
    "data.source": "python-source",
    "data.seq_len": 256,
    "train.micro_batch": 4,
    "train.tokens_per_step": 1024,
    "train.warmup_steps": 2,
    "train.lr": 3e-3,
    "train.val_tokens": 0,
    "train.sample_tokens": 0,
    "checkpoint.every": 20,
    "log.tensorboard": False,
}

# Multiple choice: which continuation of a line of Python is more likely? Nothing is downloaded.
QUESTIONS = [
    ("import", [" os\n", " 7;\n"], 0),
    ("def __init__(", ["self):\n", "))))\n"], 0),
    ("    return", [" None\n", " QZX,\n"], 0),
    ("for i in range", ["(10):\n", "]10;\n"], 0),
]


def main(folder: Path, steps: int = 20) -> dict[str, float]:
    """Run all steps; returns validation loss and lm-eval accuracy."""
    run = folder / "run"
    config = load(flags={**SIZES, "train.steps": steps, "run.dir": str(run), "run.device": "cpu"}).config
    assert train(config, origins=None, resume=None) == 0

    model = tercet.load_model(run, device="cpu")
    loss = overall(by_position(model, held_out(model, sequences=4, batch=2))).loss
    print(f"validation loss: {loss:.3f} nats per byte")

    prompt = "import os\n\ndef main():\n"
    ours = tercet.generate(model, prompt, max_new_tokens=24, temperature=0)
    print(f"Tercet generates: {ours.text!r}")
    # The same on the command line.
    flags = ["--prompt", prompt, "--max-new-tokens", "24", "--temperature", "0"]
    assert tercet_command(["generate", str(run), *flags]) == 0

    exported = export(run, folder / "exported")
    hf_model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokens = tokenizer(prompt, return_tensors="pt")
    output = hf_model.generate(**tokens, max_new_tokens=24, do_sample=False)
    new = output[0, tokens["input_ids"].shape[1] :].tolist()
    new = new[: new.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in new else new
    assert new == ours.tokens, "transformers must generate the same tokens as Tercet"
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, hf_model.state_dict()[f"model.{name}"]), name

    accuracy = lm_eval_accuracy(hf_model, tokenizer, folder / "task")
    print(f"lm-eval accuracy on {len(QUESTIONS)} multiple-choice questions: {accuracy:.0%}")
    return {"loss": loss, "accuracy": accuracy}


def lm_eval_accuracy(model: object, tokenizer: object, folder: Path) -> float:
    """Accuracy on QUESTIONS with EleutherAI's lm-eval, offline."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text, "choices": choices, "label": label} for text, choices, label in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "python_lines.yaml").write_text(
        f"""\
task: python_lines
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "questions.jsonl"}
  cache_dir: {folder / "cache"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""
    )
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu"),
        tasks=["python_lines"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return float(results["results"]["python_lines"]["acc,none"])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
