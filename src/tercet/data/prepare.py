"""Tokenise once, read many times: any source of text becomes a folder of shards.

This process reads records in their order, worker processes tokenise, this process writes. So the shards are the same
bytes whatever the number of workers, and after any interruption: a finished shard carries the cursor of the records
behind it, and the next run goes on there.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tercet.config.data import DataConfig
from tercet.data.records import Record
from tercet.data.shards import DOCUMENT, FORMAT, MANIFEST, read_json, read_manifest, write_json, write_shard
from tercet.data.sources import record_source
from tercet.data.stream import BadRecordError, DataError, DataUsageError
from tercet.data.text import BAD_RECORDS_KEPT, OpenRecords, encode_records, hash_of, objection
from tercet.data.tokenizers import LibraryTokenizer, Tokenizer, load_tokenizer

PLAN = "prepare.json"
LOCK = ".lock"
CHUNK_BYTES = 1 << 20  # text sent to a worker at once
PREPARABLE = ("python-source", "text", "jsonl", "parquet", "fineweb-edu")


@dataclass(frozen=True)
class Progress:
    """What is on disk after a shard."""

    shards: int
    documents: int
    tokens: int
    skipped: int
    left_out: int
    seconds: float


@dataclass
class _Chunk:
    records: list[Record]
    place: Any  # behind its records
    bad: list[str]  # records skipped, in words
    left_out: int


def prepare(
    data: DataConfig,
    out: Path,
    *,
    workers: int = 0,
    shard_tokens: int = 1 << 26,
    report: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Write `data`'s documents as shards under `out`, going on where an earlier run stopped. Returns the manifest.

    `workers` tokenise; 0 means one per core. Documents of both splits are written, in the order of the sorted files:
    the split and the order of reading are made when the shards are read.
    """
    if data.source not in PREPARABLE:
        raise DataUsageError(f"source={data.source} cannot be prepared: it must be one of {', '.join(PREPARABLE)}")
    if shard_tokens < 1:
        raise DataUsageError(f"shard_tokens={shard_tokens} is below 1: 67108864 is a good size")
    if workers < 0:
        raise DataUsageError(f"workers={workers} is below 0: give a number of processes, or 0 for one per core")
    workers = workers or os.cpu_count() or 1
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    records = record_source(data, seed=0, shuffle=False)
    _check_folder(out)
    _make_folder(out)
    with _only_one(out):
        plan = {
            "format": FORMAT,
            "tokenizer": _describe(tokenizer),
            "source": {
                "source": data.source,
                **records.identity(),
                "text_field": data.text_field,
                "prompt_field": data.prompt_field,
                "separator": data.separator,
            },
            "bad_records": data.bad_records,
            "shard_tokens": shard_tokens,
        }
        _check_plan(out, plan)
        if (out / MANIFEST).is_file():  # written last: everything is there
            return read_manifest(out)
        if isinstance(tokenizer, LibraryTokenizer):
            tokenizer.save(out / "tokenizer.json")
        entries = _finished(out)
        begin = time.perf_counter()
        place = entries[-1]["place"] if entries else None
        chunks = _chunks(records.open(0, place), tokenizer, skip_bad=data.bad_records == "skip")
        builder = _Builder(out, tokenizer.dtype, shard_tokens, masks=bool(data.prompt_field), entries=entries)
        with _Workers(workers, data) as pool:
            for chunk, arrays, hashes in pool.tokenise(chunks):
                if builder.add(chunk, arrays, hashes) and report:
                    report(_progress(entries, time.perf_counter() - begin))
        builder.finish()
        counts = _progress(entries, time.perf_counter() - begin)
        if not counts.documents:
            raise DataError(f"source={data.source} holds no document: there is nothing to prepare")
        manifest = {
            **plan,
            "documents": counts.documents,
            "tokens": counts.tokens,
            "skipped": counts.skipped,
            "left_out": counts.left_out,
            "shards": [{k: v for k, v in entry.items() if k != "place"} for entry in entries],
        }
        write_json(out / MANIFEST, manifest)
        if report:
            report(counts)
    return manifest


