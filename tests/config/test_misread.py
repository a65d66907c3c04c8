"""What a person reads who gave an option something that it does not take, by the kind of value it does take."""

from __future__ import annotations

import pytest

from tercet import cli
from tercet.config.load import preset_layers
from tercet.config.misread import complaint, options_with_keys

TINY = preset_layers("tiny")[-1].values

WHOLE = [
    ("--train.steps three", "--train.steps three is no whole number: give one, such as 500"),
    ("--train.steps 3.5", "--train.steps 3.5 is no whole number: give one, such as 500"),
    ("--train.steps=", "--train.steps '' is no whole number: give one, such as 500"),
    ("--train.steps 1e3", "--train.steps 1e3 is no whole number: write 1000"),
    ("--train.steps 1,000", "--train.steps 1,000 is no whole number: write 1000"),
    ("--train.steps", "--train.steps lacks its value: give a whole number, such as 500"),
    ("--train.steps 5 7", "7 belongs to no option: options begin with --, and --help lists them"),
    ("--model.value-dim x", "--model.value-dim x is no whole number: give one, or none"),
]
NUMBERS = [
    ("--train.lr fast", "--train.lr fast is no number: give one, such as 0.003"),
    ("--train.lr", "--train.lr lacks its value: give a number, such as 0.003"),
]
SWITCHES = [
    (
        "--log.tensorboard maybe",
        "--log.tensorboard maybe: a switch takes no value: say --log.tensorboard or --log.no_tensorboard alone",
    ),
    (
        "--log.tensorboard false",
        "--log.tensorboard false: a switch takes no value: say --log.no_tensorboard alone",
    ),
    ("--log.no-tensorboard yes", "--log.no-tensorboard yes: a switch takes no value: say --log.no_tensorboard alone"),
    ("--run.deterministic on", "--run.deterministic on: a switch takes no value: say --run.deterministic alone"),
]
CHOICES = [
    ("--train.precision fp8", "--train.precision fp8 is unknown: pick one of auto, bf16, fp32"),
    ("--train.precision", "--train.precision lacks its value: give one of auto, bf16, fp32, such as auto"),
    ("--model.attention nsa flash", "--model.attention nsa flash: flash is unknown: pick of nsa, dense"),
    ("--model.branches foo", "--model.branches foo: foo is unknown: pick of compressed, selected, window"),
]
LISTS = [
    ("--train.betas 0.9", "--train.betas 0.9: 2 values are needed, not 1: give them, such as 0.9 0.95"),
    ("--train.betas 0.9 1 1", "--train.betas 0.9 1 1: 2 values are needed, not 3: give them, such as 0.9 0.95"),
    ("--train.betas 0.9 x", "--train.betas 0.9 x: x is no number: give numbers, such as 0.9 0.95"),
]


def error(capsys, *arguments: str) -> str:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.strip()


@pytest.mark.parametrize(("flags", "said"), [kind[0] for kind in (WHOLE, NUMBERS, SWITCHES, CHOICES, LISTS)])
def test_a_key_says_what_it_was_given_what_it_takes_and_how_to_mend_it(capsys, flags, said):
    assert error(capsys, "plan", "--preset", "tiny", *flags.split()) == f"error: {said}"


@pytest.mark.parametrize(("flags", "said"), [*WHOLE, *NUMBERS, *SWITCHES, *CHOICES, *LISTS])
def test_each_kind_of_value_has_its_rule_and_its_mend(flags, said):
    options = options_with_keys(cli.PlanOptions, TINY)
    assert complaint(["--preset", "tiny", *flags.split()], options, prog="tercet plan") == said


def test_nothing_is_said_of_what_can_be_read():
    options = options_with_keys(cli.PlanOptions, TINY)
    fine = (
        "--preset tiny --train.steps 1_000 --train.lr -1e-3 --log.no-tensorboard --train.betas 1 2 --data.path a b "
        "--run.threads none --model.value-dim=None --train.init-from None --run.dir none"
    )
    assert complaint(fine.split(), options, prog="tercet plan") is None


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --preset tiny --run.threads none --train.steps x", "--train.steps x is no whole number: give one"),
        ("plan --preset tiny --run.threads none 5", "5 belongs to no option"),
        ("plan --preset tiny --train.steps none", "--train.steps none is no whole number: give one, such as 500"),
        ("generate x --context None --top_k x", "--top_k x is no whole number: give one, such as 0"),
        ("generate x --context none", "--context none is no whole number: give one"),  # tyro knows None alone
    ],
)
def test_none_where_it_may_be_said_is_not_blamed_for_what_is_wrong_behind_it(capsys, command, said):
    assert error(capsys, *command.split()).startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("eval needle x --trials many", "--trials many is no whole number: give one, such as 8"),
        ("eval needle x --lengths 64 b", "--lengths 64 b: b is no whole number: give whole numbers"),
        ("eval needle x --depths 0 half", "--depths 0 half: half is no number: give numbers, such as 0.0 0.25 0.5"),
        ("eval needle x --style foo", "--style foo is unknown: pick one of auto, recall, text"),
        ("eval perplexity x --seq-len long", "--seq-len long is no whole number: give one"),
        (
            "eval perplexity x y",
            "y is nothing that tercet eval perplexity takes: `tercet eval perplexity --help`",
        ),
        ("generate x --temperature hot", "--temperature hot is no number: give one, such as 1.0"),
        ("generate x --no-cache true", "--no-cache true: a switch takes no value: say --no_cache alone"),
        ("generate x --max_tokens 3", "unknown option --max_tokens: did you mean --max_new_tokens?"),
        ("generate x --frobnicate 3", "unknown option --frobnicate: --help lists all options"),
        ("data inspect --data.seq_len x", "--data.seq_len x is no whole number: give one, such as 2048"),
        ("data inspect --data.seq_len -1", "data.seq_len=-1 (flag): must be at least 2"),
        ("data inspect --data.synthetic.task foo", "--data.synthetic.task foo is unknown: pick one of random, recall"),
        ("bench train --steps x", "--steps x is no whole number: give one, such as 10"),
        ("generate x --prompt", "--prompt lacks its value: give one"),
        ("generate x --prompt a --prompt", "--prompt lacks its value: give one"),
        ("generate x --stop --seed 3", "--stop lacks its value: give one"),
        ("generate", "tercet generate lacks RUN: write tercet generate RUN; --help tells what it is"),
        ("generate --prompt x", "tercet generate lacks RUN: write"),
        ("generate --json", "tercet generate lacks RUN: write"),
        ("eval needle --lengths 64 128 --trials 2", "tercet eval needle lacks RUN: write"),
        (
            "eval selection-map x --query 3",
            "tercet eval selection-map lacks OUT: write tercet eval selection-map RUN OUT; --help tells what it is",
        ),
        (
            "eval selection-map",
            "tercet eval selection-map lacks RUN and OUT: write tercet eval selection-map RUN OUT; --help tells what",
        ),
        (
            "data prepare --workers 1",
            "tercet data prepare lacks --out: write tercet data prepare --out OUT; --help tells what it is",
        ),
    ],
)
def test_so_do_the_options_of_every_other_command(capsys, command, said):
    assert error(capsys, *command.split()).startswith(f"error: {said}")


def test_a_key_that_may_be_empty_takes_none_as_a_flag_too(capsys):
    given = "--preset tiny --run.threads none --model.value_dim=none --train.activation-checkpointing none"
    assert cli.main(["config", "show", *given.split()]) == 0
    out = capsys.readouterr().out
    for line in ("threads", "value_dim", "activation_checkpointing"):
        assert f'{line} = "none"  # flag' in out
