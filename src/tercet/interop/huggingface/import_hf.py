"""`tercet import hf`: convert a Hugging Face folder to config.toml, model.safetensors and tokenizer.json."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

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
from tercet.interop.huggingface.folder import CONFIG, FolderError, atomic_folder, read_json, read_weights
from tercet.interop.huggingface.model import TercetConfig
from tercet.interop.huggingface.support import saved_model
from tercet.interop.options import ImportOptions, attention_options, check_empty
from tercet.model.config import ModelConfig, RopeConfig
from tercet.model.transformer import Transformer
from tercet.parse import describe, first_problem, one_line_errors

BYTE_EOS = "<|endoftext|>"
# The default sequence length is at most this: 128k tokens do not fit on every GPU.
MAX_DEFAULT_SEQ_LEN = 4096
# Limits of the comparison with transformers: parameters in memory, tokens (a mask has their square), and the largest
# difference of logits by their root mean square, to which transformers' angles in float32 add.
MOST_PARAMETERS, MOST_TOKENS = 600e6, 8_300
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
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Imported:
    """Import a dense model of one of dense_weights.FAMILIES, or a Tercet export, and write it to `out`.

    options: ImportOptions. attention is None for nsa or, if config.json has settings of Tercet, for those.
    extend: train at this length, with RoPE scaled to it. Comparisons are made before.
    check: compare a dense model's logits with those of transformers, and fail if they differ.
    progress: called with what takes long, when it begins.
    """
    source, out = Path(source), Path(out)
    if source.suffix == ".gguf":
        with _unpacked(source) as folder:
            options |= {"seq_len": seq_len, "extend": extend, "seed": seed, "check": check, "progress": progress}
            return import_model(folder, out, **options)
    check_empty(out)
    hf_config, stored, chosen = read_json(source / CONFIG), read_weights(source), ImportOptions(**options)
    ours = hf_config.get("model_type") == "tercet"
    restored = ours or (bool(hf_config.get("tercet")) and chosen.attention is None)
    if restored and (unused := chosen.changed()):
        fix = "" if ours else ", or pass --attention to convert its dense weights again"
        raise UsageError(f"{source} is a Tercet export, whose options are fixed: leave out {', '.join(unused)}{fix}")
    exact_length, theirs, notes = None, None, list[str]()
    if ours:
        config, weights = _open_export(hf_config, stored)
    else:
        theirs = dense_weights.read_config(hf_config)
        config = _model_config(source, theirs, chosen, restored)
        stored = _checked(source, theirs, stored, config if restored else None)
        torch.manual_seed(seed)  # for φ or a selector, which the checkpoint does not have
        weights = dict(dense_weights.convert(config, stored, chosen.gate_logit))
        windows = dense_weights.sliding_windows(theirs)
        exact_length = dense_weights.exact_length(config, windows)
    with one_line_errors(FolderError, f"{source / CONFIG} has a value of the wrong type: copy the model again"):
        context = int((hf_config if theirs is None else theirs.to_dict()).get("max_position_embeddings") or 4096)
    run = _run_config(source, out, config, seq_len or min(context, MAX_DEFAULT_SEQ_LEN), seed)
    if config.selector == "learned" and not restored and (none := run.nothing_to_choose):
        raise UsageError(f"--selector learned has nothing to choose: {none.reason}; import with a longer --seq_len, or "
                         "other --nsa.select_count and --dense_below")  # fmt: skip
    written = run
    if extend is not None:
        written = _run_config(source, out, _extended(config, context, extend), extend, seed)
        notes.append(f"RoPE is scaled from {context:,} to {extend:,} tokens: train the model before you use it")
    with atomic_folder(out) as folder:
        _write(source, folder, written, weights)
        if theirs is not None:
            if check:
                progress("comparing logits with transformers …")
            skipped = "not compared with transformers, as --no_check says"
            notes.append(_compare(source, theirs, folder, config, windows) if check else skipped)
        if check and theirs is not None and not config.spec("nsa").gated and (source / TOKENIZER).is_file():
            notes += _compare_sparse(source, folder, run, windows, progress)
    return Imported(out, written, exact_length, restored, tuple(notes))


def batch_settings(seq_len: int) -> dict[str, int]:
    """Sequences of this length: about 4,096 tokens in a pass, and 65,536 in a step."""
    batch = max(1, MAX_DEFAULT_SEQ_LEN // seq_len)
    tokens = batch * seq_len
    step = tokens * max(1, 65536 // tokens)
    return {"data.seq_len": seq_len, "train.micro_batch": batch, "train.tokens_per_step": step}


@contextmanager
def _unpacked(file: Path) -> Iterator[Path]:
    """A GGUF file as a folder, by transformers' own loader."""
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"{file}: reading GGUF files needs the package gguf: pip install gguf")
    with tempfile.TemporaryDirectory() as temporary:
        model, tokenizer = load_dense(file, "cpu")
        folder = Path(temporary) / file.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def _open_export(hf_config: dict[str, Any], stored: dict[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """An export of Tercet, or what transformers made of it."""
    with _wrong_values():
        config = TercetConfig.from_dict(hf_config).model()
    weights = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    state = dense_weights.empty_state(config)
    dense_weights.check_weights(state, weights, "the export")
    return config, {name: weights[name] for name in state}


def _model_config(source: Path, theirs: PretrainedConfig, chosen: ImportOptions, restored: bool) -> ModelConfig:
    if restored:
        with _wrong_values():
            saved = saved_model(theirs)
        if "nsa" in saved.attention_kinds and saved.spec("nsa").gated:
            raise UsageError(f"config.json: tercet.gate={saved.gate}, but a dense model's weights need gate=none; to "
                             "convert them, pass --attention")  # fmt: skip
        settings = dict(saved)
    else:
        settings = {"nsa": chosen.nsa, **attention_options(chosen)}
    with _wrong_values():
        try:
            return dense_weights.model_config(theirs, settings)
        except ValidationError as error:
            raise FolderError(f"{source}: {first_problem(error)}") from None


def _wrong_values() -> AbstractContextManager[None]:
    return one_line_errors(FolderError, "config.json has a value of the wrong type: copy it again")


def _checked(
    source: Path, theirs: PretrainedConfig, stored: dict[str, Tensor], config: ModelConfig | None
) -> dict[str, Tensor]:
    """The weights. config: with those of its learned selectors, which an export stored next to them."""
    expected = dense_weights.meta_model(theirs).state_dict()
    if theirs.tie_word_embeddings:
        both = [stored.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        embedding, head = (None if x is None else x.float() for x in both)
        if embedding is not None and head is not None and not torch.equal(embedding, head):
            raise FolderError(
                f"{source}: lm_head.weight differs from model.embed_tokens.weight, but config.json says "
                "tie_word_embeddings=true: set that to false to use both, or remove lm_head.weight"
            )
        stored["lm_head.weight"] = expected["lm_head.weight"]
    given = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    dense_weights.check_weights(expected, given, "the checkpoint")
    if config is None or config.selector != "learned":
        return given
    selectors = read_weights(source, dense_weights.SELECTOR_WEIGHTS)
    expected = {name: x for name, x in dense_weights.empty_state(config).items() if ".selector." in name}
    dense_weights.check_weights(expected, selectors, dense_weights.SELECTOR_WEIGHTS)
    return given | selectors


def _extended(config: ModelConfig, context: int, length: int) -> ModelConfig:
    """The model with RoPE scaled from `context` tokens to `length`."""
    if length <= context:
        raise UsageError(f"--extend {length} is not above max_position_embeddings={context}: use --seq_len")
    if config.rope_scaling != 1 or config.rope_max_wavelength:
        raise UsageError(f"--extend {length}: its RoPE is scaled already (rope_scaling={config.rope_scaling:g}): "
                         "import it with --seq_len, and set model.rope_scaling")  # fmt: skip
    rope = RopeConfig("yarn", context)
    return config.model_copy(update={"rope_scaling": length / context, "rope": rope})


def _run_config(source: Path, out: Path, config: ModelConfig, seq_len: int, seed: int) -> RunConfig:
    kind = "-".join(sorted(set(config.attention_names)))
    values: dict[str, Any] = {
        "run.name": f"{source.resolve().name}-{kind}",
        "run.seed": seed,
        **batch_settings(seq_len),
        "train.init_from": str((out / OUR_WEIGHTS).resolve()),
        "train.init_state": "weights",
    }
    values |= flatten_table({"model": config.model_dump(mode="json")})
    if (source / TOKENIZER).is_file():
        with one_line_errors(FolderError, f"{source / TOKENIZER} is damaged: copy the model again"):
            if not _is_byte_tokenizer(source / TOKENIZER):
                values |= {"data.tokenizer": str((out / TOKENIZER).resolve()), "data.eos_token": _eos_token(source)}
    return load_config(flags=values).config


def _write(source: Path, folder: Path, run: RunConfig, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        weights[name] = tensor.float().contiguous()
        if not weights[name].isfinite().all():
            raise FolderError(f"{source}: {name} has NaN or infinite weights: copy or train the model again")
    save_file(weights, folder / OUR_WEIGHTS, {"format": "pt"})
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


def _affordable_layers(config: ModelConfig) -> int:
    """How many layers to compare."""
    heads = config.head_dim * config.heads
    layer = config.dim * (2 * heads + 2 * config.head_dim * config.kv_heads + 3 * config.ffn_dim)
    others = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return max(1, min(int((MOST_PARAMETERS - others) // layer), config.layers))


@torch.no_grad()
def _compare(
    source: Path, theirs: PretrainedConfig, folder: Path, config: ModelConfig, windows: Sequence[int | None]
) -> str:
    """Compare logits of transformers and of the imported weights, with dense attention in place of sparse. Says what
    was compared; raises if they differ."""
    reach = max([0, *filter(None, windows), config.rope.original_length if config.rope.type != "linear" else 0])
    length, layers = min(max(128, reach + 32), MOST_TOKENS), _affordable_layers(config)
    theirs.num_hidden_layers = layers
    if getattr(theirs, "layer_types", None):
        theirs.layer_types = theirs.layer_types[:layers]
    text = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    places = torch.linspace(0, length - 1, 64).long()  # all logits of a long sequence would be too many
    try:
        original = AutoModelForCausalLM.from_pretrained(
            source, config=theirs, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        expected = original(text, logits_to_keep=places).logits
    except Exception as error:  # of many kinds
        raise FolderError(
            f"{source} cannot be compared with what transformers computes, which fails ({describe(error)}): copy the "
            "model again or, to import it without this check, pass --no_check"
        ) from None
    model = dense_weights.dense_model(config, windows[:layers], read_weights(folder))
    logits = model.logits(model.hidden(text)[:, places])
    difference = ((logits - expected).abs().max() / expected.square().mean().sqrt().clamp(min=1e-30)).item()
    limit = LARGEST_DIFFERENCE + DIFFERENCE_PER_TOKEN * length
    if not difference <= limit:
        raise TercetError(
            f"the import of {source} differs from what transformers computes: logits of {length:,} tokens differ by "
            f"{difference:.2g} of their size, more than {limit:.2g}, so nothing was written: report it with the "
            "model's config.json"
        )
    share = "" if layers == config.layers else f", in the first {layers} of {config.layers} layers"
    short = "" if length > reach else f" (not the {reach:,} of its window or original context: too expensive here)"
    sparse = any(kind != "dense" and w is None for kind, w in zip(config.attention_kinds, windows, strict=True))
    dense = ", with dense attention in place of sparse" if sparse else ""
    return (
        f"compared with transformers{dense}{share}: logits of {length:,} tokens{short} differ by at most "
        f"{difference:.1g} of their size"
    )


@torch.no_grad()
def _compare_sparse(
    source: Path, folder: Path, run: RunConfig, windows: Sequence[int | None], progress: Callable[[str], None]
) -> list[str]:
    """A table of what reading blocks costs: facts found in long texts and loss, of the dense and the sparse model."""
    config, gpu = run.model, torch.cuda.is_available()
    length = 2 * max(config.nsa.selected_tokens, config.dense_below)
    weights = read_weights(folder)
    size = sum(x.numel() for x in weights.values())
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
        for i, document in enumerate(documents):
            progress(f"comparing facts and loss, {name}: text {i + 1} of {len(documents)} …")
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
