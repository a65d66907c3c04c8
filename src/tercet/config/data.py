"""The `data` section: sources, tokenizer, packing, validation split. Only describes the data; opens no files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tercet.config.sections import Section

SourceName = Literal["python-source", "synthetic", "text", "jsonl", "parquet", "shards", "fineweb-edu", "mixture"]
FILE_SOURCES = ("text", "jsonl", "parquet", "shards")
SHORTEST_EXERCISE = 256  # tokens; shorter pieces of text get no retrieval exercise
SHUFFLE_WARNING_BYTES = 4 << 30  # warn when a shuffle_sequences block needs more
BYTE_VOCAB = 256


def bytes_per_token(vocab_size: int) -> int:
    """Bytes per token, and per target, in a block of shuffled sequences: signed, since -100 marks ignored targets."""
    return 2 if vocab_size <= BYTE_VOCAB else 4


def looks_like_path(tokenizer: str) -> bool:
    """Whether a data.tokenizer is a path rather than a Hub name, whether or not it exists."""
    return tokenizer.endswith(".json") or tokenizer.startswith((".", "~", os.sep)) or tokenizer.count("/") > 1


def absolute(path: str) -> str:
    """Absolute path of a file, folder or glob."""
    return str(Path.cwd() / Path(path).expanduser())


def _as_tuple(value: Any) -> Any:
    """Accept a single path as a plain string in TOML."""
    return (value,) if isinstance(value, str) else value


class SyntheticConfig(Section):
    """Generated documents: random tokens, or tasks that only long-range attention can solve."""

    task: Literal["random", "recall", "copy"] = "random"
    """random: uniform tokens with nothing to learn, for throughput runs. recall: key-value pairs early in the document,
    queried at its end. copy: a string at the start, repeated at the end. In recall and copy only the answers count in
    the loss."""
    length: int = Field(default=0, ge=0)
    """Tokens per document, including its EOS; 0: data.seq_len, so that one document fills one sequence."""
    min_distance: int = Field(default=1024, ge=1)
    """Minimum distance in tokens between a fact and its query. A stack of L window-only layers sees at most
    L * (window - 1) tokens back; with a larger distance the window branch alone cannot answer."""
    pairs: int = Field(default=8, ge=1, le=500)
    """Key-value pairs per recall document."""
    queries: int = Field(default=4, ge=1)
    """Pairs queried at the end of a recall document; at most `pairs`."""
    value_tokens: int = Field(default=2, ge=1, le=64)
    """Tokens per recalled value."""
    copy_tokens: int = Field(default=32, ge=1)
    """Length in tokens of the string in the copy task."""

    @model_validator(mode="after")
    def _queries_have_pairs(self) -> SyntheticConfig:
        if self.queries > self.pairs:
            raise ValueError(
                f"queries={self.queries} is more than pairs={self.pairs}: use at most {self.pairs}, or raise pairs"
            )
        return self


class SourceConfig(Section):
    """One source of documents."""

    source: SourceName = "python-source"
    """Where documents come from. python-source: Python files on this machine (no download). synthetic: generated. text,
    jsonl, parquet: local files; text and jsonl may be .gz or .zst. shards: a folder written by `tercet data prepare`.
    fineweb-edu: streamed from the Hugging Face Hub, or read from a local folder given as path. mixture: several of
    these, by weight."""
    path: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Files, folders or globs for text, jsonl, parquet and shards; a local parquet folder for fineweb-edu."""
    python: Literal["stdlib", "site-packages"] = "stdlib"
    """For python-source. stdlib: the standard library only, the same for everyone with this Python version.
    site-packages: also the installed packages (more text, but different on every machine)."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) with a document's text, or with the messages of a conversation, which are
    rendered through the tokenizer's chat template."""
    prompt_field: str = ""
    """Field or column with a prompt (text or messages) to put before the text, excluded from the loss; empty: none."""
    loss_on: Literal["all", "assistant"] = "all"
    """assistant: records are conversations, and only what the assistant writes counts in the loss. A plain text is a
    message then: of the user in prompt_field, of the assistant in text_field."""
    special_tokens: bool = False
    """Make special tokens of strings such as <|im_end|> in the text; false: they are plain text. Conversations always
    have them, and so have prompts of `tercet generate` and `tercet eval`."""
    max_record_mib: int = Field(default=16, ge=1)
    """Longest record in MiB of text: a line of jsonl (all its fields), a row of parquet, a Python file. A longer one is
    a bad record. For text: a longer document continues as another one, from the start of a line."""
    separator: str = ""
    """For text: split each file into documents at this string, which is dropped; empty: one document per file."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """The task, for source=synthetic."""
    retrieval: float = Field(default=0.0, ge=0, le=1)
    """Share of the training text that becomes retrieval exercises: documents are joined, and facts and later questions
    about them are inserted between their lines. They teach small models to retrieve facts from far back; `tercet eval
    ruler` measures that. Validation text is never changed."""
    hub_dataset: str = "HuggingFaceFW/fineweb-edu"
    """Hub dataset that fineweb-edu streams from when no path is given; its parquet files are read."""
    hub_folder: str = "sample/10BT"
    """Folder of that dataset to stream: sample/10BT, sample/100BT, sample/350BT, or data for everything."""
    hub_revision: str = "main"
    """Branch, tag or commit of the dataset. The commit is saved in the cursor: a resumed run reads the same files."""

    @model_validator(mode="after")
    def _settings_fit_source(self) -> SourceConfig:
        source, records = self.source, ("jsonl", "parquet")
        if source in FILE_SOURCES and not self.path:
            raise ValueError(
                f"source={source} has no path: set path to files, folders or globs, "
                "or use source=python-source, which needs none"
            )
        drop = "set it in the [[data.mixture]] parts" if source == "mixture" else "drop it"
        shards = "; shards keep the special_tokens of `tercet data prepare`" * (source == "shards")
        unused = [  # setting, whether the source ignores it, fix
            (f"path={list(self.path)}", self.path and source not in (*FILE_SOURCES, "fineweb-edu"),
             "drop path, or set source to text, jsonl, parquet, shards or fineweb-edu"),
            (f"prompt_field={self.prompt_field!r}", self.prompt_field and source not in records,
             "drop it; only jsonl and parquet have fields"),
            (f"loss_on={self.loss_on}", self.loss_on != "all" and source not in records,
             "drop it; only jsonl and parquet have conversations; shards keep the loss_on of `tercet data prepare`"),
            ("special_tokens=true", self.special_tokens and source in ("synthetic", "shards", "mixture"),
             drop + shards),
            (f"retrieval={self.retrieval:g}", self.retrieval and source in ("synthetic", "mixture"), drop),
            (f"separator={self.separator!r}", self.separator and source != "text",
             "drop it; only text files are split"),
        ]  # fmt: skip
        for setting, ignored, fix in unused:
            if ignored:
                raise ValueError(f"{setting} is not used by source={source}: {fix}")
        if self.loss_on != "all" and self.retrieval:
            raise ValueError(f"retrieval={self.retrieval:g} is not used with loss_on={self.loss_on}: drop one of them")
        return self

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"path": tuple(map(absolute, self.path))})


class MixturePart(SourceConfig):
    """One source of a mixture, with its weight."""

    name: str = ""
    """Name in logs and errors; empty: the source's name."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the tokens relative to the other parts: weights 3 and 1 give 75% and 25%."""

    @model_validator(mode="after")
    def _not_nested(self) -> MixturePart:
        if self.source == "mixture":
            raise ValueError("source=mixture inside a mixture: list its parts directly, with their weights multiplied")
        return self


