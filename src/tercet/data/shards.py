"""Shards: pre-tokenized documents in memory-mapped numpy files with a manifest.

    manifest.json                    everything below, with checksums; written last
    shard-00000.tokens.npy           [tokens] u1, u2 or u4: documents one after another, each with its EOS
    shard-00000.documents.npy        [documents] (end: u8, hash: u8): end offset, and hash of the text
    shard-00000.loss.npy             [tokens] bool; only if some tokens do not count in the loss
    shard-00000.json                 its manifest entry; its presence means that the shard is complete
    tokenizer.json                   the tokenizer, unless it is `byte`

The hash is of the text, so a document has the same split as when it is read from the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from tercet import atomic_io, parse
from tercet.data.paths import FileSet
from tercet.data.stream import (
    Cursor,
    DataError,
    DataUsageError,
    Document,
    DocumentGenerator,
    ReadOptions,
    SourceNotes,
    held_out_end,
    in_validation,
    permutation,
)
from tercet.data.tokenizers import LibraryTokenizer, Tokenizer
from tercet.parse import describe, one_line_errors

FORMAT = 1
MANIFEST = "manifest.json"
DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])
DTYPES = {"tokens": ("|u1", "<u2", "<u4"), "documents": (DOCUMENT,), "loss": ("|b1",)}


class _File(BaseModel):
    bytes: int
    sha256: str


class _Shard(BaseModel):
    name: str = Field(pattern=r"^[\w-]+$")  # not a path that leads out of the folder
    tokens: int
    documents: int
    files: dict[str, _File]


class _Tokenizer(BaseModel):
    name: str
    vocab_size: int
    fingerprint: str


class _Source(BaseModel):
    source: str


class _Manifest(BaseModel):
    """The fields of a manifest that are read."""

    tokenizer: _Tokenizer
    source: _Source
    shards: list[_Shard]
    documents: int
    tokens: int
    skipped: int
    left_out: int


class ShardStream:
    """Documents of a shard folder, shuffled globally. Its cursor has `at`, the documents delivered in this epoch."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ReadOptions, hold_out_end: bool | None) -> None:
        """hold_out_end: whether validation reads the end of all tokens instead of whole documents; None: only if the
        hashes put all documents on one side of the split."""
        name, fraction = options.source, options.data.validation_fraction
        self._options, self._name = options, name
        manifest = read_manifest(folder)
        _check_tokenizer(folder, manifest, tokenizer)
        self._vocab_size = tokenizer.vocab_size
        entries = manifest["shards"]
        self._fingerprint = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]
        names = [f"{entry['name']}.{kind}.npy" for entry in entries for kind in entry["files"]]
        self.notes = SourceNotes(files={name: FileSet((file, folder / file) for file in names)})
        self._tokens = [_open(folder, entry, "tokens") for entry in entries]
        self._loss = [_open(folder, entry, "loss") if "loss" in entry["files"] else None for entry in entries]
        shard, starts, ends, hashes = _documents(folder, entries)
        validation = in_validation(hashes, fraction)
        if hold_out_end is None:
            hold_out_end = len(hashes) > 0 and validation.all() == validation.any()
        total = int((ends - starts).sum())
        held_out, note = held_out_end(len(hashes), fraction, total, "tokens") if hold_out_end else (0, "")
        if held_out:
            starts, ends = _split_tokens(starts, ends, total - held_out, options.split)
            in_split = ends > starts
            self.notes.held_out.append(f"{name}: {note}")
        else:
            in_split = validation == (options.split == "validation")
        self._shard, self._start, self._end = shard[in_split], starts[in_split], ends[in_split]
        if not in_split.any():
            raise DataUsageError(
                f"{name}: none of the {len(in_split)} documents in {folder} is for {options.split} with "
                f"validation_fraction={fraction}: change that fraction, or prepare more documents"
            )

    @property
    def identity(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"shards": self._fingerprint, "contents": self.notes.files[self._name].contents}
        facts |= {"held_out": "end"} if self.notes.held_out else {}
        return self._options.identity(facts | {"shuffle": self._options.data.shuffle})

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        epoch, at, delivered = (cursor["epoch"], cursor["at"], cursor["documents"]) if cursor else (0, 0, 0)
        count = len(self._shard)
        while epoch == 0 or self._options.repeat:
            order = permutation(count, self._options.seed, epoch) if self._options.data.shuffle else np.arange(count)
            for begin in range(at, count, 1024):  # lists of Python integers: indexing numpy scalars is slow
                indices = order[begin : begin + 1024]
                columns = (column[indices].tolist() for column in (self._shard, self._start, self._end))
                for at, (shard, start, end) in enumerate(zip(*columns, strict=True), start=begin + 1):
                    delivered += 1
                    after = {"epoch": epoch, "documents": delivered, "skipped": 0, "left_out": 0, "at": at}
                    if at == count:
                        after.update(epoch=epoch + 1, at=0)
                    loss, tokens = self._loss[shard], self._tokens[shard][start:end]
                    if tokens.max() >= self._vocab_size:
                        raise DataError(
                            f"{self._name}: token {tokens.max()} in shard {shard} is not below the tokenizer's "
                            f"vocabulary of {self._vocab_size}: prepare the shards again or restore them"
                        )
                    yield Document(tokens, None if loss is None else loss[start:end], after)
            epoch, at = epoch + 1, 0


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.glob("shard-*.json")):
            raise DataError(
                f"{folder} has shards but no {MANIFEST}: `tercet data prepare` was interrupted; run it again"
            )
        raise DataUsageError(f"{folder} has no {MANIFEST}: it was not written by `tercet data prepare`")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise DataUsageError(
            f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}: prepare the shards again"
        )
    with one_line_errors(DataError, f"{path} is damaged: restore it, or prepare the shards again"):
        _Manifest.model_validate(manifest, strict=True)
        for entry in manifest["shards"]:
            if missing := {"tokens", "documents"} - entry["files"].keys():
                raise ValueError(f"{entry['name']} has no {', '.join(sorted(missing))}")
    return manifest


