"""Document streams from a configuration: text that is split, shuffled within blocks and tokenized, and mixtures."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tercet.config.data import DataConfig, SourceConfig
from tercet.data.chat import ChatReader
from tercet.data.exercises import ExerciseStream
from tercet.data.files import (
    FileRecords,
    Record,
    RecordFormat,
    RecordIterator,
    jsonl_reader,
    parquet_reader,
    python_reader,
    text_reader,
)
from tercet.data.hub import hub_files
from tercet.data.paths import FileSet, find_files, python_files
from tercet.data.shards import ShardStream
from tercet.data.stream import (
    BadRecordError,
    Cursor,
    DataError,
    DataUsageError,
    Document,
    DocumentGenerator,
    DocumentStream,
    EmptyDataError,
    Prefetcher,
    ReadOptions,
    SourceNotes,
    Split,
    counts_of,
    document_hash,
    held_out_end,
    key,
    permutation,
    validation_threshold,
)
from tercet.data.synthetic import SyntheticStream
from tercet.data.tokenizers import CHECKED_DOCUMENTS, LibraryTokenizer, Tokenizer, check_round_trip

BLOCK_BYTES = 64 << 20  # two blocks are in memory: one in use, one being read
ONE_PER_FILE_BLOCK = 64  # records per block where the file order already shuffles everything
BAD_RECORDS_KEPT = 5
SPLIT_RECORDS = 10_000  # sources with more records are split by documents
LONGEST_LINE = 2048  # how far to look for the start of a line
TOKENISE_AT_ONCE = 64  # documents per tokenizer call; the tokenizer works on them in parallel


@dataclass
class RecordBlock:
    """Records that are read at once."""

    start: Any  # position before the first one
    end: Any
    records: list[Record]  # with text, in file order
    size: int  # bytes of text
    bad: list[str]  # messages of skipped records
    left_out: int  # records without text
    last: bool  # there are no more


def read_block(
    source: RecordIterator, tokenizer: Tokenizer, count: int | None, size: int, *, skip_bad: bool
) -> RecordBlock:
    """The next `count` records, fewer after `size` bytes of text. Bad ones are raised unless `skip_bad`."""
    block, read = RecordBlock(source.position(), None, [], 0, [], 0, last=False), 0
    while block.size < size and read != count:
        record = next(source, None)
        if record is None:
            block.last = True
            break
        read += 1
        for text in (record.prompt, record.text) if isinstance(record, Record) else ():
            if text and (reason := tokenizer.why_not_encodable(text)):
                record = BadRecordError(*source.last_record(), reason)
                break
        if isinstance(record, BadRecordError):
            if not skip_bad:
                raise record
            block.bad.append(record.summary)
        elif not record.text:
            block.left_out += 1
        else:
            block.records.append(record)
            block.size += len(record.text)
    block.end = source.position()
    return block


class ValidationSplit:
    """Which part of a record is for training, and which for validation: a hash of its text decides.

    If all records are on one side, as with a single file, the end of the text is held out instead (`held_out`), unless
    it is too short.
    """

    def __init__(self, records: FileRecords, fraction: float, hold_out_end: bool | None = None) -> None:
        """hold_out_end: whether validation reads the end of the text, as saved by the run to resume; None: only if the
        documents are too few."""
        self.held_out = ""  # message about what is held out if whole documents are not
        self._threshold = validation_threshold(fraction)
        self._kept: dict[int, int] = {}  # record hash -> bytes for training, about, of records at the end of the text
        if fraction == 0 or hold_out_end is False or not isinstance(records.files, FileSet):
            return
        seen: list[tuple[int, int, bool]] = []  # hash, bytes, with a prompt; the texts may not fit in memory
        sides: set[bool] = set()
        good = (record for record in records.open(None) if isinstance(record, Record) and record.text)
        for record in itertools.islice(good, SPLIT_RECORDS + 1):
            digest = record_hash(record)
            seen.append((digest, len(record.text), record.prompt is not None or record.learned is not None))
            sides.add(digest < self._threshold)
            if len(seen) > SPLIT_RECORDS or (len(sides) == 2 and not hold_out_end):
                return
        missing, self.held_out = held_out_end(len(seen), fraction, sum(size for _, size, _ in seen), "bytes")
        for digest, size, with_prompt in reversed(seen):
            if missing <= 0:
                break
            # A prompt belongs to its text: such records are not cut, and the first one is for training.
            self._kept[digest] = (0 if len(seen) > 1 else size) if with_prompt else max(0, size - missing)
            missing -= size

    def part(self, record: Record, split: Split) -> Record | None:
        """The part of a record that is in `split`; None if nothing is."""
        if not self.held_out:
            return record if (record_hash(record) < self._threshold) == (split == "validation") else None
        kept = _line_start(record.text, self._kept.get(record_hash(record), len(record.text)))
        text = record.text[:kept] if split == "train" else record.text[kept:]
        return record._replace(text=text) if text else None


def _line_start(text: bytes, at: int) -> int:
    """The start of a line at or soon after `at`, else of a character."""
    if 0 < at < len(text):
        newline = text.find(b"\n", at - 1, at + LONGEST_LINE)
        at = newline + 1 if 0 <= newline < len(text) - 1 else at
        while at < len(text) and text[at] & 0xC0 == 0x80:  # inside a character of UTF-8
            at += 1
    return at


class TextStream:
    """Documents of text files, in blocks of records.

    The cursor holds the position where the current block starts (`place`), its number (`block`) and the documents
    delivered from it (`at`). Resuming re-reads that one block.
    """

    def __init__(
        self, part: SourceConfig, tokenizer: Tokenizer, options: ReadOptions, hold_out_end: bool | None
    ) -> None:
        name, seed = options.source, options.seed if options.data.shuffle else None
        records = record_source(part, seed, tokenizer)
        split = ValidationSplit(records, options.data.validation_fraction, hold_out_end)
        self._facts, self._special_tokens = encoding_facts(part, tokenizer), part.special_tokens
        self.notes = SourceNotes(
            io_retries=records.io_retries,
            held_out=[f"{name}: {split.held_out}"] if split.held_out else [],
            files={name: records.files} if isinstance(records.files, FileSet) else {},
        )
        self._records, self._tokenizer, self._options, self._name = records, tokenizer, options, name
        self._split = split
        self._block_records = ONE_PER_FILE_BLOCK if records.one_per_file else options.data.shuffle_block
        self._shuffle_in_block = options.data.shuffle and not records.one_per_file

    @property
    def identity(self) -> dict[str, Any]:
        files = self._records.files
        facts = files.identity() | self._facts | {"tokenizer": self._tokenizer.fingerprint}
        facts |= {"contents": files.contents} if isinstance(files, FileSet) else {}
        facts |= {"held_out": "end"} if self.notes.held_out else {}
        order = {"shuffle": self._options.data.shuffle, "shuffle_block": self._block_records}
        return self._options.identity(facts | order)

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        counts = counts_of(cursor)
        at = cursor["at"] if cursor else 0
        blocks = Prefetcher(self._blocks(cursor), depth=1)
        try:
            for epoch, number, block in blocks:
                counts["epoch"] = epoch
                if at == 0:  # otherwise the cursor has counted this block already
                    counts["skipped"] += len(block.bad)
                    counts["left_out"] += block.left_out
                yield from self._documents_in(block, number, at, counts)
                at = 0
        finally:
            blocks.close()

    def _documents_in(self, block: RecordBlock, number: int, at: int, counts: dict[str, int]) -> Iterator[Document]:
        """Documents of a block, the `number`th of its epoch, from number `at`, in shuffled order."""
        count, epoch = len(block.records), counts["epoch"]
        if at > count and not self._options.data.accept_changes:
            raise DataError(
                f"{self._name}: the cursor is at document {at} of a block that now has {count}: the files changed "
                "since the checkpoint; restore them, or start a new run from the weights with train.init_from"
            )
        order: list[int] = list(range(count))
        if self._shuffle_in_block:
            order = permutation(count, self._options.seed, epoch, number).tolist()
        for begin in range(at, count, TOKENISE_AT_ONCE):
            group = [block.records[i] for i in order[begin : begin + TOKENISE_AT_ONCE]]
            encoded = encode_records(self._tokenizer, group, self._special_tokens)
            for done, (tokens, loss) in enumerate(encoded, start=begin + 1):
                counts["documents"] += 1
                if done < count:
                    position = {"place": block.start, "block": number, "at": done}
                elif block.last:
                    position = {"epoch": epoch + 1, "place": None, "block": 0, "at": 0}
                else:
                    position = {"place": block.end, "block": number + 1, "at": 0}
                yield Document(tokens, loss, {**counts, **position})

    def _blocks(self, cursor: Cursor | None) -> Generator[tuple[int, int, RecordBlock], None, None]:
        """Epoch, number in it, and the records of the split in every block."""
        epoch = cursor["epoch"] if cursor else 0
        position = cursor["place"] if cursor else None
        number = cursor["block"] if cursor else 0
        options, skip_bad = self._options, self._options.data.bad_records == "skip"
        while epoch == 0 or options.repeat:
            in_split: int | None = 0 if position is None else None  # counted over complete epochs only
            with_text = empty = 0
            records = self._records.open(epoch, position)
            last = False
            while not last:
                block = read_block(
                    records, self._tokenizer, count=self._block_records, size=BLOCK_BYTES, skip_bad=skip_bad
                )
                if epoch == number == 0:
                    texts = [record.text for record in block.records[:CHECKED_DOCUMENTS]]
                    check_round_trip(self._tokenizer, texts, options.data.max_lost_text)
                with_text, empty = with_text + len(block.records), empty + block.left_out
                kept = self.notes.bad_records
                kept += [message for message in block.bad if message not in kept][: BAD_RECORDS_KEPT - len(kept)]
                parts = (self._split.part(record, options.split) for record in block.records)
                block.records = [part for part in parts if part is not None]
                in_split = None if in_split is None else in_split + len(block.records)
                yield epoch, number, block
                number, last = number + 1, block.last
            if in_split == 0:
                raise self._nothing_read(with_text, empty)
            epoch, position, number = epoch + 1, None, 0

    def _nothing_read(self, with_text: int, empty: int) -> DataError:
        if with_text:
            return DataUsageError(
                f"{self._name}: no document for {self._options.split} with "
                f"validation_fraction={self._options.data.validation_fraction}: change that fraction, or add documents "
                "(identical ones are all on one side)"
            )
        if self.notes.bad_records:
            return DataError(
                f"{self._name}: every record with text was skipped as bad (the first: {self.notes.bad_records[0]}): "
                "fix them, or check data.source and data.path"
            )
        return EmptyDataError(f"{self._name}: no document has any text (empty documents: {empty:,}): check data.path")


def encoding_facts(part: SourceConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the tokens of records, besides the tokenizer, where it is not the default."""
    facts: dict[str, Any] = {"special_tokens": True} if part.special_tokens else {}
    if part.source in ("jsonl", "parquet"):
        facts |= {"loss_on": part.loss_on} if part.loss_on != "all" else {}
        facts |= {"chat_template": tokenizer.chat.fingerprint} if tokenizer.chat else {}
    return facts


