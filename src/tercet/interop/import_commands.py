"""`tercet import …`: each function is a command. Imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from tercet import hints
from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.interop.options import ImportOptions, attention_options, check_empty


def hf(
    source: Path,
    out: Path,
    nsa: NSAConfig = NSAConfig(),  # noqa: B008  (frozen)
    attention: str | None = None,
    compression: Literal["mlp", "mean"] = "mlp",
    compress_selected_keys: bool = False,
    gate_logit: float = 8.0,
    dense_below: int = 0,
    selector: Literal["own", "compressed", "learned"] | None = None,
    seq_len: int | None = None,
    extend: int | None = None,
    seed: int = 1337,
    check: bool = True,
) -> int:
    """Import a dense Llama- or Qwen-style checkpoint, or a Tercet export, to continue training from it.

    Args:
        source: Folder with config.json and safetensors, or a GGUF file (needs the package gguf).
        out: Folder to write: config.toml, model.safetensors, tokenizer.json.
        nsa: Block sizes of Native Sparse Attention.
        attention: nsa; block-sparse, which adds no parameters; two-branch, nsa without its compressed branch and with
            learned selectors; dense; window; or a pattern of layers such as nsa*11,dense. Default: nsa or, for an
            export of Tercet, the attention that it had.
        compression: How a block of keys and values is compressed: mlp (learned, starts as the mean) or mean.
        compress_selected_keys: Compress the keys of the selected branch instead of separate keys.
        gate_logit: Gates start at sigmoid(gate_logit) for the selected branch, sigmoid(-gate_logit) for the others.
            Higher is closer to the dense model; with lower values the other branches learn sooner.
        dense_below: With block-sparse: queries at positions below this read everything.
        selector: What scores the blocks of block-sparse or two-branch: the model's own queries and keys (own, the
            default of block-sparse), means of keys (compressed), or new projections (learned, that of two-branch).
        seq_len: Sequence length to train with; default: the model's own, at most 4096.
        extend: Train with this sequence length, above the model's own: RoPE is scaled from one to the other (yarn).
        seed: Random seed for newly initialized weights.
        check: Compare logits with those of transformers, of as many layers and tokens as are affordable; an import that
            differs is an error. With block-sparse also the loss, and facts planted in long texts, with the dense model.
    """
    if not source.is_dir() and not (source.suffix == ".gguf" and source.is_file()):
        raise UsageError(
            f"{source} is not a folder: download the model first, e.g. with `hf download OWNER/NAME --local-dir "
            "FOLDER`, and pass its folder"
        )
    check_empty(out)
    options = ImportOptions(nsa, attention, compression, compress_selected_keys, gate_logit, dense_below, selector)
    if attention is not None:
        attention_options(options)  # which checks them
    if seq_len is not None and seq_len < 2:
        raise UsageError(f"--seq_len {seq_len} is below 2: give a length to train with, or leave it out")
    if extend is not None and seq_len is not None:
        raise UsageError(f"--extend {extend} and --seq_len {seq_len} both set the length to train with: drop one")
    from transformers.utils import logging

    from tercet.interop.huggingface.import_hf import import_model

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    imported = import_model(
        source, out, **vars(options), seq_len=seq_len, extend=extend, seed=seed, check=check,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    if imported.restored:
        print("restored the settings that the model was exported with")
    for note in imported.notes:
        print(note)
    model, length = imported.run.model, imported.run.data.seq_len
    if imported.exact_length is not None:
        print(f"equal to the dense model up to {imported.exact_length:,} tokens")
        if not model.spec("nsa").gated and length <= imported.exact_length:
            print(f"attention is still dense in sequences of {length:,} tokens: to train it sparse, use a longer "
                  "--data.seq_len, or import with --seq_len")  # fmt: skip
    if source.is_dir() and not (source / "tokenizer.json").is_file():
        print(f"warning: {source} has no tokenizer.json, so {out} uses the byte tokenizer, whose tokens are not this "
              "model's: add the file and import again, or train with --data.tokenizer", file=sys.stderr)  # fmt: skip
    new_selectors = model.selector == "learned" and not imported.restored
    _print_training(out, length, imported.run.train.tokens_per_step, new_selectors)
    return 0


def _print_training(out: Path, length: int, tokens: int, new_selectors: bool) -> None:
    """Print commands that train the model on this machine."""
    import torch

    flags: dict[str, Any] = {}
    if not torch.cuda.is_available():  # a step of 65,536 tokens would take minutes, a validation hours
        tokens = length
        flags = {"train.micro_batch": 1, "train.tokens_per_step": tokens, "train.val_tokens": 16 * tokens}
    if not new_selectors:
        print(f"Wrote {out}. To use it:  {hints.generate(out)}\nTo train it:")
        stages = [flags]
    else:  # as in docs/results/conversion.md
        print(f"Wrote {out}. Its selectors start at random: it is not usable until they have learned. Train them alone "
              "for 5M tokens, then everything for 20M:")  # fmt: skip
        flags |= {"train.schedule": "constant", "train.warmup_steps": 10}
        first = {"train.selector.only": "true", "train.lr": "1e-3", "train.steps": -(-5_000_000 // tokens)}
        then = {"train.init_from": "warmup", "train.lr": "2e-4", "train.steps": -(-20_000_000 // tokens)}
        stages = [{"run.dir": "warmup", **flags, **first}, {"run.dir": "converted", **flags, **then}]
    for stage in stages:
        print(f"  {hints.train_config(out / 'config.toml', stage)}")
    print("This reads Python source; for your own texts add: --data.source text --data.path FILES")
