"""What `tercet generate` and `tercet eval` check and read without torch: arguments, the model's folder and tokenizer,
and prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from tercet.config.data import DataConfig
from tercet.config.flags import Arg
from tercet.config.load import load
from tercet.config.schema import RunConfig
from tercet.data.chat import ChatError
from tercet.data.paths import SUFFIXES, check_paths
from tercet.data.tokenizers import LibraryTokenizer, Tokenizer, load_tokenizer
from tercet.errors import UsageError
from tercet.parse import one_line_errors
from tercet.train import manifest, resume

if TYPE_CHECKING:
    from torch import Tensor


Run = Annotated[Path, Arg("A run folder (its newest checkpoint), a checkpoint, or a folder of imported weights.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Arg("Device to run on.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Arg("Weights and arithmetic; auto: bfloat16 on a GPU if the model was trained in bfloat16, else float32."),
]
DataOf = Annotated[
    Path | None,
    Arg("Read the validation text of this run, to compare models that were trained with different data or seeds."),
]
RulerTask = Literal[
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe",
]  # fmt: skip

WEIGHTS = "model.safetensors"
CONFIG = "config.toml"


class ModelError(UsageError):
    """A model that cannot be loaded."""


def check_model(path: str | Path) -> Path:
    """The folder of a model, without `~`. Raises if it has neither a checkpoint nor imported weights."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"{path} does not exist: pass a run folder, a checkpoint, or a folder of imported weights")
    if has_weights(path) or (path / manifest.MANIFEST).is_file() or _checkpoints(path):
        return path
    if manifest.step_of(path) is None and (path / "config.json").is_file():
        raise ModelError(
            f"{path} is a Hugging Face folder: load it with transformers, or convert it with "
            f"`tercet import hf {path} OUT`"
        )
    unfinished = [p.name for p in path.glob("**/.writing-*")]
    more = f" ({unfinished[0]} is unfinished)" if unfinished else ""
    raise ModelError(
        f"{path} has no checkpoint{more}: pass a run folder with checkpoints/, a checkpoint folder with "
        f"{manifest.MANIFEST}, or a folder with {CONFIG} and {WEIGHTS}"
    )


def has_weights(path: Path) -> bool:
    """Whether this is a folder of weights with a config.toml, as `tercet import hf` writes."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def _checkpoints(path: Path) -> Path | None:
    """The folder of complete checkpoints: `checkpoints` in a run folder, or the path itself."""
    return next((folder for folder in (path / "checkpoints", path) if manifest.complete_checkpoints(folder)), None)


def at_least_one(**values: int | Sequence[int] | None) -> None:
    """Raise for the first value below 1. None stands for a default."""
    for name, value in values.items():
        for number in value if isinstance(value, Sequence) else [] if value is None else [value]:
            if number < 1:
                raise UsageError(f"{name}={number} must be at least 1")


def check_known(flag: str, given: Sequence[str], known: Iterable[str], *, may_be_empty: bool = False) -> None:
    """Raise for the first name that is not one of the known ones, and if there is none."""
    if unknown := [name for name in given if name not in known]:
        raise UsageError(f"{flag} {unknown[0]} is unknown: pick from {', '.join(known)}")
    if not given and not may_be_empty:
        raise UsageError(f"{flag} is empty: pick from {', '.join(known)}")


def own_text(path: Path, text_field: str = "text") -> DataConfig:
    """All the text of --data in its order, once: a file or a folder of text, jsonl, parquet or shards."""
    path = path.expanduser()
    check_paths([str(path)])
    names = [file.name for file in path.rglob("*")] if path.is_dir() else [path.name]
    kinds = [kind for kind in ("jsonl", "parquet") if any(name.endswith(SUFFIXES[kind]) for name in names)]
    if (path / "manifest.json").is_file():
        kinds = ["shards"]
    if len(kinds) > 1:
        raise UsageError(f"--data {path} has both {' and '.join(kinds)} files: name one file, or a folder of one kind")
    source = kinds[0] if kinds else "text"
    if source in ("text", "shards") and text_field != "text":
        raise UsageError(f"--text-field {text_field} has no effect: --data {path} is {source}, without fields; drop it")
    values = {"source": source, "path": str(path), "text_field": text_field}
    return DataConfig.model_validate(values | {"validation_fraction": 0, "shuffle": False, "exhaustion": "stop"})


def read_prompt_file(path: Path, flag: str = "--prompt_file") -> str:
    """The text of a file that a flag names; - is standard input."""
    try:
        if str(path) != "-":
            return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path} is not UTF-8 text (byte {error.start}): convert it") from None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text (byte {error.start}): convert it") from None


@dataclass(frozen=True)
class StoredModel:
    run: RunConfig
    source: Path  # a checkpoint, or a folder of weights
    step: int

    @property
    def context(self) -> int:
        """The sequence length it was trained with."""
        return self.run.data.seq_len


def find_model(path: str | Path, *, verify: bool = False) -> StoredModel:
    """The model of a run folder (its newest checkpoint), a checkpoint, or a folder of weights.

    verify: check the checkpoint's checksums, and skip a damaged one of a run folder.
    """
    path = check_model(path)
    if has_weights(path):
        return StoredModel(load(file=path / CONFIG).config, path, 0)
    folder = _checkpoints(path)
    # `auto` skips damaged checkpoints of a run; an explicitly named checkpoint must be intact.
    found = resume.find_checkpoint("auto" if folder else str(path), folder or path, verify=verify)
    assert found is not None
    with one_line_errors(ModelError, f"{found.path}: {manifest.RUN_STATE} is damaged: restore it from a backup"):
        step = int(found.run_state["step"])
        return StoredModel(resume.saved_config(found).at_step(step), found.path, step)


def stored_tokenizer(run: RunConfig, source: Path | None) -> Tokenizer:
    """The tokenizer of a model's training data: the copy next to its weights if there is one."""
    data, copy = run.data, None
    if source is not None and data.tokenizer != "byte":
        copy = source / manifest.TOKENIZER if has_weights(source) else manifest.saved_tokenizer(source)
    return load_tokenizer(str(copy) if copy is not None and copy.is_file() else data.tokenizer, data.eos_token)


