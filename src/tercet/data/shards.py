"""Pre-tokenised documents on disk: memory-mapped numpy files and a manifest.

    manifest.json                    everything below, with checksums; written last
    shard-00000.tokens.npy           [tokens] u1, u2 or u4: documents one after another, each with its EOS
    shard-00000.documents.npy        [documents] (end: u8, hash: u8): where each ends; the hash of its text
    shard-00000.loss.npy             [tokens] bool, only where some tokens do not count in the loss
    shard-00000.json                 its entry of the manifest; its presence means that the shard is complete
    tokenizer.json                   the tokenizer, unless it is `byte`

The hash is that of the text, so documents are on the same side of the validation split as when read from the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tercet import atomic_io
from tercet.data.order import in_validation, permutation
from tercet.data.stream import Cursor, DataError, DataUsageError, Document, Documents, Reading
from tercet.data.tokenizers import Tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
DOCUMENT = np.dtype([("end", "<u8"), ("hash", "<u8")])


class ShardStream:
    """Documents of a folder of shards, shuffled over all of them. Cursor: `at`, documents given in this epoch."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, reading: Reading, name: str) -> None:
        self.bad_records: list[str] = []
        self._folder, self._reading, self._name = folder, reading, name
        manifest = read_manifest(folder)
        made_with = manifest["tokenizer"]
        if made_with["fingerprint"] != tokenizer.fingerprint:
            mend = "byte" if made_with["name"] == "byte" else str(folder / "tokenizer.json")
            raise DataUsageError(
                f"{folder} was tokenised with {made_with['name']}, not with tokenizer={tokenizer.name}: "
                f"use --data.tokenizer {mend}, or prepare the shards again"
            )
        entries = manifest["shards"]
        self._fingerprint = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:32]
        self._tokens = [_open(folder, entry, "tokens") for entry in entries]
        self._loss = [_open(folder, entry, "loss") if "loss" in entry["files"] else None for entry in entries]
        documents = [np.asarray(_open(folder, entry, "documents")) for entry in entries]
        hashes = np.concatenate([shard["hash"] for shard in documents] or [np.empty(0, np.uint64)])
        # [documents of the split]: shard, first token, length
        ends = np.concatenate([shard["end"].astype(np.int64) for shard in documents] or [np.empty(0, np.int64)])
        shard = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        starts[np.flatnonzero(np.diff(shard, prepend=-1))] = 0
        mine = np.ones(len(hashes), dtype=bool)
        if reading.split != "all":
            mine = in_validation(hashes, reading.validation_fraction) == (reading.split == "validation")
        self._shard, self._start, self._end = shard[mine], starts[mine], ends[mine]
        if not mine.any():
            raise DataUsageError(
                f"{name}: no document of {len(mine)} in {folder} is for {reading.split} with validation_fraction="
                f"{reading.validation_fraction}: change that fraction, or prepare more documents"
            )

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "source": self._name,
            "shards": self._fingerprint,
            "validation_fraction": self._reading.validation_fraction,
            "shuffle": self._reading.shuffle,
            "seed": self._reading.seed,
            "split": self._reading.split,
        }

    def documents(self, cursor: Cursor | None = None) -> Documents:
        epoch, at, given = (cursor["epoch"], cursor["at"], cursor["documents"]) if cursor else (0, 0, 0)
        count = len(self._shard)
        while epoch == 0 or self._reading.repeat:
            order = permutation(count, self._reading.seed, epoch) if self._reading.shuffle else np.arange(count)
            for begin in range(at, count, 1024):  # lists of Python integers: indexing numpy scalars is slow
                chosen = order[begin : begin + 1024]
                places = zip(
                    self._shard[chosen].tolist(), self._start[chosen].tolist(), self._end[chosen].tolist(), strict=True
                )
                for at, (shard, start, end) in enumerate(places, start=begin + 1):
                    given += 1
                    here = {"epoch": epoch, "documents": given, "skipped": 0, "left_out": 0, "at": at}
                    if at == count:
                        here.update(epoch=epoch + 1, at=0)
                    loss = self._loss[shard]
                    yield Document(self._tokens[shard][start:end], None if loss is None else loss[start:end], here)
            epoch, at = epoch + 1, 0


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.glob("shard-*.json")):
            raise DataError(f"{folder} has shards but no {MANIFEST}: its preparation was interrupted; run it again")
        raise DataUsageError(f"{folder} has no {MANIFEST}: it is not a folder made by `tercet data prepare`")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise DataUsageError(
            f"{path} has format {manifest.get('format')!r}, this version reads {FORMAT}: prepare the shards again"
        )
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file with its checksum in the manifest, which is returned."""
    manifest = read_manifest(folder)
    for entry in manifest["shards"]:
        for kind, facts in entry["files"].items():
            path = folder / f"{entry['name']}.{kind}.npy"
            _check_size(path, facts)
            if (found := atomic_io.sha256(path)) != facts["sha256"]:
                raise DataError(
                    f"{path} has sha256 {found[:16]}…, its manifest says {facts['sha256'][:16]}…: "
                    "the file is damaged; prepare the shards again or restore it"
                )
    return manifest


def write_shard(
    folder: Path, name: str, tokens: np.ndarray, documents: np.ndarray, loss: np.ndarray | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write one shard and, last and atomically, its entry: a shard is there as a whole or not at all."""
    arrays = {"tokens": tokens, "documents": documents} | ({} if loss is None else {"loss": loss})
    entry: dict[str, Any] = {"name": name, "tokens": len(tokens), "documents": len(documents), "files": {}, **facts}
    for kind, array in arrays.items():
        path = folder / f"{name}.{kind}.npy"
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.save(file, array)
        entry["files"][kind] = {"bytes": path.stat().st_size, "sha256": atomic_io.sha256(path)}
    write_json(folder / f"{name}.json", entry)
    return entry


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """The name of a temporary file beside `path`, which takes its place if nothing went wrong."""
    try:
        with atomic_io.atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}): make room or name another folder, then run it again; "
            "finished shards are kept"
        ) from error


def write_json(path: Path, value: Any) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): prepare the shards again into a new folder") from error
    return value


def _open(folder: Path, entry: dict[str, Any], kind: str) -> np.ndarray:
    path = folder / f"{entry['name']}.{kind}.npy"
    _check_size(path, entry["files"][kind])
    try:
        # Nothing cannot be mapped: a shard of skipped records alone has no tokens.
        array: np.ndarray = np.load(path, mmap_mode="r" if entry["tokens"] else None, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be opened ({error}): prepare the shards again or restore it") from error
    # A plain view of the map: slicing np.memmap itself costs a microsecond of Python per document.
    return array.view(np.ndarray)


def _check_size(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != facts["bytes"]:
        found = "missing" if size is None else f"{size} bytes long"
        raise DataError(
            f"{path} is {found}, its manifest says {facts['bytes']} bytes: restore it, or prepare the shards again"
        )