class DataConfig(SourceConfig):
    """What the model reads, and in which order."""

    tokenizer: str = "byte"
    """byte (256 tokens; byte 0 is EOS), a tokenizer.json or a folder with one, or a Hub model name such as gpt2."""
    eos_token: str = ""
    """Token that ends a document, if the tokenizer.json has none of the usual ones (<|endoftext|>, </s>, ...)."""
    seq_len: int = Field(default=2048, ge=2)
    """Tokens per sequence. Longer documents continue in the next sequence; nothing is truncated."""
    mixture: tuple[MixturePart, ...] = ()
    """Parts of source=mixture, as [[data.mixture]] tables: each a source with its own path and weight."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Fraction of documents held out for validation. Chosen by a hash of the text, so a document and its exact copies
    are always in the same split, whatever the seed, order or tokenizer. If no document is held out, as with a single
    file, the end of the text is."""
    shuffle: bool = True
    """Read documents in a new random order each epoch, derived from the seed. false: in the order of the sorted
    files."""
    shuffle_block: int = Field(default=4096, ge=1)
    """For jsonl, parquet and Hub streams: the files are shuffled, and records are shuffled within blocks of this many.
    python-source, shards, synthetic and text without a separator are shuffled globally."""
    shuffle_sequences: int = Field(default=0, ge=0)
    """Shuffle packed sequences within blocks of this many, so that one long document does not fill many small steps in
    a row; 0: keep packing order. Validation is never shuffled. A block takes 4 bytes of host memory per token and
    process if the vocabulary has at most 256 tokens, else 8."""
    packing: Literal["continue", "whole"] = "continue"
    """continue: every sequence is full, and a document may continue in the next one. whole: a document that does not
    fit in the rest of a sequence starts the next one, and the rest is padding (counted)."""
    cross_document_attention: bool = False
    """Let tokens attend to earlier documents in their sequence. Targets never cross documents either way."""
    exhaustion: Literal["repeat", "stop"] = "repeat"
    """When all training documents have been read: start another epoch, or end the run. Validation is always one
    pass."""
    bad_records: Literal["error", "skip"] = "error"
    """A record that is damaged (broken JSON, no text, not UTF-8): stop and name it, or skip and count it. Files that
    cannot be read for another reason (disk, network) are retried for 15 seconds, then an error."""
    accept_changes: bool = False
    """Resume even if data files have changed since the checkpoint, and read them as they are now, from the same
    position. After repairs all other documents keep their place. If files were added or removed, the order changes: in
    the current epoch some documents are read twice and others not at all. Not saved in config.toml."""
    max_lost_text: float = Field(default=0.01, ge=0, le=1)
    """Largest share of characters that the tokenizer may lose, checked on the first documents; more is an error.
    Changes of case, accents, whitespace and Unicode normalization are not losses. 1: do not check."""
    prefetch: int = Field(default=4, ge=0, le=1024)
    """Batches prepared in the background; 0: prepare each batch when training asks for it."""

    def with_absolute_paths(self) -> Self:
        """With paths that are valid in every folder. A Hub name stays as it is."""
        updates: dict[str, Any] = {"mixture": tuple(part.with_absolute_paths() for part in self.mixture)}
        if looks_like_path(self.tokenizer) or (self.tokenizer != "byte" and Path(self.tokenizer).exists()):
            updates["tokenizer"] = absolute(self.tokenizer)
        return super().with_absolute_paths().model_copy(update=updates)

    def check_exercises_fit(self, seq_len: int) -> None:
        """Raise if sequences of seq_len tokens are too short for the retrieval exercises that they should hold."""
        share = max([self.retrieval, *(part.retrieval for part in self.mixture)])
        if share and seq_len < SHORTEST_EXERCISE:
            raise ValueError(
                f"data.retrieval={share:g} with data.seq_len={seq_len}: an exercise needs sequences of at least "
                f"{SHORTEST_EXERCISE} tokens; raise data.seq_len, or drop data.retrieval"
            )

    def max_vocab(self, model_vocab: int) -> int:
        """Largest vocabulary the tokenizer can have, before it is loaded: a run rejects one larger than the model's."""
        return BYTE_VOCAB if self.tokenizer == "byte" else model_vocab

    def shuffle_bytes(self, vocab_size: int) -> int:
        """Host memory of one block of shuffled sequences: tokens and targets."""
        return 2 * bytes_per_token(vocab_size) * self.seq_len * self.shuffle_sequences

    def shuffle_warning(self, vocab_size: int, host_bytes: int | None = None) -> str | None:
        """A one-line warning if a shuffle block takes over 4 GiB, or over half of `host_bytes` where that is known."""
        limit = SHUFFLE_WARNING_BYTES if host_bytes is None else min(SHUFFLE_WARNING_BYTES, host_bytes // 2)
        needed = self.shuffle_bytes(vocab_size)
        if needed <= limit:
            return None
        return (
            f"data.shuffle_sequences={self.shuffle_sequences} at data.seq_len={self.seq_len} holds "
            f"{needed / 2**30:.1f} GiB of host memory per process: --data.shuffle_sequences "
            f"{self.shuffle_sequences * limit // needed} holds {limit / 2**30:.1f} GiB"
        )

    @model_validator(mode="after")
    def _mixture_has_parts(self) -> DataConfig:
        if self.source == "mixture" and not self.mixture:
            raise ValueError("source=mixture has no parts: add [[data.mixture]] tables with source and weight")
        if self.mixture and self.source != "mixture":
            raise ValueError(
                f"mixture has {len(self.mixture)} parts but source={self.source}: set source=mixture or drop them"
            )
        names = [part.name or part.source for part in self.mixture]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two parts of the mixture are called {name}: give each its own name")
        return self
