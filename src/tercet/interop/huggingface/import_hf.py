"""`tercet import hf`: convert a Hugging Face folder to config.toml, model.safetensors and tokenizer.json.

Continue training with: tercet train --config OUT/config.toml
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from tercet.config.keys import flatten_table
from tercet.config.load import load as load_config
from tercet.config.load import to_toml
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import SOURCE_CONFIG, TOKENIZER, TRANSFORMERS_FILES
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import CONFIG as OUR_CONFIG
from tercet.inference.arguments import WEIGHTS as OUR_WEIGHTS
from tercet.inference.calibrate import load_dense, plant_facts
from tercet.interop.huggingface import dense_weights
from tercet.interop.huggingface.attention import saved_model
from tercet.interop.huggingface.folder import (
    CONFIG,
    FolderError,
    LazyWeights,
    atomic_folder,
    check_folder,
    read_json,
    weight_files,
    write_tensors,
)
from tercet.interop.huggingface.tokenizer import BYTE_EOS
from tercet.interop.options import BLOCK_SPARSE, ImportOptions, attention_options, check_empty
from tercet.model.config import ModelConfig, RopeConfig
from tercet.model.transformer import Transformer
from tercet.parse import WRONG_VALUE, describe, first_problem, one_line_errors

# The default sequence length is at most this: 128k tokens do not fit on every GPU.
MAX_DEFAULT_SEQ_LEN = 4096
# Limits of the comparison with transformers: parameters in memory, floating-point operations for each of the models,
# tokens (a mask has their square), and the largest difference of logits by their root mean square, to which
# transformers' angles in float32 add.
MOST_PARAMETERS, MOST_OPERATIONS, MOST_TOKENS = 600e6, 5e12, 8_300
LARGEST_DIFFERENCE, DIFFERENCE_PER_TOKEN = 1e-3, 1e-6


@dataclass(frozen=True)
class Imported:
    folder: Path
    run: RunConfig
    exact_length: int | None  # equal to the dense model up to this many tokens; None: always equal
    restored: bool = False  # whether the folder had settings of an earlier export, which were taken
    notes: tuple[str, ...] = ()  # what was found, in words


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    seq_len: int | None = None,
    extend: int | None = None,
    seed: int = 1337,
    check: bool = True,
    **options: Any,
) -> Imported:
    """Import a dense model of one of dense_weights.FAMILIES, or a Tercet export, and write it to `out`.

    options: ImportOptions. attention is None for nsa or, if config.json has settings of Tercet, for those.
    extend: train at this length, with RoPE scaled to it. Comparisons are made before.
    check: compare a dense model's logits with those of transformers, and fail if they differ.
    """
    source, out = Path(source), Path(out)
    if source.suffix == ".gguf":
        with _unpacked(source) as folder:
            return import_model(folder, out, seq_len=seq_len, extend=extend, seed=seed, check=check, **options)
    if not source.is_dir():
        raise FolderError(f"{source} is not a folder: pass one with config.json and safetensors files")
    check_empty(out)
    check_folder(source)
    hf_config = read_json(source / CONFIG)
    exact_length, theirs, notes = None, None, list[str]()
    chosen = ImportOptions(**options)
    attention = chosen.attention
    ours = hf_config.get("model_type") == "tercet"
    restored = ours or (bool(hf_config.get("tercet")) and attention is None)
    if restored:
        _check_no_options(source, chosen, ours)
    if ours:
        model = _load_export(source, hf_config)
        config, weights = model.config, iter(model.state_dict().items())
    else:
        with quiet():
            theirs = dense_weights.read_config(hf_config)
        hf_config = theirs.to_dict()
        if restored:
            settings = dense_weights.saved_options(_saved_config(source, hf_config))
        else:
            settings = {name: getattr(chosen, name) for name in ("nsa", "compression", "compress_selected_keys")}
            settings |= attention_options(attention or "nsa", chosen.dense_below, chosen.selector)
        stored = LazyWeights(weight_files(source))
        if hf_config["tie_word_embeddings"] and not dense_weights.same_embeddings(stored):
            hf_config["tie_word_embeddings"] = False
            notes.append(
                "lm_head.weight differs from the embedding, although config.json says tie_word_embeddings=true: both "
                "were imported, as transformers does"
            )
        config = _dense_model_config(hf_config, settings, attention)
        dense_weights.check_weights(config, theirs.model_type, stored.shapes)
        selectors = _saved_selectors(source, config) if restored else {}
        torch.manual_seed(seed)  # for φ or a selector, which the checkpoint does not have
        weights = dense_weights.convert(config, stored, selectors, cover=chosen.cover, gate_logit=chosen.gate_logit)
        windows = dense_weights.sliding_windows(hf_config)
        exact_length = dense_weights.exact_length(config, windows, chosen.cover)
    with _wrong_values(source / CONFIG):
        context = int(hf_config.get("max_position_embeddings") or MAX_DEFAULT_SEQ_LEN)
    run = _run_config(source, out, config, seq_len or min(context, MAX_DEFAULT_SEQ_LEN), seed)
    written = run
    if extend is not None:
        written = _run_config(source, out, _extended(config, context, extend), extend, seed)
        notes.append(f"RoPE is scaled from {context:,} to {extend:,} tokens: train the model before you use it")
    with atomic_folder(out) as folder:
        _write(source, folder, written, weights)
        if theirs is not None:
            skipped = "not compared with transformers, as --no_check says"
            notes.append(_compare(source, theirs, folder, config, windows) if check else skipped)
        if check and theirs is not None and not config.spec("nsa").gated and (source / TOKENIZER).is_file():
            notes += _compare_sparse(source, folder, run, windows)
    return Imported(out, written, exact_length, restored, tuple(notes))


def batch_settings(seq_len: int) -> dict[str, int]:
    """Sequences of this length: about 4,096 tokens in a pass, and 65,536 in a step."""
    batch = max(1, MAX_DEFAULT_SEQ_LEN // seq_len)
    tokens = batch * seq_len
    return {
        "data.seq_len": seq_len,
        "train.micro_batch": batch,
        "train.tokens_per_step": tokens * max(1, 65536 // tokens),
    }


@contextmanager
def _unpacked(file: Path) -> Iterator[Path]:
    """A GGUF file as a folder, by transformers' own loader."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"{file}: reading GGUF files needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as temporary, quiet():
        model, tokenizer = load_dense(file, "cpu")
        folder = Path(temporary) / file.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def _check_no_options(source: Path, options: ImportOptions, ours: bool) -> None:
    """Refuse options for an export, which has its own. ours: its weights are not those of a dense model."""
    if unused := options.changed():
        fix = "" if ours else ", or pass --attention to convert its dense weights again"
        raise UsageError(f"{source} is a Tercet export, whose options are fixed: leave out {', '.join(unused)}{fix}")


