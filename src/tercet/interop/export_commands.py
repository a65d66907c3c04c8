"""`tercet export …`: each function is a command. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def hf(run: Path, out: Path, dtype: Literal["float32", "bfloat16", "float16"] = "float32") -> int:
    """Write a folder that transformers loads wherever tercet is installed: config, safetensors, tokenizer.

    Args:
        run: A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.
        out: The folder to write; it must not hold anything yet.
        dtype: Of the weights; float32 keeps every bit of training.
    """
    from tercet.interop.huggingface.export import export

    export(run, out, dtype=dtype)
    print(f"{out} is written. Load it anywhere tercet is installed:")
    print("  import tercet.interop.huggingface")
    print("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f"  model, tokenizer = (c.from_pretrained({str(out)!r}) for c in (AutoModelForCausalLM, AutoTokenizer))")
    return 0
