"""Damaged and crafted files of every format are read, or refused with one line, never with a traceback.

The slow matrix mutates each format some hundreds of times and prints how many were read and how many refused.
TERCET_FUZZ sets the number of mutations per format.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runs import train_small
from tercet import cli
from tercet.config.data import DataConfig
from tercet.config.load import load, to_toml
from tercet.data.commands import describe, describe_shards
from tercet.data.loader import build_loader
from tercet.data.prepare import prepare, train_bpe
from tercet.errors import TercetError
from tercet.interop.huggingface.import_hf import import_model
from tercet.parse import one_line_errors
from tercet.report.commands import report, watch
from tercet.report.read import read_run
from tercet.report.verdict import judge
from tercet.terminal import printable

MUTATIONS = int(os.environ.get("TERCET_FUZZ", "300"))
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
        "attention_factor": 1.1,
    },
    "tie_word_embeddings": True,
}  # fmt: skip
NESTED = "[" * 2000 + "]" * 2000  # written without quotes
JSON_VALUES = [
    None, True, False, 0, -1, 7, 2**31, 2**63, 10**400, 1.5, -1e308, float("inf"), float("nan"), "", "x", "../x", "\0",
    "\x1b[2J", "\ud800", "9" * 30, [], [[]], [None], ["x"], [1, 2, 3], {}, {"x": 1}, {"": {"": {}}},
    NESTED,
]  # fmt: skip
TOML_VALUES = [
    "{}", "[]", "5", "-1", "0", "2.5", "inf", "nan", "1e400", "true", '"x"', '"none"', '"\\u001b[2J"', "[[1]]",
    "{ a = 1 }", "1979-05-27", "9999999999999999999999", "9" * 5000, "[" * 3000, '["a", 1]', "a.b = 1", '"../.."',
    "'''\n'''", "1", "2", "64", "0.5", "false", '"auto"', "[]",
]  # fmt: skip
FORMATS = (
    "configuration", "Hugging Face folder", "shards", "jsonl", "parquet", "checkpoint", "events",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------
# Mutations


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of a JSON tree, tables and lists included."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:40]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def mutate_json(data: bytes, draw: random.Random) -> bytes:
    """Replace or remove a value, or damage the text."""
    if draw.random() < 0.2:
        return damage(data, draw)
    tree = json.loads(data)
    paths = list(leaves(tree)) or [(0,)]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        *parents, last = draw.choice(paths)
        node = tree
        with contextlib.suppress(LookupError, TypeError):  # a mutation before this one removed it
            for key in parents:
                node = node[key]
            if draw.random() < 0.15:
                del node[last]
            else:
                node[last] = copy.deepcopy(draw.choice(JSON_VALUES))
    return json.dumps(tree).replace(f'"{NESTED}"', NESTED).encode()


def mutate_lines(data: bytes, draw: random.Random) -> bytes:
    """Mutate some lines of a file of JSON lines."""
    lines = data.splitlines()
    chosen = set(draw.sample(range(len(lines)), min(len(lines), draw.choice([1, 3, 20]))))
    return b"\n".join(mutate_json(line, draw) if i in chosen else line for i, line in enumerate(lines)) + b"\n"


def mutate_toml(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.2:
        return damage(data, draw)
    lines = data.decode().splitlines()
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        number = draw.choice([i for i, line in enumerate(lines) if " = " in line])
        lines[number] = f"{lines[number].partition(' = ')[0]} = {draw.choice(TOML_VALUES)}"
    return "\n".join(lines).encode()


def mutate_npy(data: bytes, draw: random.Random) -> bytes:
    """Damage the header, which has 128 bytes, or the values."""
    if draw.random() < 0.3:
        return data[:128] + damage(data[128:], draw)[: len(data) - 128].ljust(len(data) - 128)
    return damage(data[:128], draw) + data[128:]


def damage(data: bytes, draw: random.Random) -> bytes:
    """Cut, flip, repeat or insert bytes."""
    at, to = sorted(draw.randrange(len(data)) for _ in range(2))
    junk = draw.choice([b"\xff", b"\0" * 9, b"{" * 3000, b"[" * 50_000, b"9" * 5000, b"\x1b[2J", b"a." * 3000])
    return draw.choice(
        [
            data[:at],
            data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
            data[:at] + data[to:],
            data[:to] + data[at:],
            data[:at] + junk + data[at:],
        ]
    )


# ------------------------------------------------------------------------------------------------
# Formats: a folder of files, how to mutate them, and what reads them


class Format:
    """`original` is copied for each mutation, one of `files` (names or globs) is mutated, and `read` reads the copy."""

    def __init__(self, original: Path, mutate: dict[str, Callable[..., bytes]], read: Callable[[Path], Any]) -> None:
        self.original, self.mutate, self.read = original, mutate, read

    def attempt(self, folder: Path, draw: random.Random) -> str:
        """Read one mutation: "read" or "refused"; anything else raises."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.original, folder, symlinks=True)
        pattern = draw.choice(list(self.mutate))
        path = draw.choice(sorted(folder.glob(pattern)))
        path.write_bytes(self.mutate[pattern](path.read_bytes(), draw))
        out, problem = io.StringIO(), "read"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                self.read(folder)
        except TercetError as error:
            problem = f"refused: {printable(str(error))}"
        assert "\n" not in problem, problem
        assert "\x1b" not in out.getvalue()
        return problem.partition(":")[0]


