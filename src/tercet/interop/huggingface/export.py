"""`tercet export hf`: write a model folder that transformers can load.

--format tercet: wherever tercet is installed. --format llama|qwen2|qwen3|mistral: a model with a dense model's weights,
in transformers alone. There it runs with dense attention, which a block-sparse model equals below model.dense_below.
Weights of learned selectors, which the family has no place for, go to SELECTOR_WEIGHTS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tercet.config.keys import flatten_table
from tercet.config.load import load as load_config
from tercet.config.load import to_toml
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import GENERATION, SOURCE_CONFIG, TOKENIZER, ByteTokenizer, LibraryTokenizer, Tokenizer
from tercet.errors import TercetError
from tercet.inference.arguments import CONFIG as OUR_CONFIG
from tercet.inference.load import Dtype, LanguageModel, load_model
from tercet.interop.huggingface import dense_weights
from tercet.interop.huggingface.dense_weights import SELECTOR_WEIGHTS
from tercet.interop.huggingface.folder import atomic_folder
from tercet.interop.huggingface.import_hf import BYTE_EOS, batch_settings
from tercet.interop.huggingface.model import TercetConfig, TercetForCausalLM
from tercet.interop.options import check_empty, check_family
from tercet.parse import one_line_errors, parse_json


def export(
    run: str | Path, out: str | Path, family: str = "tercet", *, dtype: Dtype = "float32", verify: bool = True
) -> Path:
    """Export the model of a run, a checkpoint or a folder of weights to `out`, which must be empty or not exist.

    verify: check the checkpoint's checksums first.
    """
    out = Path(out)
    check_empty(out)
    model = load_model(run, device="cpu", dtype=dtype, verify=verify)
    theirs = as_transformers_model(model) if family == "tercet" else as_dense_model(model, family)
    with atomic_folder(out) as folder:
        theirs.save_pretrained(folder)
        save_tokenizer(model.tokenizer, _positions(model), folder)
        text = json.dumps(generation_settings(model.tokenizer), indent=2) + "\n"
        (folder / GENERATION).write_text(text, encoding="utf-8")
        if family == "tercet":
            (folder / OUR_CONFIG).write_text(to_toml(_own_config(model)), encoding="utf-8")
        elif selectors := {name: x for name, x in model.state_dict().items() if ".selector." in name}:
            save_file(selectors, folder / SELECTOR_WEIGHTS, {"format": "pt"})
    return out


def as_transformers_model(model: LanguageModel) -> TercetForCausalLM:
    """Wrap a model for transformers. Weights are shared, not copied."""
    config = TercetConfig(
        tercet=model.config.model_dump(mode="json"),
        max_position_embeddings=_positions(model),
        **special_ids(model.tokenizer),
        dtype=model.dtype,
    )
    with torch.device("meta"):
        wrapped = TercetForCausalLM(config)
    wrapped.model.load_state_dict(model.state_dict(), assign=True)
    wrapped.generation_config = GenerationConfig(
        **{name: value for name, value in generation_settings(model.tokenizer).items() if name.endswith("token_id")}
    )
    return wrapped.eval()


def as_dense_model(model: LanguageModel, family: str) -> PreTrainedModel:
    """The model of a family with these weights, for `save_pretrained`: buffers have no values."""
    check_family(model.config, family)
    others = {**special_ids(model.tokenizer), "dtype": model.dtype}
    config = dense_weights.family_config(model.config, family, _positions(model), **others)
    theirs, weights = dense_weights.meta_model(config), dense_weights.family_weights(model.state_dict())
    if model.config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    if family == "qwen2":  # which has no biases of the output projections: an import made them 0
        weights = {name: x for name, x in weights.items() if x.any() or not name.endswith("o_proj.bias")}
    dense_weights.check_weights(theirs.state_dict(), weights, f"--format {family} does not fit: the model")
    theirs.load_state_dict(weights, assign=True)
    theirs.tie_weights()
    return theirs


def _positions(model: LanguageModel) -> int:
    """max_position_embeddings: an imported model keeps its own, even if trained in shorter sequences."""
    source = saved_settings(model.tokenizer, SOURCE_CONFIG) if model.run.train.init_from is not None else None
    return max(model.context, (source or {}).get("max_position_embeddings") or 0)


def _own_config(model: LanguageModel) -> RunConfig:
    """A configuration without the data of the run: `tercet eval` and `generate` read the export like an import."""
    byte = isinstance(model.tokenizer, ByteTokenizer)
    values = {"run.name": model.run.run.name, **batch_settings(model.context)}
    values |= {"data.tokenizer": "byte" if byte else f"./{TOKENIZER}", "data.eos_token": model.run.data.eos_token}
    return load_config(flags=values | flatten_table({"model": model.config.model_dump(mode="json")})).config


# ------------------------------------------------------------ tokenizers


def save_tokenizer(tokenizer: Tokenizer, context: int, folder: Path) -> None:
    """Write what AutoTokenizer reads: the files that the tokenizer came with, unchanged; else new ones."""
    if isinstance(tokenizer, LibraryTokenizer) and "tokenizer_config.json" in tokenizer.files:
        for name, text in tokenizer.files.items():
            if name not in (GENERATION, SOURCE_CONFIG):  # these are the model's
                (folder / name).write_bytes(text.encode())
        return
    as_transformers_tokenizer(tokenizer, context).save_pretrained(folder)


def saved_settings(tokenizer: Tokenizer, name: str) -> dict[str, Any] | None:
    """A JSON file that came with the tokenizer; None: there is none."""
    text = tokenizer.files.get(name) if isinstance(tokenizer, LibraryTokenizer) else None
    with one_line_errors(TercetError, f"{name} next to {tokenizer.name} is damaged: copy it again, or delete it"):
        return None if text is None else dict(parse_json(text))


def special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """BOS, EOS and padding for config.json: those of the model that the tokenizer came with, if there is one."""
    source = saved_settings(tokenizer, SOURCE_CONFIG)
    if source is None:
        return {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.eos_id}
    return {name: source.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json that the tokenizer came with; generation also stops at the EOS of the training."""
    settings = saved_settings(tokenizer, GENERATION) or special_ids(tokenizer)
    ends = settings.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return settings if tokenizer.eos_id in ends else settings | {"eos_token_id": [*ends, tokenizer.eos_id]}


def as_transformers_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer for `save_pretrained` and AutoTokenizer. EOS is also the padding token."""
    end: str | None = BYTE_EOS
    if isinstance(tokenizer, ByteTokenizer):
        library = _byte_tokenizer()
    else:
        library = Library.from_str(tokenizer.files["tokenizer.json"])
        library.post_processor = None  # it may add BOS or EOS to a text, which training does not
        end = library.id_to_token(tokenizer.eos_id)
    return PreTrainedTokenizerFast(
        tokenizer_object=library,
        eos_token=end,
        pad_token=end,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        # bytes have no special tokens: <|endoftext|> is 13 of them
        split_special_tokens=isinstance(tokenizer, ByteTokenizer),
    )


def _byte_tokenizer() -> Library:
    """256 tokens, one per byte; byte 0 never occurs in text and is EOS."""
    vocabulary = {char: byte for byte, char in bytes_to_unicode().items() if byte != 0} | {BYTE_EOS: 0}
    library = Library(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(BYTE_EOS, special=True, normalized=False)])
    return library
