"""docs/continue.md: its commands run, with fewer steps and a small Llama in place of a downloaded checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tercet import cli

PAGE = (Path(__file__).parents[2] / "docs" / "continue.md").read_text(encoding="utf-8")
SMALLER = {"400": "5", "80": "4", "320": "4", "800": "6", "200": "2", "1000": "8", "20": "1"}  # steps
FASTER = ["--train.val_tokens=256", "--train.sample_tokens=0", "--log.tensorboard=false"]


def commands() -> list[list[str]]:
    first, *others = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = "".join([*others, first]).replace("\\\n", "").splitlines()  # there is something to resume at the end
    return [shlex.split(line, comments=True) for line in lines]


def save_llama(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=256, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_llama(Path("Qwen3-0.6B"))
    Path("corpus").mkdir()
    for at in range(20):
        Path(f"corpus/{at}.txt").write_text(f"document {at}\n" * 100)
    for program, *arguments in commands():
        assert program == "tercet"
        words = [SMALLER.get(word, word).replace("step-00000320", "step-00000004") for word in arguments]
        if words[:2] == ["train", "--preset"]:
            words += [*FASTER, "--train.warmup_steps=1", "--data.shuffle_sequences=0"]
        if {"model/config.toml", "sparse/config.toml"} & set(words):
            words += [*FASTER, "--train.steps=1", "--train.tokens_per_step=256", "--train.micro_batch=1"]
            words += ["--train.warmup_steps=0"]
        assert cli.main(words) == 0, capsys.readouterr().err
    ends = {run.name: json.loads((run / "metrics.json").read_text())["step"] for run in Path("runs").iterdir()}
    assert ends == {"mine": 6, "longer": 6, "long": 2, "fork": 8, "tuned": 2, "qwen": 1, "dense": 2, "sparse": 1}
