"""Bad records are reported by name, or skipped and counted. I/O errors are retried, and never skipped."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tercet.config.data import DataConfig
from tercet.data import files
from tercet.data.loader import build_loader
from tercet.data.paths import find_files
from tercet.data.sources import open_stream, record_source
from tercet.data.stream import BadRecordError, DataError
from tercet.data.tokenizers import ByteTokenizer

zstandard = pytest.importorskip("zstandard")  # machines of `make test-gpu` may lack it

GOOD = [json.dumps({"text": f"good {i}"}) for i in range(6)]


def jsonl_with(bad: bytes) -> bytes:
    lines = [line.encode() for line in GOOD]
    return b"\n".join(lines[:3] + [bad] + lines[3:]) + b"\n"


def config(source: str, path, **kwargs) -> DataConfig:
    return DataConfig(
        source=source, path=str(path), seq_len=16, validation_fraction=0, exhaustion="stop", shuffle=False, **kwargs
    )


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"text": "half', "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b'["text"]', "is a JSON list, not an object"),
        (b'{"id": "a", "content": "xyz"}', r"has no field 'text' \(it has id, content\).*--data.text_field content,"),
        (b'{"text": null}', "its text is NoneType, not a string"),
        (b'{"text": 5}', "its text is int, not a string"),
        (b'{"text": "\\ud800"}', "its text is not Unicode"),
        (b'{"text": "a\\u0000b"}', "has a zero byte at 1"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_bad_line_is_named_or_skipped_and_counted(bad, reason, suffix, tmp_path, read, documents_of):
    path = tmp_path / f"a.{suffix}"
    compress = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(compress[suffix](jsonl_with(bad)))
    with pytest.raises(BadRecordError, match=rf"record 4 of .*a\.{suffix}: {reason}.*--data.bad_records skip"):
        read(config("jsonl", path))
    batches = read(config("jsonl", path, bad_records="skip"))
    assert documents_of(batches) == [f"good {i}".encode() for i in range(6)]
    assert batches[-1].stats.skipped == 1


def test_skipped_and_empty_records_are_counted_once_even_after_a_resume(tmp_path, read):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"good {i} " + "x" * (i % 7)}) for i in range(60)]
    for i in range(0, 60, 9):
        lines[i] = "broken"
        lines[i + 4] = '{"text": ""}'
    path.write_text("\n".join(lines) + "\n")
    data = config("jsonl", path, bad_records="skip", shuffle_block=10)
    straight = read(data, sequences=1)
    assert (straight[-1].stats.skipped, straight[-1].stats.left_out) == (7, 7)
    for k, batch in enumerate(straight[:-1]):
        rest = read(data, sequences=1, state=batch.state)
        assert [b.stats for b in rest] == [b.stats for b in straight[k + 1 :]]


@pytest.mark.parametrize("bad_records", ["error", "skip"])
@pytest.mark.parametrize("source", ["jsonl", "text"])
@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_a_truncated_or_damaged_compressed_file_is_an_error(suffix, source, bad_records, tmp_path, read):
    lines = "".join(json.dumps({"text": f"{i} " + str(hash(str(i)))}) + "\n" for i in range(5000)).encode()
    compress = gzip.compress if suffix.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress
    packed, path = compress(lines), tmp_path / f"a.{suffix}"
    damaged = bytearray(packed)
    damaged[len(damaged) // 2] ^= 255
    for content, what in ((packed[: len(packed) * 95 // 100], "truncated"), (damaged, "damaged")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.{suffix} is {what} \(.*: fetch or compress it again$"):
            read(config(source, tmp_path, bad_records=bad_records))


@pytest.mark.parametrize(("suffix", "name"), [("gz", "gzip"), ("zst", "zstd")])
def test_plain_text_with_the_name_of_a_compressed_file_is_called_so(suffix, name, tmp_path, read):
    (tmp_path / f"a.jsonl.{suffix}").write_text("\n".join(GOOD))
    with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix} is not a {name} file: .* without \.{suffix}$"):
        read(config("jsonl", tmp_path))


class UnreliableStorage:
    """Replaces `open_binary`: the first `failures` reads of a file fail, after two lines."""

    def __init__(self, failures: int) -> None:
        self.failures, self.open = failures, files.open_binary

    def __call__(self, path):
        self.failures -= 1
        return self if self.failures >= 0 else self.open(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def readline(self, _size):
        self.lines = getattr(self, "lines", 0) % 3 + 1
        return GOOD[0].encode() + b"\n" if self.lines < 3 else self.read(0)

    def read(self, _size):
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_an_io_error_is_retried_and_warned_about(source, tmp_path, monkeypatch, documents_of):
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD))
    monkeypatch.setattr("tercet.data.files.RETRY_SECONDS", (0, 0, 0))
    monkeypatch.setattr(files, "open_binary", UnreliableStorage(3))
    with build_loader(config(source, tmp_path, bad_records="skip"), seed=0, batch_sequences=1) as loader:
        batches = list(loader)
        assert len(loader.stream.notes.io_retries) == 3
        assert "a.jsonl could not be read (Input/output error): retry 1 of 3" in loader.stream.notes.io_retries[0]
    assert len(documents_of(batches)) == (6 if source == "jsonl" else 1)
    assert batches[-1].stats.skipped == 0


def test_an_io_error_that_stays_is_fatal_and_not_a_bad_record(tmp_path, monkeypatch, read):
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD))
    waits = []
    monkeypatch.setattr("tercet.data.files.time.sleep", waits.append)
    monkeypatch.setattr(files, "open_binary", UnreliableStorage(99))
    with pytest.raises(DataError, match=r"a.jsonl cannot be read \(Input/output error\), also after 4 retries in 15 s"):
        read(config("jsonl", tmp_path, bad_records="skip"))
    assert waits == [1, 2, 4, 8]
    with pytest.raises(FileNotFoundError):  # raised by the reader, so retried too
        next(files.parquet_reader(files.RecordFormat())(tmp_path / "missing.parquet", 0))


@pytest.mark.parametrize(("kind", "fix"), [(PermissionError, "change the permissions"), (IsADirectoryError, "make it")])
def test_an_error_that_waiting_does_not_fix_is_fatal_at_once(kind, fix, tmp_path, monkeypatch, read):
    (tmp_path / "a.jsonl").write_text("\n".join(GOOD))

    def refused(path):
        raise kind(0, "refused")

    monkeypatch.setattr("tercet.data.files.time.sleep", lambda _: pytest.fail("retried"))
    monkeypatch.setattr(files, "open_binary", refused)
    with pytest.raises(DataError, match=rf"a\.jsonl cannot be read \(refused\): {fix}"):
        read(config("jsonl", tmp_path, bad_records="skip"))


def test_bad_parquet_rows_and_files_are_named(tmp_path, read, documents_of):
    pq.write_table(pa.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    with pytest.raises(BadRecordError, match=r"record 2 of .*a.parquet: its text is NoneType"):
        read(config("parquet", tmp_path))
    batches = read(config("parquet", tmp_path, bad_records="skip"))
    assert documents_of(batches) == [b"one", b"three"]
    with pytest.raises(BadRecordError, match=r"a.parquet: has no column 'body' \(it has text\)"):
        read(config("parquet", tmp_path, text_field="body"))
    for column in ([{"a": "b"}], [1], [None]):
        pq.write_table(pa.table({"text": column}), tmp_path / "c.parquet")
        with pytest.raises(BadRecordError, match=r"its column 'text' is .*, not text"):
            read(config("parquet", tmp_path / "c.parquet"))
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(BadRecordError, match=r"b.parquet: is not a readable parquet file"):
        read(config("parquet", tmp_path / "b.parquet"))


def test_text_that_is_not_utf8_is_named(tmp_path, read):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadRecordError, match=r"a.txt: is not UTF-8 \(.* at byte 3\)"):
        read(config("text", tmp_path))
    (tmp_path / "a.txt").write_text("café", encoding="utf-16")
    with pytest.raises(BadRecordError, match=r"a.txt: is UTF-16, not UTF-8"):
        read(config("text", tmp_path))


def test_text_files_are_split_at_the_separator(tmp_path, read, documents_of):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\nthree")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"four"))
    assert documents_of(read(config("text", tmp_path, separator="\n---\n"))) == [b"one", b"two", b"three", b"four"]
    whole = documents_of(read(config("text", tmp_path)))
    assert whole == [b"one\n---\ntwo\n---\nthree", b"four"]


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, read, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.txt").write_text("text")
    listed = os.scandir

    def scandir(folder):
        if Path(folder).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"locked cannot be read \(Permission denied\): change the permissions"):
        read(config("text", tmp_path))


def test_paths_can_be_files_folders_and_globs(tmp_path, read, documents_of):
    for name in ("x/a.jsonl", "x/deep/b.jsonl", "y/c.jsonl", "y/notes.md", "x/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")

    def names(*paths) -> set[bytes]:
        data = config("jsonl", "x").model_copy(update={"path": tuple(str(tmp_path / p) for p in paths)})
        return set(documents_of(read(data)))

    assert names("x") == {b"x/a.jsonl", b"x/deep/b.jsonl"}
    assert names("x", "y/c.jsonl") == {b"x/a.jsonl", b"x/deep/b.jsonl", b"y/c.jsonl"}
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "a.jsonl").write_text(json.dumps({"text": "z/a.jsonl"}) + "\n")
    assert names("x", "z") == {b"x/a.jsonl", b"x/deep/b.jsonl", b"z/a.jsonl"}, "equal names in two folders"
    (tmp_path / "z" / "a.jsonl").unlink()
    assert names("**/*.jsonl") == {b"x/a.jsonl", b"x/deep/b.jsonl", b"y/c.jsonl"}
    with pytest.raises(DataError, match=r"matches no file: .* if the files have moved"):
        names("z*.jsonl")
    with pytest.raises(DataError, match="has no parquet files"):
        read(config("parquet", tmp_path / "x"))
    with pytest.raises(DataError, match=r"names .*a.jsonl twice"):
        names("x/a.jsonl", "x/*.jsonl")


def long_jsonl(path):
    path.write_bytes(jsonl_with(json.dumps({"text": "x" * (2 << 20)}).encode()))


def long_parquet(path):
    texts = [json.loads(line)["text"] for line in GOOD]
    pq.write_table(pa.table({"text": [*texts[:3], "x" * (2 << 20), *texts[3:]]}), path)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_record_over_the_limit_is_bad_until_the_limit_is_raised(source, tmp_path):
    path = tmp_path / f"a.{source}"
    (long_jsonl if source == "jsonl" else long_parquet)(path)
    found = dict(record_source(config(source, path, max_record_mib=1), None)._reader(path, 0))
    limits = r"is longer than data.max_record_mib=1 allows: split it, or raise --data.max_record_mib"
    assert re.search(rf"record 4 of .*a\.{source}: {limits}", str(found.pop(4)))
    assert [record.text for record in found.values()] == [f"good {i}".encode() for i in range(6)]
    whole = dict(record_source(config(source, path), None)._reader(path, 0))
    assert len(whole[4].text) == 2 << 20


def test_repeated_values_of_a_parquet_file_are_not_written_out(tmp_path):
    """300 rows share one value of 1 MiB: a file of a few kB, which took 256 MiB of memory."""
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x" * (1 << 20)]))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": shared}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    before = pa.total_allocated_bytes()
    rows = files.parquet_reader(files.RecordFormat())(path, 0)
    assert len(next(rows)[1].text) == 1 << 20
    assert pa.total_allocated_bytes() - before < 16 << 20
    assert sum(1 for _ in rows) == 299


@pytest.mark.parametrize("separator", ["", "\n--\n"])
def test_a_text_of_any_length_is_read_in_pieces_that_start_at_lines(separator, tmp_path, monkeypatch):
    class Endless:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, size):
            return b"0123456\n" * (size // 8)

    monkeypatch.setattr(files, "open_binary", lambda _: Endless())
    rows = files.text_reader(separator, 1)(tmp_path, 0)
    assert [len(next(rows)[1].text) for _ in range(3)] == [1 << 20] * 3


HOSTILE = {
    "deep.jsonl": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "nested too deeply"),
    "long-name.jsonl": (b'{"' + b"k" * 100_000 + b'": 1}\n', "has no field 'text'"),
    "digits.jsonl": (b'{"text": "x", "a": ' + b"9" * 5000 + b"}\n", "is not JSON"),
    "nul.jsonl": (b"\0" * 100 + b"\n", "is not JSON"),
    "magic.parquet": (b"PAR1" + b"\xff" * 100 + b"\x00\x00\x00\x80PAR1", "is not a readable parquet file"),
    "zeros.txt": (b"\0" * 100, "has a zero byte at 0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_one_short_line(name, tmp_path):
    content, words = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    source = {"jsonl": "jsonl", "parquet": "parquet"}.get(name.rsplit(".")[-1], "text")
    with pytest.raises(DataError, match=words) as error:
        list(open_stream(config(source, tmp_path / name), ByteTokenizer(), seed=0, split="train").documents())
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 800


def test_links_that_form_loops_are_not_followed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert find_files([f"{tmp_path}/**/*.txt"], "text").names == ["a.txt"]
