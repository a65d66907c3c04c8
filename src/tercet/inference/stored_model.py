"""A model on disk: its configuration, step and tokenizer, without loading its weights or torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tercet.config.load import load as load_config
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import Tokenizer, load_tokenizer
from tercet.inference.arguments import CONFIG, ModelError, check_model, has_weights
from tercet.parse import one_line_errors
from tercet.train import manifest, resume


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
        return StoredModel(load_config(file=path / CONFIG).config, path, 0)
    found = _checkpoint(path, verify)
    with one_line_errors(ModelError, f"{found.path}: {manifest.RUN_STATE} is damaged: restore it from a backup"):
        step = int(found.run_state["step"])
        return StoredModel(resume.saved_config(found).at_step(step), found.path, step)


def stored_tokenizer(run: RunConfig, source: Path | None) -> Tokenizer:
    """The tokenizer of a model's training data: the copy next to its weights if there is one."""
    data, copy = run.data, None
    if source is not None and data.tokenizer != "byte":
        copy = source / manifest.TOKENIZER if has_weights(source) else manifest.saved_tokenizer(source)
    return load_tokenizer(str(copy) if copy is not None and copy.is_file() else data.tokenizer, data.eos_token)


def _checkpoint(path: Path, verify: bool) -> resume.FoundCheckpoint:
    inside = [folder for folder in (path / "checkpoints", path) if manifest.complete_checkpoints(folder)]
    # `auto` skips damaged checkpoints of a run; an explicitly named checkpoint must be intact.
    found = resume.find_checkpoint("auto" if inside else str(path), inside[0] if inside else path, verify=verify)
    assert found is not None
    return found