def verify_shards(folder: Path) -> dict[str, Any]:
    """Check every file against its checksum; returns the manifest."""
    manifest = read_manifest(folder)
    for entry in manifest["shards"]:
        for kind, facts in entry["files"].items():
            path = folder / f"{entry['name']}.{kind}.npy"
            _check_size(path, facts)
            if (digest := atomic_io.sha256(path)) != facts["sha256"]:
                raise DataError(
                    f"{path} has sha256 {digest[:16]}…, its manifest says {facts['sha256'][:16]}…: "
                    "the file is damaged; prepare the shards again or restore it"
                )
    return manifest


def write_shard(
    folder: Path, name: str, tokens: np.ndarray, documents: np.ndarray, loss: np.ndarray | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write one shard and then, atomically, its manifest entry: a shard is complete or not there at all."""
    arrays = {"tokens": tokens, "documents": documents} | ({} if loss is None else {"loss": loss})
    entry: dict[str, Any] = {"name": name, "tokens": len(tokens), "documents": len(documents), "files": {}, **facts}
    for kind, array in arrays.items():
        path = folder / f"{name}.{kind}.npy"
        with _atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.save(file, array)
        entry["files"][kind] = {"bytes": path.stat().st_size, "sha256": atomic_io.sha256(path)}
    write_json(folder / f"{name}.json", entry)
    return entry


@contextmanager
def _atomic_write(path: Path) -> Iterator[Path]:
    """`atomic_io.atomic_write`, with an error that names the fix."""
    try:
        with atomic_io.atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}): free disk space or choose another folder, then run it again; "
            "finished shards are kept"
        ) from error


def write_json(path: Path, value: Any) -> None:
    with _atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    return parse.read_json(path, DataError, "prepare the shards again into a new folder")


def _documents(folder: Path, entries: list[dict[str, Any]]) -> tuple[np.ndarray, ...]:
    """Shard, first token, end and hash of each document, of all shards."""
    shards = [_open(folder, entry, "documents") for entry in entries]
    for entry, shard in zip(entries, shards, strict=True):
        ends = shard["end"].astype(np.int64)
        if (np.diff(ends, prepend=0) <= 0).any() or (ends[-1] if len(ends) else 0) != entry["tokens"]:
            raise DataError(
                f"{folder / entry['name']}.documents.npy does not fit its tokens: the end of a document is not after "
                "the one before; prepare the shards again or restore it"
            )
    documents = np.concatenate([np.empty(0, DOCUMENT), *shards])
    number = np.repeat(np.arange(len(shards), dtype=np.int32), [len(shard) for shard in shards])
    ends = documents["end"].astype(np.int64)
    starts = np.where(np.diff(number, prepend=-1) > 0, 0, np.roll(ends, 1))
    return number, starts, ends, documents["hash"]


def _check_tokenizer(folder: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
    used = manifest["tokenizer"]
    if used["fingerprint"] == tokenizer.fingerprint:
        return
    saved = folder / "tokenizer.json"
    specials = not manifest["source"].keys().isdisjoint(("special_tokens", "chat_template"))
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.encodes_as(saved, used["fingerprint"], specials):
        return
    ends = f" and data.eos_token to its token {used['eos_id']}" if used["eos_id"] != tokenizer.eos_id else ""
    raise DataUsageError(
        f"{folder} was tokenized with {used['name']}, not with tokenizer={tokenizer.name}: "
        f"set data.tokenizer to {'byte' if used['name'] == 'byte' else saved}{ends}, or prepare the shards again",
    )


def _split_tokens(starts: np.ndarray, ends: np.ndarray, first: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """What a split has of each document if the first `first` tokens of all documents together are for training."""
    sizes = ends - starts
    train = np.clip(first - (np.cumsum(sizes) - sizes), 0, sizes)
    if split == "train":
        return starts, starts + train
    return starts + train, ends


def _open(folder: Path, entry: dict[str, Any], kind: str) -> np.ndarray:
    path = folder / f"{entry['name']}.{kind}.npy"
    _check_size(path, entry["files"][kind])
    try:
        # An empty file cannot be mapped, and a shard of only skipped records has no tokens.
        array: np.ndarray = np.load(path, mmap_mode="r" if entry["tokens"] else None, allow_pickle=False)
    except Exception as error:  # numpy raises errors of many kinds for a damaged header
        raise DataError(f"{path} cannot be opened ({describe(error)}): restore it, or prepare it again") from None
    length = entry["documents" if kind == "documents" else "tokens"]
    if array.dtype not in DTYPES[kind] or array.shape != (length,):
        raise DataError(
            f"{path} holds {array.dtype} of shape {list(array.shape)}, its manifest says {length} {kind}: prepare the "
            "shards again or restore it"
        )
    # A plain array: slicing np.memmap costs a microsecond of Python per document.
    return array.view(np.ndarray)


def _check_size(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != facts["bytes"]:
        actual = "missing" if size is None else f"{size} bytes long"
        raise DataError(
            f"{path} is {actual}, its manifest says {facts['bytes']} bytes: restore it, or prepare the shards again"
        )
