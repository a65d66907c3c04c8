"""The commands of docs/own-data.md and docs/continue.md run in order, with fewer steps."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tercet import cli

DOCS = Path(__file__).parents[2] / "docs"
FASTER = ["--train.val_tokens=256", "--train.sample_tokens=0", "--log.tensorboard=false"]


def blocks(page: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    pending = ""
    for line in text.replace("\\\n", "").splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # inside quotes
            continue
        pending = ""
        if words:
            yield words


def save_model(folder: Path, family: str = "Llama") -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    make = getattr(transformers, f"{family}Config")
    config = make(vocab_size=256, max_position_embeddings=256, num_key_value_heads=1, head_dim=32, **sizes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(Path("Qwen3-0.6B"), "Qwen3")
    Path("my-texts").mkdir()
    Path("my-texts/one.txt").write_text("A text of mine.\n" * 500)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].config._attn_implementation == "tercet"
    small = ["--train.steps=1", "--train.tokens_per_step=256", "--train.micro_batch=1", "--train.warmup_steps=0"]
    (text,) = blocks("../README.md")
    for program, *words in commands(text):
        assert program == "tercet"
        assert cli.main(words + [*FASTER, *small] * (words[0] == "train")) == 0, capsys.readouterr().err
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "qwen3"


def test_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("own-data.md")
    for program, *arguments in commands(text):
        if program == "python":
            exec(arguments[1], {})
            continue
        assert program == "tercet"
        words = [{"400": "3", "600": "4", "100": "10"}.get(word, word) for word in arguments]
        if words[:2] == ["train", "--preset"]:
            words += [*FASTER, "--train.sample_tokens=2", "--data.shuffle_sequences=0"]
        assert cli.main(words) == 0, capsys.readouterr().err
    assert json.loads(Path("runs/mine/metrics.json").read_text())["step"] == 4
    assert Path("runs/mine/report/report.html").is_file()
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in Path("hf-model").iterdir()}


@pytest.mark.slow
def test_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a small Llama in place of a downloaded checkpoint."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("Qwen3-0.6B"))
    Path("corpus").mkdir()
    for at in range(20):
        Path(f"corpus/{at}.txt").write_text(f"document {at}\n" * 100)
    steps = {"400": "5", "80": "4", "320": "4", "800": "6", "200": "2", "1000": "8", "20": "1"}
    first, *others = blocks("continue.md")
    for program, *arguments in commands("".join([*others, first])):  # there is something to resume at the end
        if program == "hf":  # the download
            continue
        assert program == "tercet"
        words = [steps.get(word, word).replace("step-00000320", "step-00000004") for word in arguments]
        if words[:2] == ["train", "--preset"]:
            words += [*FASTER, "--train.warmup_steps=1", "--data.shuffle_sequences=0"]
            words += [] if "--train.steps" in words else ["--train.steps=2"]
        if {"model/config.toml", "sparse/config.toml"} & set(words):
            words += [*FASTER, "--train.steps=1", "--train.tokens_per_step=256", "--train.micro_batch=1"]
            words += ["--train.warmup_steps=0"]
        assert cli.main(words) == 0, capsys.readouterr().err
    ends = {run.name: json.loads((run / "metrics.json").read_text())["step"] for run in Path("runs").iterdir()}
    short = {"long": 2, "plain": 2, "tuned": 2, "dense": 2, "qwen": 1, "sparse": 1}
    assert ends == {"mine": 6, "longer": 6, "fork": 8, **short}
