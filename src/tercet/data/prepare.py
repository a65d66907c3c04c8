"""`tercet data prepare`: tokenize a text source once into a folder of shards; and `tercet data train-tokenizer`.

Records are read in order, and the tokenizer's threads use all cores. The shards are byte-identical after any
interruption: each finished shard stores the position of the next record, where the next run continues.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tercet.atomic_io import check_writable, check_writable_folder
from tercet.config.data import DataConfig
from tercet.config.keys import flatten_table
from tercet.data.files import pieces
from tercet.data.shards import DOCUMENT, FORMAT, MANIFEST, read_json, read_manifest, write_json, write_shard
from tercet.data.sources import (
    BAD_RECORDS_KEPT,
    RecordBlock,
    ValidationSplit,
    encode_records,
    encoding_facts,
    read_block,
    record_hash,
    record_source,
)
from tercet.data.stream import BadRecordError, DataError, DataUsageError
from tercet.data.tokenizers import CHECKED_DOCUMENTS, TOKENIZER, LibraryTokenizer, check_round_trip, load_tokenizer
from tercet.errors import first_few

PLAN = "prepare.json"
LOCK = ".lock"
CHUNK_BYTES = 1 << 20  # text that is tokenized at once
PREPARABLE = ("python-source", "text", "jsonl", "parquet", "fineweb-edu")
COUNTED = ("documents", "tokens", "skipped", "left_out")  # summed over the shards

# Tokens of each document, which of them count in the loss (None: all), and its hash.
Encoded = list[tuple[np.ndarray, np.ndarray | None, int]]


@dataclass
class _Shard:
    """What the next shard has so far. Shards end where a chunk does."""

    documents: Encoded = field(default_factory=list)
    tokens: int = 0
    skipped: int = 0
    bad: list[str] = field(default_factory=list)  # messages of the first few
    left_out: int = 0
    position: Any = None

    def add(self, chunk: RecordBlock, encoded: Encoded) -> None:
        self.documents += encoded
        self.tokens += sum(len(tokens) for tokens, _, _ in encoded)
        self.skipped += len(chunk.bad)
        self.bad = (self.bad + chunk.bad)[:BAD_RECORDS_KEPT]
        self.left_out += chunk.left_out
        self.position = chunk.end


def prepare(
    data: DataConfig, out: Path, *, shard_tokens: int = 1 << 26, report: Callable[[dict[str, int]], None] | None = None
) -> dict[str, Any]:
    """Write the documents of `data` as shards to `out`, continuing an interrupted run. Returns the manifest.

    Documents of both splits are written, in the order of the sorted files; split and shuffling are applied when the
    shards are read. report: gets the totals after each shard.
    """
    _check_arguments(data, shard_tokens)
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    records = record_source(data, None, tokenizer)
    _make_folder(out)
    with _lock(out):
        fields = {"text_field": data.text_field, "prompt_field": data.prompt_field, "separator": data.separator}
        plan = {
            "format": FORMAT,
            "tokenizer": {
                **{name: getattr(tokenizer, name) for name in ("name", "fingerprint", "vocab_size", "eos_id")},
                "dtype": tokenizer.dtype.str,
            },
            "source": {"source": data.source, **records.files.identity(), **fields, **encoding_facts(data, tokenizer)},
            "bad_records": data.bad_records,
            "shard_tokens": shard_tokens,
        }
        _check_plan(out, plan)
        if (out / MANIFEST).is_file():  # written last: preparation is complete
            return read_manifest(out)
        if isinstance(tokenizer, LibraryTokenizer):
            for name, text in tokenizer.files.items():
                (out / name).write_text(text, encoding="utf-8")
        entries = _finished_shards(out)
        reading = records.open(0, entries[-1]["place"] if entries else None)
        masks = bool(data.prompt_field) or data.loss_on != "all"
        shard, last = _Shard(), False
        while not last:
            chunk = read_block(reading, tokenizer, None, CHUNK_BYTES, skip_bad=data.bad_records == "skip")
            if not (entries or shard.documents):
                texts = [record.text for record in chunk.records[:CHECKED_DOCUMENTS]]
                check_round_trip(tokenizer, texts, data.max_lost_text)
            encoded = encode_records(tokenizer, chunk.records, data.special_tokens)
            hashes = map(record_hash, chunk.records)
            shard.add(chunk, [(*document, digest) for document, digest in zip(encoded, hashes, strict=True)])
            last = chunk.last
            any_left = not entries or shard.documents or shard.skipped or shard.left_out
            if shard.tokens >= shard_tokens or (last and any_left):
                entries.append(_write_shard(out, len(entries), shard, tokenizer.dtype, masks))
                shard = _Shard()
                if report:
                    report(_totals(entries))
        totals = _totals(entries)
        if not totals["documents"]:
            bad = [message for entry in entries for message in entry["bad_records"]]
            skipped = f" ({totals['skipped']:,} bad records skipped, the first: {bad[0]})" if bad else ""
            raise DataError(f"source={data.source} has no documents{skipped}: there is nothing to prepare")
        shards = [{k: v for k, v in entry.items() if k != "place"} for entry in entries]
        manifest = {**plan, **{name: totals[name] for name in COUNTED}, "shards": shards}
        write_json(out / MANIFEST, manifest)
    return manifest


def _check_arguments(data: DataConfig, shard_tokens: int) -> None:
    if data.source not in PREPARABLE:
        raise DataUsageError(f"source={data.source} cannot be prepared: use one of {', '.join(PREPARABLE)}")
    if data.retrieval:
        raise DataUsageError(
            f"retrieval={data.retrieval:g} is not used here: shards keep the plain text; set it when training on them"
        )
    if shard_tokens < 1:
        raise DataUsageError(f"shard_tokens={shard_tokens} is below 1: use a positive number, such as 67108864")


def _write_shard(out: Path, number: int, shard: _Shard, dtype: np.dtype, masks: bool) -> dict[str, Any]:
    tokens = np.concatenate([np.empty(0, dtype), *(tokens for tokens, _, _ in shard.documents)])
    documents = np.empty(len(shard.documents), dtype=DOCUMENT)
    documents["end"] = np.cumsum([len(tokens) for tokens, _, _ in shard.documents])
    documents["hash"] = [digest for _, _, digest in shard.documents]
    loss = None
    if masks:
        parts = [np.ones(len(tokens), bool) if learned is None else learned for tokens, learned, _ in shard.documents]
        loss = np.concatenate([np.empty(0, bool), *parts])
    facts = {
        "skipped": shard.skipped, "bad_records": shard.bad, "left_out": shard.left_out, "place": shard.position,
    }  # fmt: skip
    return write_shard(out, f"shard-{number:05d}", tokens, documents, loss, facts)


def _make_folder(out: Path) -> None:
    """Create the output folder; an existing one must be empty or from an earlier preparation."""
    if out.is_dir() and not (out / PLAN).is_file():
        others = sorted(p.name for p in out.iterdir() if p.name not in (LOCK, f"{PLAN}.partial"))
        if others:
            raise DataUsageError(f"out={out} contains {first_few(others)}, but no {PLAN}: choose a new or empty folder")
    check_writable_folder("--out", out)
    out.mkdir(parents=True, exist_ok=True)


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Only one process may prepare a folder. The lock is released when its process ends."""
    with open(out / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"out={out} is being written by another process: wait for it, or choose another folder"
            ) from error
        yield


