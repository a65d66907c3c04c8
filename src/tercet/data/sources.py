"""From configuration to a stream of documents."""

from __future__ import annotations

from pathlib import Path

from tercet.config.data import DataConfig, SourceConfig
from tercet.data.errors import DataUsageError
from tercet.data.files import FileRecords, find_files, python_files
from tercet.data.mixture import MixtureStream
from tercet.data.order import document_hash, key
from tercet.data.records import jsonl_reader, parquet_reader, read_python, text_reader
from tercet.data.shards import ShardStream
from tercet.data.stream import DocumentStream, Reading, Split
from tercet.data.synthetic import SyntheticStream
from tercet.data.text import RecordSource, TextStream
from tercet.data.tokenizers import Tokenizer


def open_stream(data: DataConfig, tokenizer: Tokenizer, *, seed: int, split: Split) -> DocumentStream:
    """All documents of a split of a run's data, in their one global order."""
    if data.source != "mixture":
        return _open_part(data, data, tokenizer, _reading(data, seed, split), data.source)
    parts: dict[str, tuple[float, DocumentStream]] = {}
    for part in data.mixture:
        name = part.name or part.source
        # Its own seed: two parts over the same files would otherwise go through them in step.
        reading = _reading(data, key(seed, document_hash(name.encode())), split)
        parts[name] = (part.weight, _open_part(part, data, tokenizer, reading, name))
    return MixtureStream(parts)


def record_source(part: SourceConfig, *, seed: int, shuffle: bool) -> RecordSource:
    """The records of a source of text."""
    if part.source == "python-source":
        return FileRecords(python_files(part.python), read_python, seed=seed, shuffle=shuffle, one_per_file=True)
    if part.source == "fineweb-edu":
        from tercet.data.hub import hub_records, local_records

        if part.path:
            return local_records(part.path, part.text_field, seed=seed, shuffle=shuffle)
        return hub_records(
            part.hub_dataset, part.hub_folder, part.hub_revision, part.text_field, seed=seed, shuffle=shuffle
        )
    files = find_files(part.path, part.source)
    if part.source == "text":
        reader, one_per_file = text_reader(part.separator), not part.separator
    elif part.source == "jsonl":
        reader, one_per_file = jsonl_reader(part.text_field, part.prompt_field), False
    else:
        reader, one_per_file = parquet_reader(part.text_field, part.prompt_field), False
    return FileRecords(files, reader, seed=seed, shuffle=shuffle, one_per_file=one_per_file)


def _open_part(
    part: SourceConfig, data: DataConfig, tokenizer: Tokenizer, reading: Reading, name: str
) -> DocumentStream:
    if part.source == "synthetic":
        return SyntheticStream(part.synthetic, data.seq_len, tokenizer, reading, name)
    if part.source == "shards":
        if len(part.path) != 1:
            raise DataUsageError(
                f"source=shards with {len(part.path)} paths: one folder per source; join several as parts of a mixture"
            )
        return ShardStream(Path(part.path[0]).expanduser(), tokenizer, reading, name)
    return TextStream(record_source(part, seed=reading.seed, shuffle=reading.shuffle), tokenizer, reading, name)


def _reading(data: DataConfig, seed: int, split: Split) -> Reading:
    if split == "validation" and data.validation_fraction == 0:
        raise DataUsageError("validation_fraction=0 keeps no document for validation: raise it, or turn validation off")
    return Reading(
        seed=seed,
        split=split,
        validation_fraction=data.validation_fraction,
        repeat=data.exhaustion == "repeat" and split == "train",
        shuffle=data.shuffle,
        shuffle_block=data.shuffle_block,
        skip_bad=data.bad_records == "skip",
    )
