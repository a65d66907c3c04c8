"""What `tercet flight` reports about flight records, and what it refuses to load."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.errors import TercetError
from tercet.parallel.flight_recorder import flight, read, settings, summarize, write


def entry(
    number: int, *, kind: str = "all_reduce", size: int = 8, done: bool = True, group: str = "0"
) -> dict[str, Any]:
    """As PyTorch 2.13 writes it for NCCL."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": f"nccl:{kind}", "input_sizes": [[size]],
        "state": "completed" if done else "started", "retired": done, "is_p2p": False,
        "frames": [{"name": "all_sum", "filename": "/x/tercet/parallel/distributed.py", "line": 93}],
    }  # fmt: skip


def record(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": {}, "entries": list(entries)}


def keep(run: Path, records: dict[int, Any], *, pickled: bool = True) -> Path:
    folder = run / "flight_recorder"
    folder.mkdir(exist_ok=True)
    for rank, made in records.items():
        if pickled:
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(made))
        else:
            (folder / f"rank_{rank}.json").write_text(json.dumps(made))
    return folder


@pytest.mark.parametrize("pickled", [True, False])
def test_the_rank_that_others_wait_for_is_named_with_its_last_collective(tmp_path, pickled):
    folder = keep(
        tmp_path,
        {
            0: record(entry(6), entry(7, kind="all_gather", done=False)),
            1: record(entry(5), entry(6)),
            2: record(entry(6), entry(7, kind="all_gather", done=False)),
        },
        pickled=pickled,
    )
    gather, reduce = (f"({kind} of 8 at distributed.py:93)" for kind in ("all_gather", "all_reduce"))
    assert summarize(*read(folder)) == [
        "records of rank 0, 1, 2",
        f"group 0 (default_pg): rank 0 waits in collective 7 {gather} for rank 1",
        f"group 0 (default_pg): rank 1 got no further than collective 6 {reduce}, completed",
        f"group 0 (default_pg): rank 2 waits in collective 7 {gather} for rank 1",
    ]


def test_ranks_in_different_collectives_are_reported(tmp_path):
    folder = keep(tmp_path, {0: record(entry(3), entry(4)), 1: record(entry(3), entry(4, size=9))})
    assert summarize(*read(folder))[1] == (
        "group 0 (default_pg): ranks diverged at collective 4: rank 0 all_reduce of 8, rank 1 all_reduce of 9"
    )


def test_backends_of_one_group_are_numbered_separately(tmp_path):
    gloo = entry(1) | {"profiling_name": "gloo:broadcast"}
    waits = entry(2, done=False)
    folder = keep(tmp_path, {0: record(gloo, entry(1), waits), 1: record(gloo, entry(1))})
    what, where = "(all_reduce of 8 at distributed.py:93)", "group 0 (default_pg) on nccl"
    assert summarize(*read(folder))[1:] == [
        f"{where}: rank 0 waits in collective 2 {what} for rank 1",
        f"{where}: rank 1 got no further than collective 1 {what}, completed",
    ]


def test_a_record_has_the_collectives_of_nccl_and_of_other_backends(tmp_path, monkeypatch):
    """NCCL keeps a separate record; the record of an unused backend has no entries key."""
    import torch._C._distributed_c10d as c10d

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: json.dumps({"version": "2.10"}), raising=False)
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda *_: json.dumps(record(entry(1))), raising=False)
    path = write(tmp_path, 0, 1)
    assert [e["profiling_name"] for e in json.loads(path.read_text())["entries"]] == ["nccl:all_reduce"]
    assert summarize(*read(path.parent)) == ["records of rank 0", "no rank is waiting in a collective"]


def test_no_rank_is_blamed_when_all_collectives_completed(tmp_path, capsys):
    keep(tmp_path, {0: record(entry(3)), 1: record(entry(3))})
    assert flight(str(tmp_path)) == 0
    assert capsys.readouterr().out == "records of rank 0, 1\nno rank is waiting in a collective\n"


