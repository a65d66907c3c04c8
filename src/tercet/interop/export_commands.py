"""`tercet export …`: each function is a command. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tercet.inference.arguments import find_model
from tercet.interop.options import check_empty, check_family


def hf(
    run: Path,
    out: Path,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    format: Literal["tercet", "llama", "qwen2", "qwen3", "mistral"] = "tercet",
) -> int:
    """Export a model to a Hugging Face folder. transformers can load it wherever tercet is installed.

    Args:
        run: A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.
        out: The folder to write; must be empty or not exist.
        dtype: Type of the weights; float32 is exact.
        format: tercet; or, for a dense or block-sparse model, a family that transformers loads without tercet, with
            dense attention.
    """
    check_empty(out)
    stored = find_model(run, verify=True)
    print(f"exporting {stored.source}", flush=True)
    if format != "tercet":
        check_family(stored.run.model, format)
    from tercet.interop.huggingface.export import SELECTOR_WEIGHTS, export

    export(stored.source, out, format, dtype=dtype, verify=False)
    where = "anywhere tercet is installed" if format == "tercet" else "with transformers alone"
    print(f"Wrote {out}. To load it {where}:")
    if format == "tercet":
        print("  import tercet.interop.huggingface")
    print("  from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f"  model, tokenizer = (c.from_pretrained({str(out)!r}) for c in (AutoModelForCausalLM, AutoTokenizer))")
    if format != "tercet" and stored.run.model.attention != "dense":
        print('With attn_implementation="tercet", after `import tercet.interop.huggingface`, it reads blocks.')
    if (out / SELECTOR_WEIGHTS).exists():
        print(f"Weights of the learned selectors are in {SELECTOR_WEIGHTS}, which transformers does not read.")
    return 0