def _saved_selectors(source: Path, config: ModelConfig) -> Mapping[str, Tensor]:
    """The learned selectors that an export stored next to the weights of the family."""
    if config.selector != "learned":
        return {}
    path = source / dense_weights.SELECTOR_WEIGHTS
    if not path.is_file():
        raise FolderError(
            f"{source} has no {path.name}, but config.json says tercet.selector=learned: copy that file too, or pass "
            "--attention block-sparse --selector learned for new selectors"
        )
    selectors = LazyWeights([path])
    dense_weights.check_selectors(config, selectors.shapes)
    return selectors


def _dense_model_config(hf_config: dict[str, Any], options: dict[str, Any], attention: str | None) -> ModelConfig:
    try:
        return dense_weights.model_config(hf_config, options)
    except KeyError as error:
        raise FolderError(f"config.json has no {error.args[0]}: it is not a config of this model family") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(map(str, first["loc"]))
        if attention and (message.startswith("attention=") or where == "attention"):
            raise UsageError(f"--attention {attention}: {message}") from None
        raise FolderError(": ".join(filter(None, ("config.json", where, message)))) from None
    except WRONG_VALUE as error:
        raise FolderError(f"config.json has a value of the wrong type ({describe(error)}): copy it again") from None


def _wrong_values(path: Path) -> AbstractContextManager[None]:
    return one_line_errors(FolderError, f"{path} has a value of the wrong type: copy the model again")