def test_a_pickle_with_anything_but_plain_values_is_refused_and_not_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    folder = keep(tmp_path, {0: record() | {"entries": [Harm()]}})
    with pytest.raises(TercetError, match=r"rank_0 is not a flight record: it refers to posix.mkdir"):
        read(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x80", pickle.dumps([1]), *(pickle.dumps({"entries": e}) for e in (3, [{}], ["x"]))]
)
def test_a_damaged_record_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(TercetError, match="rank_0 is not a flight record"):
        read(tmp_path)


def test_an_empty_folder_is_an_error_that_says_when_records_are_written(tmp_path):
    with pytest.raises(TercetError, match="has no records: they are written when a collective fails"):
        read(tmp_path)


def test_a_damaged_record_does_not_hide_the_others(tmp_path):
    folder = keep(tmp_path, {0: record(entry(6), entry(7, done=False)), 1: record(entry(6))})
    (folder / "rank_2.json").write_text('{"entries": [')
    lines = summarize(*read(folder))
    assert lines[0].startswith(f"{folder}/rank_2.json is not a flight record: ")
    assert lines[1] == "records of rank 0, 1"
    assert any("rank 0 waits in collective 7" in line for line in lines)


@pytest.mark.parametrize("pickle_is_newer", [True, False])
def test_the_newer_of_two_records_of_a_rank_is_used(tmp_path, pickle_is_newer):
    folder = keep(tmp_path, {0: record(entry(7))})
    keep(tmp_path, {0: record(entry(9))}, pickled=False)
    os.utime(folder / "rank_0", (2000, 2000 if pickle_is_newer else 1000))
    os.utime(folder / "rank_0.json", (1500, 1500))
    newest = read(folder)[0][0]["entries"][-1]["collective_seq_id"]
    assert newest == (7 if pickle_is_newer else 9)
    newer = folder / ("rank_0" if pickle_is_newer else "rank_0.json")
    newer.write_bytes(b"{")  # half written
    os.utime(newer, (3000, 3000))
    found, damaged = read(folder)
    assert found[0]["entries"][-1]["collective_seq_id"] == (9 if pickle_is_newer else 7)
    assert len(damaged) == 1


def test_records_of_earlier_processes_are_moved_aside_and_shown_until_there_are_new_ones(tmp_path, capsys):
    folder = keep(tmp_path, {0: record(entry(7)), 5: record(entry(9))})
    settings(tmp_path, 1)
    assert read(folder)  # only rank 0 moves them
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    settings(tmp_path, 0)
    assert [p.name for p in folder.iterdir()] == ["earlier-19700101-001640"]
    assert flight(str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "no failure since the run was last started; the one before that (earlier-19700101-001640):",
        "records of rank 0, 5",
    ]
    keep(tmp_path, {1: record(entry(2))})
    assert flight(str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[0] == "records of rank 1"


def test_a_record_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    import torch._C._distributed_c10d as c10d

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: json.dumps(record(entry(7))), raising=False)
    path = write(tmp_path, 0, 2)
    assert read(path.parent)[0][0]["world_size"] == 2
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: json.dumps(record(entry(8))), raising=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tercet.atomic_io.sync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 0, 2)
    assert read(path.parent)[0][0]["entries"][-1]["collective_seq_id"] == 7


def test_a_failing_flight_record_does_not_hide_why_the_run_failed(tmp_path, monkeypatch):
    from tercet.parallel.failure import FailureMonitor

    asked = []

    def broken(*given):
        asked.append(given)
        raise json.JSONDecodeError("no JSON", "", 0)

    monkeypatch.setattr("tercet.parallel.flight_recorder.write", broken)
    monitor = object.__new__(FailureMonitor)  # without its heartbeat thread
    monitor._folder, monitor._launch = str(tmp_path), SimpleNamespace(rank=1, world_size=2)
    monitor._write_flight_record()
    assert asked == [(tmp_path, 1, 2)]
