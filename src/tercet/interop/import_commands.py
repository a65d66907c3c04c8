"""`tercet import …`: each function is a command. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Literal

from tercet.attention.config import NSAConfig
from tercet.typed import typed


def hf(
    source: Path,
    out: Path,
    nsa: NSAConfig = NSAConfig(),  # noqa: B008  (frozen)
    attention: Literal["nsa", "dense"] = "nsa",
    compression: Literal["mlp", "mean"] = "mlp",
    compress_selected_keys: bool = False,
    cover: Literal["selected", "window"] = "selected",
    gate_logit: float = 8.0,
    seq_len: int | None = None,
    seed: int = 1337,
) -> int:
    """Make a Llama- or Qwen-style dense checkpoint (or an export of Tercet's) a model that training goes on from.

    Args:
        source: A folder with config.json and safetensors.
        out: The folder to write: config.toml, model.safetensors, tokenizer.json.
        nsa: Block sizes of Native Sparse Attention.
        attention: nsa, or dense to go on as it was.
        compression: How a block of keys and values becomes one: learnt (the mean at first), or its mean for good.
        compress_selected_keys: Give the compressed branch no keys of its own but summaries of the selected branch's.
        cover: The branch whose gates start open; up to its reach the import equals the dense model.
        gate_logit: How far open: its gates are sigmoid(this), the others' sigmoid(-this). Higher is nearer to the dense
            model, lower learns sooner to use the other branches.
        seq_len: Sequence length of the training to come; the model's own, at most 4096, unless given.
        seed: Of what starts fresh.
    """
    from tercet.interop.huggingface.import_hf import import_model

    made = import_model(
        source,
        out,
        nsa=nsa,
        attention=attention,
        compression=compression,
        compress_selected_keys=compress_selected_keys,
        cover=cover,
        gate_logit=gate_logit,
        seq_len=seq_len,
        seed=seed,
    )
    if made.covers is not None:
        print(f"gates start with the {cover} branch open: equal to the dense model up to {made.covers:,} tokens")
    print(f"{out} is written. Go on with:  {typed()} train --config {quote(str(out / 'config.toml'))}")
    print(f"or use it as it is:            {typed()} generate {quote(str(out))} --prompt TEXT")
    return 0