def _check_plan(out: Path, plan: dict[str, Any]) -> None:
    """Continue only with the settings that the folder was started with; save them in a new one."""
    if (out / PLAN).is_file():
        before, now = flatten_table(read_json(out / PLAN)), flatten_table(plan)
        for name in now | before:
            was, is_ = (f"{name}={x[name]}" if name in x else f"no {name}" for x in (before, now))
            # Switching to skip is the fix for a bad record: shards written so far had nothing to skip.
            if was == is_ or (was, is_) == ("bad_records=error", "bad_records=skip"):
                continue
            difference = "other files (by name and size)" if name == "source.files" else f"{was}, now {is_}"
            raise DataUsageError(f"out={out} was started with {difference}: choose another folder, or delete this one")
    if not (out / MANIFEST).is_file():
        write_json(out / PLAN, plan)


def _finished_shards(out: Path) -> list[dict[str, Any]]:
    """Manifest entries of the complete shards, in order. Deletes partial files of an interrupted run."""
    for leftover in out.glob("*.partial"):
        leftover.unlink()
    entries: list[dict[str, Any]] = []
    while (path := out / f"shard-{len(entries):05d}.json").is_file():
        entries.append(read_json(path))
    return entries


def _totals(entries: list[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(entry[name] for entry in entries) for name in COUNTED} | {"shards": len(entries)}


EOS = "<|endoftext|>"
MIN_VOCAB = 256 + 1  # all bytes and EOS


def train_bpe(
    data: DataConfig, out: Path, *, vocab_size: int, max_bytes: int = 1 << 30, force: bool = False
) -> LibraryTokenizer:
    """Write a tokenizer.json with `vocab_size` tokens, including EOS (`<|endoftext|>`, token 0) and all 256 bytes.

    Reads at most `max_bytes` of text, in random order, without validation documents. Overwrites an existing file,
    which models may depend on, only with `force`.
    """
    if out.exists() and not force:
        raise DataUsageError(f"out={out} exists: choose another file, or overwrite it with --force")
    if data.source not in PREPARABLE:
        raise DataUsageError(
            f"source={data.source} has no text to train a tokenizer on: use one of {', '.join(PREPARABLE)}"
        )
    if vocab_size < MIN_VOCAB:
        raise DataUsageError(f"vocab_size={vocab_size} is below {MIN_VOCAB}: it must cover all 256 bytes and EOS")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError("training needs the tokenizers library: pip install 'tercet[data]'") from error
    check_writable("--out", out)
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    library.train_from_iterator(_texts(data, max_bytes), trainer)
    if library.get_vocab_size() < vocab_size:
        raise DataUsageError(
            f"vocab_size={vocab_size} is too large for this text, which gives {library.get_vocab_size()} tokens: "
            "ask for that many, or give more text"
        )
    tokenizer = LibraryTokenizer(library, str(out), EOS)
    try:
        out.write_text(tokenizer.files[TOKENIZER], encoding="utf-8")
    except OSError as error:
        raise DataError(f"out={out} cannot be written ({error}): choose another file") from error
    return tokenizer


def _texts(data: DataConfig, max_bytes: int) -> Iterator[str]:
    source, size = record_source(data, 0), 0
    bad, first = 0, ""
    split = ValidationSplit(source, data.validation_fraction)
    for record in source.open(0, None):
        if isinstance(record, BadRecordError):
            if data.bad_records == "error":
                raise record
            bad, first = bad + 1, first or record.summary
            continue
        if record.text and (part := split.part(record, "train")) is not None:
            size += len(part.text)
            for piece in pieces(part.text, 1 << 20):  # the library takes about 100 times their memory
                yield piece.decode()
            if size >= max_bytes:
                return
    if bad and not size:
        raise DataUsageError(f"no text is left to train a tokenizer on: {bad:,} bad records, the first: {first}")
