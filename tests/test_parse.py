"""Files of others that no parser can read give one error line, never a traceback."""

from __future__ import annotations

import pytest

from tercet.config.load import read_toml
from tercet.data import shards
from tercet.data.records import jsonl_reader
from tercet.errors import TercetError
from tercet.interop.huggingface import folder
from tercet.report.integrity import checkpoint_problem
from tercet.report.read import last_heartbeat
from tercet.telemetry.events import Noted, encode, read_events
from tercet.train import manifest

DEPTH = 100_000
BROKEN = {"nested": "[" * DEPTH + "]" * DEPTH, "digits": "9" * 5000}


@pytest.fixture(params=BROKEN)
def value(request):
    return BROKEN[request.param]


@pytest.mark.parametrize("read", [manifest.read_json, shards.read_json, folder.read_json])
def test_json_files(read, value, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(f'{{"files": {value}}}')
    with pytest.raises(TercetError, match=r"manifest\.json:? cannot be read \((nested|Exceeds)") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert checkpoint_problem(tmp_path) == "manifest.json cannot be read"


def test_json_lines(value, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"text": "a"}}\n{{"text": {value}}}\n{{"text": "b"}}\n')
    first, bad, last = (record for _, record in jsonl_reader("text", "")(path, 0))
    assert (first.text, last.text) == (b"a", b"b")
    assert "is not JSON" in str(bad)


def test_an_event_is_skipped(value, tmp_path):
    path = tmp_path / "events_rank0.jsonl"
    path.write_text(f'{{"kind": "note", "step": {value}}}\n' + encode(Noted(step=1, text="a")))
    assert [event.text for event in read_events(path)] == ["a"]


def test_a_heartbeat_is_skipped(tmp_path):
    path = tmp_path / "heartbeat_rank0.jsonl"
    path.write_text('{"time": 1}\n' + "[" * 60_000 + "\n")
    assert last_heartbeat(path) == {"time": 1}


def test_toml_files(value, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"[train]\nbetas = {value}\n")
    with pytest.raises(TercetError, match=r"mine\.toml is not valid TOML: (nested|Exceeds)") as caught:
        read_toml(path)
    assert "\n" not in str(caught.value)