def record_hash(record: Record) -> int:
    """The hash that decides a record's split, also of a conversation independent of the tokenizer."""
    text = record.messages or record.text
    return document_hash(text if record.prompt is None else record.prompt + b"\0" + text)


def encode_records(
    tokenizer: Tokenizer, records: list[Record], specials: bool
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of each record, including EOS, and which of them count in the loss; None: all. specials: make special
    tokens of their strings, as in conversations."""
    texts = iter(tokenizer.encode_documents([r.text for r in records if r.learned is None], specials))
    prompts = iter(tokenizer.encode_documents([r.prompt for r in records if r.prompt], specials))
    conversations = [(r.text, r.learned) for r in records if r.learned is not None]
    chats = iter(tokenizer.encode_chats(conversations) if isinstance(tokenizer, LibraryTokenizer) else ())
    encoded: list[tuple[np.ndarray, np.ndarray | None]] = []
    for record in records:
        if record.learned is not None:
            encoded.append(next(chats))
            continue
        tokens, loss = next(texts), None
        if record.prompt:
            prompt = next(prompts)[:-1]  # without its EOS
            tokens = np.concatenate([prompt, tokens])
            loss = np.arange(len(tokens)) >= len(prompt)
        encoded.append((tokens, loss))
    return encoded


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


def record_source(part: SourceConfig, seed: int | None, tokenizer: Tokenizer | None = None) -> FileRecords:
    """The records of a text source.

    seed: of the order of the files; None: as sorted.
    tokenizer: the one whose chat template renders conversations; None refuses them.
    """
    if part.source == "python-source":
        return FileRecords(python_files(part.python), python_reader(part.max_record_mib), seed, one_per_file=True)
    if part.source == "text":
        reader = text_reader(part.separator, part.max_record_mib)
        return FileRecords(find_files(part.path, "text"), reader, seed, one_per_file=not part.separator)
    chat = ChatReader(tokenizer.name, tokenizer.chat, part.loss_on == "assistant") if tokenizer else None
    record_format = RecordFormat(part.text_field, part.prompt_field, part.max_record_mib, chat)
    if part.source == "jsonl":
        return FileRecords(find_files(part.path, "jsonl"), jsonl_reader(record_format), seed)
    from_hub = part.source == "fineweb-edu" and not part.path
    hub = (part.hub_dataset, part.hub_folder, part.hub_revision)
    return FileRecords(
        hub_files(*hub) if from_hub else find_files(part.path, "parquet"), parquet_reader(record_format), seed
    )


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
        stream = TextStream(part, tokenizer, options, hold_out_end)
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
