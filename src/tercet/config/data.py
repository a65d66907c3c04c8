"""What a run reads: sources, tokenizer, packing, validation split. Nothing here opens a file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tercet.config.sections import Section

SourceName = Literal["python-source", "synthetic", "text", "jsonl", "parquet", "shards", "fineweb-edu", "mixture"]
FILE_SOURCES = ("text", "jsonl", "parquet", "shards")
SHUFFLE_BYTES = 4 << 30  # a block of shuffled sequences that takes more is told
BYTE_VALUES = 256


def held_bytes(vocab_size: int) -> int:
    """Of one token, or one target with its -100, in a block of shuffled sequences."""
    return 2 if vocab_size <= BYTE_VALUES else 4


def _as_tuple(value: Any) -> Any:
    """A single path may be written as a plain string in TOML."""
    return (value,) if isinstance(value, str) else value


class _DataSection(Section):
    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            # --help wraps lines itself; the line breaks of this file would show as ragged ones.
            field.description = " ".join((field.description or "").split())


class SyntheticConfig(_DataSection):
    """Made-up documents: noise, or tasks that only long-range attention can solve."""

    task: Literal["random", "recall", "copy"] = "random"
    """random: uniform tokens, nothing to learn (throughput runs). recall: keys and values scattered early in
    the document, asked for at its end. copy: a string at the start, to be repeated at the end. In recall and
    copy only the answers count in the loss."""

    length: int = Field(default=0, ge=0)
    """Tokens per document, its EOS included; 0 means data.seq_len, so that one document fills one
    sequence."""

    min_distance: int = Field(default=1024, ge=1)
    """Least distance in tokens from a fact to the question about it. A stack of L window-only layers sees at
    most L * (window - 1) tokens back: choose more than that and the window alone cannot answer."""

    pairs: int = Field(default=8, ge=1, le=500)
    """Key-value pairs per recall document."""

    queries: int = Field(default=4, ge=1)
    """How many of the pairs are asked for at the end of a recall document; at most `pairs`."""

    value_tokens: int = Field(default=2, ge=1, le=64)
    """Tokens in one recalled value."""

    copy_tokens: int = Field(default=32, ge=1)
    """Tokens of the string to repeat, for the copy task."""

    @model_validator(mode="after")
    def _queries_have_pairs(self) -> SyntheticConfig:
        if self.queries > self.pairs:
            raise ValueError(
                f"queries={self.queries} is more than pairs={self.pairs}: ask for at most {self.pairs}, or raise pairs"
            )
        return self


class SourceConfig(_DataSection):
    """One source of documents."""

    source: SourceName = "python-source"
    """Where documents come from. python-source: Python files of this machine (no download). synthetic: made
    up. text, jsonl, parquet: local files, .gz and .zst allowed for text and jsonl. shards: a folder written
    by `tercet data prepare`. fineweb-edu: streamed from the hub, or read from a local folder given as path.
    mixture: several of these, by weight."""

    path: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    """Files, folders or globs for text, jsonl, parquet and shards; a local parquet folder for fineweb-edu."""

    python: Literal["stdlib", "site-packages"] = "stdlib"
    """For python-source: stdlib is the standard library alone, the same for everyone with this Python
    version; site-packages adds the installed packages (more text, but different on every machine)."""

    text_field: str = "text"
    """Name of the field (jsonl) or column (parquet) that holds a document's text."""

    prompt_field: str = ""
    """Field or column with a prompt that stands before the text and does not count in the loss; empty:
    none."""

    separator: str = ""
    """For text files: cut each file into documents at this string (it belongs to none); empty: a file is a
    document."""

    synthetic: SyntheticConfig = SyntheticConfig()
    """The task, for source=synthetic."""

    hub_dataset: str = "HuggingFaceFW/fineweb-edu"
    """Hub repository that fineweb-edu streams from when no path is given; its parquet files are read."""

    hub_folder: str = "sample/10BT"
    """Folder of that repository to stream: sample/10BT, sample/100BT, sample/350BT, or data for
    everything."""

    hub_revision: str = "main"
    """Branch, tag or commit. The commit it stands for is kept in the cursor: a resumed run reads the same
    files."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> SourceConfig:
        if self.source in FILE_SOURCES and not self.path:
            raise ValueError(
                f"source={self.source} has no path: name files, folders or globs with path, "
                "or use source=python-source, which needs none"
            )
        if self.path and self.source not in (*FILE_SOURCES, "fineweb-edu"):
            raise ValueError(
                f"path={list(self.path)} is not read by source={self.source}: "
                "drop path, or set source to text, jsonl, parquet, shards or fineweb-edu"
            )
        if self.prompt_field and self.source not in ("jsonl", "parquet"):
            raise ValueError(
                f"prompt_field={self.prompt_field!r} is not read by source={self.source}: "
                "only jsonl and parquet have fields"
            )
        if self.separator and self.source != "text":
            raise ValueError(
                f"separator={self.separator!r} is not read by source={self.source}: only text files are cut"
            )
        return self


class MixturePart(SourceConfig):
    """One source of a mixture, with its share."""

    name: str = ""
    """Name in logs and errors; empty: the source's name."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the tokens, relative to the other parts: weights 3 and 1 give three tokens in four and one in
    four."""

    @model_validator(mode="after")
    def _no_mixture_within(self) -> MixturePart:
        if self.source == "mixture":
            raise ValueError("source=mixture inside a mixture: list its parts directly, with their weights multiplied")
        return self


class DataConfig(SourceConfig):
    """What the model reads, and in which order."""

    tokenizer: str = "byte"
    """byte (256 values; byte 0 is EOS), a tokenizer.json or a folder that holds one, or a hub name such as
    gpt2."""

    eos_token: str = ""
    """Token that ends a document, where a tokenizer.json has no well-known one (such as <|endoftext|> or
    </s>)."""

    seq_len: int = Field(default=2048, ge=2)
    """Tokens per sequence. Longer documents go on in the next sequence; nothing is cut off."""

    mixture: tuple[MixturePart, ...] = ()
    """Parts of source=mixture, as [[data.mixture]] tables: each a source with its own path and a weight."""

    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of documents kept for validation. A hash of the text decides, so a document and its exact copies
    are all on one side, whatever the seed, the order or the tokenizer."""

    shuffle: bool = True
    """Read documents in a new order each epoch, given by the seed. Off: in the order of the sorted files."""

    shuffle_block: int = Field(default=4096, ge=1)
    """jsonl, parquet and hub streams: files are put in random order, and records are shuffled within blocks
    of this many. python-source, whole text files, shards and synthetic are shuffled over everything."""

    shuffle_sequences: int = Field(default=0, ge=0)
    """Hand out sequences in a new order within blocks of this many, so that one long document does not fill
    many small steps in a row; 0: as they are packed. Validation is never shuffled. A block takes 4 bytes of every
    process's memory for a token where the tokenizer has at most 256, else 8."""

    packing: Literal["continue", "whole"] = "continue"
    """continue: every sequence is full, and a document may go on in the next one. whole: a document that
    would not fit in the rest of a sequence starts the next one, and the rest is padding (counted)."""

    cross_document_attention: bool = False
    """Let tokens attend to earlier documents of their sequence. No loss is taken across documents either
    way."""

    exhaustion: Literal["repeat", "stop"] = "repeat"
    """When every training document was read: begin the next epoch, or end the run. Validation is always one
    pass."""

    bad_records: Literal["error", "skip"] = "error"
    """A record that cannot be read (broken JSON, no text, not UTF-8): stop and name it, or skip it and count
    it."""

    prefetch: int = Field(default=4, ge=0, le=1024)
    """Batches made ahead of time in the background; 0 makes each one when it is asked for."""

    def most_tokens(self, model: int) -> int:
        """The vocabulary of the tokenizer before it is read, at most: one with more than the model's is refused."""
        return BYTE_VALUES if self.tokenizer == "byte" else model

    def shuffle_bytes(self, vocab_size: int) -> int:
        """Memory of a block of shuffled sequences, tokens and targets, of a tokenizer with so many tokens."""
        return 2 * held_bytes(vocab_size) * self.seq_len * self.shuffle_sequences

    def shuffle_warning(self, vocab_size: int, room: int | None = None) -> str | None:
        """One line if that is much; `room`: bytes of this machine, where they are known."""
        limit = SHUFFLE_BYTES if room is None else min(SHUFFLE_BYTES, room // 2)
        held = self.shuffle_bytes(vocab_size)
        if held <= limit:
            return None
        one = held // self.shuffle_sequences
        fewer = limit // one
        there = "" if room is None else f", and there are {room / 2**30:.1f} GiB"
        return (
            f"data.shuffle_sequences={self.shuffle_sequences} at data.seq_len={self.seq_len} holds "
            f"{held / 2**30:.1f} GiB in the memory of every process{there}: "
            f"--data.shuffle_sequences {fewer} holds {fewer * one / 2**30:.1f} GiB"
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