class _Builder:
    """Collects documents until a shard is full, and writes it. A shard ends at the end of a chunk."""

    def __init__(
        self, out: Path, dtype: np.dtype, shard_tokens: int, *, masks: bool, entries: list[dict[str, Any]]
    ) -> None:
        self._out, self._dtype, self._shard_tokens, self._masks = out, dtype, shard_tokens, masks
        self._entries = entries
        self._clear()
        self._place: Any = entries[-1]["place"] if entries else None

    def _clear(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._prompts: list[int] = []
        self._hashes: list[int] = []
        self._bad: list[str] = []
        self._size = self._skipped = self._left_out = 0

    def add(self, chunk: _Chunk, encoded: list[tuple[np.ndarray, int]], hashes: list[int]) -> bool:
        """True if this filled a shard, which is then on disk."""
        for tokens, prompt in encoded:
            self._tokens.append(tokens)
            self._prompts.append(prompt)
            self._size += len(tokens)
        self._hashes += hashes
        self._skipped += len(chunk.bad)
        self._bad = (self._bad + chunk.bad)[:BAD_RECORDS_KEPT]
        self._left_out += chunk.left_out
        self._place = chunk.place
        if self._size < self._shard_tokens:
            return False
        self._write()
        return True

    def finish(self) -> None:
        if self._tokens or self._skipped or self._left_out or not self._entries:
            self._write()

    def _write(self) -> None:
        lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        documents = np.empty(len(lengths), dtype=DOCUMENT)
        documents["end"] = np.cumsum(lengths)
        documents["hash"] = self._hashes
        loss = None
        if self._masks:
            loss = np.ones(self._size, dtype=bool)
            for end, length, prompt in zip(documents["end"].tolist(), lengths.tolist(), self._prompts, strict=True):
                loss[end - length : end - length + prompt] = False
        tokens = np.concatenate(self._tokens) if self._tokens else np.empty(0, dtype=self._dtype)
        facts = {
            "skipped": self._skipped,
            "bad_records": self._bad,
            "left_out": self._left_out,
            "place": self._place,
        }
        name = f"shard-{len(self._entries):05d}"
        self._entries.append(write_shard(self._out, name, tokens, documents, loss, facts))
        self._clear()


class _Workers:
    """Processes that tokenise; with one worker, this process itself."""

    def __init__(self, count: int, data: DataConfig) -> None:
        self._count = count
        self._tokenizer = load_tokenizer(data.tokenizer, data.eos_token) if count == 1 else None
        self._pool = None
        if count > 1:
            # Spawned, not forked: the tokenizer library has threads, which a fork does not take along.
            self._pool = ProcessPoolExecutor(
                count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(data.tokenizer, data.eos_token),
            )

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def tokenise(self, chunks: Iterator[_Chunk]) -> Iterator[tuple[_Chunk, list[tuple[np.ndarray, int]], list[int]]]:
        """Chunks in their order, with the tokens and hashes of their documents; a few are under way at a time."""
        if self._pool is None:
            assert self._tokenizer is not None
            for chunk in chunks:
                yield chunk, *_work(self._tokenizer, chunk.records)
            return
        under_way: deque[tuple[_Chunk, Future[tuple[list[tuple[np.ndarray, int]], list[int]]]]] = deque()
        try:
            for chunk in chunks:
                under_way.append((chunk, self._pool.submit(_work_here, chunk.records)))
                if len(under_way) > 3 * self._count:
                    first, future = under_way.popleft()
                    yield first, *future.result()
            while under_way:
                first, future = under_way.popleft()
                yield first, *future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenising process died (killed, or out of memory): run the same command again to go on behind the "
                "last finished shard, with fewer --workers if memory was short"
            ) from error


_worker_tokenizer: Tokenizer | None = None


def _start_worker(spec: str, eos_token: str) -> None:
    global _worker_tokenizer
    # The processes are the parallelism; threads in each would only fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(spec, eos_token)
    # A worker holds both ends of its queue, so it would wait for ever for work from a parent that was killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work_here(records: list[Record]) -> tuple[list[tuple[np.ndarray, int]], list[int]]:
    assert _worker_tokenizer is not None
    return _work(_worker_tokenizer, records)