def command(*arguments: str) -> None:
    """Run a command line; an exit code of 2 is an error of one line."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = cli.main(arguments)
    if code:
        raise TercetError(errors.getvalue().removeprefix("error: ").rstrip("\n"))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Format]:
    """A format by its name; its original files are made on first use."""
    root = tmp_path_factory.mktemp("originals")
    corpus = root / "corpus"
    corpus.mkdir()
    records = [{"text": f"document {i} of some words and numbers", "id": i} for i in range(200)]
    (corpus / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def read_data(source: str, path: Path, **more: Any) -> None:
        data = DataConfig(source=source, path=str(path), seq_len=16, validation_fraction=0.1, prefetch=0, **more)
        with build_loader(data, seed=1, batch_sequences=4) as loader:
            for _ in range(3):
                next(loader, None)
        list(describe(data, split="train", sequences=2, seed=1))

    def read_model(folder: Path) -> None:
        shutil.rmtree(root / "imported", ignore_errors=True)
        import_model(folder, root / "imported")

    def config() -> Format:
        folder = root / "config"
        folder.mkdir()
        (folder / "mine.toml").write_text(to_toml(load("tiny").config))

        def read(folder: Path) -> None:
            command("config", "show", "--config", str(folder / "mine.toml"))
            command("train", "--config", str(folder / "mine.toml"), "--help", "all")
            command("plan", "--config", str(folder / "mine.toml"), "--gpu", "H200")

        return Format(folder, {"mine.toml": mutate_toml}, read)

    def huggingface() -> Format:
        import torch
        from safetensors.torch import save_file

        folder = root / "hf"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        (folder / "tokenizer.json").write_bytes(bpe().read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
        sizes = {"input_layernorm": (16,), "post_attention_layernorm": (16,), "mlp.down_proj": (16, 24)}
        sizes |= {"mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "self_attn.q_proj": (16, 16)}
        sizes |= {"self_attn.o_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        weights = {
            f"model.layers.{i}.{name}.weight": torch.zeros(size) for i in range(2) for name, size in sizes.items()
        }
        weights |= {"model.embed_tokens.weight": torch.zeros(40, 16), "model.norm.weight": torch.zeros(16)}
        save_file(weights, folder / "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")})
        )

        changes = dict.fromkeys(("config.json", "*.index.json", "tokenizer*.json", "config.*"), mutate_json)
        return Format(folder, changes | {"model.safetensors": damage}, read_model)

    def bpe() -> Path:
        path = root / "tokenizer.json"
        if not path.exists():
            train_bpe(DataConfig(source="jsonl", path=str(corpus)), path, vocab_size=300)
        return path

    def shards() -> Format:
        prepare(DataConfig(source="jsonl", path=str(corpus)), root / "shards", shard_tokens=3000)

        def read(folder: Path) -> None:
            list(describe_shards(folder, check=False))
            read_data("shards", folder)

        return Format(root / "shards", {"manifest.json": mutate_json, "shard-*.npy": mutate_npy}, read)

    def jsonl() -> Format:
        return Format(corpus, {"a.jsonl": mutate_lines}, lambda folder: read_data("jsonl", folder))

    def parquet() -> Format:
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = root / "parquet"
        folder.mkdir()
        pq.write_table(pa.table({"text": [record["text"] for record in records]}), folder / "a.parquet")
        return Format(folder, {"a.parquet": damage}, lambda folder: read_data("parquet", folder))

    def checkpoint() -> Format:
        run = root / "run"
        assert train_small(run, train__steps=2) == 0

        def read(folder: Path) -> None:
            changes = {"checkpoint__verify": False, "checkpoint__every": 0, "train__steps": 3}
            train_small(folder, **changes, resume="auto")

        files = "checkpoints/step-*/*.json"
        return Format(run, {files: mutate_json, "checkpoints/*/run.json": mutate_json}, read)

    def events() -> Format:
        run = root / "watched"
        assert train_small(run, train__steps=3, train__val_tokens=128) == 0
        (run / "heartbeat_rank0.jsonl").write_text(
            json.dumps({"time": 1.0, "rank": 0, "step": 3, "doing": "x", "for_seconds": 1.0}) + "\n"
        )

        mutation = itertools.count()

        def read(folder: Path) -> None:
            watch(folder, once=True)
            with one_line_errors(TercetError, "damaged records"):  # as `report` does for its gates
                judge(read_run(folder))
            if next(mutation) % 30 == 0:  # plots take seconds
                report([folder], out=root / "page")

        return Format(run, {"events_rank0.jsonl": mutate_lines, "heartbeat_rank0.jsonl": mutate_lines}, read)

    makers = (config, huggingface, shards, jsonl, parquet, checkpoint, events)
    return lambda name: dict(zip(FORMATS, makers, strict=True))[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_or_refused_in_one_line(
    name: str, make: Callable[[str], Format], tmp_path: Path, matrix_counts: list[str]
) -> None:
    tested, outcomes = make(name), {"read": 0, "refused": 0}
    for seed in range(MUTATIONS):
        try:
            outcomes[tested.attempt(tmp_path / "copy", random.Random(seed))] += 1
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: see {tmp_path / 'copy'}") from error
    matrix_counts.append(f"fuzz, {name}: {MUTATIONS} mutations, {outcomes['read']} read, {outcomes['refused']} refused")
    assert min(outcomes.values()) > 0  # mutations that are always refused test only the parser
