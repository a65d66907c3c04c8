"""Train a small model in Python, evaluate it, and use it in transformers: python examples/from_scratch.py FOLDER

A minute on a CPU. Needs: pip install 'tercet[hub]'
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import tercet
import tercet.interop.huggingface  # registers Tercet's models with transformers
from tercet.config.load import load
from tercet.inference.perplexity import by_position, held_out, overall
from tercet.interop.huggingface.export import export
from tercet.train.trainer import train

SETTINGS = {  # docs/configuration.md lists all keys; flags of `tercet train` are the same
    "data.source": "python-source",
    "data.seq_len": 256,
    "data.shuffle_sequences": 0,
    "train.steps": 100,
    "train.micro_batch": 4,
    "train.tokens_per_step": 1024,
    "train.warmup_steps": 2,
    "train.val_tokens": 1024,
    "train.sample_tokens": 0,
    "log.tensorboard": False,
}


def main(folder: Path, **changes: object) -> float:
    """The held-out loss, after checking that transformers generates the same text."""
    run = folder / "run"
    given = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()} | {"run.dir": str(run)}
    if train(load("tiny", flags=given).config, origins=None, resume=None):
        raise SystemExit("the run was stopped")

    model = tercet.load_model(run, device="cpu")
    loss = overall(by_position(model, held_out(model, sequences=4, batch=2))).loss
    prompt = "import os\n\ndef main():\n"
    ours = tercet.generate(model, prompt, max_new_tokens=24, temperature=0)
    print(f"loss {loss:.3f} nats per byte; after {prompt!r} it writes {ours.text!r}")

    exported = export(run, folder / "exported")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    tokens = tokenizer(prompt, return_tensors="pt")
    output = theirs.generate(**tokens, max_new_tokens=24, do_sample=False)
    new = output[0, tokens["input_ids"].shape[1] :].tolist()
    assert new[: len(ours.tokens)] == ours.tokens, "transformers must generate the same tokens"
    return loss


if __name__ == "__main__":
    main(Path(sys.argv[1]))