def _work(tokenizer: Tokenizer, records: list[Record]) -> tuple[list[tuple[np.ndarray, int]], list[int]]:
    return encode_records(tokenizer, records), [hash_of(record) for record in records]


def _chunks(opened: OpenRecords, tokenizer: Tokenizer, *, skip_bad: bool) -> Iterator[_Chunk]:
    records: list[Record] = []
    bad: list[str] = []
    size = left_out = 0
    for record in opened:
        if not isinstance(record, BadRecordError) and (reason := objection(tokenizer, record)):
            record = BadRecordError(*opened.where(), reason)
        if isinstance(record, BadRecordError):
            if not skip_bad:
                raise record
            bad.append(str(record))
        elif not record.text:
            left_out += 1
        else:
            records.append(record)
            size += len(record.text)
        if size >= CHUNK_BYTES:
            yield _Chunk(records, opened.place(), bad, left_out)
            records, size, bad, left_out = [], 0, [], 0
    yield _Chunk(records, opened.place(), bad, left_out)


def _describe(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": tokenizer.dtype.str,
    }


def _check_folder(out: Path) -> None:
    """Shards go into a folder of their own: one that is empty, or that a preparation has begun."""
    if not out.is_dir() or (out / PLAN).is_file() or any(out.glob("shard-*.json")):
        return  # whose shards they are is for the plan to say
    others = sorted(p.name for p in out.iterdir() if p.name not in (LOCK, f"{PLAN}.partial"))
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise DataUsageError(f"out={out} holds {shown}, and no shards: name a folder that is new or empty")


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataUsageError(f"out={out} cannot be made ({error}): name a folder that can be written") from error


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Two preparations of one folder would overwrite each other; the lock goes with its process."""
    with open(out / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"out={out} is being written by another process: wait for it, or name another") from error
        yield


def _check_plan(out: Path, plan: dict[str, Any]) -> None:
    if (out / PLAN).is_file():
        before = read_json(out / PLAN)
        for name, now in plan.items():
            was = before.get(name)
            # What was written without skipping had nothing to skip: the mend for a bad record goes on behind it.
            if was == now or (name, was, now) == ("bad_records", "error", "skip"):
                continue
            raise DataUsageError(
                f"out={out} was begun with {_difference(name, was, now)}: name another folder, or remove this one"
            )
    elif any(out.glob("shard-*.json")):
        raise DataUsageError(f"out={out} holds shards of something else (no {PLAN}): name another folder")
    if not (out / MANIFEST).is_file():
        write_json(out / PLAN, plan)


_ABSENT = object()


def _difference(name: str, was: Any, now: Any) -> str:
    """What differs; of a table, the first thing in it that does."""
    if isinstance(was, dict) and isinstance(now, dict):
        # a key that is not there is no key that is None: another version of Tercet may have written the table
        key = next(key for key in {**now, **was} if was.get(key, _ABSENT) != now.get(key, _ABSENT))
        if key == "files":  # a digest, which says nothing to a person
            return "other files (by their names and sizes)"
        return _difference(f"{name}.{key}", was.get(key, _ABSENT), now.get(key, _ABSENT))
    before, after = (f"no {name}" if x is _ABSENT else f"{name}={x}" for x in (was, now))
    return f"{before}, now {after}"


def _finished(out: Path) -> list[dict[str, Any]]:
    """Entries of the complete shards, 0 up; what an interrupted run left half-written is removed."""
    for leftover in out.glob("*.partial"):
        leftover.unlink()
    entries: list[dict[str, Any]] = []
    while (path := out / f"shard-{len(entries):05d}.json").is_file():
        entries.append(read_json(path))
    return entries


def _progress(entries: list[dict[str, Any]], seconds: float) -> Progress:
    sums = {n: sum(entry[n] for entry in entries) for n in ("documents", "tokens", "skipped", "left_out")}
    return Progress(shards=len(entries), seconds=seconds, **sums)