Conversation: TypeAlias = Sequence[Mapping[str, Any]]  # messages: {"role": ..., "content": ...}
Prompts: TypeAlias = Union[
    str, Sequence[int], Conversation, Sequence[str], Sequence[Sequence[int]], Sequence[Conversation], "Tensor"
]


class PromptError(UsageError):
    """An invalid prompt or generation option."""


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt, not a batch."""
    if not isinstance(prompts, Sequence):
        return prompts.dim() == 1
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, Mapping)))


def end_tokens(prompts: Prompts, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end an answer: EOS, and what ends the assistant's turn in a conversation."""
    if tokenizer is None:
        return ()
    first = prompts[0] if isinstance(prompts, Sequence) and len(prompts) else None
    chat = _is_conversation(prompts) or _is_conversation(first)
    turn_end = tokenizer.turn_end if chat and isinstance(tokenizer, LibraryTokenizer) else None
    return (tokenizer.eos_id,) if turn_end in (None, tokenizer.eos_id) else (tokenizer.eos_id, turn_end)


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def tokenize_prompts(prompts: Prompts, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The tokens of every prompt: at least one each, all within the vocabulary."""
    listed = prompts if isinstance(prompts, Sequence) else prompts.tolist()
    batch = [listed] if is_single(prompts) else list(listed)
    if not batch:
        raise PromptError("no prompt given: give at least one")
    names = _names(len(batch))
    rows = [_tokenize(prompt, name, tokenizer) for prompt, name in zip(batch, names, strict=True)]
    for row, name in zip(rows, names, strict=True):
        _check_tokens(row, name, vocab_size)
    return rows


def required_context(rows: list[list[int]], max_new_tokens: int, context: int | None) -> int:
    """Tokens of the longest prompt plus its answer; raises PromptError if that exceeds `context`."""
    sizes = [len(row) for row in rows]
    longest = max(sizes)
    needed = longest + max_new_tokens
    if context is not None and needed > context:
        name = _names(len(rows))[sizes.index(longest)]
        fits = f"ask for at most {context - longest} new tokens, " if longest < context else "shorten it, "
        raise PromptError(
            f"{name} has {longest} tokens; with max_new_tokens={max_new_tokens} that makes {needed}, "
            f"over the context of {context}: {fits}or allow it with context={needed} (--context {needed})"
        )
    return needed


def _names(count: int) -> list[str]:
    return ["the prompt"] if count == 1 else [f"prompt {i}" for i in range(count)]


def _tokenize(prompt: object, name: str, tokenizer: Tokenizer | None) -> list[int]:
    if _is_conversation(prompt):
        prompt = _render(prompt, name, tokenizer)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"{name} is text, but there is no tokenizer: give token IDs, or tokenizer=…")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{name} is not valid UTF-8: character {error.start} ({prompt[error.start]!r}) is a lone surrogate; "
                "give UTF-8 text"
            ) from None
        return tokenizer.encode(prompt, specials=True)
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise PromptError(f"{name} is {type(prompt).__name__}: give text or a list of token IDs")


def _render(messages: Any, name: str, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or tokenizer.chat is None:
        which = "there is no tokenizer" if tokenizer is None else f"tokenizer {tokenizer.name} has no chat template"
        raise PromptError(
            f"{name} is a conversation, but {which}: put tokenizer_config.json or chat_template.jinja next to its "
            "tokenizer.json, or give plain text"
        )
    try:
        return tokenizer.chat.render(list(messages), answer=True, today=True)[0]
    except ChatError as error:
        raise PromptError(f"{name} cannot be rendered: {error}") from None


def _check_tokens(row: list[int], name: str, vocab_size: int) -> None:
    if not row:
        raise PromptError(f"{name} is empty: give at least one token")
    for position, token in enumerate(row):
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{name}: token {token} at position {position} is outside the vocabulary, 0 to {vocab_size - 1}: "
                "is it from another tokenizer?"
            )
