"""Files and variables of others give one error line, never a traceback. test_fuzz.py tries many more."""

from __future__ import annotations

import json

import numpy as np
import pytest

from runs import small, step_logged, train_small
from tercet import cli
from tercet.config.data import DataConfig
from tercet.config.load import load, read_toml
from tercet.data import shards
from tercet.data.files import RecordFormat, parquet_reader
from tercet.data.prepare import prepare
from tercet.data.sources import open_stream
from tercet.data.tokenizers import load_tokenizer
from tercet.errors import TercetError
from tercet.interop.huggingface import folder
from tercet.parallel.launch import Launch
from tercet.report.commands import watch
from tercet.telemetry.event_log import last_heartbeat, read_events
from tercet.telemetry.events import Noted, RunStarted, encode
from tercet.train import manifest
from tercet.train.trainer import train

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


def one_line(capsys, *arguments: str) -> str:
    """The error line of a command that is refused."""
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "2"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "0"), ("WORLD_SIZE", "9" * 5000),
     ("MASTER_PORT", "65536"), ("MASTER_PORT", "²")],
)  # fmt: skip
def test_numbers_of_a_launch(name, value, monkeypatch):
    for variable, number in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", name: value}.items():
        monkeypatch.setenv(variable, number)
    with pytest.raises(TercetError, match=rf"^{name}='{value}' must be an integer from \d+ to \d+: ") as caught:
        Launch.from_environment()
    assert caught.value.exit_code == 2


def test_control_characters_of_a_configuration(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text('preset = "tiny"\nrun.name = "\\u001b[2J\\u009bH\\u00a0"\n')
    for command in ("train --help all", "plan", "config show"):
        assert cli.main([*command.split(), "--config", str(tmp_path / "mine.toml")]) == 0
        out = capsys.readouterr().out
        assert not {"\x1b", "\x9b"} & set(out)
    (tmp_path / "again.toml").write_text(out)
    assert load(file=tmp_path / "again.toml").config == load(file=tmp_path / "mine.toml").config


def test_names_that_are_not_utf_8(capsys):
    assert one_line(capsys, "report", "r\udcfcn") == "error: 'r\\udcfcn' is not UTF-8: rename the file or folder"


def test_files_whose_names_are_not_utf_8(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "b\udcff").write_bytes(b"\xff")
    files = {"data__source": "text", "data__path": str(tmp_path / "corpus"), "data__max_lost_text": 1.0}
    with pytest.raises(TercetError, match="b\udcff: is not UTF-8"):
        train_small(tmp_path / "run", **files)
    *_, last = read_events(tmp_path / "run" / "events_rank0.jsonl")  # the event log has its name too
    assert "b\udcff: is not UTF-8" in last.reason


def test_text_of_parquet_that_is_not_utf_8(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    import pyarrow as arrow

    text = arrow.array([b"a", b"b\xff", b"c"]).cast(arrow.binary()).view(arrow.string())
    arrow.parquet.write_table(arrow.table({"text": text}), tmp_path / "a.parquet")
    first, bad, last = (record for _, record in parquet_reader(RecordFormat())(tmp_path / "a.parquet", 0))
    assert (first.text, last.text) == (b"a", b"c")
    assert "record 2" in str(bad)
    assert "is not UTF-8" in str(bad)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    source = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(9)))
    prepare(DataConfig(source="jsonl", path=str(source)), source.parent / "shards")
    return source.parent / "shards"


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("tokens", lambda a: a.astype(np.float64)),
        ("tokens", lambda a: a.reshape(1, -1)),
        ("documents", lambda a: a["end"].copy()),
        ("documents", lambda a: a[::-1].copy()),
        ("documents", None),
    ],
)
def test_arrays_of_shards(kind, change, prepared, tmp_path):
    (tmp_path / "manifest.json").write_text((prepared / "manifest.json").read_text())
    for path in prepared.glob("*.npy"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / f"shard-00000.{kind}.npy"
    if change is None:  # numpy parses the header as Python
        path.write_bytes(path.read_bytes().replace(b"'descr':", b"(((((((("))
    else:
        np.save(path, change(np.load(path)))
    facts = json.loads((tmp_path / "manifest.json").read_text())
    facts["shards"][0]["files"][kind]["bytes"] = path.stat().st_size
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(TercetError, match=rf"shard-00000\.{kind}\.npy (cannot be opened|holds|does not fit)") as caught:
        open_stream(DataConfig(source="shards", path=str(tmp_path)), load_tokenizer("byte"), seed=0, split="train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../secret", 5])
def test_names_of_shards(name, prepared, tmp_path):
    facts = json.loads((prepared / "manifest.json").read_text())
    facts["shards"][0]["name"] = name
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(TercetError, match=r"manifest\.json is damaged: .*shards\.0\.name") as caught:
        shards.read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_states_of_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    assert train_small(run, train__steps=1) == 0
    again = small(run__dir=str(run), train__steps=2, checkpoint__verify=False)
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    for file, path, wrong in (
        ("run", ["guard"], {"total": "x"}),
        ("rank-00000", ["state", "rng", "torch"], 7),
    ):
        original = (checkpoint / f"{file}.json").read_text()
        facts = json.loads(original)
        node = facts
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = wrong
        (checkpoint / f"{file}.json").write_text(json.dumps(facts))
        with pytest.raises(TercetError, match=r"step-00000001 has a value of the wrong type: ") as caught:
            train(again, resume="auto")
        assert "\n" not in str(caught.value)
        (checkpoint / f"{file}.json").write_text(original)


def test_times_of_a_run_that_are_not_finite(tmp_path, capsys):
    started = RunStarted(
        step=0, name="a", steps=9, world_size=1, strategy="single", device="CPU", parameters=1, tokens_per_step=1,
        accumulation=1,
    )  # fmt: skip
    lines = encode(started)
    for number in (1e308, float("inf"), float("nan")):
        changes = dict.fromkeys(("loss", "lr", "grad_norm", "tokens_per_s", "step_seconds", "data_seconds"), number)
        lines += encode(step_logged(1, **changes, memory_gib=number, losses=[number] * 3, grad_norms=[number]))
        (tmp_path / "events_rank0.jsonl").write_text(lines)
        (tmp_path / "heartbeat_rank0.jsonl").write_text(f'{{"time": {json.dumps(number)}, "for_seconds": "x"}}\n')
        assert watch(tmp_path, once=True) == 0
        assert "step 1  " in capsys.readouterr().out


def test_inspecting_shards_escapes_their_manifest(prepared, tmp_path, capsys):
    facts = json.loads((prepared / "manifest.json").read_text())
    facts["source"]["source"] = "\x1b[2J"
    for path in prepared.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    assert cli.main(["data", "inspect", "--data.source", "shards", "--data.path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "prepared from \\x1b[2J" in out
    assert "\x1b" not in out