def _saved_config(source: Path, hf_config: dict[str, Any]) -> ModelConfig:
    sizes = (hf_config.get(f"num_{name}", 0) for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    try:
        return saved_model(hf_config.get("tercet") or {}, *sizes)
    except ValidationError as error:
        raise FolderError(f"{source / CONFIG}: {first_problem(error, 'tercet')}") from None


def _load_export(source: Path, hf_config: dict[str, Any]) -> Transformer:
    config = _saved_config(source, hf_config)
    stored = dict(LazyWeights(weight_files(source)))
    layers = len({name.split(".")[2] for name in stored if name.startswith("model.blocks.")})
    if layers != config.layers:
        raise FolderError(f"{source}: config.json says {config.layers} layers, the weights {layers}: copy it again")
    with torch.device("meta"):
        model = Transformer(config)
    weights = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise FolderError(f"{source}: its weights do not fit its config.json ({message[:300]})") from None
    return model


def _extended(config: ModelConfig, context: int, length: int) -> ModelConfig:
    """The model with RoPE scaled from `context` tokens to `length`."""
    if length <= context:
        raise UsageError(f"--extend {length} is not above max_position_embeddings={context}: use --seq_len")
    if config.rope_scaling != 1 or config.rope_max_wavelength:
        raise UsageError(
            f"--extend {length}: RoPE of this model is scaled already (rope_scaling={config.rope_scaling}, "
            f"rope_max_wavelength={config.rope_max_wavelength}): import it with --seq_len, and set model.rope_scaling"
        )
    rope = RopeConfig(type="yarn", original_length=context)
    return config.model_copy(update={"rope_scaling": length / context, "rope": rope})


def _run_config(source: Path, out: Path, config: ModelConfig, seq_len: int, seed: int) -> RunConfig:
    sparse = [name for name in config.attention_names if name in (BLOCK_SPARSE, "nsa")]
    kind = sparse[0] if sparse else "-".join(sorted(set(config.attention_names)))
    values: dict[str, Any] = {
        "run.name": f"{source.resolve().name}-{kind}",
        "run.seed": seed,
        **batch_settings(seq_len),
        "train.init_from": str((out / OUR_WEIGHTS).resolve()),
        "train.init_state": "weights",
    }
    values |= flatten_table({"model": config.model_dump(mode="json")})
    tokenizer = source / TOKENIZER
    with _wrong_values(tokenizer):
        copy_tokenizer = tokenizer.is_file() and not _is_byte_tokenizer(tokenizer)
    if copy_tokenizer:
        values["data.tokenizer"] = str((out / TOKENIZER).resolve())
        values["data.eos_token"] = _eos_token(source)
    return load_config(flags=values).config


def _write(source: Path, folder: Path, run: RunConfig, weights: Iterator[tuple[str, Tensor]]) -> None:
    with torch.device("meta"):
        state = Transformer(run.model).state_dict()
    write_tensors(folder / OUR_WEIGHTS, {name: tensor.shape for name, tensor in state.items()}, weights)
    if Path(run.data.tokenizer).name == TOKENIZER:
        for name in (TOKENIZER, *TRANSFORMERS_FILES):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        shutil.copyfile(source / CONFIG, folder / SOURCE_CONFIG)
    (folder / OUR_CONFIG).write_text(to_toml(run), encoding="utf-8")


def _is_byte_tokenizer(tokenizer: Path) -> bool:
    """Whether this is the byte tokenizer written by an export."""
    model = read_json(tokenizer).get("model", {})
    vocabulary = model.get("vocab", {})
    return not model.get("merges") and len(vocabulary) == 256 and vocabulary.get(BYTE_EOS) == 0


def _eos_token(source: Path) -> str:
    """The EOS token in tokenizer_config.json; empty to look for one of the usual names."""
    path = source / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings and progress bars of transformers."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
def _compare(
    source: Path, theirs: PretrainedConfig, folder: Path, config: ModelConfig, windows: Sequence[int | None]
) -> str:
    """Compare logits of transformers and of the imported weights, with dense attention in place of sparse. Says what
    was compared; raises if they differ."""
    reach = max([0, *filter(None, windows), config.rope.original_length if config.rope.type != "linear" else 0])
    lengths, layers = _affordable(config, reach)
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab_size, (1, length), generator=random) for length in lengths]
    # at the start, at the end and in between: all logits of a long sequence would be too many
    places = [torch.linspace(0, length - 1, min(length, 64)).long() for length in lengths]
    expected = _expected_logits(source, theirs, layers, texts, places)
    model = dense_weights.dense_model(config, windows[:layers], LazyWeights([folder / OUR_WEIGHTS]))
    worst = 0.0
    for text, place, logits in zip(texts, places, expected, strict=True):
        difference = (model.logits(model.hidden(text)[:, place]) - logits).abs().max() / logits.square().mean().sqrt()
        found = 0.0 if difference.isnan() and not logits.any() else difference.item()  # of weights that are all 0
        limit = LARGEST_DIFFERENCE + DIFFERENCE_PER_TOKEN * text.shape[1]
        if not found <= limit:
            raise TercetError(
                f"the import of {source} differs from what transformers computes: logits of {text.shape[1]:,} tokens "
                f"differ by {found:.2g} of their size, more than {limit:.2g}, so nothing was written: report it with "
                "the model's config.json"
            )
        worst = max(worst, found)
    share = "" if layers == config.layers else f", in the first {layers} of {config.layers} layers"
    short = "" if lengths[-1] > reach else f" (not the {reach:,} of its window or original context: too expensive here)"
    kinds = zip(config.attention_kinds, windows, strict=True)
    sparse = any(kind != "dense" and window is None for kind, window in kinds)
    dense = ", with dense attention in place of sparse" if sparse else ""
    return (
        f"compared with transformers{dense}{share}: logits of {len(lengths)} sequences of up to {lengths[-1]:,} tokens"
        f"{short} differ by at most {worst:.1g} of their size"
    )


