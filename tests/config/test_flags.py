"""The command line: which spellings it accepts, which values it takes them for, its errors and its help."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

from tercet import cli
from tercet.config.flags import OTHER_NAMES, call, help_topic, key_options, read_arguments
from tercet.config.keys import all_keys, flatten
from tercet.config.load import load


def keys(flags: str) -> dict[str, object]:
    """The configuration keys that a command line sets."""
    given = read_arguments(shlex.split(flags), key_options({}), prog="tercet plan")
    values = flatten(load("tiny", flags=given).config)
    return {name: values[name] for name in given if name != "data.source"}


def arguments(command: str) -> dict[str, object]:
    """The arguments with which a command line calls its function."""
    words = shlex.split(command)
    if words[0] in cli.FUNCTIONS:
        function, count, positional = cli._found(words[0]), 1, True
    else:
        function, count, positional = cli._members(words[0])[words[1]], 2, words[0] in cli.POSITIONAL
    seen: dict[str, object] = {}
    recorder = functools.wraps(function)(lambda **given: seen.update(given))
    call(recorder, words[count:], prog=f"tercet {' '.join(words[:count])}", positional=positional)
    return seen


def error(capsys, *words: str) -> str:
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.strip()


# ------------------------------------------------------------------------------------------------
# Spellings


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train.micro-batch 4", {"train.micro_batch": 4}),
        ("--train.micro_batch=4", {"train.micro_batch": 4}),
        ("--train.steps 1_000", {"train.steps": 1000}),
        ("--train.steps 1 --train.steps 2", {"train.steps": 2}),
        ("--train.lr 1e-3", {"train.lr": 1e-3}),
        ("--log.tensorboard", {"log.tensorboard": True}),
        ("--log.no_tensorboard", {"log.tensorboard": False}),
        ("--model.no-tie-embeddings", {"model.tie_embeddings": False}),
        ("--log.no_tensorboard --log.tensorboard", {"log.tensorboard": True}),
        ("--log.tensorboard auto", {"log.tensorboard": "auto"}),
        ("--log.tensorboard=off --log.wandb yes", {"log.tensorboard": False, "log.wandb": True}),
        ("--train.betas 0.8 0.9", {"train.betas": (0.8, 0.9)}),
        ("--train.betas 0.8,0.9", {"train.betas": (0.8, 0.9)}),
        ("--model.branches selected,window", {"model.branches": ("selected", "window")}),
        ("--model.attention dense", {"model.attention": "dense"}),
        ("--model.attention nsa dense", {"model.attention": ("nsa", "dense")}),
        ("--model.attention window,nsa", {"model.attention": "window,nsa"}),
        ("--data.source text --data.path a 'b c'", {"data.path": ("a", "b c")}),
        ("--data.source text --data.path a,b", {"data.path": ("a,b",)}),
        ("--data.path", {"data.path": ()}),
        ("--data.source text --data.path a --data.path b", {"data.path": ("b",)}),
        (r"--data.source text --data.path a --data.separator '\n'", {"data.path": ("a",), "data.separator": "\n"}),
        ("--model.value-dim None", {"model.value_dim": None}),
        ("--run.dir none", {"run.dir": None}),
        ("--train.activation-checkpointing none", {"train.activation_checkpointing": "none"}),
        ("--train.sample_prompt=--hello", {"train.sample_prompt": "--hello"}),
        ("--train.sample_prompt ''", {"train.sample_prompt": ""}),
    ],
)
def test_spellings_of_keys(flags, expected):
    assert keys(flags) == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("generate -- run", {"run": Path("run")}),
        ("generate --json run", {"run": Path("run"), "json": True}),
        ("generate run --chat --no-graph", {"run": Path("run"), "chat": True, "graph": False}),
        ("generate --prompt a run --prompt b", {"run": Path("run"), "prompt": ("a", "b")}),
        ("generate run --prompt=--x --stop y", {"run": Path("run"), "prompt": ("--x",), "stop": ("y",)}),
        ("generate run --prompt_file - --top-k 5", {"run": Path("run"), "prompt_file": Path("-"), "top_k": 5}),
        ("report", {"runs": []}),
        ("report --out c a b", {"runs": [Path("a"), Path("b")], "out": Path("c")}),
        ("eval ruler run --lengths 64, 128 --seed 0", {"run": Path("run"), "lengths": (64, 128), "seed": 0}),
        ("report a,b", {"runs": [Path("a,b")]}),
        ("sweep --lrs 1, .5", {"lrs": (1, 0.5)}),
        ("eval ruler run --tasks vt,cwe fwe", {"run": Path("run"), "tasks": ("vt", "cwe", "fwe")}),
        ("eval selection-map r o --query -1", {"run": Path("r"), "out": Path("o"), "query": -1}),
        ("doctor --short --no-short", {"short": False}),
    ],
)  # fmt: skip
def test_spellings_of_function_commands(command, expected):
    assert arguments(command) == expected


def test_a_table_parameter_is_built_from_dotted_flags():
    given = arguments("data prepare --out o --data.source text --data.path a b --data.no_shuffle --data.seq-len 8")
    data = given["data"]
    assert (data.source, data.path, data.shuffle, data.seq_len) == ("text", ("a", "b"), False, 8)
    assert arguments("data inspect --data.synthetic.length 9")["data"].synthetic.length == 9
    assert arguments("import hf a b --nsa.window 64")["nsa"].window == 64


@pytest.mark.parametrize("name", [name for name in all_keys() if name != "data.mixture"])
def test_every_key_is_a_flag_in_both_spellings(name, capsys):
    for flag in (name, name.replace("_", "-")):
        cli.main(["plan", "--preset", "tiny", f"--{flag}", "!", "!", "!"])
        err = capsys.readouterr().err
        assert "unknown option" not in err
        assert "Traceback" not in err


ROOT = Path(__file__).parents[2]


def documented_flags() -> set[str]:
    """Flags of configuration sections in the documentation, scripts and printed messages."""
    files = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    files += [file for folder in ("scripts", "examples", "src") for file in (ROOT / folder).rglob("*.py")]
    pattern = rf"--((?:{'|'.join({key.partition('.')[0] for key in all_keys()})})\.[a-z_][\w.-]*\w)"
    return {
        flag for file in files for flag in re.findall(pattern, file.read_text(encoding="utf-8").replace("\\_", "_"))
    }


def test_documented_flags_exist():
    found = {flag.replace("-", "_") for flag in documented_flags()}
    assert len(found) > 30
    known = {*all_keys(), *(option.negative[2:] for option in key_options({}).values() if option.is_switch)}
    assert found - known == set()
    assert set(OTHER_NAMES.values()) <= known


# ------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --train.steps three", "train.steps=three (flag): must be a valid integer, such as 1000"),
        ("plan --train.lr -1", "train.lr=-1 (flag): must be greater than 0"),
        ("plan --train.steps", "argument --train.steps: expected one argument (see tercet plan --help)"),
        ("plan --train.steps 5 7", "unexpected argument 7"),
        ("plan tiny", "unexpected argument tiny: did you mean --preset tiny?"),
        ("plan --log.tensorboard maybe", "log.tensorboard=maybe (flag): must be a valid boolean or 'auto'"),
        ("plan --log.no-tensorboard yes", "unexpected argument yes"),
        ("plan --train.precision fp8", "train.precision=fp8 (flag): must be 'auto', 'bf16' or 'fp32'"),
        ("plan --model.attention nsa flash", "model.attention=nsa flash (flag): 'flash' is unknown: a list takes nsa"),
        ("plan --model.branches foo", "model.branches=foo (flag): entry 1: must be 'compressed', 'selected' or 'wi"),
        ("plan --train.betas 0.9 x", "train.betas=0.9 x (flag): entry 2: must be a valid number"),
        ("plan --train.stages 5:x", "train.stages=5:x (flag): steps of entry 1: must be a valid integer"),
        ("plan --lr 1", "unknown option --lr: did you mean --train.lr?"),
        ("plan --data.mixture x", "data.mixture is a table and has no flag: set it in a file"),
        ("plan --train.eps 1", "--train.eps is not an option since 0.3: AdamW's epsilon is fixed"),
        ("train --learning-rate 1 --preset tiny", "unknown option --learning_rate: use --train.lr"),
        ("train --model.n_layer 1 --preset tiny", "unknown option --model.n_layer: use --model.layers"),
        ("eval ruler x --questions many", "questions=many (flag): must be a valid integer"),
        ("eval ruler x --lengths 64 b", "lengths=64 b (flag): entry 2: must be a valid integer"),
        ("eval perplexity x y", "unexpected argument y: `tercet eval perplexity --help`"),
        ("bench train --steps 99999999999999999999", "steps is an integer of 20 digits: it must fit in 64 bits"),
        ("generate x --max_tokens 3", "unknown option --max_tokens: did you mean --max_new_tokens?"),
        ("generate x --frobnicate 3", "unknown option --frobnicate: --help lists all options"),
        ("data inspect --data.seq_len -1", "data.seq_len=-1 (flag): must be greater than or equal to 2"),
        ("data inspect --data.source text", "data: source=text has no path"),
        ("data inspect --data.mixture x", "unknown option --data.mixture"),
        ("import hf a b --nsa.window 0", "nsa: window=0 must be at least 1"),
        ("eval selection-map", "the following arguments are required: RUN, OUT (see tercet eval selection-map --help)"),
        ("data prepare --shard_tokens 1", "the following arguments are required: --out"),
        ("train --help trian", "--help trian: no option has this in its name or description: did you mean train?"),
    ],
)
def test_errors_name_the_option_its_value_the_rule_and_the_fix(capsys, command, message):
    assert error(capsys, *command.split()).startswith(f"error: {message}")


# ------------------------------------------------------------------------------------------------
# Help


def shown(capsys, command: str) -> str:
    assert cli.main(command.split()) == 0
    return capsys.readouterr().out


def test_help_shows_the_common_options_with_the_presets_values(capsys):
    out = shown(capsys, "train --preset m7c --help")
    assert len(re.findall(r"^  --", out, re.M)) in range(9, 13)
    assert "--preset TEXT" in out
    assert re.search(r"--train.steps INT .*\(default: 50000\)", out)
    assert "run, model, data, train, checkpoint" in " ".join(out.split())


@pytest.mark.parametrize("words", ["--help model", "--help=model", "-h model"])
def test_help_of_a_section_lists_its_keys(capsys, words):
    flags = set(re.findall(r"^  --([\w.]+)", shown(capsys, f"plan --preset m7c {words}"), re.M))
    assert flags == {name for name in all_keys() if name.startswith("model.")}


@pytest.mark.parametrize(
    ("word", "first", "lines"),
    [("train.lr", "--train.lr", 1), ("lr", "--train.lr", 40), ("--train.lr", "--train.lr", 1),
     ("resume", "--resume", 9), ("micro-batch", "--train.micro_batch", 9), ("Peak", "--train.lr", 30)],
)  # fmt: skip
def test_help_finds_keys_by_name_or_description(capsys, word, first, lines):
    out = shown(capsys, f"train --help={word}")
    assert out == shown(capsys, f"--help {word}")
    assert out.split()[0] == first
    assert out.count("  --") <= lines
    assert shown(capsys, "help generate") == shown(capsys, "generate --help")


def test_help_all_lists_every_key(capsys):
    flags = set(re.findall(r"^  --([\w.]+)", shown(capsys, "config show --help all"), re.M))
    assert flags == {*all_keys(), "preset", "config", "changed"} - {"data.mixture"}
    assert "one of python-source, synthetic" in " ".join(shown(capsys, "config show --help data.source").split())


@pytest.mark.parametrize("width", [60, 200])
def test_help_fits_the_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for command in ("train --help", "train --help all", "generate --help", "data prepare --help"):
        assert max(map(len, shown(capsys, command).splitlines())) <= width


def test_help_of_a_function_command_describes_every_parameter(capsys):
    for name in ("generate", "report", "sweep", "doctor", "watch"):
        assert shown(capsys, f"{name} --help").startswith(f"usage: tercet {name}")
    assert "--prompt TEXT" in shown(capsys, "generate x --help")
    assert "RUNS ..." in shown(capsys, "report --help")
    assert "--data.seq_len INT" in shown(capsys, "data prepare --help")
    assert help_topic(["--prompt", "x"]) is None
