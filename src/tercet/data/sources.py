"""Open the document stream that a configuration describes, and mix several streams by weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.config.data import DataConfig, SourceConfig
from tercet.data.chat import ChatReader
from tercet.data.exercises import ExerciseStream
from tercet.data.files import FileRecords, find_files, python_files
from tercet.data.order import document_hash, key
from tercet.data.records import RecordFormat, jsonl_reader, parquet_reader, python_reader, text_reader
from tercet.data.shards import ShardStream
from tercet.data.stream import (
    Cursor,
    DataUsageError,
    DocumentGenerator,
    DocumentStream,
    ReadOptions,
    SourceNotes,
    Split,
)
from tercet.data.synthetic import SyntheticStream
from tercet.data.text import RecordSource, TextStream, ValidationSplit
from tercet.data.tokenizers import Tokenizer


def open_stream(
    data: DataConfig, tokenizer: Tokenizer, *, seed: int, split: Split, saved: Mapping[str, Any] | None = None
) -> DocumentStream:
    """All documents of a split, in the global order shared by all ranks. saved: the identity of a cursor to resume."""
    saved = saved if isinstance(saved, Mapping) else None  # damaged: reading the cursor says so
    if split == "validation" and data.validation_fraction == 0:
        raise DataUsageError("validation_fraction=0 keeps no document for validation: raise it, or turn validation off")
    if data.source != "mixture":
        return _open_part(data, tokenizer, ReadOptions(data, data.source, seed, split), saved)
    parts: dict[str, tuple[float, DocumentStream]] = {}
    for part in data.mixture:
        name = part.name or part.source
        # A seed per part: two parts over the same files must not read them in the same order.
        options = ReadOptions(data, name, key(seed, document_hash(name.encode())), split)
        parts[name] = (part.weight, _open_part(part, tokenizer, options, saved and saved.get(name)))
    return MixtureStream(parts)


def record_source(part: SourceConfig, *, seed: int, shuffle: bool, tokenizer: Tokenizer | None = None) -> RecordSource:
    """The records of a text source. tokenizer: the one whose chat template renders conversations; None refuses them."""
    if part.source == "python-source":
        reader = python_reader(part.max_record_mib)
        return FileRecords(python_files(part.python), reader, seed=seed, shuffle=shuffle, one_per_file=True)
    if part.source == "fineweb-edu":
        from tercet.data.hub import hub_records, local_records

        if part.path:
            return local_records(part.path, part.text_field, seed=seed, shuffle=shuffle)
        return hub_records(
            part.hub_dataset, part.hub_folder, part.hub_revision, part.text_field, seed=seed, shuffle=shuffle
        )
    files = find_files(part.path, part.source)
    if part.source == "text":
        reader = text_reader(part.separator, part.max_record_mib)
        return FileRecords(files, reader, seed=seed, shuffle=shuffle, one_per_file=not part.separator)
    chat = ChatReader(tokenizer.name, tokenizer.chat, part.loss_on == "assistant") if tokenizer else None
    record_format = RecordFormat(part.text_field, part.prompt_field, part.max_record_mib, chat)
    reader = (jsonl_reader if part.source == "jsonl" else parquet_reader)(record_format)
    return FileRecords(files, reader, seed=seed, shuffle=shuffle, one_per_file=False)


def validation_split(records: RecordSource, fraction: float, hold_out_end: bool | None = None) -> ValidationSplit:
    """How to split records. hold_out_end: whether validation reads the end of the text instead of whole documents, as
    saved by the run to resume; None: only if the documents are too few."""
    if fraction == 0 or hold_out_end is False or not isinstance(records, FileRecords):
        return ValidationSplit(fraction)
    return ValidationSplit.of(records.in_file_order(), fraction, always=hold_out_end is True)


def _open_part(
    part: SourceConfig, tokenizer: Tokenizer, options: ReadOptions, saved: Mapping[str, Any] | None
) -> DocumentStream:
    hold_out_end = "held_out" in saved if isinstance(saved, Mapping) else None
    stream: DocumentStream
    if part.source == "synthetic":
        stream = SyntheticStream(part.synthetic, tokenizer, options)
    elif part.source == "shards":
        if len(part.path) != 1:
            raise DataUsageError(
                f"source=shards with {len(part.path)} paths: give one folder; combine several with a mixture"
            )
        stream = ShardStream(Path(part.path[0]).expanduser(), tokenizer, options, hold_out_end)
    else:
        records = record_source(part, seed=options.seed, shuffle=options.data.shuffle, tokenizer=tokenizer)
        split = validation_split(records, options.data.validation_fraction, hold_out_end)
        stream = TextStream(records, tokenizer, options, part, split)
    if part.retrieval and options.split == "train":
        return ExerciseStream(stream, part.retrieval, options.data.seq_len, tokenizer, options.seed)
    return stream


class MixtureStream:
    """Several streams as one: the next document comes from the part furthest behind its share of the tokens.

    Deterministic, so shares hold from the first documents on, and the cursor is the parts' cursors and token counts.
    If a part ends (exhaustion=stop), the mixture ends too: continuing would change the shares.
    """

    def __init__(self, parts: Mapping[str, tuple[float, DocumentStream]]) -> None:
        self._parts = dict(parts)

    @property
    def identity(self) -> dict[str, Any]:
        return {name: {"weight": weight, **stream.identity} for name, (weight, stream) in self._parts.items()}

    @property
    def notes(self) -> SourceNotes:
        parts = [stream.notes for _, stream in self._parts.values()]
        return SourceNotes(
            bad_records=[message for notes in parts for message in notes.bad_records],
            io_retries=[message for notes in parts for message in notes.io_retries],
            held_out=[message for notes in parts for message in notes.held_out],
            files={name: files for notes in parts for name, files in notes.files.items()},
        )

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        names = list(self._parts)
        tokens: dict[str, int] = dict(cursor["tokens"]) if cursor else dict.fromkeys(names, 0)
        cursors: dict[str, Cursor | None] = dict(cursor["parts"]) if cursor else dict.fromkeys(names)
        open_parts = {name: self._parts[name][1].documents(cursors[name]) for name in names}
        try:
            while True:
                name = min(names, key=lambda part: tokens[part] / self._parts[part][0])
                document = next(open_parts[name], None)
                if document is None:
                    return
                tokens[name] += len(document.tokens)
                cursors[name] = document.cursor
                after: Cursor = {"tokens": dict(tokens), "parts": dict(cursors)}
                yield document._replace(cursor=after)
        finally:
            for part in open_parts.values():
                part.close()
