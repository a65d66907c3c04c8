"""`tercet import …`: each function is a command. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tercet import hints
from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.interop.options import ImportOptions, attention_options, check_empty, check_used


def hf(
    source: Path,
    out: Path,
    nsa: NSAConfig = NSAConfig(),  # noqa: B008  (frozen)
    attention: str | None = None,
    compression: Literal["mlp", "mean"] = "mlp",
    compress_selected_keys: bool = False,
    cover: Literal["selected", "window"] = "selected",
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
        cover: The branch whose gates start open; as long as it sees every token, the import equals the dense model.
        gate_logit: Gates start at sigmoid(gate_logit) for the open branch, sigmoid(-gate_logit) for the others. Higher
            is closer to the dense model; with lower values the other branches learn sooner.
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
    if attention is not None:
        selector = attention_options(attention, dense_below, selector).get("selector", selector)
    options = ImportOptions(
        nsa, attention, compression, compress_selected_keys, cover, gate_logit, dense_below, selector
    )
    if attention is not None:
        check_used(attention, options)
    if seq_len is not None and seq_len < 2:
        raise UsageError(f"--seq_len {seq_len} is below 2: give a length to train with, or leave it out")
    if extend is not None and seq_len is not None:
        raise UsageError(f"--extend {extend} and --seq_len {seq_len} both set the length to train with: drop one")
    if selector == "learned" and nsa.select_count == nsa.forced_blocks:
        raise UsageError(
            f"--nsa.select_count {nsa.select_count} leaves --selector learned nothing to choose: these are the forced "
            f"blocks (select_initial + select_local); use at least {nsa.select_count + 1}"
        )
    from tercet.interop.huggingface.import_hf import batch_settings, import_model

    imported = import_model(source, out, **vars(options), seq_len=seq_len, extend=extend, seed=seed, check=check)
    if imported.restored:
        print("restored the settings that the model was exported with")
    for note in imported.notes:
        print(note)
    model, two_stages = imported.run.model, imported.run.model.selector == "learned" and not imported.restored
    if imported.exact_length is not None:
        gated = model.spec("nsa").gated
        gates = f"gates start with the {cover} branch open: " if gated and "nsa" in model.attention_kinds else ""
        print(f"{gates}equal to the dense model up to {imported.exact_length:,} tokens")
        length = imported.run.data.seq_len
        if not gated and length <= imported.exact_length and not two_stages:
            print(f"attention is still dense in sequences of {length:,} tokens: to train it sparse, use a longer "
                  "--data.seq_len, or import with --seq_len")  # fmt: skip
    if source.is_dir() and not (source / "tokenizer.json").is_file():
        print(f"warning: {source} has no tokenizer.json, so {out} uses the byte tokenizer, whose tokens are not this "
              "model's: add the file and import again, or train with --data.tokenizer", file=sys.stderr)  # fmt: skip
    flags: dict[str, Any] = {}
    if two_stages and imported.run.nothing_to_choose:  # the sequences are too short: selectors were checked above
        block, reach = model.nsa.select_block, max(model.nsa.selected_tokens, model.dense_below)
        length, longer = imported.run.data.seq_len, -(-2 * reach // block) * block
        print(f"attention is still dense in sequences of {length:,} tokens: the commands below use {longer:,}, "
              "where queries choose blocks")  # fmt: skip
        written = batch_settings(length)
        flags = {key: value for key, value in batch_settings(longer).items() if value != written[key]}
    _print_training(out, {**batch_settings(imported.run.data.seq_len), **flags}, flags, two_stages=two_stages)
    if not two_stages:
        print(f"To use it without training:  {hints.generate(out)}")
    return 0


# What two measured conversions trained with: docs/results/conversion.md.
SELECTOR_TOKENS, ALL_TOKENS = 5_000_000, 20_000_000
RECIPE = {"train.schedule": "constant", "train.warmup_steps": 10}


def _print_training(out: Path, batch: Mapping[str, int], flags: dict[str, Any], *, two_stages: bool) -> None:
    """Print commands that train the model on this machine. flags: what they change in the file's batch settings."""
    import torch

    tokens, on_cpu = batch["train.tokens_per_step"], not torch.cuda.is_available()
    if on_cpu:  # a step of 65,536 tokens would take minutes, a validation hours
        tokens = batch["data.seq_len"]
        flags |= {"train.micro_batch": 1, "train.tokens_per_step": tokens, "train.val_tokens": 16 * tokens}
    stages = [flags]
    if two_stages:
        flags |= RECIPE
        stages = [
            {"run.dir": "warmup", **flags, "train.selector.only": "true", "train.lr": "1e-3",
             "train.steps": -(-SELECTOR_TOKENS // tokens)},
            {"run.dir": "converted", **flags, "train.init_from": "warmup", "train.lr": "2e-4",
             "train.steps": -(-ALL_TOKENS // tokens)},
        ]  # fmt: skip
        print(f"Wrote {out}. Its selectors start at random: it is not usable until they have learned. As in the "
              f"measured conversions, train them alone for {SELECTOR_TOKENS // 10**6}M tokens, then everything for "
              f"{ALL_TOKENS // 10**6}M:")  # fmt: skip
    else:
        print(f"Wrote {out}. To train it:")
    for stage in stages:
        print(f"  {hints.train_config(out / 'config.toml', stage)}")
    print("This reads Python source; for your own texts add: --data.source text --data.path FILES")
    if on_cpu:
        print(
            "Without a GPU it takes long: the first lines of a run say how long. Fewer --train.steps are a trial only."
        )