@torch.no_grad()
def _compare_sparse(source: Path, folder: Path, run: RunConfig, windows: Sequence[int | None]) -> list[str]:
    """A table of what reading blocks costs: facts found in long texts and loss, of the dense and the sparse model."""
    config, gpu = run.model, torch.cuda.is_available()
    length = 2 * max(config.nsa.selected_tokens, config.dense_below)
    weights = LazyWeights([folder / OUR_WEIGHTS])
    size = sum(math.prod(shape) for shape in weights.shapes.values())
    if "nsa" not in config.attention_kinds or config.selector == "learned" or run.data.seq_len < length:
        return []
    if size > MOST_PARAMETERS and not gpu:
        return ["facts and loss were not compared with the dense model: too expensive without a GPU"]
    try:
        documents = plant_facts(AutoTokenizer.from_pretrained(source), length=length, count=16 if gpu else 4)
        if (largest := max(max(document.tokens) for document in documents)) >= config.vocab_size:
            raise UsageError(f"its tokenizer has token {largest}, its vocabulary {config.vocab_size} tokens")
    except (OSError, ValueError, UsageError) as error:  # a tokenizer that transformers does not know, or too few tokens
        return [f"facts and loss were not compared with the dense model: {describe(error)}"]
    lines, first = [f"{'':24}{'facts':>10}{'loss':>8}   in texts of {length:,} tokens"], 0.0
    model = dense_weights.dense_model(config, windows, weights).to("cuda" if gpu else "cpu")
    for name in ("dense", f"{config.nsa.select_count} blocks of {config.nsa.select_block}, {config.selector}"):
        if name != "dense":
            sparse = Transformer(config).to(model.embedding.weight.device)
            sparse.load_state_dict(model.state_dict())
            model = sparse.eval()
        found, losses = 0, []
        for document in documents:
            tokens = torch.tensor([document.tokens], device=model.embedding.weight.device)
            hidden, answer = model.hidden(tokens), slice(document.answer.start, document.answer.stop)
            guess = model.logits(hidden[:, answer.start - 1 : answer.stop - 1]).argmax(-1)
            found += torch.equal(guess, tokens[:, answer])
            text = slice(answer.start - 320, answer.start - 64)
            logits = model.logits(hidden[0, text.start - 1 : text.stop - 1]).float()
            losses.append(F.cross_entropy(logits, tokens[0, text]).item())
        loss = sum(losses) / len(losses)
        change = f"   {loss / first - 1:+.1%}" if first else ""
        first = first or loss
        lines.append(f"{name:24}{f'{found} of {len(documents)}':>10}{loss:8.3f}{change}")
    return lines


def _expected_logits(
    source: Path, config: PretrainedConfig, layers: int, texts: Sequence[Tensor], places: Sequence[Tensor]
) -> list[Tensor]:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            ).eval()
            return [model(text, logits_to_keep=place).logits for text, place in zip(texts, places, strict=True)]
    except Exception as error:  # of many kinds
        raise FolderError(
            f"{source} cannot be compared with what transformers computes, which fails ({describe(error)}): copy the "
            "model again or, to import it without this check, pass --no_check"
        ) from None


def _affordable(config: ModelConfig, reach: int) -> tuple[list[int], int]:
    """Lengths of the sequences to compare, if possible one longer than `reach`, and how many of the layers."""
    heads = config.head_dim * config.heads
    layer = config.dim * (2 * heads + 2 * config.head_dim * config.kv_heads + 3 * config.ffn_dim)
    length = min(max(128, reach + 32), MOST_TOKENS)
    while (operations := 2 * length * (layer + 2 * length * heads)) > MOST_OPERATIONS and length > 128:
        length //= 2
    others = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    layers = min((MOST_PARAMETERS - others) // layer, MOST_OPERATIONS // operations, config.layers)
    return [16, 64, length], max(1, int(layers))
